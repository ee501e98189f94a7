"""Bridges to torch: process groups, pickles, tensors, random number generators and samplers."""
