"""Universal checkpoints: the planner, and the state that DeepSpeed does not restore from them."""
