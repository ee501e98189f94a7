"""The digest of a tensor of torch, on the device that has it, and the text of tensors and arrays."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpttool import digests
from ckpttool.dtypes import BY_TORCH_NAME, numpy_dtype
from ckpttool.model.items import NOT_COMPARED, canonical

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_WORDS = 1 << 22
"""Words that are digested at once on a device."""
COPIED_ELEMENTS = 1 << 14
"""Most elements of a tensor on a device that is digested on the host: a copy is faster than the device's calls."""


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor on the CPU as an array that shares its memory if it is contiguous."""
    dtype = BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")]
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), numpy_dtype(dtype.name))
    # Two steps: numpy has no bf16, and a 0-dim tensor cannot be seen as bytes.
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # of one element, which counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return raw.view(numpy_dtype(dtype.name)).reshape(tuple(tensor.shape))


def digest(tensor: torch.Tensor, at: tuple[int, ...] | int, shape: Sequence[int]) -> int:
    """Return the digest of a part of a tensor, computed on the device that has its elements.

    Args:
        tensor: The elements, with as many dimensions as the tensor unless they are one run.
        at: Index of the first element in each dimension; or in C order, if the elements are one run.
        shape: Shape of the whole tensor.
    """
    tensor = tensor.detach()
    if not tensor.numel():
        return 0
    if tensor.device.type != "cpu" and tensor.numel() <= COPIED_ELEMENTS:
        tensor = tensor.cpu()
    if tensor.device.type != "cpu":
        return _on_device(tensor, at, shape)
    values = as_array(tensor)
    if isinstance(at, int):
        return digests.digest(values.reshape(-1), at)
    return digests.digest_box(values, at, shape)


@cache
def _factors_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(digests.factors_in_block().view(np.int64)).to(device)


def _on_device(tensor: torch.Tensor, at: tuple[int, ...] | int, shape: Sequence[int]) -> int:
    """Return the digest of a part, computed by integer operations of its device, which wrap around at 2^64."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.dtype in {torch.float16, torch.bfloat16}:
        flat = flat.float()  # of one part, as the optimizer's step does
    per_element = max(1, flat.element_size() // 4)
    words = flat.view(
        torch.int32 if flat.element_size() >= 4 else {1: torch.uint8, 2: torch.int16}[flat.element_size()]
    )
    mask = 0xFFFF if words.dtype == torch.int16 else 0xFFFFFFFF
    total = [0] * digests.LANES
    for begin in range(0, len(words), CHUNK_WORDS):
        wide = words[begin : begin + CHUNK_WORDS].to(torch.int64) & mask
        places = torch.arange(begin, begin + len(wide), dtype=torch.int64, device=flat.device)
        if isinstance(at, int):
            places += at * per_element
        else:
            places = _place(places // per_element, tensor.shape, at, shape) * per_element + places % per_element
        blocks = places >> 12
        first = int(blocks.min())
        of_blocks = digests.factors_of_blocks(first, int(blocks.max()) - first + 1).view(np.int64)
        factors = torch.from_numpy(of_blocks).to(flat.device)
        blocks -= first
        places &= digests.BLOCK_WORDS - 1
        for lane in range(digests.LANES):
            coefficients = _factors_on(flat.device)[lane][places] * factors[lane][blocks]
            total[lane] += int((wide * coefficients).sum())
    high, low = total[1] & digests.MASK, total[0] & digests.MASK
    return high << 64 | low


def _place(element: torch.Tensor, own: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the indexes in the whole tensor of elements of a box."""
    place = torch.zeros_like(element)
    for dim in reversed(range(len(shape))):
        place += (element % own[dim] + starts[dim]) * math.prod(shape[dim + 1 :])
        element = element // own[dim]
    return place


def tensor_text(value: Any) -> str | None:
    """Return a tensor, an array or a number of numpy as text; None for any other object.

    A number counts by its value; a tensor or an array by its type, shape and elements.
    """
    if isinstance(value, np.generic | np.ndarray):
        return _array_text(np.asarray(value))
    if not isinstance(value, torch.Tensor):
        return None
    if value.dim() == 0 and value.dtype.is_floating_point | (not value.is_complex()):
        return canonical(value.item())
    if str(value.dtype).removeprefix("torch.") in BY_TORCH_NAME and not value.is_quantized:
        found = BY_TORCH_NAME[str(value.dtype).removeprefix("torch.")].name
        return f"tensor {found} {list(value.shape)} {digest(value, 0, value.shape):032x}"
    return _array_text(value.detach().cpu().resolve_conj().resolve_neg().numpy())


def _array_text(array: np.ndarray[Any, Any]) -> str:
    native = array.dtype.newbyteorder("=")
    what = f"array {native} {list(array.shape)}"
    if array.dtype.names is not None:
        return f"{what} {canonical({name: array[name] for name in array.dtype.names}, tensor_text)}"
    plain = array.dtype.kind in "biufc" and array.dtype.itemsize <= 16 and array.dtype.char not in "gG"
    if array.ndim == 0 and (plain or array.dtype.kind in "US"):
        return canonical(array.item())
    if plain:
        data = np.ascontiguousarray(array.astype(native)).tobytes()
        return f"{what} {hashlib.sha256(data).hexdigest()}"
    if array.dtype.kind in "OUSgGMmV" or array.dtype.char in "gG":  # extended precision has bytes without a value
        elements = array.astype("i8") if array.dtype.kind in "Mm" else array
        items = elements.ravel().tolist()
        return f"{what} {canonical([repr(item) for item in items] if array.dtype.kind != 'O' else items, tensor_text)}"
    return f"{NOT_COMPARED}numpy.ndarray of {array.dtype}"
