"""Tests of the integrations with training frameworks, on real engines."""
