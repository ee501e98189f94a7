"""Native ZeRO checkpoints for any number of ranks."""
