"""Where the files of a plan go: a directory or a prefix of a bucket that appears whole or not at all."""
