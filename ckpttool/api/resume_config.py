"""``resume_config``: DeepSpeed's configuration with the same global batch on another number of ranks."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_at_least
from ckpttool.errors import ArgumentError, StorageError
from ckpttool.formats import Opening, open_checkpoint
from ckpttool.messages import brief
from ckpttool.model.batch import (
    ACCUMULATION,
    GLOBAL,
    MICRO,
    BatchSizes,
    configured_size,
    equal_batch,
    fitting_numbers,
    saved_batch,
)

if TYPE_CHECKING:
    from ckpttool.formats import Source


def resume_config(
    ds_config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int,
    src: Source | None = None,
    tag: str | None = None,
    train_batch_size: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> dict[str, Any]:
    """Return a configuration with the global batch of the saved run on another number of ranks.

    The micro batch is the largest one that divides each rank's share, and is not larger than in ``ds_config`` or in the
    saved run, because that fits into the memory of a rank. Gradient accumulation is set to reach the global batch.

    Args:
        ds_config: DeepSpeed's configuration, or the path of its JSON file; it is not changed.
        world_size: Data-parallel ranks of the run that resumes.
        src: The checkpoint to resume from, a path that ``inspect`` takes: its global batch counts. Default:
            ``train_batch_size`` of ``ds_config``.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        train_batch_size: The global batch, in the place of the one in ``src`` and ``ds_config``.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Returns:
        A copy with ``train_batch_size``, ``train_micro_batch_size_per_gpu`` and ``gradient_accumulation_steps``.

    Raises:
        ArgumentError: The global batch is unknown, or not divisible by the number of ranks; names numbers that fit.
        CkptError: The checkpoint cannot be opened.
    """
    opening = Opening(storage_options, follow_links)
    check_at_least("world_size", world_size, 1)
    check_at_least("train_batch_size", train_batch_size, 1)
    config = _configuration(ds_config)
    if isinstance(elastic := config.get("elasticity"), Mapping) and elastic.get("enabled"):
        problem = "has elasticity enabled, which sets the batch sizes itself"
        raise ArgumentError("ds_config", problem, "disable it, or leave the batch sizes to it")
    saved: BatchSizes | None = None
    if src is not None:
        checkpoint = open_checkpoint(src, tag=tag, opening=opening)
        saved = saved_batch(checkpoint)
        if saved is None and train_batch_size is None:
            problem = f"({checkpoint.location}) does not record the global batch of its run"
            raise ArgumentError("src", problem, "pass train_batch_size", ("train_batch_size",))
    whole = train_batch_size or (saved.whole if saved else configured_size(config, GLOBAL))
    if whole is None:
        problem = f"has no {GLOBAL}: the global batch of the saved run is unknown"
        raise ArgumentError("ds_config", problem, "pass src, the checkpoint, or train_batch_size")
    largest = configured_size(config, MICRO) or (saved.micro if saved else None)
    if largest is None and (accumulation := configured_size(config, ACCUMULATION)):
        largest = max(1, whole // world_size // accumulation)
    sizes = equal_batch(whole, world_size, largest)
    if sizes is None:
        problem = f"is {world_size}, which does not divide the global batch of {whole} samples"
        raise ArgumentError("world_size", problem, f"choose {fitting_numbers(whole, world_size)}")
    return {**config, **sizes.to_config()}


def _configuration(given: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    path = os.fspath(given)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise StorageError(path, error.strerror or str(error), "check the path of the configuration") from error
    except ValueError as error:
        raise ArgumentError("ds_config", f"({path}) is not JSON: {error}", "correct the file") from error
    if not isinstance(found, dict):
        raise ArgumentError("ds_config", f"({path}) is {brief(found)}, not an object", "correct the file")
    return found
