"""Positions in data sets: a batch sampler and a data loader that resume on any number of ranks."""
