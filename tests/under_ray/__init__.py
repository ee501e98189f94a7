"""What needs Ray: in processes of its own, so that nothing of it reaches pytest's."""
