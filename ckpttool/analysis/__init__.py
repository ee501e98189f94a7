"""Commands that read checkpoints: verify, diff, digest, extract, stats."""
