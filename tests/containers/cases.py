"""Values to save: the bundled checkpoints, and one value for each special case of torch.save."""

from __future__ import annotations

import functools
import glob
import itertools
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

FIXTURES = os.path.join(os.path.dirname(__file__), "../../fixtures/checkpoints")
_IN_FOLDERS = re.compile(r"(?P<zero>.*/zero)/(?P<parameter>[^/]*)/[^/]*")
"""A file of a universal checkpoint, which has a folder for each parameter."""


def _files() -> list[str]:
    """Every file, but of the folders of a universal checkpoint only one, and one of a layer in several parts."""
    chosen: dict[str, set[str]] = {}
    files = []
    for name in sorted(glob.glob("**/*.pt", root_dir=FIXTURES, recursive=True)):
        match = _IN_FOLDERS.fullmatch(name)
        if match:
            parameters = chosen.setdefault(match["zero"], {match["parameter"]})
            if match["parameter"].endswith("qkv.weight"):
                parameters.add(match["parameter"])
        if match is None or match["parameter"] in parameters:
            files.append(name)
    return files


FILES = _files()
OF_CHECKPOINTS = {name: list(files) for name, files in itertools.groupby(FILES, key=lambda name: name.split("/")[0])}
"""Files by bundled checkpoint."""


@dataclass(frozen=True)
class Case:
    id: str
    make: Callable[[], Any]


def _shared() -> Any:
    base = torch.arange(24.0)
    return {
        "base": base,
        "view": base[4:12].view(2, 4),
        "again": base,
        "transposed": base.view(4, 6).t(),
        "one": base[23],
    }


def _parameter(**attributes: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def _attributed() -> torch.Tensor:
    made = torch.arange(4.0)
    made.ds_id = "0_14"
    made.partner = torch.ones(2)
    return made


def module_state() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]

CASES = [
    *(Case(f"{dtype}", functools.partial(torch.tensor([0, 1, 2, 3, 127]).to, dtype)) for dtype in DTYPES),
    Case("a scalar", lambda: torch.tensor(3.5)),
    Case("an integer scalar", lambda: {"step": torch.tensor(7)}),
    Case("an empty tensor", lambda: torch.empty(0)),
    Case("an empty tensor of three dimensions", lambda: torch.empty(2, 0, 3, dtype=torch.bfloat16)),
    Case("an empty view beyond the end of an empty storage", lambda: torch.zeros(0, 3)[:, 2:]),
    Case("an empty view at the end of a storage", lambda: torch.zeros(4)[4:]),
    Case("a slice", lambda: torch.arange(10)[3:7]),
    Case("every second element", lambda: torch.arange(10)[::2]),
    Case("transposed", lambda: torch.arange(6.0).view(2, 3).t()),
    Case("channels last", lambda: torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)),
    Case("expanded", lambda: torch.tensor([1.0]).expand(1000, 3)),
    Case("sizes of one with odd strides", lambda: torch.arange(12.0).view(3, 4)[:, 1:2]),
    Case("shared storages", _shared),
    Case("one storage as two dtypes", lambda: (lambda t: [t, t.view(torch.uint32)])(torch.ones(4, dtype=torch.uint16))),
    Case("the same tensor twice", lambda: (lambda t: [t, t])(torch.ones(3))),
    Case("a parameter", _parameter),
    Case("a frozen parameter", lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    Case("a parameter with attributes", lambda: _parameter(ds_id=3, tensor_model_parallel=True)),
    Case("a parameter of bfloat16", lambda: torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))),
    Case(
        "a parameter of float8", lambda: torch.nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    ),
    Case("a tensor with attributes", _attributed),
    Case("a tensor that requires a gradient", lambda: torch.ones(2, requires_grad=True)),
    Case("a module's state with its metadata", module_state),
    Case(
        "sizes, dtypes and devices",
        lambda: [torch.Size([2, 3]), torch.Size([]), torch.float8_e5m2, torch.device("cuda", 1)],
    ),
    Case(
        "plain data",
        lambda: {"a": [1, -1, 2**31, -(2**70), 1.5, float("inf"), None, True], 0: ("x", b"\0\xff", "\ud800é")},
    ),
    Case("sets", lambda: {"s": {1, 2, "x"}, "f": frozenset([(1, 2), ()]), "c": 2 - 3j, "b": bytearray(b"ab")}),
    Case("an odd key", lambda: {(1, "a"): 1, 1.5: 2, None: 3, True: 4, frozenset([1]): 5, 1 << 100: 6, 2j: 7}),
    Case("nothing", lambda: None),
    Case("many storages", lambda: {str(i): torch.full((i % 3,), float(i)) for i in range(300)}),
    Case("a long list", lambda: list(range(5000))),
]
