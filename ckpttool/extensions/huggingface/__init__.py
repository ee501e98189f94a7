"""Commits and restores of the Hugging Face Trainer, exports beside its run, and a runner of unchanged scripts."""
