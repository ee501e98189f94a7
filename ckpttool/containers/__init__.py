"""Byte containers, parsed and built without torch; they know nothing of checkpoints."""
