"""Run a script with Lightning's DeepSpeed strategy on a CPU, which Lightning itself refuses."""

from __future__ import annotations

import runpy
import sys

from recipes import lightning

if __name__ == "__main__":
    del sys.argv[0]
    lightning.run_on_cpu()
    runpy.run_path(sys.argv[0], run_name="__main__")
