"""States of optimizers in any shape that follows from the parameter's are saved, read and restored; others refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.integrations.torch.optimizers import Forms
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPES = [(), (1,), (5,), (1, 5), (5, 1), (4, 6), (5, 5), (2, 3, 1, 4, 2)]
KINDS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "rows": lambda p, _: {"row": torch.zeros(p.shape[:1])},
    "kept dimensions": lambda p, _: {"row": torch.zeros([*p.shape[:1], *[1] * (p.dim() - 1)])},
    "last dimension": lambda p, _: {"column": torch.zeros(p.shape[-1:]), "element": torch.zeros(p.shape)},
    "one by one": lambda *_: {"number": torch.zeros(1, 1)},
    "constant": lambda *_: {"table": torch.zeros(4, 3), "count": torch.zeros(1)},
    "transposed": lambda p, _: {"other": torch.zeros(p.shape[::-1])},
    "blocks": lambda p, _: {"blocks": torch.zeros(-(-p.numel() // 4))},
    "late": lambda p, step: {"row": torch.zeros(p.shape[:1])} if step == 3 else {},
}


class Shaped(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """An optimizer whose states have odd shapes, and change the parameter."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.1, "kind": kind})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            own["step"] = own.get("step", torch.zeros(())) + 1
            for key, value in KINDS[self.param_groups[0]["kind"]](parameter, int(own["step"])).items():
                own.setdefault(key, value)
            for key in sorted(own.keys() - {"step"}):
                own[key] += parameter.grad.sum().float() * 0.01
                parameter += own[key].sum() * 0.001


class Net(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Parameters of all shapes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.rand(shape).to(dtype) for shape in SHAPES)

    def forward(self) -> Any:
        return sum((one.float() ** 2).sum() for one in self.all)


def _run(kind: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = Net(dtype)
    return net, Shaped(net.parameters(), kind)


def _train(run: tuple[Any, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = run[0]()
        loss.backward()
        run[1].step()
        run[1].zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _states(run: tuple[Any, Any]) -> dict[tuple[int, str], tuple[Any, ...]]:
    found = [(n, key, one) for n, p in enumerate(run[0].parameters()) for key, one in run[1].state[p].items()]
    return {(n, key): (one.dtype, tuple(one.shape), one.tolist()) for n, key, one in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"blocks"}))
def test_every_state_is_restored_into_a_new_optimizer(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved = _run(kind, 1, dtype)
    _train(saved, 4)
    ckpttool.CheckpointManager(tmp_path / "saved").save(saved[0], optimizer=saved[1], step=4)
    ckpttool.convert(tmp_path / "saved", tmp_path / "converted", to="dcp", prove=True)
    expected = _states(saved)
    further = _train(saved, 2)
    for source in (tmp_path / "saved", tmp_path / "converted"):
        run = _run(kind, 2, dtype)
        ckpttool.load(run[0], source, optimizer=run[1])
        assert _states(run) == expected, source
        assert _train(run, 2) == further, source


def test_a_shape_that_does_not_follow_from_the_parameters_is_refused_at_the_save(tmp_path: Path) -> None:
    net, _ = _run("rows", 1)
    optimizer = Shaped(net.parameters(), "blocks")
    _train((net, optimizer), 1)
    with refused(ArgumentError):
        ckpttool.CheckpointManager(tmp_path).save(net, optimizer=optimizer, step=1)
    assert not [*tmp_path.glob("*/*")]


def test_a_state_of_another_shape_than_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, (net, optimizer) = _run("constant", 1), _run("constant", 2)
    _train(saved, 1)
    ckpttool.CheckpointManager(tmp_path).save(saved[0], optimizer=saved[1], step=1)
    monkeypatch.setitem(KINDS, "constant", lambda *_: {"table": torch.zeros(4, 2), "count": torch.zeros(1)})
    before = [one.tolist() for one in net.parameters()]
    with refused(PlanError):
        ckpttool.load(net, tmp_path, optimizer=optimizer)
    assert [one.tolist() for one in net.parameters()] == before
    assert not optimizer.state


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (lambda p: p.shape[:1], (7,)),
        (lambda p: (p.shape[2], 1, p.shape[0]), (9, 1, 7)),
        (lambda p: (3, p.shape[1]), (3, 8)),
        (lambda p: (2, 3, 5), (2, 3, 5)),
        (lambda p: (p.numel(),), None),
        (lambda p: (p.shape[0] + 1,), None),
        (lambda p: (2,) * p.shape[0], None),
    ],
    ids=range(7),
)
def test_the_dimensions_of_a_state_are_found_by_the_sizes_of_two_parameters(
    shape: Callable[[Any], Any], expected: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "own", lambda p, _: {"own": torch.zeros(shape(p))})
    parameter = nn.Parameter(torch.zeros(7, 8, 9))
    optimizer = Shaped([parameter], "own")
    forms = Forms(optimizer, optimizer.param_groups[0])
    if expected is None:
        with pytest.raises(ArgumentError, match="own has a shape that does not follow from the parameter's"):
            forms.of(parameter)
    else:
        found = forms.of(parameter)
        assert found is not None
        assert found["own"].shape_for(parameter.shape) == expected


def test_a_conversion_changes_no_option_and_names_a_step_that_it_does_not_write(tmp_path: Path) -> None:
    for name, optimizer_of in (("nadam", torch.optim.NAdam), ("sgd", torch.optim.SGD)):
        net = nn.Linear(3, 2)
        optimizer = optimizer_of(net.parameters(), lr=0.1)
        _train((lambda net=net: net(torch.ones(3)).sum(), optimizer), 2)
        ckpttool.CheckpointManager(tmp_path / name).save(net, optimizer=optimizer, step=2)
        report = ckpttool.convert(tmp_path / name, tmp_path / f"{name} converted", to="dcp")
        found = ckpttool.diff(tmp_path / name, tmp_path / f"{name} converted", all=True)
        assert found.equal == (name == "nadam"), found
        assert ("not written: the step (2)" in report.notes) == (name == "sgd"), report.notes


def test_an_export_without_a_state_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    ckpttool.CheckpointManager(tmp_path / "run").save(net, optimizer=torch.optim.SGD(net.parameters()), step=2)
    with refused(PlanError):
        ckpttool.consolidate(tmp_path / "run", tmp_path / "out", to="safetensors", optimizer=True)
    assert not (tmp_path / "out").exists()


def test_a_conversion_names_frozen_parameters_that_it_cannot_tell_from_trained_ones(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    net[1].bias.requires_grad_(requires_grad=False)
    for momentum in (0.0, 0.9):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
        _train((lambda: net(torch.ones(3)).sum(), optimizer), 1)
        source, out = tmp_path / f"run {momentum}", tmp_path / f"out {momentum}"
        ckpttool.CheckpointManager(source).save(net, optimizer=optimizer, step=1)
        report = ckpttool.convert(source, out, to="dcp")
        named = "which parameters are frozen (1.bias)" in " ".join(report.notes)
        kept = [p.name for p in ckpttool.inspect(out).parameters if p.frozen] == ["1.bias"]
        assert (named, kept) == (momentum == 0, momentum > 0)
