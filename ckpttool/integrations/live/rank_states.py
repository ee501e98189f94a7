"""Rank states: an object of each rank, saved by that rank with the checkpoint, and read again at a restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

from ckpttool.errors import LayoutError
from ckpttool.formats.sidecars import rank_state_indexes, rank_state_name
from ckpttool.integrations.torch.objects import read_file

if TYPE_CHECKING:
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.model import Checkpoint, Topology
    from ckpttool.saving.coordination import Ranks

EMPTY: Mapping[str, Any] = MappingProxyType({})
FORMAT = 1
"""Version of the files' content; readers refuse later versions."""
RESTORE = "restore it from a copy, or use another tag"


def rank_state_file(topology: Topology, ranks: Ranks, state: Any, extra: Mapping[str, Any] = EMPTY) -> dict[str, Any]:
    """Return the name and the content of this rank's file: the state, and the ranks that saved it.

    A conversion copies the file unchanged, also for another number of ranks. Therefore it records its own ranks.

    Args:
        topology: The ranks of the run.
        ranks: The ranks that take part, which know this one.
        state: The rank state.
        extra: The states of other objects by name; other ranks have other states.
    """
    return {
        rank_state_name(ranks.rank): {
            "rank_state_format": FORMAT,
            "rank": ranks.rank,
            "world_size": ranks.size,
            "ranks": _degrees(topology),
            "state": state,
            **({"extra": dict(extra)} if extra else {}),
        }
    }


def _degrees(topology: Topology) -> tuple[int, int, int]:
    return topology.data_parallel, topology.tensor_parallel, topology.pipeline_parallel


class RankStates(Sequence[Any]):
    """The rank states of a checkpoint, by the number of the rank that saved them.

    An item is read from its file at each access, so that a rank keeps only the states that it uses in memory. Read them
    before the checkpoint is removed.

    Args:
        checkpoint: The checkpoint.
        options: The options of the load: requests in flight, recorded checksums to compare, and trusted classes.
    """

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions) -> None:
        self._checkpoint = checkpoint
        self._indexes = rank_state_indexes(checkpoint)
        self._options = options

    def __len__(self) -> int:
        return len(self._indexes)

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        """Read the state of a rank.

        Raises:
            IndexError: There are fewer ranks.
            LayoutError: The file is of another rank or another save.
            CkptError: The file is missing or damaged, or has an object of an unknown class.
        """
        if isinstance(rank, slice):
            return [self[number] for number in range(*rank.indices(len(self)))]
        if not -len(self) <= rank < len(self):
            raise IndexError(f"there are {len(self)} rank states, and none of rank {rank}")
        return self._read(rank % len(self))["state"]

    def other_states(self, rank: int) -> Mapping[str, Any]:
        """Return the states of other objects that a rank saved, by name."""
        found: Mapping[str, Any] = self._read(rank).get("extra", EMPTY)
        return found

    def saved_by(self, rank: int) -> tuple[int, int, int]:
        """Return the data-, tensor- and pipeline-parallel ranks of the saving run, as the file of a rank records."""
        found = self._read(rank)["ranks"]
        return found[0], found[1], found[2]

    def _read(self, rank: int) -> dict[str, Any]:
        checkpoint = self._checkpoint
        index = self._indexes[rank]
        path = checkpoint.path(index)
        if checkpoint.files[index].name != rank_state_name(rank):
            missing = f"{checkpoint.location}/{rank_state_name(rank)}"
            raise LayoutError(missing, "is missing, others have theirs", RESTORE)
        content = read_file(checkpoint, index, self._options)
        _check_content(path, content, rank, len(self))
        found: dict[str, Any] = content
        return found


def _check_content(path: str, content: Any, rank: int, count: int) -> None:
    """Compare the content of a file with its name and the number of files.

    Raises:
        LayoutError: They differ.
    """
    names = ("rank_state_format", "rank", "world_size", "ranks", "state")
    if not isinstance(content, dict) or any(name not in content for name in names):
        raise LayoutError(path, "is not a rank state", RESTORE)
    version, saved, size, ranks = (content[name] for name in names[:4])
    if not isinstance(version, int) or version > FORMAT:
        raise LayoutError(path, "was written by a later release of ckpttool", "upgrade ckpttool")
    if saved != rank:
        raise LayoutError(path, f"was saved by rank {saved}, not by rank {rank}: files were renamed", RESTORE)
    if size != count:
        raise LayoutError(path, f"is one of {size} rank states, but {count} are there", RESTORE)
    if not isinstance(ranks, tuple) or len(ranks) != 3:
        raise LayoutError(path, "does not record the ranks that saved it", RESTORE)


def read_rank_states(live: LiveEngine, checkpoint: Checkpoint, options: LoadOptions) -> tuple[Any, Sequence[Any]]:
    """Read the rank states of a checkpoint before the engine changes.

    Each rank reads its own; at another number of ranks it reads a share of all, so that together the ranks find each
    damaged file.

    Returns:
        The state of this rank, None at other ranks than those that saved; and the states of all ranks.

    Raises:
        CkptError: A file is missing or damaged, or has an object of an unknown class.
    """
    import torch.distributed as dist

    states = RankStates(checkpoint, options)
    if not states or options.weights_only:
        return None, ()
    if options.dry_run:
        return None, states
    rank, size = dist.get_rank(), dist.get_world_size()
    if len(states) == size and states.saved_by(rank) == _degrees(live.topology):
        return states[rank], states
    for number in range(rank, len(states), size):
        _ = states[number]
    return None, states
