"""One file a command; each has `main(argv) -> exit code`."""
