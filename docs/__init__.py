"""The documentation; ``conf.py`` is the configuration of Sphinx."""
