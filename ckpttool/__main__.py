"""Run the command line: ``python -m ckpttool``."""

from ckpttool.cli import main

main()
