"""Targets: a Checkpoint -> a CopyPlan. One module for each thing that can be written."""
