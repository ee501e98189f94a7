"""Computations on checkpoints that write none: findings, differences, digests, statistics, layouts."""
