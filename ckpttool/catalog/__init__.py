"""List the checkpoints of a root, order them for a restore, decide which to keep, and remove the others."""
