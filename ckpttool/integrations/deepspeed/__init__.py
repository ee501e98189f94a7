"""Save and load the state of a live DeepSpeed engine; imported only with an engine."""

POSITION = "ckpttool_position"
"""Attribute of a data sampler of DeepSpeed whose position a run saves itself."""
