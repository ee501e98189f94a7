"""Plan the sidecar files of a checkpoint: configuration, tokenizer and the like."""

from __future__ import annotations

import fnmatch
import json
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import DTYPES
from ckpttool.execution.checks import archive_records
from ckpttool.formats.sidecars import (
    OWN,
    POSITION,
    RANDOM,
    RESUME_FILES,
    STEPS_OF_RANKS,
    SidecarFile,
    find_sidecars,
    rank_state_indexes,
    sidecar_directory,
)
from ckpttool.plan import COPY, CopyPlan, SourceFile, TargetFile
from ckpttool.storage import connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint

_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of the weights' dtype in ``config.json``: transformers 5, and earlier releases."""


def sidecars_for(checkpoint: Checkpoint, ranks: int | None) -> tuple[list[SidecarFile], list[str]]:
    """Return the sidecar files to copy to the target, and a note on each kind that is left out.

    Args:
        checkpoint: The source.
        ranks: Number of ranks of the target; None for a target of any number.
    """
    sidecars = find_sidecars(checkpoint, (*RESUME_FILES, *RANDOM, *POSITION))
    random, position = ([c for c in sidecars if _is(c.name, kind)] for kind in (RANDOM, POSITION))
    copied = [c for c in sidecars if c not in random and c not in position]
    topology = checkpoint.topology
    same_ranks = ranks == topology.data_parallel and topology.tensor_parallel == topology.pipeline_parallel == 1
    notes = []
    if same_ranks:
        copied += [*(random if len(random) == ranks else ()), *position]
    names = {sidecar.name for sidecar in copied}
    if omitted := [c.name for c in random if c.name not in names]:
        notes.append(f"not copied: the random number state of each rank ({_few(omitted)}); random numbers start again")
    if omitted := [c.name for c in position if c.name not in names]:
        notes.append(f"not copied: positions of data loaders, counted for the source's ranks ({_few(omitted)})")
    if STEPS_OF_RANKS in names and not same_ranks:
        notes.append(
            f"{STEPS_OF_RANKS} is copied unchanged: Accelerate's scheduler takes one step for each rank, unless it "
            "splits batches, so that its position is wrong for another number of ranks"
        )
    known = {*names, *(c.name for c in (*random, *position)), *(f.name for f in checkpoint.files)}
    if checkpoint.latest is not None:
        beside = connect(checkpoint.storage).listing(sidecar_directory(checkpoint))
        omitted = [e.name for e in beside if not e.is_dir and e.name not in known and not _is(e.name, OWN)]
        if omitted:
            notes.append(f"not copied: other files in the checkpoint's root ({_few(sorted(omitted))})")
    return copied, notes


def rank_state_sidecars(checkpoint: Checkpoint, tag: str) -> list[SidecarFile]:
    """Return the rank states to copy to the directory of a tag, unchanged for any number of ranks.

    Each file records its rank and the number of ranks that saved, so that a resume recognises its own.
    """
    return [
        SidecarFile(f"{tag}/{file.name}", checkpoint.path(index), file.nbytes, file.version, checkpoint.storage, None)
        for index in rank_state_indexes(checkpoint)
        for file in (checkpoint.files[index],)
    ]


def _is(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:4], f"and {len(names) - 4} more"] if len(names) > 4 else names)


def with_sidecars(plan: CopyPlan, sidecars: Sequence[SidecarFile], dtype: str | None) -> CopyPlan:
    """Add sidecar files to a plan, before the files that make the output look complete.

    If ``config.json`` names a dtype, it is set to ``dtype``; None copies the file unchanged.
    """
    sources = (
        *plan.sources,
        *(
            SourceFile(c.path, c.nbytes, c.version, c.storage, archive_records(connect(c.storage), c.path))
            for c in sidecars
        ),
    )
    casts = (*plan.casts, ("U8", "U8"))
    files = []
    for number, sidecar in enumerate(sidecars):
        edited = _edit_config(sidecar.text, dtype) if sidecar.text is not None and dtype is not None else None
        if edited is None and sidecar.changed and sidecar.text is not None:
            edited = sidecar.text.encode()
        if edited is not None:
            files.append(TargetFile(sidecar.name, len(edited), ((0, edited),), np.zeros(0, dtype=COPY)))
        else:
            copy = np.zeros(1 if sidecar.nbytes else 0, dtype=COPY)
            if sidecar.nbytes:
                copy[0] = (len(plan.sources) + number, 0, sidecar.nbytes, 0, len(plan.casts))
            files.append(TargetFile(sidecar.name, sidecar.nbytes, (), copy))
    return CopyPlan(sources, casts, (*files, *plan.files), plan.consistency)


def _edit_config(text: str, dtype: str) -> bytes | None:
    """Return ``config.json`` with the dtype of the weights; None if the file needs no change."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None
    keys = [k for k in _DTYPE_KEYS if k in config] if isinstance(config, dict) else []
    if not keys or all(config[k] == DTYPES[dtype].torch for k in keys):
        return None
    config |= dict.fromkeys(keys, DTYPES[dtype].torch)
    return (json.dumps(config, indent=2, ensure_ascii="\\u" in text) + "\n").encode()
