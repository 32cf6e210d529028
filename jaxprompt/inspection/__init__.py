"""What a run learned, looked at."""
