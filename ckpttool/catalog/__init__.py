"""The checkpoints under one root: listed, ordered for a restore, kept or removed."""
