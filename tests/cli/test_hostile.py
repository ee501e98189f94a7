"""Hostile checkpoints: refused in one line, or shown unchanged, in bounded time, without running their code."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.containers.values import Opaque
from tests import damage, sampling
from tests.cli.command import Outcome, ckpttool, ckpttool_process, remains
from tests.damage import edit, edit_model, edit_optimizer, files_of, model_file, optimizer_file
from tests.hostile import attacks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ZERO2, ZERO3 = "zero2-dp2-bf16", "zero3-dp2-bf16"
SECONDS = 20
"""No command may take longer: a good checkpoint of this size takes a hundredth of a second."""
CHARACTERS = 50_000_000
"""No command may print more."""


def _commands(root: Path, out: Path) -> list[tuple[object, ...]]:
    return [
        ("inspect", root),
        ("inspect", root, "--params"),
        ("inspect", root, "--ranks"),
        ("inspect", root, "--json"),
        ("consolidate", root, out / "a", "--to", "safetensors"),
        ("consolidate", root, out / "b", "--to", "torch"),
        ("verify", root, "--json"),
        ("verify", root, "--deep"),
    ]


def _assert_harmless(root: Path, commands: list[tuple[object, ...]]) -> list[Outcome]:
    """Each command succeeds, or fails in one line and leaves nothing; nothing that it prints drives the terminal."""
    outcomes = []
    for command in commands:
        before = remains(root.parent)
        began = time.monotonic()
        done = ckpttool(*command)
        assert time.monotonic() - began < SECONDS, command
        assert len(done.stdout) < CHARACTERS
        assert done.stdout.replace("\n", "").isprintable(), command
        assert done.code in {0, 1, 3}, command
        if done.code and command[0] != "verify":
            assert done.error
            assert remains(root.parent) == before
        if done.stdout and "--json" in command:
            _strictly(done.stdout)
        outcomes.append(done)
    return outcomes


def _strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("file", [optimizer_file, model_file])
@pytest.mark.parametrize("attack", ["os.system", "builtins.eval", "builtins.getattr", "os.system under a key"])
def test_pickle_that_runs_a_command_runs_nothing(
    file: Callable[[Path], Path], attack: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(ZERO2)
    marker = tmp_path / "obeyed"
    assert attack in attacks(str(marker))
    damage.make_hostile(file(root), marker, attack)
    for done in _assert_harmless(root, _commands(root, tmp_path / "checkpoints")):
        assert done.code in {1, 3}
    assert not marker.exists()


def test_object_that_runs_a_command_is_shown_by_its_name(
    checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(ZERO3)
    marker = tmp_path / "obeyed"
    edit_model(root, lambda s: s.update(callback=Opaque("os", "system", "call", (f"touch {marker}",))))
    for done in _assert_harmless(root, _commands(root, tmp_path / "checkpoints")):
        assert done.code == 0
    done = ckpttool_process("inspect", root, "--json")
    assert json.loads(done.stdout)["client_state"]["callback"] == {"class": "os.system", "args": [f"touch {marker}"]}
    assert not marker.exists()


# ------------------------------------------------------------------------------------------------- names

NAMES = {
    "climbing": "../../../../../../etc/evil",
    "absolute": "/etc/evil",
    "newline": "a\nError: b",
    "carriage return": "a\rb",
    "escape": "\x1b[31mred\x1b]0;title\x07",
    "markup": "[red]x[/red] [link=http://x]y[/link] :smile:",
    "right to left": "a\u202eb",
    "zero byte": "a\0b",
    "empty": "",
    "blank": " ",
    "long": "x" * 100_000,
    "not ASCII": "模型.вес.é",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("called", "name"),
    [
        pytest.param(called, name, id=f"{kind}-{name}")
        for number, (kind, called) in enumerate(NAMES.items())
        for name in ((ZERO2, ZERO3) if sampling.thorough() else ((ZERO2, ZERO3)[number % 2],))
    ],
)
def test_parameter_may_have_any_name(
    name: str, called: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(name)
    damage.rename_parameter(root, "up.weight", called)
    commands = _commands(root, tmp_path / "checkpoints")
    for done in _assert_harmless(root, commands):
        assert done.code == 0
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in called)
    assert f"\n{shown}" in ckpttool("inspect", root, "--params").stdout
    assert called in [p["name"] for p in json.loads(ckpttool("inspect", root, "--json").stdout)["parameters"]]
    written = remains(tmp_path / "checkpoints/a") + remains(tmp_path / "checkpoints/b")
    assert written == ["model.safetensors", "pytorch_model.bin"]
    import safetensors
    import torch

    with safetensors.safe_open(tmp_path / "checkpoints/a/model.safetensors", "pt") as file:
        assert file.get_slice(called).get_shape() == [37, 18]
    assert torch.load(tmp_path / "checkpoints/b/pytorch_model.bin", weights_only=True)[called].shape == (37, 18)


@pytest.mark.parametrize("called", ["__metadata__", "a\ud800"])
def test_name_that_safetensors_cannot_hold_is_refused(
    called: str, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy(ZERO2)
    damage.rename_parameter(root, "up.weight", called)
    error = ckpttool("consolidate", root, tmp_path / "out", "--to", "safetensors").error
    assert f"a tensor is named {called!r}; leave it out with --exclude: safetensors cannot hold it" in error
    assert not (tmp_path / "out").exists()
    assert ckpttool("inspect", root, "--params").code == 0
    assert ckpttool("consolidate", root, tmp_path / "out", "--to", "torch").code == 0


# ------------------------------------------------------------------------------------------------- values

JUNK: dict[str, Any] = {
    "nothing": None,
    "minus one": -1,
    "huge": 1 << 62,
    "huger": 10**2000,
    "true": True,
    "text": "x",
    "surrogate": "\ud800",
    "fraction": 1.5,
    "not a number": float("nan"),
    "empty list": [],
    "list of lists": [[]],
    "empty dict": {},
    "numbered dict": {1: 2},
    "object": Opaque("os", "system", "call", ("true",)),
}
ENDLESS: dict[str, Any] = {"billion laughs": damage.laughs(), "cycle": damage.cycle()}

MODEL_PLACES: list[tuple[str, tuple[Any, ...]]] = [
    *[(ZERO2, place) for place in [
        ("module",), ("module", "up.weight"), ("buffer_names",), ("param_shapes",), ("param_shapes", 0, "up.weight"),
        ("shared_params",), ("lr_scheduler",), ("skipped_steps",), ("ds_config",),
    ]],
    *[(ZERO3, place) for place in [
        ("module",), ("param_shapes",), ("param_shapes", 0), ("frozen_param_shapes",), ("frozen_param_fragments",),
        ("frozen_param_shapes", "frozen_proj.weight"), ("frozen_param_fragments", "frozen_proj.weight"),
        ("global_steps",), ("dp_world_size",), ("ds_version",), ("epoch",),
    ]],
]  # fmt: skip
OPTIMIZER_PLACES: list[tuple[str, tuple[Any, ...]]] = [
    *[(ZERO2, place) for place in [
        ("zero_stage",), ("partition_count",), ("loss_scaler",), ("base_optimizer_state",),
        ("single_partition_of_fp32_groups",), ("single_partition_of_fp32_groups", 0), ("group_paddings",),
        ("param_slice_mappings",), ("base_optimizer_state", "state"), ("base_optimizer_state", "state", 0),
        ("base_optimizer_state", "state", 0, "step"), ("base_optimizer_state", "state", 0, "exp_avg"),
        ("base_optimizer_state", "param_groups"), ("base_optimizer_state", "param_groups", 0),
        ("base_optimizer_state", "param_groups", 0, "lr"), ("base_optimizer_state", "param_groups", 0, "betas"),
    ]],
    *[(ZERO3, place) for place in [
        ("zero_stage",), ("partition_count",), ("loss_scaler",), ("optimizer_state_dict",), ("fp32_flat_groups",),
        ("fp32_flat_groups", 0), ("optimizer_state_dict", "state"), ("optimizer_state_dict", "state", 0),
        ("optimizer_state_dict", "state", 0, "step"), ("optimizer_state_dict", "state", 0, "exp_avg"),
        ("optimizer_state_dict", "param_groups"), ("optimizer_state_dict", "param_groups", 0),
        ("optimizer_state_dict", "param_groups", 0, "params"), ("optimizer_state_dict", "param_groups", 0, "lr"),
    ]],
]  # fmt: skip


def _put(states: Any, place: tuple[Any, ...], value: object) -> None:
    for key in place[:-1]:
        states = states[key]
    states[place[-1]] = value


def _remove(states: Any, place: tuple[Any, ...]) -> None:
    for key in place[:-1]:
        states = states[key]
    del states[place[-1]]


def _assert_harmless_to_all(root: Path) -> None:
    """As above, of the commands that between them read and use everything; soon over where the first one refuses."""
    commands = _commands(root, root.parent)
    done = _assert_harmless(root, [commands[3]])[0]
    if done.code == 0:
        _assert_harmless(root, [(*commands[4], "--overwrite")])
    _assert_harmless(root, [commands[7]])


@pytest.mark.parametrize(("name", "place"), MODEL_PLACES, ids=lambda p: p if isinstance(p, str) else str(p[-1]))
def test_junk_in_model_states(name: str, place: tuple[Any, ...], checkpoint_copy: Callable[[str], Path]) -> None:
    _assert_harmless_at(checkpoint_copy(name), place, JUNK, "model")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), OPTIMIZER_PLACES, ids=lambda p: p if isinstance(p, str) else str(p[-1]))
def test_junk_in_optimizer_states(name: str, place: tuple[Any, ...], checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(name)
    _assert_harmless_at(root, ("optimizer_state_dict", *place), JUNK, "optim")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("junk", "kind", "place"),
    [
        ("billion laughs", "model", ("ds_version",)),
        ("cycle", "model", ("frozen_param_shapes", "frozen_proj.weight")),
        ("cycle", "model", ("epoch",)),
        ("billion laughs", "optim", ("optimizer_state_dict", "partition_count")),
        ("billion laughs", "optim", ("optimizer_state_dict", "optimizer_state_dict", "param_groups", 0, "lr")),
    ],
    ids=lambda p: p if isinstance(p, str) else str(p[-1]),
)
def test_value_without_end_comes_to_an_end(
    junk: str, kind: str, place: tuple[Any, ...], checkpoint_copy: Callable[[str], Path]
) -> None:
    root = checkpoint_copy(ZERO3)
    for path in files_of(root, kind):
        edit(path, functools.partial(_put, place=place, value=ENDLESS[junk]))
    _assert_harmless(root, [_commands(root, root.parent)[i] for i in (3, 4)])


def _assert_harmless_at(root: Path, place: tuple[Any, ...], junk: dict[str, Any], kind: str) -> None:
    """Nothing comes of any of these values, nor of none, at one place in all files of a kind."""
    good = {path: path.read_bytes() for path in files_of(root, kind)}
    changes = [functools.partial(_put, place=place, value=value) for value in junk.values()]
    for change in sampling.some([*changes, functools.partial(_remove, place=place)], 3, key=f"{kind} {place}"):
        for path, data in good.items():
            path.write_bytes(data)
            edit(path, change)
        _assert_harmless_to_all(root)


@dataclasses.dataclass(frozen=True)
class Lie:
    """Something well-formed that is not true."""

    id: str
    checkpoint: str
    tell: Callable[[Path], object]
    says: str


def _shapes(shape: tuple[int, ...]) -> Callable[[Path], object]:
    return lambda root: edit_model(root, lambda s: _put(s, ("param_shapes", 0, "up.weight"), shape))


def _model(key: str, value: object) -> Callable[[Path], object]:
    return lambda root: edit_model(root, lambda s: s.update({key: value}))


def _optimizer(key: str, value: object) -> Callable[[Path], object]:
    return lambda root: edit_optimizer(root, lambda s: s.update({key: value}))


def _sub_groups(indices: list[int]) -> Callable[[Path], object]:
    place = ("optimizer_state_dict", "param_groups", 0, "params")
    return lambda root: edit_optimizer(root, lambda s: _put(s, place, indices))


LIES = [
    Lie("huge shape", ZERO2, _shapes((1 << 60, 18)), "gives 'up.weight' no shape"),
    Lie("shape that overflows", ZERO3, _shapes((1 << 31, 1 << 31, 1 << 31)), "gives 'up.weight' no shape"),
    Lie("negative shape", ZERO2, _shapes((-37, 18)), "gives 'up.weight' no shape"),
    Lie("boolean shape", ZERO2, _shapes((True, 18)), "gives 'up.weight' no shape"),
    Lie("shape of a thousand dimensions", ZERO3, _shapes((1,) * 1000), "gives 'up.weight' no shape"),
    Lie("shape too large by one", ZERO3, _shapes((37, 19)), "elements, but param_shapes gives "),
    Lie("shape too large for its file", ZERO2, _shapes((37, 1 << 40)), "group 0 has partitions of "),
    Lie("no ranks", ZERO2, _optimizer("partition_count", [0, 0]), "partition_count is not a number of ranks"),
    Lie("negative ranks", ZERO3, _optimizer("partition_count", -2), "partition_count is not a number of ranks"),
    Lie("boolean ranks", ZERO3, _optimizer("partition_count", True), "partition_count is not a number of ranks"),
    Lie("no groups of ranks", ZERO2, _optimizer("partition_count", []), "partition_count is not a number of ranks"),
    Lie("far too many ranks", ZERO3, _optimizer("partition_count", 1 << 17), "is missing (ZeRO-3 over 131072 ranks"),
    Lie("a billion ranks", ZERO3, _optimizer("partition_count", 1 << 30), "partition_count is not a number of ranks"),
    Lie("different ranks", ZERO2, _optimizer("partition_count", [2, 1]), "group 1 has partitions of 40 elements on 1"),
    Lie("junk for ranks", ZERO2, _optimizer("partition_count", [damage.laughs(), 2]), "is not a number of ranks"),
    Lie("padding of too few groups", ZERO2, _optimizer("group_paddings", []), "group_paddings lacks group 0"),
    Lie("negative padding", ZERO2, _optimizer("group_paddings", [0, -1]), "group_paddings calls 0 elements of"),
    Lie("huge padding", ZERO2, _optimizer("group_paddings", [1 << 62, 0]), "group 0 has partitions of "),
    Lie("alignment of too few parameters", ZERO2, _optimizer("param_alignment_paddings", [[0], [0]]),
        "param_alignment_paddings does not fit the 4 parameters of group 0"),
    Lie("alignment that is none", ZERO2, _optimizer("param_alignment_paddings", [[2, 0, 0, 0], [0] * 5]),
        "group 0 has partitions of "),
    Lie("huge alignment", ZERO2, _optimizer("param_alignment_paddings", [[1 << 62] * 4, [0] * 5]),
        "param_alignment_paddings does not fit the 4 parameters of group 0"),
    Lie("tie to nothing", ZERO2, _model("shared_params", {"a": "gone"}), "ties 'a' to 'gone', which is not there"),
    Lie("ties in a circle", ZERO2, _model("shared_params", {"a": "b", "b": "a"}), "ties 'a' to 'b', which is"),
    Lie("tie to itself", ZERO2, _model("shared_params", {"up.weight": "up.weight"}), "but the optimizer holds both"),
    Lie("tie of two owners", ZERO3, _model("shared_params", {"up.weight": "embed.weight"}), "but the optimizer holds"),
    Lie("tie to a list", ZERO3, _model("shared_params", {"a": [["b"]]}), "shared_params ties "),
    Lie("tie of a number", ZERO3, _model("shared_params", {1: "up.weight"}), "shared_params ties "),
    Lie("sub-group that is not there", ZERO3, _sub_groups([5]), "params names a sub-group that does not exist"),
    Lie("negative sub-group", ZERO3, _sub_groups([-1]), "params names a sub-group that does not exist"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES, ids=lambda c: c.id)
def test_a_false_size_is_refused(lie: Lie, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(lie.checkpoint)
    lie.tell(root)
    outcomes = _assert_harmless(root, _commands(root, root.parent))
    assert lie.says in outcomes[0].error
    assert {done.code for done in outcomes} == {1, 3}  # 1 from verify


def test_tensors_that_overlap_are_no_danger(checkpoint_copy: Callable[[str], Path]) -> None:
    """Two states may name the same bytes: each is still inside its file, and nothing is written to a source."""

    def overlap(states: dict[str, Any]) -> None:
        moments = states["optimizer_state_dict"]["state"][0]
        moments["exp_avg"] = dataclasses.replace(moments["exp_avg"], storage=moments["exp_avg_sq"].storage)

    root = checkpoint_copy(ZERO3)
    edit_optimizer(root, overlap)
    _assert_harmless(root, _commands(root, root.parent))


def test_tensor_that_repeats_its_memory_is_read_as_torch_reads_it(checkpoint_copy: Callable[[str], Path]) -> None:
    def widen(states: dict[str, Any]) -> None:
        states["module"]["positions"] = dataclasses.replace(states["module"]["positions"], stride=(0,))

    root = checkpoint_copy(ZERO2)
    edit_model(root, widen)
    for done in _assert_harmless(root, _commands(root, root.parent))[:6]:
        assert done.code == 0


@pytest.mark.slow
def test_client_state_without_end_is_shown_up_to_a_limit(checkpoint_copy: Callable[[str], Path]) -> None:
    big = "x" * 1_000_000
    root = checkpoint_copy(ZERO3)
    edit_model(
        root,
        lambda s: s.update(
            laughs=damage.laughs(), cycle=damage.cycle(), texts=[big] * 30_000, keys=[{big: 1}] * 30_000
        ),
    )
    outcomes = _assert_harmless(root, _commands(root, root.parent))
    assert [done.code for done in outcomes] == [0] * 8
    assert "laughs (2 entries)" in outcomes[0].stdout
    assert '"..."' in outcomes[3].stdout


def test_numbers_that_json_lacks_become_texts(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(ZERO3)
    edit_model(root, lambda s: s.update(losses=[1.0, float("nan"), float("inf"), -float("inf")]))
    losses = _strictly(ckpttool("inspect", root, "--json").stdout)["client_state"]["losses"]
    assert losses == [1.0, "nan", "inf", "-inf"]
