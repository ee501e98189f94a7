"""Tests of the documentation: its code blocks run, and its generated pages are complete."""
