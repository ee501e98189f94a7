"""Commits and restores of Accelerate: ``save_state`` and ``load_state`` of one accelerator."""
