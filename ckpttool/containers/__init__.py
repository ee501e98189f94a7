"""Byte containers, parsed and built without torch; they do not know about checkpoints."""
