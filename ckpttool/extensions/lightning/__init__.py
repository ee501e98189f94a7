"""Commits and restores of Lightning: its strategies for DeepSpeed and FSDP2."""
