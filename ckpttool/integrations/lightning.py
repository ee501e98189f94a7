"""Public names of ``ckpttool.extensions.lightning.api``."""

from ckpttool.extensions.lightning.api import (
    CkptDeepSpeedStrategy,
    CkptModelParallelStrategy,
    CkptSaves,
    newest_checkpoint,
    run_directory,
)

__all__ = ["CkptDeepSpeedStrategy", "CkptModelParallelStrategy", "CkptSaves", "newest_checkpoint", "run_directory"]
