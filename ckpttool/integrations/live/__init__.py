"""Saves, restores and loads of live runs of any trainer, and their interface to a run."""
