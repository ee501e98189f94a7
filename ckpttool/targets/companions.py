"""Companion files of the model -> files of a plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import DTYPES
from ckpttool.plan import COPY, CopyPlan, SourceFile, TargetFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.formats.companions import Companion

_DTYPE_KEYS = ("dtype", "torch_dtype")
"""What ``config.json`` calls the type of the weights: transformers 5, and before."""


def with_companions(plan: CopyPlan, companions: Sequence[Companion], dtype: str) -> CopyPlan:
    """Add companion files to a plan, before the files that make it look whole.

    ``config.json`` gets the type that the weights are written in, where it names one.
    """
    sources = (*plan.sources, *(SourceFile(c.path, c.nbytes, c.version) for c in companions))
    casts = (*plan.casts, ("U8", "U8"))
    files = []
    for number, companion in enumerate(companions):
        edited = _edit_config(companion.text, dtype) if companion.text is not None else None
        if edited is not None:
            files.append(TargetFile(companion.name, len(edited), ((0, edited),), np.zeros(0, dtype=COPY)))
        else:
            copy = np.zeros(1 if companion.nbytes else 0, dtype=COPY)
            if companion.nbytes:
                copy[0] = (len(plan.sources) + number, 0, companion.nbytes, 0, len(plan.casts))
            files.append(TargetFile(companion.name, companion.nbytes, (), copy))
    return CopyPlan(sources, casts, (*files, *plan.files), plan.proofs)


def _edit_config(text: str, dtype: str) -> bytes | None:
    """``config.json`` with the type of the weights; None if it is to be copied as it is."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None
    keys = [k for k in _DTYPE_KEYS if k in config] if isinstance(config, dict) else []
    if not keys or all(config[k] == DTYPES[dtype].torch for k in keys):
        return None
    config |= dict.fromkeys(keys, DTYPES[dtype].torch)
    return (json.dumps(config, indent=2, ensure_ascii="\\u" in text) + "\n").encode()
