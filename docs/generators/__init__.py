"""Scripts that write parts of the documentation from the source and from the fixtures."""
