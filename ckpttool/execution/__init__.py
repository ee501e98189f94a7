"""Run a plan: read its source ranges and write its target files."""
