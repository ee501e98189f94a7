"""Runs a plan: reads the ranges that it names and writes the files of the target."""
