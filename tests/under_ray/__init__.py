"""Tests that need Ray, in separate processes, so that Ray does not enter pytest's process."""
