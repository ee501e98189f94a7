"""Convert numpy arrays to torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import DTYPES, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_torch(values: NDArray[Any]) -> Any:
    """Return the values as a ``torch.Tensor``.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    import torch

    name = next(d.torch for d in DTYPES.values() if numpy_dtype(d.name) == values.dtype)
    raw = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, name)).reshape(values.shape)
