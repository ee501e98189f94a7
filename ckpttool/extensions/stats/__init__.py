"""Statistics of the values of a checkpoint: the function, the command and the page."""
