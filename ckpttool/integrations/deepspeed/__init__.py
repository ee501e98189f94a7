"""Live DeepSpeed engines. Nothing heavy is imported before an engine is there."""
