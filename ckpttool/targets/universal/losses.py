"""List the state that DeepSpeed does not restore from a universal checkpoint.

Source: DeepSpeed 0.19, runtime/engine.py (``_load_checkpoint``, which skips the module) and runtime/zero/stage3.py
(``load_hp_checkpoint_state_from_checkpoint_dir_stage3``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckpttool.formats.universal import STEP
from ckpttool.model import NEWER_COPIES
from ckpttool.targets.embedded import lacks_tensors
from ckpttool.targets.universal.plan import has_bare_states, optimizer_states, release_numbers, takes_scaler
from ckpttool.targets.zero.shape import sliced_by_autotp

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint, Parameter

STAGE3_RELEASE = "0.19.4"
"""The first DeepSpeed whose stage 3 accepts tensors in dictionaries, as stages 1 and 2 always did."""
STAGE3_STATES = frozenset({"exp_avg", "exp_avg_sq"})
"""The optimizer's states that the loader of stage 3 reads, whatever the optimizer."""

_NATIVE_EXPERT = ".deepspeed_experts."


def universal_losses(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return one sentence per loss when DeepSpeed loads a universal checkpoint made from this one."""
    trained = [p for p in checkpoint.parameters if p.trained]
    return tuple(sentence for rule in _RULES for sentence in rule(checkpoint, trained))


def _not_loaded(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    """Tensors that the optimizer does not train."""
    frozen = [p for p in checkpoint.parameters if not p.trained and p.numel]
    for what, count in (("buffers", len(checkpoint.buffers)), ("frozen parameters", len(frozen))):
        if count:
            yield (
                f"DeepSpeed's universal load leaves {what} ({count}) at their initial values; "
                "a zero checkpoint restores them"
            )


def _bare_states(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    if has_bare_states(checkpoint):
        yield "states other than those of experts are bare tensors, as DeepSpeed writes them: they load only at stage 3"


def _newer_copies(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    if checkpoint.has_newer_copies:
        yield f"{NEWER_COPIES}: the masters are computed from the copies, as ZenFlow does when it selects new columns"


def _several_groups(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    """Parameter groups that differ."""
    groups = checkpoint.groups
    if any(dict(g.hyperparameters) != dict(groups[0].hyperparameters) for g in groups[1:]):
        yield (
            f"at stage 3 DeepSpeed's universal load gives all {len(groups)} parameter groups the hyper-parameters of "
            "the first; a zero checkpoint keeps each group's own"
        )
    steps = [g.scalars[STEP] for g in groups if STEP in g.scalars]
    if any(step.value != steps[0].value for step in steps):
        yield (
            "at stage 3 DeepSpeed's universal load gives all parameter groups the step of the first; a zero "
            "checkpoint keeps each group's own"
        )


def _old_release(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    version = checkpoint.deepspeed_version
    if version and release_numbers(version) < release_numbers(STAGE3_RELEASE):
        yield (
            f"DeepSpeed {version}, which saved this, loads a universal checkpoint only at stages 1 and 2; stage 3 "
            f"needs {STAGE3_RELEASE} or later, or a zero checkpoint"
        )


def _other_states(_checkpoint: Checkpoint, trained: Sequence[Parameter]) -> Iterator[str]:
    """Optimizers with other states than Adam's."""
    keys = {key for p in trained for key in optimizer_states(p)}
    missing = sorted(STAGE3_STATES - {key for key in keys if all(key in p.states for p in trained if p.numel)})
    if missing:
        yield (
            f"at stage 3 DeepSpeed's universal load fails without {' and '.join(missing)} of every parameter; "
            "a zero checkpoint works there"
        )
    elif extra := sorted(keys - STAGE3_STATES):
        yield f"at stage 3 DeepSpeed's universal load leaves out {', '.join(extra)}; a zero checkpoint restores them"


def _muon(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    if any(g.hyperparameters.get("use_muon") for g in checkpoint.groups):
        yield (
            "at stages 1 and 2 on several ranks Muon needs the momentum of whole matrices, but DeepSpeed's universal "
            "load gives each rank only a part: the next step fails; use a zero checkpoint"
        )


def _numbers(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    """Scalars of a group other than the step."""
    for key in sorted({key for g in checkpoint.groups for key in g.scalars} - {STEP}):
        yield f"DeepSpeed's universal load drops {key}; a zero checkpoint keeps it"


def _nonpartitionable(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    for what in checkpoint.nonpartitionable:
        yield f"{what}: belongs to no parameter, so that a universal checkpoint cannot hold it; a zero checkpoint may"


def _round_robin(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    zero = checkpoint.ds_config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        yield (
            "an engine with round_robin_gradients on several ranks, as this run had, loads a universal checkpoint in "
            "the wrong order; turn the option off to load, or use a zero checkpoint"
        )


def _scaler(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    if checkpoint.loss_scaler is not None and not takes_scaler(checkpoint.loss_scaler):
        yield "ZeRO cannot load the state of this loss scaler, which is reset; a zero checkpoint may keep it"


def _slices(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    """Tensor parallelism other than AutoTP's.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (``load_hp_checkpoint_state``) and checkpoint/universal_checkpoint.py
    (``load_hp_checkpoint_state``: ``full_param_numel``).
    """
    if sliced_by_autotp(checkpoint):
        return
    padded = [p.name for p in checkpoint.parameters if p.slicing.vocabulary]
    if padded:
        yield (
            f"at stage 3 DeepSpeed's universal load does not pad the vocabulary ({_few(padded)}), and loads "
            "wrong values into a padded model without an error: use a model with that number of rows, or stages 1 and 2"
        )
    ranks = checkpoint.topology.tensor_parallel
    if ranks == 1:
        return
    yield (
        "at stage 3 DeepSpeed's universal load slices tensors only for AutoTP; the tensor parallelism of this run "
        "loads at stages 1 and 2"
    )
    sizes = {p.name: p.slicing.view[p.slicing.dim] for p in checkpoint.parameters if p.slicing.view}
    uneven = [name for name, parts in sizes.items() if isinstance(parts, tuple) and any(n % ranks for n in parts)]
    if uneven:
        yield (
            f"over {ranks} tensor-parallel ranks DeepSpeed's universal load fails, because it takes only slices of one "
            f"size ({_few(uneven)}): load it without tensor parallelism"
        )


def _experts(_checkpoint: Checkpoint, trained: Sequence[Parameter]) -> Iterator[str]:
    if any(_NATIVE_EXPERT in p.name for p in trained):
        yield (
            "DeepSpeed's universal load gives every rank the first experts: load it with an expert-parallel size of 1, "
            "or use a zero checkpoint"
        )


def _client_tensors(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    keys = [key for key, value in checkpoint.client_state.items() if lacks_tensors(checkpoint, value)]
    if keys:
        yield f"tensors in the client state are left out ({', '.join(map(str, keys))}); copy them from the source"


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], "..."] if len(names) > 3 else names)


_Rule = Callable[["Checkpoint", Sequence["Parameter"]], Iterator[str]]

_RULES: tuple[_Rule, ...] = (
    _not_loaded, _bare_states, _newer_copies, _several_groups, _old_release, _other_states, _muon, _numbers,
    _nonpartitionable, _round_robin, _scaler, _slices, _experts, _client_tensors,
)  # fmt: skip
"""The rules; each yields its sentences if it applies."""
