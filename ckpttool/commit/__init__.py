"""Read and check the files that tell committed checkpoints from unfinished saves: manifests and markers."""
