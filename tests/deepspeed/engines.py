"""Engines of the ranks that the tests fork, and what these tell of them."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def told(function: Callable[[], object]) -> str:
    """What a call raises: "Class: what it says"; "" if nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusal(function: Callable[[], object]) -> str:
    """What ckpttool refuses a call with; "" if it does not."""
    from ckpttool import CkptError

    try:
        function()
    except CkptError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def logged(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collect what ckpttool logs."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckpttool")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def build(stage: int, dtype: str, groups: str, optimizer: str, seed: int = 0, accumulation: int = 1) -> Any:
    """Three layers of one shape under DeepSpeed."""
    import deepspeed
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    torch.manual_seed(seed)
    net = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "steps_per_print": 10_000,
        "zero_allow_untested_optimizer": True, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 40}
    return deepspeed.initialize(model=net, optimizer=_optimizer(optimizer, _grouped(net, groups)), config=config)[0]


def _grouped(net: Any, how: str) -> list[dict[str, Any]]:
    layers = [net.a, net.b, net.c]
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    rates = (0.01, 0.003, 0.001)
    if how.startswith("frozen"):
        frozen = layers.pop("abc".index(how[-1]))
        for p in frozen.parameters():
            p.requires_grad_(False)
        return [{"params": [p for layer in layers for p in layer.parameters()], "lr": rates[0]}]
    cuts = {
        "two": ([weights, biases], rates),
        "swapped": ([biases, weights], (rates[1], rates[0])),
        "reversed": ([weights[::-1], biases[::-1]], rates),
        "cut": ([weights[:2], [*weights[2:], *biases]], rates),
        "one": ([list(net.parameters())], rates),
        "layers": ([list(layer.parameters()) for layer in layers], rates),
        "layers swapped": ([list(layers[i].parameters()) for i in (1, 0, 2)], (rates[1], rates[0], rates[2])),
    }
    return [{"params": own, "lr": rate} for own, rate in zip(*cuts[how], strict=False)]


def _optimizer(name: str, groups: Any) -> Any:
    import torch
    from deepspeed.ops.adam import FusedAdam

    class Fused(FusedAdam):  # type: ignore[misc]  # DeepSpeed is not followed
        """What DeepSpeed's wrapper takes for its own, and torch computes: nothing is compiled."""

        _init_group = torch.optim.Adam._init_group

        def __init__(self, groups: Any) -> None:
            defaults = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults
            torch.optim.Optimizer.__init__(self, groups, defaults)

        def step(self, closure: Any = None) -> Any:
            return torch.optim.Adam.step(self, closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            torch.optim.Optimizer.zero_grad(self, set_to_none)

    makers: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(groups),
        "fused": lambda: Fused(groups),
        "amsgrad": lambda: torch.optim.AdamW(groups, amsgrad=True),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01),
        "rmsprop": lambda: torch.optim.RMSprop(groups),
        "nadam": lambda: torch.optim.NAdam(groups),
    }
    return makers[name]()


def step(engine: Any, count: int) -> None:
    """Train on the same numbers."""
    import torch

    for _ in range(count):
        torch.manual_seed(5)
        x = torch.randn(2, 6).to(next(engine.module.parameters()).dtype)
        engine.backward((engine(x).float() ** 2).sum())
        engine.step()


def held(engine: Any) -> dict[str, Any]:
    """Everything by the names of the parameters, learning rates too; taken from the live engine alone."""
    import torch
    from recipes import common

    wrapper, names = engine.optimizer, {id(p): n for n, p in engine.module.named_parameters()}
    if engine.zero_optimization_stage():
        found: dict[str, Any] = {k: v.detach().clone() for k, v in common.live_tensors(engine).items()}
        for group, options in zip(common.live_groups(engine), wrapper.param_groups, strict=True):
            found |= {f"lr/{name}": options["lr"] for name in group}
        return found
    found = {f"module/{n}": p.detach().clone() for n, p in engine.module.named_parameters()}
    inner = getattr(wrapper, "optimizer", wrapper)
    for number, options in enumerate(inner.param_groups):
        own = wrapper.fp16_groups[number] if wrapper is not inner else options["params"]
        flat = hasattr(wrapper, "fp32_groups_flat")
        at = 0
        for i, p in enumerate(own):
            name, master = names[id(p)], options["params"][0 if flat else i]
            found[f"lr/{name}"] = options["lr"]
            for key, value in {"fp32": master.detach(), **inner.state.get(master, {})}.items():
                is_cut = flat and isinstance(value, torch.Tensor) and value.shape == master.shape
                piece = value[at : at + p.numel()].view(p.shape) if is_cut else value
                found[f"{key}/{name}"] = piece.clone() if isinstance(piece, torch.Tensor) else piece
            at += p.numel()
    return found


def differing(a: dict[str, Any], b: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """What is not in both, or not the same; with a tolerance, of tensors relative to their largest element."""
    import torch

    def same(x: Any, y: Any) -> bool:
        if tolerance and isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            return bool((x.float() - y.float()).abs().max() <= tolerance * x.float().abs().max())
        return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else bool(x == y)

    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or not same(a[key], b[key]))


def build_parallel(job: dict[str, Any]) -> Any:
    """The engine of a job: its model, stage, number of ranks, and type."""
    from recipes import common

    from tests import parallel_engines

    config = {"scheduler": None, "gradient_clipping": None, **job.get("config", {})}
    case = common.Case(
        job["id"], job["stage"], job["world_size"], common.no_training, job.get("dtype", "bf16"), {}, config
    )
    if job["model"] == "plain":
        return _plain(common.ds_config(case))
    return parallel_engines.build(
        job["model"], common.ds_config(case), tensor=1, stages=job.get("stages", 1), experts=job["experts"]
    )


def _plain(config: dict[str, Any]) -> Any:
    """The odd model, which learns slowly enough for losses to be compared."""
    import deepspeed
    import torch
    from recipes import common, plain

    from tests.parallel_engines import Parallel

    model = plain.build_model()
    optimizer = torch.optim.AdamW(plain.param_groups(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> Any:
        tokens = torch.arange(12).reshape(2, 6)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        return loss

    return Parallel(engine, lambda: common.live_tensors(engine), step)
