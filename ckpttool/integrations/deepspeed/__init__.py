"""Save and load the state of a live DeepSpeed engine; imported only with an engine."""
