"""Match the names of a checkpoint with a model that wraps its modules otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckpttool.model import Checkpoint

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes under which ``torch.compile`` and wrappers of activation checkpointing keep the module."""
ORDER = "the optimizer numbers its parameters: where shapes are equal, the order of the model is assumed"
"""Remark on an optimizer whose order only the code of the run knows."""
PREFIX = "module."
"""Prefix of all names in the state dict of DDP."""
TUNERS = (
    "lora_",
    "ia3_",
    "hada_",
    "lokr_",
    "vera_",
    "oft_",
    "boft_",
    "hra_",
    "bone_",
    "fourierft_",
    "randlora_",
    "road_",
)
"""Name prefixes of an adapter's tensors in a layer; the adapter's name follows."""
SAVED = "modules_to_save"
"""Name of a layer trained whole and saved with the adapter; the adapter's name follows."""


def plain_name(name: str) -> str:
    """Return the name of a parameter without the names of wrappers around its module."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def with_names_of(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Return a checkpoint under the names of a model, where wrappers of modules alone make them different.

    Args:
        checkpoint: The checkpoint.
        names: The model's parameters and buffers.
    """
    own = [*(p.name for p in checkpoint.parameters), *(b.name for b in checkpoint.buffers), *checkpoint.aliases]
    found = renames(own, names)
    return _renamed(checkpoint, found) if found else checkpoint


def renames(own: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Return the model's name of each name of a checkpoint that differs from it by wrappers.

    Args:
        own: The checkpoint's parameters and buffers.
        names: The model's.
    """
    there, here = {*own}, {*names}
    lacking = [name for name in there if name not in here]
    wanted = {plain_name(name): name for name in here - there}
    found = {name: wanted[plain_name(name)] for name in lacking if plain_name(name) in wanted}
    if not found and not there & here:
        both = [all(plain_name(name).startswith(PREFIX) for name in side) for side in (there, here)]
        if both[0] != both[1]:
            bare = {plain_name(name).removeprefix(PREFIX): name for name in here}
            cut = {name: plain_name(name).removeprefix(PREFIX) for name in there}
            found = {name: bare[plain] for name, plain in cut.items() if plain in bare}
    return found if len({*found.values()}) == len(found) else {}


def _renamed(checkpoint: Checkpoint, found: Mapping[str, str]) -> Checkpoint:
    def of(names: Collection[str]) -> tuple[str, ...]:
        return tuple(found.get(name, name) for name in names)

    return replace(
        checkpoint,
        renamed=True,
        parameters=tuple(replace(p, name=found.get(p.name, p.name)) for p in checkpoint.parameters),
        buffers=tuple(replace(b, name=found.get(b.name, b.name)) for b in checkpoint.buffers),
        aliases={found.get(alias, alias): found.get(name, name) for alias, name in checkpoint.aliases.items()},
        groups=tuple(replace(g, parameters=of(g.parameters), listed=of(g.listed)) for g in checkpoint.groups),
        replicas=tuple(replace(r, name=found.get(r.name, r.name)) for r in checkpoint.replicas),
        unsharded=frozenset(of(checkpoint.unsharded)),
        beside=frozenset(of(checkpoint.beside)),
    )


def adapter_name(name: str) -> tuple[str, str] | None:
    """Return (adapter, tensor name in its file) of a parameter; None if it belongs to no adapter."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.startswith(TUNERS):
            return parts[i + 1], ".".join(parts[: i + 1] + parts[i + 2 :])
        if part == SAVED:
            return parts[i + 1], ".".join(parts[:i] + parts[i + 2 :])
    return None


def full_names(trained: Collection[str], stored: Collection[str]) -> dict[str, str]:
    """Return the name in the model of each stored weight of an adapter, whose file leaves out the adapter's name.

    Args:
        trained: Names of parameters in the model.
        stored: Names of weights in the file.
    """
    names = {found[1]: name for name in trained if name not in stored and (found := adapter_name(name))}
    return {name: full for name, full in names.items() if name in stored}
