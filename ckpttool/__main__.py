"""``python -m ckpttool``."""

from ckpttool.cli import main

main()
