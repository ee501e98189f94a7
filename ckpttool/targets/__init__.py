"""Planners: Checkpoint -> CopyPlan, one module per target format."""
