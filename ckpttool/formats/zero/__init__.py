"""Reader of DeepSpeed's own checkpoints: ZeRO stages 0 to 3, with tensor, pipeline and expert parallelism."""
