"""Loads checkpoints into real DeepSpeed engines on the CPU, and tells what each then holds."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


@dataclass(frozen=True)
class Load:
    """One checkpoint to load into one engine."""

    id: str
    """A name for it: a file name without an extension."""
    root: str
    """The directory to give to ``load_checkpoint``."""
    stage: int
    """ZeRO stage of the engine."""
    world_size: int
    """Its ranks."""
    dtype: str = "bf16"
    """What the model computes in."""
    optimizer: str = "adamw"
    """"muon", or see ``_optimizer``."""
    universal: bool = False
    """Whether to load a universal checkpoint."""
    zero_options: dict[str, Any] = field(default_factory=dict)
    """Laid over ``zero_optimization``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Laid over the configuration."""
    empty: bool = False
    """Whether the model has parameters without elements."""
    model: str = ""
    """One of those that are spread over ranks; see ``parallel_engines``."""
    tensor: int = 1
    """Slices of its layers."""
    stages: int = 1
    """Of its pipeline."""
    experts: int = 1
    """Ranks that its experts are spread over."""
    resume: dict[str, Any] | None = None
    """What to tell ``ckpttool.load``; None to let DeepSpeed load by itself."""
    steps: int = 0
    """Steps that the engine takes before the load, so that its optimizer has states."""
    change: str = ""
    """What is otherwise with the model or its groups; see ``_change`` and ``_optimizer``."""


@dataclass(frozen=True)
class Loaded:
    """What an engine held after a load."""

    error: str
    """What DeepSpeed raised instead: "ValueError: what it said"; "" if nothing."""
    tensors: dict[str, torch.Tensor]
    """By "fp32/NAME", "exp_avg/NAME", "module/NAME", "buffer/NAME"; whole."""
    facts: dict[str, Any]
    """Counters, hyper-parameters and scalars of every group, client state; "step": what the next step raised."""


def load_all(loads: Sequence[Load]) -> dict[str, Loaded]:
    """Run all loads; by id what came of each."""
    late = ("llama", "mixtral") if any(load.model.startswith("auto") for load in loads) else ()
    jobs = [{"id": load.id, "world_size": load.world_size, "load": load} for load in loads]
    imports = [f"transformers.models.{name}.modeling_{name}" for name in late]
    found = each_on_ranks(_loaded, jobs, imports=imports)
    return {name: ranks[0] for name, ranks in found.items()}


# ------------------------------------------------------------------------------------------------- in the processes


def _loaded(job: dict[str, Any]) -> Loaded | None:
    import torch

    load: Load = job["load"]
    _compile_nothing()
    torch.manual_seed(4321)  # not the seed that the fixtures started from
    tensors, facts = _load_parallel(load) if load.model else _load(load)
    if torch.distributed.get_rank():
        return None
    held = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    return Loaded(facts.pop("error"), held, json.loads(json.dumps(facts)))  # as the facts of fixtures are


def _compile_nothing() -> None:
    """Let DeepSpeed's Muon take its own Adam: compiling FusedAdam lasts minutes on a busy machine."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def jit_load(self: Any, verbose: bool = True) -> None:
        raise RuntimeError(f"{self.name} is not compiled in tests")

    OpBuilder.jit_load = jit_load


def _load(load: Load) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build an engine whose values are not those of the checkpoint, load, look, and take a step."""
    import deepspeed
    import torch
    from recipes import common, optimizers, plain

    model = plain.build_model()
    if load.empty:
        model.empty = torch.nn.Parameter(torch.empty(0, 4))
        model.norm.empty_bias = torch.nn.Parameter(torch.empty(0))
    for buffer in (model.positions, model.seen, model.mask):
        buffer.zero_()
    options = {**(optimizers.ADAGRAD if load.optimizer == "adagrad" else {}), **load.config}
    case = common.Case(load.id, load.stage, load.world_size, plain.train, load.dtype, load.zero_options, options)
    config = common.ds_config(case)
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": load.universal}
    _change(load.change, model)
    given: dict[str, Any]
    if load.optimizer == "muon":  # DeepSpeed builds it itself
        config |= optimizers.MUON
        given = {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
    else:
        given = {"optimizer": _optimizer(load.optimizer, model, load.change)}
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    for _ in range(load.steps):
        _step(engine)
    look = load.stage > 0 and load.optimizer != "muon" and (load.change or load.resume is not None)
    before = _copied(common.live_tensors(engine)) if look else {}
    try:
        client_state, report = _load_engine(engine, load)
    except Exception as error:
        try:
            same = not before or _same(before, common.live_tensors(engine))
        except AssertionError:  # half loaded: its weights are not those of its masters
            same = False
        engine.destroy()
        return {}, {"error": f"{type(error).__name__}: {error}", "untouched": same}
    tensors = common.live_tensors(engine)
    facts = {
        "error": "",
        "wrapper": type(engine.optimizer).__name__,
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None,
        "loss_scale": float(getattr(engine.optimizer, "cur_scale", 0) or 0),
        "scalars": common.live_scalars(engine),
        "groups": [
            {"params": names, **common.hyper_parameters(options)}
            for names, options in zip(common.live_groups(engine), engine.optimizer.param_groups, strict=True)
        ],
        "client_state": {k: client_state[k] for k in common.CLIENT_STATE if k in client_state},
        "untouched": bool(before) and _same(before, tensors),
        **report,
    }
    tensors |= {f"before/{key}": value for key, value in before.items()} if load.change else {}
    try:
        tokens = torch.arange(12).reshape(2, 6)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        facts["step"] = "" if torch.isfinite(loss) else f"the loss is {loss}"
        facts["losses"] = [loss.item(), *(_step(engine) for _ in range(2))]
    except Exception as error:
        facts["step"] = f"{type(error).__name__}: {error}"
    engine.destroy()
    return tensors, facts


def _step(engine: Any) -> float:
    """Train on; the same tokens on every rank, so that their mean gradient does not depend on how many there are."""
    import torch

    tokens = torch.arange(12).reshape(2, 6)
    loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _load_engine(engine: Any, load: Load) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load as it is asked for; the client's state, and of a load by ckpttool its report and what all ranks read."""
    import torch

    import ckpttool

    if load.resume is None:
        return engine.load_checkpoint(load.root)[1], {}
    count = _count_bytes(fails=load.change == "rank 1 fails" and torch.distributed.get_rank() == 1)
    with count as read:
        report = ckpttool.load(engine, load.root, **load.resume)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (report.nbytes_read, *read))
    plain = {
        name: getattr(report, name)
        for name in ("method", "missing", "unexpected", "notes", "states", "scheduler", "loss_scale", "groups_kept",
                     "parameters", "buffers", "dry_run", "weights_only")
    }  # fmt: skip
    return dict(report.client_state), {"report": plain, "read": everyone, "told": str(report)}


@contextlib.contextmanager
def _count_bytes(*, fails: bool) -> Iterator[list[int]]:
    """What this rank reads of local files meanwhile: [of structure, of tensors]; or it can read none of the latter."""
    from ckpttool import StorageError
    from ckpttool.storage import LocalReader

    counted = [0, 0]
    read, read_into = LocalReader.read, LocalReader.read_into

    def count_read(self: Any, start: int, end: int) -> bytes:
        counted[0] += end - start
        return read(self, start, end)

    def count_read_into(self: Any, start: int, buffer: memoryview) -> None:
        if fails:
            raise StorageError(self.path, "Input/output error", "check the disk")
        counted[1] += len(buffer)
        read_into(self, start, buffer)

    LocalReader.read, LocalReader.read_into = count_read, count_read_into  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        LocalReader.read, LocalReader.read_into = read, read_into  # type: ignore[method-assign]


def _copied(tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    import torch

    return before.keys() == now.keys() and all(torch.equal(before[key], now[key]) for key in before)


def _change(change: str, model: Any) -> None:
    """Make a model that is not quite the one that was saved."""
    import torch

    if change == "shape":
        model.tiny = torch.nn.Parameter(torch.ones(4))
    elif change == "more":
        model.extra = torch.nn.Parameter(torch.linspace(-1, 1, 30).reshape(5, 6))
        model.register_buffer("more", torch.full((2,), 7.0))
    elif change == "less":
        del model.norm.bias
        model.norm.bias = None
        del model.seen
    elif change == "unfrozen":
        for p in model.frozen_proj.parameters():
            p.requires_grad_(True)


def _load_parallel(load: Load) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with an engine whose ranks hold parts of a model."""
    import torch
    from recipes import common, moe

    from tests.parallel_engines import build

    if load.change == "more experts":
        moe.EXPERTS *= 2  # in this forked process alone
    config = {"scheduler": None, "gradient_clipping": None, **load.config}
    case = common.Case(load.id, load.stage, load.world_size, common.no_training, load.dtype, load.zero_options, config)
    config = {**common.ds_config(case), "checkpoint": {"load_universal": load.universal}}
    parallel = build(load.model, config, tensor=load.tensor, stages=load.stages, experts=load.experts)
    engine = parallel.engine
    try:
        _, report = _load_engine(engine, load)
    except Exception as error:
        return {}, {"error": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {
        "error": "",
        **report,
        "global_steps": engine.global_steps,
        "scalars": common.live_scalars(engine),
        "groups": [common.hyper_parameters(group) for group in engine.optimizer.param_groups],
    }
    tensors = parallel.whole()
    loss = parallel.step()
    facts["step"] = "" if torch.isfinite(loss) else f"the loss is {loss}"
    engine.destroy()
    return tensors, facts


def _optimizer(name: str, model: Any, change: str = "") -> Any:
    import torch
    from recipes.plain import param_groups

    groups = param_groups(model)
    if change == "reversed":  # other groups first, other parameters first
        groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
    elif change == "one group":
        groups = [{**groups[0], "params": [p for group in groups for p in group["params"]]}]
    elif change == "three groups":
        first, second = groups
        groups = [{**first, "params": first["params"][:2]}, second, {**first, "params": first["params"][2:]}]
    if name == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    if name == "adagrad":
        return torch.optim.Adagrad([{"params": [p for g in groups for p in g["params"]], "lr": 0.01}])
    if name == "amsgrad":
        return torch.optim.Adam(groups, amsgrad=True)
    if name == "lion":
        return _lion()(groups)
    # Other hyper-parameters than the fixtures have: what a load does not restore is seen.
    for group in groups:
        group["weight_decay"] = 0.25
    return torch.optim.AdamW(groups, betas=(0.5, 0.5), eps=1e-4)


def _lion() -> Any:
    """Lion with the states of DeepSpeed's, which must be compiled first."""
    import torch

    class Lion(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0})

        @torch.no_grad()  # type: ignore[untyped-decorator]  # the same
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    for key in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(key, torch.zeros_like(p))
                    state["step"] = state.get("step", 0) + 1
                    update = state["exp_avg"].lerp(p.grad, 1 - group["betas"][0]).sign_()
                    p.add_(update, alpha=-group["lr"])
                    state["exp_avg"].lerp_(p.grad, 1 - group["betas"][1])

    return Lion
