"""The output of ``convert`` to the files of single ranks, by its options."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_choice, check_positive
from ckpttool.errors import ArgumentError
from ckpttool.extensions.rank_files.writer import mesh_for, plan_rank_files
from ckpttool.formats.sidecars import HUGGINGFACE, find_sidecars
from ckpttool.plan.builder import sample_checks
from ckpttool.targets.conversions import losses_of_torch, with_sidecars_of_accelerate
from ckpttool.targets.sidecars import with_sidecars
from ckpttool.targets.table import Planned

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

DEVICES = ("cpu", "cuda", "hpu", "mps", "npu", "xpu")
"""Types of devices of torch."""


def parse_mesh(text: str) -> dict[str, int] | list[int]:
    """Parse the sizes of dimensions, all with names or none, such as ddp=2,fsdp=4.

    Raises:
        ValueError: The text has another form.
    """
    parts = [part.rpartition("=") for part in text.split(",")]
    names = [name for name, _, _ in parts if name]
    if not all(size.isdecimal() and int(size) for _, _, size in parts) or len({*names}) not in {0, len(parts)}:
        raise ValueError("write sizes by different names, such as ddp=2,fsdp=4, or sizes alone, such as 4")
    sizes = [int(size) for _, _, size in parts]
    return dict(zip(names, sizes, strict=True)) if names else sizes


def check(given: Mapping[str, Any]) -> None:
    """Refuse options that no checkpoint allows.

    Raises:
        ArgumentError: There is one.
    """
    if given["layout"] is None:
        raise ArgumentError("layout", "is missing", "set it to verl or accelerate")
    if given["torch"] is not None:
        check_choice("torch", given["torch"], ("2.6", "2.13"))
    if given["device"] is not None:
        check_choice("device", given["device"], DEVICES)
    mesh = given["mesh"] or ()
    for size in mesh.values() if isinstance(mesh, Mapping) else mesh:
        check_positive("mesh", size)
    check_positive("world_size", given["world_size"])


def plan(checkpoint: Checkpoint, given: Mapping[str, Any], tag: str) -> Planned:
    """Plan the files of all ranks.

    Raises:
        CkptError: The checkpoint or an option does not fit.
    """
    layout = given["layout"]
    mesh = mesh_for(checkpoint, layout, **{name: given[name] for name in ("world_size", "mesh", "device", "torch")})
    files = plan_rank_files(checkpoint, layout, mesh, consistency=sample_checks(checkpoint))
    last = (files.files[-1].name,)
    releases = "2.13 and later" if mesh.torch == "2.13" else "2.6 to 2.9"
    names = "" if mesh.names else ", whose dimensions have no names"
    notes = [f"these files load on a mesh of {mesh}{names}, on {mesh.device}, in torch {releases}"]
    notes += losses_of_torch(checkpoint, tag, (), scheduler=layout == "verl")
    if layout == "verl":
        found = find_sidecars(checkpoint)
        files = with_sidecars(files, [replace(s, name=posixpath.join(HUGGINGFACE, s.name)) for s in found], None)
    else:
        files, left_behind = with_sidecars_of_accelerate(files, checkpoint, given["world_size"])
        notes += left_behind
    return Planned(files, last, notes)
