"""Which files mark a directory as a finished checkpoint, and what they say."""
