"""Weights computed from others: LoRA adapters merged into their base model, and means of checkpoints."""
