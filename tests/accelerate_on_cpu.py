"""Run a script with FSDP2 of Accelerate or the Trainer on a CPU; Accelerate has it on accelerators alone."""

from __future__ import annotations

import runpy
import sys
from typing import Any


def run_on_cpu() -> None:
    """Let Accelerate shard models with FSDP2 on a CPU."""
    from accelerate import DistributedType, PartialState
    from accelerate.state import AcceleratorState

    start = AcceleratorState.__init__

    def start_on_a_cpu(self: Any, *given: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        start(self, *given, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = start_on_a_cpu


def forget() -> None:
    """Let this process begin another run with Accelerate, in the same process group."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


if __name__ == "__main__":
    del sys.argv[0]
    run_on_cpu()
    runpy.run_path(sys.argv[0], run_name="__main__")
