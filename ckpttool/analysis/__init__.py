"""What commands that read checkpoints compute: findings, differences, digests, statistics, layouts as data."""
