"""Weights of any checkpoint as a lazy mapping of torch tensors, each read on access."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.arguments import check_choice, check_installed
from ckpttool.dtypes import DTYPES, TRAINING_DTYPES, short_name
from ckpttool.errors import PlanError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.run import MEMORY
from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import VirtualFile
from ckpttool.formats import Opening, open_checkpoint
from ckpttool.integrations.torch.memory import empty
from ckpttool.options import CHECKS
from ckpttool.plan import CopyPlan, TargetFile
from ckpttool.plan.builder import CopyBuilder, Placement
from ckpttool.registry import with_options
from ckpttool.targets.weights import select_weights
from ckpttool.targets.zero.match import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from ckpttool.execution.checks import Check, ReadReport
    from ckpttool.formats import Source
    from ckpttool.model import Checkpoint
    from ckpttool.targets.weights import Weight


class Incompatible(NamedTuple):
    """Names on one side only, as torch's ``load_state_dict`` returns them."""

    missing_keys: list[str]
    """Names only in the module."""
    unexpected_keys: list[str]
    """Names only in the checkpoint."""


@with_options
def load_state_dict(  # noqa: PLR0913  public API
    src: Source,
    *,
    tag: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    check: Check = "read",
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> LazyStateDict:
    """Return the weights and buffers of any checkpoint as a lazy mapping; ZeRO of any stage and number of ranks too.

    Args:
        dtype: Type of the parameters: "fp32", "bf16", "fp16" or one of torch's. Default: fp32, as ``consolidate``
            writes. Buffers keep their own.
        device: Device of the tensors; default: host memory.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none. A
            record shared by several tensors is compared when the last of them is read.

    Raises:
        CkptError: The checkpoint is damaged, nothing matches, or a parameter cannot be cast.
    """
    opening = Opening(storage_options, follow_links)
    name = short_name(dtype or "fp32")
    check_choice("dtype", name, tuple(TRAINING_DTYPES))
    check_choice("check", check, CHECKS)
    checkpoint = open_checkpoint(src, tag=tag, opening=opening, trust_names=trust_names)
    return LazyStateDict(
        checkpoint, dtype=TRAINING_DTYPES[name], device=device, include=include, exclude=exclude, check=check
    )


class LazyStateDict(Mapping[str, "torch.Tensor"]):
    """Tensors by name, each read on every access. Tied names return one tensor while it is referenced.

    Args:
        checkpoint: The source.
        dtype: Type of the parameters, safetensors' spelling.
        device: Device of the tensors; None for host memory.
        include: Globs on full names; empty means all.
        exclude: Globs on full names.
        check: The recorded CRC-32 to compare with the bytes read.

    Raises:
        PlanError: Nothing matches, or a parameter cannot be cast.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        device: str | torch.device | None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        check: Check = "read",
    ) -> None:
        chosen = select_weights(
            checkpoint, source="masters", dtype=dtype, include=include, exclude=exclude, exclude_frozen=False
        )
        weights = {w.name: w for w in chosen.weights}
        self._weights: dict[str, Weight] = {**weights, **{a: weights[n] for a, n in chosen.aliases.items()}}
        self._tied = {*chosen.aliases.values()}
        self._held: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        self._checkpoint = checkpoint
        self._device = device
        self._builder = CopyBuilder(checkpoint)
        self._checks = checks_for(self._builder.sources, checkpoint, check)
        self._sources = Sources(self._builder.sources, self._checks)
        self._reading = threading.Lock()
        weakref.finalize(self, self._sources.close)

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        tensor = self._held.get(weight.name)
        if tensor is None:
            tensor = self._read(weight)
            if weight.name in self._tied:
                self._held[weight.name] = tensor
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"LazyStateDict({self._checkpoint.location!r}, {len(self)} tensors)"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, without reading."""
        return {name: weight.state.shape for name, weight in self._weights.items()}

    def checks(self) -> ReadReport | None:
        """Return the report of the checksums compared so far; None without checks."""
        return None if self._checks is None else self._checks.report

    def load_into(self, module: torch.nn.Module, *, strict: bool = True) -> Incompatible:
        """Copy all tensors into a module, one after another; names and shapes are compared first.

        Args:
            module: Any module that contains whole parameters.
            strict: Whether both must have the same names.

        Raises:
            ChecksumError: The bytes read differ from those saved; the module has a part of them.
            PlanError: A shape differs; with ``strict`` a name is missing; a parameter is partitioned or has no memory.
            StorageError: Reading failed.
        """
        where = self._checkpoint.location
        if not hasattr(module, "named_parameters") or not hasattr(module, "state_dict"):
            problem = f"cannot be loaded into a {type(module).__name__}"
            raise PlanError(where, problem, "pass a torch.nn.Module; dict(weights) is a plain dictionary")
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "ds_id"):
                hint = "use ckpttool.load(engine, ..., weights_only=True)"
                raise PlanError(where, f"{name} is partitioned by ZeRO-3 in the module", hint)
        targets = module.state_dict()
        names = [name for name in targets if name in self._weights]
        found = Incompatible([n for n in targets if n not in self._weights], [n for n in self if n not in targets])
        for verb, whose, odd in (
            ("lacks", "of", found.missing_keys),
            ("holds", "that are not in", found.unexpected_keys),
        ):
            if strict and odd:
                raise PlanError(
                    where, f"{verb} {listed(odd)} {whose} the module", "pass strict=False to leave these out"
                )
        for name in names:
            shape, wanted = self._weights[name].state.shape, tuple(targets[name].shape)
            if shape != wanted:
                problem = f"{name} has shape {list(shape)}, but {list(wanted)} in the module"
                raise PlanError(where, problem, "build the module with the shapes of the checkpoint")
            if targets[name].is_meta:
                raise PlanError(where, f"{name} of the module has no memory", "call module.to_empty(device=...) first")
        done: set[tuple[int, tuple[int, ...]]] = set()
        for name in names:
            place = targets[name].data_ptr(), tuple(targets[name].shape)
            if place not in done:  # a tied tensor is copied once
                targets[name].copy_(self[name])
            done.add(place)
        return found

    def _read(self, weight: Weight) -> torch.Tensor:
        check_installed("a tensor of torch")
        import torch

        dtype = DTYPES[weight.dtype]
        tensor = empty(weight.nbytes).view(getattr(torch, dtype.torch)).view(weight.state.shape)
        copies, gathers = self._builder.copies([Placement(weight.state, weight.dtype, 0)])
        file = TargetFile("tensor", weight.nbytes, (), copies, gathers)
        plan = CopyPlan(self._builder.sources, self._builder.casts, (file,))
        if weight.nbytes:
            with self._reading, VirtualFile(plan, file, self._sources, memory=MEMORY) as planned:
                planned.readinto(tensor.view(-1).view(torch.uint8).numpy().data)
                self._sources.finish_checks()
        self._sources.check_unchanged()
        return tensor if self._device is None else tensor.to(self._device)
