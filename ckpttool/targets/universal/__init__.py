"""Universal checkpoints: the plan of one, and what DeepSpeed does not restore from it."""
