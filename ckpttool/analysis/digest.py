"""``digest``: 128 bits for each tensor, and one digest of all, independent of stage, world size and format."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckpttool import digests
from ckpttool.blocks import Facts, Shown
from ckpttool.concurrency import default_jobs, in_order
from ckpttool.errors import LayoutError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader
from ckpttool.model import MASTER, MODULE
from ckpttool.model.items import (
    STATE,
    Fact,
    Item,
    Mismatch,
    TensorDigest,
    canonical,
    difference,
    equal_values,
    paired,
)
from ckpttool.model.selection import WEIGHTS, Content, contents
from ckpttool.plan.builder import source_files
from ckpttool.plan.casts import cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.blocks import Block
    from ckpttool.model import Checkpoint, State
    from ckpttool.units import Advance


@dataclass(frozen=True, slots=True)
class Digest(Shown):
    """Digests of a checkpoint.

    Values narrower than fp32 are widened first, which is exact: weights of equal value (except zeros of different sign)
    have one digest, whatever their dtype.
    """

    weights: str
    """Digest of all parameters and buffers, with their names and shapes: "sha256:" and 64 hexadecimal digits, the hash
    of the digests of all tensors."""
    optimizer: str | None
    """Digest of all optimizer states, with their names and shapes; None if there are none."""
    tensors: Mapping[str, Mapping[str, TensorDigest]] = field(default_factory=dict, compare=False, repr=False)
    """Digest of each tensor, by state ("weights", "module", "exp_avg") and name; see ``docs/digest.md``."""

    def blocks(self) -> Iterator[Block]:
        """Yield both digests."""
        yield Facts([("weights", self.weights), ("optimizer", self.optimizer or "no states")])


def digest(checkpoint: Checkpoint, *, jobs: int | None, advance: Advance) -> Digest:
    """Digest the weights and the optimizer's states.

    Args:
        checkpoint: The checkpoint.
        jobs: Threads; None for one for each core, up to four.
        advance: Called with the number of bytes read since the last call.

    Raises:
        StorageError: Reading failed, or a file changed meanwhile.
    """
    found = tensor_digests(checkpoint, every_tensor(checkpoint), jobs=jobs, advance=advance)
    weights = {names: one for names, one in found.items() if names[0] == WEIGHTS}
    optimizer = {names: one for names, one in found.items() if names[0] not in {WEIGHTS, MODULE}}
    return Digest(_joined(weights), _joined(optimizer) if optimizer else None, by_state(found))


def by_state(found: Mapping[tuple[str, str], TensorDigest]) -> dict[str, dict[str, TensorDigest]]:
    """Return digests by state and name of ``tensor_digests`` as mappings in mappings."""
    result: dict[str, dict[str, TensorDigest]] = {}
    for (key, name), one in found.items():
        result.setdefault(key, {})[name] = one
    return result


def every_tensor(checkpoint: Checkpoint) -> list[Content]:
    """Return all tensors, and the copies that the module computes with, of the parameters that have masters too."""
    trained = [p for p in checkpoint.parameters if MODULE in p.states and MASTER in p.states]
    return [*contents(checkpoint), *(Content(p.name, MODULE, p.states[MODULE]) for p in trained)]


def tensor_digests(
    checkpoint: Checkpoint,
    tensors: Sequence[Content],
    *,
    jobs: int | None,
    dtypes: Mapping[str, str] | None = None,
    advance: Advance = lambda _: None,
) -> dict[tuple[str, str], TensorDigest]:
    """Return the digests of some tensors, by state and name, in their order.

    Args:
        checkpoint: The checkpoint.
        tensors: The tensors, in any order.
        jobs: Threads.
        dtypes: Dtypes to cast tensors to first, by name, to compute the digest of an output in those dtypes.
        advance: Called with the number of bytes read since the last call.

    Raises:
        StorageError: Reading failed, or a file changed meanwhile.
    """
    files = source_files(checkpoint)
    with Sources(files, checks_for(files, checkpoint, "read")) as sources:
        tasks = (partial(_one, sources, c, (dtypes or {}).get(c.name), advance) for c in tensors)
        with contextlib.closing(in_order(tasks, jobs or default_jobs(remote=sources.remote))) as results:
            found = dict(results)
        sources.finish(jobs=jobs)
    return found


def _joined(found: Mapping[tuple[str, str], TensorDigest]) -> str:
    """Return the hash of names and digests."""
    widened = {c: one._replace(dtype=digests.kind_of(one.dtype)) for c, one in found.items()}
    lines = sorted(f"{key}\0{name}\0{one}\n" for (key, name), one in widened.items())
    return "sha256:" + hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _one(
    sources: Sources, content: Content, dtype: str | None, advance: Advance
) -> tuple[tuple[str, str], TensorDigest]:
    """Return the digest of one tensor with its state and name."""
    state = content.state
    written, parts = dtype or state.dtype, []
    for first, values in StateReader(sources).chunks(state):
        advance(values.nbytes)
        parts.append(digests.digest(values if state.dtype == written else cast(values, written), first))
    one = TensorDigest(written, state.shape, digests.add(*parts))
    return (content.key, content.name), one


HINT = "a disk or memory may be failing: try again, and report it if it happens again"


def same_digest(source: Checkpoint, written: Checkpoint, directory: str, jobs: int | None) -> str:
    """Check that source and output have the same digests, and the same numbers of each parameter, such as steps.

    Returns:
        The digest of the weights.

    Raises:
        LayoutError: They differ.
    """
    numbers = [{(k, p.name): n.value for p in c.parameters for k, n in c.numbers(p).items()} for c in (source, written)]
    both = [key for key in numbers[0] if key in numbers[1]]  # not all formats have all of them
    _check_same(directory, *({key: canonical(own[key]) for key in both} for own in numbers))
    tensors = [
        {names: one for names, one in tensor_digests(c, every_tensor(c), jobs=jobs).items() if names[0] != MODULE}
        for c in (source, written)
    ]
    _check_same(directory, *tensors)
    return _joined({names: one for names, one in tensors[1].items() if names[0] == WEIGHTS})


def same_weights(
    checkpoint: Checkpoint, selected: Mapping[str, tuple[State, str]], written: Checkpoint, jobs: int | None
) -> str:
    """Check that selected weights and output have the same digest; returns it.

    Args:
        checkpoint: The source.
        selected: The state of each tensor of the source, and the type that was written, by name.
        written: The output.
        jobs: Threads.

    Raises:
        LayoutError: They differ.
    """
    contents_of_source = [Content(name, WEIGHTS, state) for name, (state, _) in selected.items()]
    dtypes = {name: dtype for name, (_, dtype) in selected.items()}
    expected = tensor_digests(checkpoint, contents_of_source, dtypes=dtypes, jobs=jobs)
    _check_same(written.location, expected, tensor_digests(written, contents(written), jobs=jobs))
    return _joined(expected)


def _check_same(
    directory: str, source: Mapping[tuple[str, str], Fact], written: Mapping[tuple[str, str], Fact]
) -> None:
    """Check that an output has the items of the source, by key and name; equal values may have another type."""
    a, b = ({Item(STATE, *names): fact for names, fact in own.items()} for own in (source, written))
    found = [
        Mismatch(item.key, item.name, difference(own, other))
        for item, own, other in paired(a, b, {})
        if not equal_values(own, other)
    ]
    if found:
        more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
        raise LayoutError(directory, f"is not the source: {found[0]}{more}", HINT)
