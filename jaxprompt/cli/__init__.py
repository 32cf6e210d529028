"""The commands, one file each, with `main(argv) -> exit code`."""
