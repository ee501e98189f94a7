"""Thin old checkpoints: keep their weights, and remove their optimizer states."""
