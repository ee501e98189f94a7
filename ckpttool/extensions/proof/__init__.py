"""Digests of the live state of a run: recorded by saves, and compared with a checkpoint after a load."""
