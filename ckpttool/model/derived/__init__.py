"""Checkpoints computed from other checkpoints: their states have formulas, and any target can write them."""
