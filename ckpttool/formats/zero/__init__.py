"""What DeepSpeed saves: ZeRO stages 0 to 3, with tensor, pipeline and expert parallelism."""
