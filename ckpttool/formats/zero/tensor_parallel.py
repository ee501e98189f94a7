"""Merge tensor-parallel slices into whole tensors, by the checkpoint's ``universal_checkpoint_info``.

Source: DeepSpeed 0.7.4 to 0.19.8, checkpoint/ds_to_universal.py (``merge_tp_slices``), checkpoint/constants.py and
checkpoint/affine.py (``ParamAffineMap``, since 0.19.8).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.budget import OBJECTS, spend
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import shape_of
from ckpttool.formats.strided import Box, box, merge_slices
from ckpttool.messages import brief
from ckpttool.model import BY_ROWS, Slicing, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.containers.values import Opaque
    from ckpttool.formats.zero.files import ZeroFiles
    from ckpttool.model.places import Place

NEWEST_VERSION = 0.4
"""Newest known version of ``universal_checkpoint_info``."""
MAX_BOXES = 1 << 16
"""Maximum number of boxes in one entry of an affine map."""
MAX_TRIES = 1 << 24
"""Maximum number of ways in which a pattern may match a name; patterns of frameworks have a few hundred."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The slicing of one parameter over the tensor-parallel ranks."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    boxes: tuple[tuple[Box, ...], ...]
    """The boxes of each rank in the whole tensor."""
    copies: tuple[tuple[int, Box, int, Box], ...] = ()
    """Replicas: (rank, its box, other rank, box of that rank)."""
    averaged: bool = False
    """Whether every rank stores the whole tensor, and the values of the parameter are the mean over the ranks."""
    slicing: Slicing = BY_ROWS
    """The slicing for other numbers of ranks."""


class TensorParallel:
    """The checkpoint's description of its tensor-parallel slices.

    Args:
        files: The files of the tensor-parallel ranks of one pipeline stage.
    """

    def __init__(self, files: Sequence[ZeroFiles]) -> None:
        self._path = files[0].model[0].path
        info = _info(files[0])
        if info is None:
            raise LayoutError(
                self._path,
                f"is one of {len(files)} tensor-parallel ranks, but no file records how parameters are sliced "
                "(no universal_checkpoint_info)",
                "save with it (AutoTP does since DeepSpeed 0.18.9), or merge them with the framework that trained it",
            )
        self._info = info
        version = info.get("universal_checkpoint_version", 0.0)
        if not isinstance(version, int | float) or not version <= NEWEST_VERSION:
            raise self._error(f"has version {brief(version, 40)}, but only versions up to {NEWEST_VERSION} are known")
        self._version = version
        affine = info.get("affine_map")
        self._affine = affine.get("params", {}) if isinstance(affine, dict) else {}
        if isinstance(affine, dict) and affine.get("version") != 1:
            raise self._error(f"has an affine map of version {brief(affine.get('version'), 40)}, which is not known")

    def cut(self, name: str, shapes: Sequence[tuple[int, ...]]) -> Cut:
        """Compute the slicing of a parameter.

        Args:
            name: Its name.
            shapes: Shape of its slice on each rank.

        Raises:
            LayoutError: The description contradicts the slices or itself.
        """
        reason = self._matched("autotp_unsupported_parameter_patterns", name)
        if reason is not None:
            why = self._info["autotp_unsupported_parameter_patterns"]
            raise self._error(
                f"calls {name} unsupported ({brief(why.get(reason) if isinstance(why, dict) else why, 200)})"
            )
        try:
            cut = self._cut(name, shapes)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise self._error(f"describes {name} in an unreadable form") from error
        if self._matched("vocabulary_parameter_patterns", name) is not None:
            size = self._info.get("original_vocab_size")
            if not isinstance(size, int) or not cut.shape or not 0 < size <= cut.shape[0]:
                raise self._error(f"says that {name} has {brief(size, 40)} rows of vocabulary, but it has {cut.shape}")
            slicing = replace(cut.slicing, vocabulary=True)
            return replace(cut, shape=(size, *cut.shape[1:]), slicing=slicing)
        return cut

    def _cut(self, name: str, shapes: Sequence[tuple[int, ...]]) -> Cut:
        entry = self._matched_in(self._affine, name, "affine_map")
        if entry is not None:
            return self._affine_cut(name, self._affine[entry], shapes)
        replicated = self._matched("tp_replicated_parameter_patterns", name) is not None
        averaged = self._matched("parameter_to_average_patterns", name) is not None
        if replicated or averaged:
            if len(set(shapes)) > 1:
                raise self._error(f"says that every rank holds all of {name}, but the shapes are {list(shapes)}")
            numel = math.prod(shapes[0])
            whole = Box(0, 0, 1, numel, numel, numel)
            nothing: tuple[tuple[Box, ...], ...] = ((),) * (len(shapes) - 1)
            copies = () if averaged and not replicated else tuple((r, whole, 0, whole) for r in range(1, len(shapes)))
            return Cut(shapes[0], ((whole,), *nothing), copies, averaged and not replicated)
        if self._matched("parameter_with_2_sub_params_cat_dim_0", name) is not None:
            if any(not shape or shape[0] % 2 for shape in shapes):
                raise self._error(f"says that {name} has two halves, but the shapes are {list(shapes)}")
            cut = self._sub_cut(name, shapes, 0, [[shape[0] // 2 for shape in shapes]] * 2)
            return replace(cut, slicing=Slicing(parts=2))
        sub = self._sub_params(name)
        if sub is not None:
            viewed, dim, widths = self._widths(name, *sub, shapes)
            seen = max(viewed, key=math.prod)  # the rank with the largest slice: others may store nothing
            sizes = tuple(map(sum, widths))
            view: tuple[int | tuple[int, ...], ...] = (*seen[:dim], sizes, *seen[dim + 1 :])
            return replace(self._sub_cut(name, viewed, dim, widths), slicing=Slicing(dim, view=view))
        row = self._matched("parameter_with_row_parallelism_patterns", name) is not None
        dim = 1 if row else 0
        return replace(self._sub_cut(name, shapes, dim, None), slicing=Slicing(dim))

    def _sub_cut(
        self, name: str, shapes: Sequence[tuple[int, ...]], dim: int, widths: Sequence[Sequence[int]] | None
    ) -> Cut:
        """Concatenate along one dimension, sub-parameter by sub-parameter."""
        if any(len(s) <= dim or (*s[:dim], *s[dim + 1 :]) != (*shapes[0][:dim], *shapes[0][dim + 1 :]) for s in shapes):
            raise self._error(f"says that {name} is cut along dimension {dim}, but the shapes are {list(shapes)}")
        widths = [[shape[dim] for shape in shapes]] if widths is None else widths
        whole = list(shapes[0])
        whole[dim] = sum(map(sum, widths))
        boxes: list[list[Box]] = [[] for _ in shapes]
        target, begun = 0, [0] * len(shapes)
        for sub in widths:
            for rank, (width, shape) in enumerate(zip(sub, shapes, strict=True)):
                if width:
                    own = box(shape, tuple(whole), dim, source=begun[rank], target=target, count=width)
                    boxes[rank].append(own)
                begun[rank] += width
                target += width
        if begun != [shape[dim] for shape in shapes]:
            raise self._error(f"gives the ranks {begun} of {name}, but the shapes are {list(shapes)}")
        return Cut(tuple(whole), tuple(map(tuple, boxes)))

    def _sub_params(self, name: str) -> tuple[str, object, int] | None:
        """Return the matching entry of ``parameter_with_sub_params``: (pattern, shape, dimension)."""
        for entry in self._info.get("parameter_with_sub_params") or []:
            fields = _as_mapping(entry)
            patterns, dim = fields.get("patterns"), fields.get("partition_dim")
            if not isinstance(patterns, list | tuple) or not isinstance(dim, int) or dim < 0:
                raise self._error("has a parameter_with_sub_params that cannot be read")
            for pattern in patterns:
                if self._match(pattern, name):
                    return pattern, fields.get("shape"), dim
        return None

    def _widths(
        self, name: str, pattern: str, shape: object, dim: int, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[list[tuple[int, ...]], int, list[list[int]]]:
        """Return the shapes of the slices in the view of the sub-parameters, and the widths on each rank."""
        if not isinstance(shape, tuple | list) or dim >= len(shape):
            raise self._error(f"says that {name} has sub-parameters along dimension {dim} of {brief(shape, 80)}")
        size, ranks = shape[dim], len(shapes)
        if isinstance(size, int):
            # Before 0.4: a number of equal sub-parameters.
            total = sum(s[dim] for s in shapes if len(s) > dim)
            if size <= 0 or total % size:
                raise self._error(
                    f"says that {name} has {size} equal sub-parameters, but the shapes are {list(shapes)}"
                )
            sizes = [total // size] * size
        else:
            sizes = list(size)
        recorded = (self._info.get("sub_param_shard_widths") or {}).get(pattern)
        if recorded is not None:
            widths = [list(w) for w in recorded]
        elif self._version >= 0.4 or any(n % ranks for n in sizes):
            raise self._error(f"does not say how wide the sub-parameters of {name} are on each rank")
        else:
            widths = [[n // ranks] * ranks for n in sizes]
        negative = any(n < 0 for w in widths for n in w)
        if negative or [len(w) for w in widths] != [ranks] * len(sizes) or [sum(w) for w in widths] != sizes:
            raise self._error(f"gives the sub-parameters of {name} widths {widths} for sizes {sizes}")
        viewed = []
        for rank, own in enumerate(shapes):
            others = [n for i, n in enumerate(shape) if i != dim]
            known = math.prod(n for n in others if isinstance(n, int) and n >= 0)
            width = sum(w[rank] for w in widths)
            free = math.prod(own) // (known * width) if known * width else 0
            view = [free if not isinstance(n, int) or n < 0 else n for n in shape]
            view[dim] = width
            if math.prod(view) != math.prod(own):
                raise self._error(f"sees {name} as {view} on rank {rank}, but its shape is {own}")
            viewed.append(tuple(view))
        if len(viewed[0]) == len(shapes[0]):
            viewed = list(shapes)
        return viewed, dim, widths

    def _affine_cut(self, name: str, entry: Any, shapes: Sequence[tuple[int, ...]]) -> Cut:
        """Compute the slicing from an affine map: each piece is a strided view of the whole and of a slice."""
        whole = shape_of(entry.get("logical_shape")) if isinstance(entry, dict) else None
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if whole is None or not isinstance(ranks, dict) or set(ranks) != set(range(len(shapes))):
            raise self._error(f"has an affine map of {name} that does not fit {len(shapes)} ranks")
        boxes: list[list[Box]] = [[] for _ in shapes]
        shared: dict[int, dict[tuple[object, ...], list[Box]]] = {}
        copies: list[tuple[int, Box, int, Box]] = []
        for rank in sorted(ranks):
            if shape_of(ranks[rank].get("shard_shape")) != shapes[rank]:
                raise self._error(f"maps {ranks[rank].get('shard_shape')} of {name}, but the shape is {shapes[rank]}")
            for piece in ranks[rank].get("pieces", []):
                if piece.get("scale") not in {None, 1}:
                    raise self._error(f"scales a piece of {name}, which optimizer states cannot follow")
                own = list(_boxes(piece, math.prod(shapes[rank]), math.prod(whole)))
                if len(boxes[rank]) + len(copies) + len(own) > MAX_BOXES:
                    raise self._error(f"cuts {name} into more than {MAX_BOXES} pieces")
                owner = min(map(int, piece["locations"]), default=rank)
                where = tuple((b.target, b.runs, b.numel, b.pitch) for b in own)
                if owner == rank:
                    boxes[rank] += own
                    shared.setdefault(rank, {})[where] = own
                elif (theirs := shared.get(owner, {}).get(where)) is not None:
                    copies += [(rank, a, owner, b) for a, b in zip(own, theirs, strict=True)]
        return Cut(whole, tuple(map(tuple, boxes)), tuple(copies))

    def _matched(self, key: str, name: str) -> str | None:
        return self._matched_in(self._info.get(key) or (), name, key)

    def _matched_in(self, patterns: Any, name: str, key: str) -> str | None:
        if not isinstance(patterns, list | tuple | dict):
            raise self._error(f"has a {key} that is not a list")
        found = [p for p in patterns if self._match(p, name)]
        if len(found) > 1:
            raise self._error(f"matches {name} twice in {key}: {brief(found[0], 80)} and {brief(found[1], 80)}")
        return found[0] if found else None

    def _match(self, pattern: object, name: str) -> bool:
        # AutoTP has one pattern a parameter, an escaped name; comparing names saves compiling it.
        if not isinstance(pattern, str):
            raise self._error("has a pattern that is not text")
        if (plain := _literal_name(pattern)) is not None:
            return plain == name
        if _costly(pattern, name):
            raise self._error(f"has a pattern that could take unlimited time: {brief(pattern, 80)}")
        spend(OBJECTS, 1 + len(pattern) + len(name), self._path)
        try:
            return _compiled(pattern).match(name) is not None
        except (re.error, OverflowError, RecursionError) as error:
            raise self._error(f"has an invalid pattern ({error}): {brief(pattern, 80)}") from error

    def _error(self, problem: str) -> LayoutError:
        hint = "it was written by an unknown framework, or is damaged"
        return LayoutError(self._path, f"its universal_checkpoint_info {problem}", hint)


def merge(cut: Cut, states: Sequence[State]) -> tuple[State, list[tuple[State, State]]]:
    """Merge the slices of a state; also returns the pairs of replicas, which must be equal."""
    if cut.averaged:
        first = State(cut.shape, states[0].dtype, _merged_place(states[0], cut))
        others = tuple(State(cut.shape, s.dtype, _merged_place(s, cut)) for s in states[1:])
        return State(first.shape, first.dtype, first.place, others), []
    whole = merge_slices([(s, boxes) for s, boxes in zip(states, cut.boxes, strict=True) if boxes], cut.shape)
    pairs = [(_cut_out(states[owner], theirs), _cut_out(states[rank], own)) for rank, own, owner, theirs in cut.copies]
    return whole, pairs


def _merged_place(state: State, cut: Cut) -> Place:
    return merge_slices([(state, cut.boxes[0])], cut.shape).place


def _cut_out(state: State, b: Box) -> State:
    """Return a box of a slice as a tensor."""
    alone = Box(b.source, 0, b.runs, b.numel, b.stride, b.numel)
    return merge_slices([(state, [alone])], (b.runs * b.numel,))


def _boxes(piece: Mapping[str, Any], slice_numel: int, whole_numel: int) -> Iterator[Box]:
    """Yield the boxes of a piece of an affine map: strided views of the whole (``source``) and the slice (``dest``)."""
    shape = list(piece["shape"])
    (target, pitches), (source, strides) = piece["source"], piece["dest"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, target, *pitches, source, *strides)):
        raise ValueError
    numel = 1
    while shape and pitches[len(shape) - 1] == strides[len(shape) - 1] == numel:
        numel *= shape.pop()
    if numel == 0 or 0 in shape:
        return
    outer, runs = shape[:-1], shape[-1] if shape else 1
    stride, pitch = (strides[len(shape) - 1], pitches[len(shape) - 1]) if shape else (numel, numel)
    if math.prod(outer) > MAX_BOXES:
        raise ValueError
    for index in itertools.product(*map(range, outer)):
        begin = source + sum(i * s for i, s in zip(index, strides, strict=False))
        at = target + sum(i * s for i, s in zip(index, pitches, strict=False))
        if begin + (runs - 1) * stride + numel > slice_numel or at + (runs - 1) * pitch + numel > whole_numel:
            raise ValueError
        yield Box(begin, at, runs, numel, stride, pitch)


@functools.lru_cache(maxsize=1 << 14)
def _literal_name(pattern: str) -> str | None:
    """Return the name of a pattern that is an escaped name; else None."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    inner = pattern[1:-1]
    return None if re.search(r"(?<!\\)[.^$*+?{}\[\]|()]|\\[^\W_]", inner) else re.sub(r"\\(.)", r"\1", inner)


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _costly(pattern: str, name: str) -> bool:
    """Return whether a regular expression may take very long to match a name, by backtracking."""
    loops, choices = (sum(map(pattern.count, signs)) for signs in ("*+{", "?|"))
    nested = re.search(r"\)[*+{]", pattern) is not None
    return nested or len(pattern) > 1000 or len(name) ** loops << choices > MAX_TRIES


def _info(files: ZeroFiles) -> Mapping[str, Any] | None:
    """Return ``universal_checkpoint_info``, from the model states or the optimizer states."""
    for file in (files.model[0], *files.optimizer[:1]):
        inner = file.fields.values.get("optimizer_state_dict")
        for fields in (file.fields.values, inner if isinstance(inner, dict) else {}):
            info = fields.get("universal_checkpoint_info")
            if isinstance(info, dict) and info:
                return info
    return None


def _as_mapping(value: dict[str, Any] | Opaque | object) -> Mapping[str, Any]:
    """Return a ``SubparamShape`` as a mapping; it may be pickled as a mapping or as an object."""
    if isinstance(value, dict):
        return value
    state = getattr(value, "state", None)
    return state if isinstance(state, dict) else {}
