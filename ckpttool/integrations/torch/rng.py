"""Save and set the random number generators of a rank, and derive new streams for another number of ranks.

Source: CPython, Lib/random.py (``getstate``); numpy 2, numpy/random/mtrand.pyx (``get_state``, a frozen stream); torch
2.13, torch/random.py and torch/cuda/random.py; DeepSpeed 0.19.8, runtime/activation_checkpointing/checkpointing.py
(``CudaRNGStatesTracker``).
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.arguments import check_installed
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

FORMAT = 1
"""Version of the state's content."""
KEY = "rng_format"
"""Field with the version; marks a mapping as a state of ``rng_state``."""
GENERATORS = ("python", "numpy", "torch", "cuda", "deepspeed")
"""The generators, and fields of the state."""
FIRST_DEVICE = 1024
"""Number of the first device's generator in the seeds of a rank; smaller ones are for the CPU and the tracker."""
TRACKER = "deepspeed.runtime.activation_checkpointing.checkpointing"
"""Module of DeepSpeed's tracker of random number states."""


def rng_state() -> dict[str, Any]:
    """Return the state of every random number generator that a train loop uses on this rank.

    Pass it to ``CheckpointManager.save`` as (a part of) ``rank_state``. The state contains numbers, text, tuples,
    mappings and ``torch.uint8`` or ``torch.int64`` tensors in host memory.

    Returns:
        "python": the generator of the module ``random``. "numpy": the legacy global generator of ``numpy.random``.
        "torch": the default generator of the CPU. With CUDA in use, "cuda": the states of all visible devices, and the
        number of the current one. If DeepSpeed's activation checkpointing has a tracker, "deepspeed": its states by
        name. Generators that the program itself has created are not included.
    """
    check_installed("rng_state")
    import torch

    state: dict[str, Any] = {
        KEY: FORMAT,
        "python": random.getstate(),
        "numpy": _with_tensors(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = {"states": tuple(torch.cuda.get_rng_state_all()), "current": torch.cuda.current_device()}
    if tracked := _tracker_states():
        state["deepspeed"] = {name: value.clone() for name, value in tracked.items()}
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the random number generators of this rank to a state of ``rng_state`` or ``derive_rng_state``.

    Call it as the last step before the train loop continues: a constructor of a model draws numbers, too. A generator
    that the state or this process lacks (CUDA, DeepSpeed's tracker) is not changed.

    Args:
        state: The state. Devices of CUDA are set by number; with another number of visible devices, the current device
            gets the state of the device that was current.

    Raises:
        ArgumentError: It is not such a state.
    """
    check_installed("set_rng_state")
    import torch

    _check_state(state)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(_with_arrays(state["numpy"]))
    torch.set_rng_state(state["torch"])
    cuda = state.get("cuda")
    if cuda is not None and torch.cuda.is_available():
        if len(cuda["states"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda["states"])
        else:
            torch.cuda.set_rng_state(cuda["states"][cuda["current"]])
    tracked = state.get("deepspeed")
    if tracked and (tracker := _tracker()) is not None:
        tracker.set_states({name: value.clone() for name, value in tracked.items()})


def derive_rng_state(
    states: Iterable[Mapping[str, Any]], rank: int, world_size: int, *, shared: Collection[str] = ()
) -> dict[str, Any]:
    """Derive the random number state of a rank from the states of all ranks of a run with another number of ranks.

    Seeds come from the SHA-256 of all states and the number of ranks. So the same checkpoint gives the same streams,
    and the next one others, also after several resumes. No two ranks share a stream: ranks and generators of torch get
    consecutive numbers from there on (its CPU generator takes only 32 bits of a seed), Python's and numpy's get hashes
    of 256 bits.

    Args:
        states: States of ``rng_state`` from all ranks that saved, by rank.
        rank: This rank.
        world_size: Number of ranks now.
        shared: Generators, by their names in the state, that get one stream for all ranks: for decisions that all ranks
            must take alike, such as layers to skip under ZeRO-3.

    Returns:
        A state for ``set_rng_state`` in this process: with "cuda" where CUDA is in use, with "deepspeed" if the saved
        states have it.

    Raises:
        ArgumentError: An argument is outside its range, or a state is not one of ``rng_state``.
        PlanError: numpy's global generator was not the default one.
    """
    check_installed("derive_rng_state")
    import torch

    given = list(states)
    if not given:
        raise ArgumentError("states", "has no state", "pass the states of all ranks that saved")
    if not 0 <= rank < world_size:
        raise ArgumentError("rank", f"is {rank}, not from 0 to {world_size - 1}", "pass this rank and the world size")
    if unknown := sorted(set(shared) - set(GENERATORS)):
        raise ArgumentError("shared", f"names {unknown[0]!r}", f"choose of {', '.join(GENERATORS)}")
    for state in given:
        _check_state(state)
        kind = state["numpy"].get("bit_generator")
        if kind != "MT19937":
            problem = f"used {brief(kind)}, for which no stream can be derived"
            raise PlanError("numpy.random", problem, "leave numpy's global generator as it is")
    digest = _digest([dict(state) for state in given])

    def seed(generator: str) -> bytes:
        who = "all" if generator in shared else str(rank)
        return hashlib.sha256(digest + f"{generator}/{world_size}/{who}".encode()).digest()

    first = int.from_bytes(hashlib.sha256(digest + f"torch/{world_size}".encode()).digest()[:8], "little")

    def number(generator: str, slot: int) -> int:
        return (first + slot * world_size + (0 if generator in shared else rank)) % (1 << 64)

    words = np.frombuffer(seed("numpy"), dtype="<u4").astype(np.uint32)
    made: dict[str, Any] = {
        KEY: FORMAT,
        "python": random.Random(int.from_bytes(seed("python"), "little")).getstate(),  # noqa: S311
        "numpy": _with_tensors(np.random.RandomState(words).get_state(legacy=False)),
        "torch": _seeded("cpu", number("torch", 0)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        states_of_devices = tuple(_seeded(f"cuda:{n}", number("cuda", FIRST_DEVICE + n)) for n in devices)
        made["cuda"] = {"states": states_of_devices, "current": torch.cuda.current_device()}
    names = sorted({name for state in given for name in state.get("deepspeed", ())})
    if names:
        device = f"cuda:{torch.cuda.current_device()}" if "cuda" in made else "cpu"
        made["deepspeed"] = {name: _seeded(device, number("deepspeed", 1 + n)) for n, name in enumerate(names)}
    return made


def is_rng_state(value: Any) -> bool:
    """Return whether a value is a state of ``rng_state``."""
    return isinstance(value, Mapping) and KEY in value


def _check_state(state: Any) -> None:
    if not is_rng_state(state):
        problem = f"is a {type(state).__name__}, not a state of rng_state"
        raise ArgumentError("state", problem, "pass the result of ckpttool.rng_state")
    if not isinstance(state[KEY], int) or state[KEY] > FORMAT:
        raise ArgumentError("state", "was written by a later release of ckpttool", "upgrade ckpttool")
    if missing := [name for name in GENERATORS[:3] if name not in state]:
        raise ArgumentError("state", f"lacks {missing[0]}", "pass the result of ckpttool.rng_state")


def _seeded(device: str, seed: int) -> torch.Tensor:
    """Return the state of a new generator of torch."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return generator.get_state()


def _tracker() -> Any:
    """Return DeepSpeed's tracker; None if DeepSpeed's activation checkpointing is not imported."""
    module = sys.modules.get(TRACKER)
    return None if module is None else module.get_cuda_rng_tracker()


def _tracker_states() -> dict[str, Any]:
    tracker = _tracker()
    return {} if tracker is None else dict(tracker.get_states())


def _with_tensors(value: Any) -> Any:
    """Replace numpy's arrays and scalars in nested mappings by tensors and numbers, which any reader knows."""
    import torch

    if isinstance(value, Mapping):
        return {str(key): _with_tensors(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64))
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any) -> Any:
    """Undo ``_with_tensors``; numpy casts the arrays to its own dtype."""
    import torch

    if isinstance(value, Mapping):
        return {key: _with_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _digest(value: Any) -> bytes:
    """Return the SHA-256 of nested plain data and tensors, independent of how they were pickled."""
    import torch

    if isinstance(value, torch.Tensor):
        held = value.detach().cpu().contiguous()
        parts = [str(held.dtype).encode(), str(tuple(held.shape)).encode(), held.view(torch.uint8).numpy().tobytes()]
    elif isinstance(value, Mapping):
        parts = [_digest(key) + _digest(value[key]) for key in sorted(value, key=str)]
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        parts = [_digest(item) for item in value]
    else:
        parts = [repr(value).encode()]
    kind = "tensor" if isinstance(value, torch.Tensor) else "mapping" if isinstance(value, Mapping) else "value"
    whole = hashlib.sha256(kind.encode())
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()
