"""Bridges to torch: process groups, pickles, tensors and random number generators."""
