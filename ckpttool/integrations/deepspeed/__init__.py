"""A live DeepSpeed engine: its state to files, and files to its state. Nothing heavy is imported before it is there."""
