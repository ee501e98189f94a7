"""Work spread over a Ray cluster: the options ``--ray`` and ``ray=``."""
