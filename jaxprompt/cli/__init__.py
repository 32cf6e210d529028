"""One file a verb; each has `main(argv) -> exit code`."""
