"""Planner of native ZeRO checkpoints for any number of ranks, and the match of a checkpoint with a live model."""
