"""Bridges to torch: process groups, pickles and tensors."""
