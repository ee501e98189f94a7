"""Tests of checkpoints that are computed from others."""
