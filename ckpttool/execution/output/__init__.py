"""Outputs of a plan: a directory or a bucket prefix, committed as a whole or discarded."""
