"""Computations on checkpoints that write no files: findings, differences, digests, statistics, layouts."""
