"""Public names of ``ckpttool.extensions.huggingface.api``."""

from ckpttool.extensions.huggingface.api import CkptCallback, main

__all__ = ["CkptCallback"]

if __name__ == "__main__":
    main()
