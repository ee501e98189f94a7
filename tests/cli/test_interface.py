"""The stable interface: exit codes, JSON, streams, help, and a small number of imports."""

from __future__ import annotations

import ast
import functools
import inspect as python_inspect
import io
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import typing
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

import ckpttool as api
from ckpttool import errors
from ckpttool.analysis.json_report import JSON_VERSION
from ckpttool.catalog.retention import format_best
from ckpttool.cli import COMMANDS, _output, cli
from ckpttool.cli._errors import with_flags
from ckpttool.errors import ArgumentError, CkptError, PlanError
from tests import damage
from tests.cli.command import ckpttool, ckpttool_process, in_terminal, plain
from tests.truth import REPRESENTATIVE, source, tag_directory
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

ZERO3 = source("zero3-dp2-bf16")
VIEW_FLAGS = ("params", "ranks", "files", "map")
VIEWS = [(), ("--params",), ("--ranks",), ("--files",), ("--param", "up.weight"), ("--param", "head.weight")]


# ------------------------------------------------------------------------------------------------- exit codes

USAGE = [
    [],
    ["inspect"],
    ["inspect", ZERO3, "--nonsense"],
    ["inspect", ZERO3, ZERO3],
    ["diff", ZERO3],
    ["convert", ZERO3, "out", "--to", "zero"],
    ["convert", ZERO3, "out", "--to", "zero", "--world-size", "2000000"],
    ["convert", ZERO3, "out", "--to", "universal", "--stage", "2"],
    ["convert", ZERO3, "out", "--to", "dcp", "--dtype", "fp16"],
    ["convert", ZERO3, "out", "--to", "dcp", "--prove", "--dry-run"],
    ["diff", ZERO3, ZERO3, "--rtol", "-1"],
    ["extract", ZERO3, "up.weight"],
    ["extract", ZERO3, "up.weight", "x.npy", "--index", "1:2:3"],
    ["inspect", ZERO3, "--params", "--param", "x"],
    ["nonsense"],
    ["consolidate", ZERO3, "out"],
    ["consolidate", ZERO3, "--to", "torch"],
    ["consolidate", ZERO3, "out", "--to", "onnx"],
    ["consolidate", ZERO3, "out", "--to", "torch", "--dtype", "int8"],
    ["consolidate", ZERO3, "out", "--to", "torch", "--max-shard-size", "lots"],
    ["consolidate", ZERO3, "out", "--to", "torch", "--max-shard-size", "0"],
    ["consolidate", ZERO3, "out", "--to", "torch", "--jobs", "0"],
    ["verify", ZERO3, "--jobs", "many"],
]


@pytest.mark.parametrize("arguments", USAGE, ids=lambda a: " ".join(a[:1] + a[2:]).replace(ZERO3, "SRC") or "nothing")
def test_wrong_usage_exits_with_2_and_says_how_it_is_right(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ckpttool(*arguments)
    assert (done.code, "--json" in arguments) == (2, bool(done.stdout))
    assert done.stderr.startswith(("Usage: ckpttool", "Error: --"))
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_success_exits_with_0_and_is_silent_on_stderr(tmp_path: Path) -> None:
    for arguments in (
        ["inspect", ZERO3],
        ["verify", ZERO3, "--deep"],
        ["consolidate", ZERO3, tmp_path / "out", "--to", "torch"],
    ):
        done = ckpttool_process(*arguments)
        assert (done.code, done.stderr) == (0, "")
        assert done.stdout


def test_failure_exits_with_3_in_one_line(tmp_path: Path) -> None:
    done = ckpttool_process("inspect", tmp_path)
    assert done.error.startswith(f"Error: {tmp_path}: contains no checkpoint; pass ")
    assert done.error == ckpttool("inspect", tmp_path).error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["inspect", ZERO3, "--param", "up.weigth"],
            {"error": "holds no parameter up.weigth", "path": tag_directory("zero3-dp2-bf16"),
             "hint": "did you mean up.weight? inspect --params lists the names"},
        ),
        (
            ["consolidate", ZERO3, "out", "--to", "torch", "--include", "nothing"],
            {"error": "no parameter is left to write", "path": tag_directory("zero3-dp2-bf16"),
             "hint": "check --include, --exclude, --exclude-frozen: globs match whole names, as '*.q_proj.*' does"},
        ),
        (
            ["consolidate", ZERO3, "", "--to", "torch"],
            {"error": "is an empty name", "path": "OUT", "hint": "name a directory"},
        ),
    ],
)  # fmt: skip
def test_a_failure_is_told_as_json_too(
    arguments: list[str], told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ckpttool(*arguments, "--json")
    code = 2 if told["path"].isupper() else 3  # of an argument, or of a checkpoint
    assert (done.code, done.stderr) == (code, ckpttool(*arguments).stderr)
    told |= {"version": JSON_VERSION}
    assert json.loads(done.stdout) == told
    done = ckpttool(*arguments, "--json", "--debug")
    assert (done.code, json.loads(done.stdout)) == (code, told)
    assert done.stderr.startswith("Traceback")


def test_findings_exit_with_1(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    damage.optimizer_file(root).unlink()
    for options in ([], ["--deep"], ["--json"]):
        done = ckpttool_process("verify", root, *options)
        assert (done.code, done.stderr) == (1, "")
        assert "is missing" in done.stdout


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = ckpttool_process("inspect", tmp_path, "--debug")
    assert done.code == 3
    assert done.stderr.startswith("Traceback")
    assert "ckpttool.formats.locate.NoCheckpointError: " in done.stderr.splitlines()[-1]


def test_parameter_that_is_not_there_is_an_error() -> None:
    error = ckpttool("inspect", ZERO3, "--param", "up.weigth").error
    assert error.endswith("holds no parameter up.weigth; did you mean up.weight? inspect --params lists the names")
    assert "holds no parameter ;" in ckpttool("inspect", ZERO3, "--param", "").error


def test_globs_that_match_nothing_are_an_error(tmp_path: Path) -> None:
    error = ckpttool("consolidate", ZERO3, tmp_path / "out", "--to", "torch", "--include", "nothing.*").error
    assert "no parameter is left to write; check --include, --exclude, --exclude-frozen" in error
    assert os.listdir(tmp_path) == []


def test_version() -> None:
    assert ckpttool_process("--version").stdout == f"ckpttool, version {api.__version__}\n"


# ------------------------------------------------------------------------------------------------- help


def _commands() -> list[tuple[str, click.Command]]:
    context = click.Context(cli)
    return [("", cli), *((name, _command(name)) for name in cli.list_commands(context))]


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


@pytest.mark.parametrize(("name", "command"), _commands(), ids=lambda c: c or "ckpttool" if isinstance(c, str) else "")
def test_everything_has_help(name: str, command: click.Command) -> None:
    arguments = [name, "--help"] if name else ["--help"]
    done = ckpttool(*arguments)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == ckpttool(*arguments[:-1], "-h").stdout
    assert done.stdout.startswith(f"Usage: ckpttool {name}".rstrip())
    assert "..." not in re.sub(r"COMMAND \[ARGS\]\.\.\.|SRC\.\.\.|exp_avg, \.\.\.", "", done.stdout), (
        "a help text is cut"
    )
    assert (command.help or "").strip().endswith(".") or name in {
        "",
        "completion",
    }  # exit codes, or lines to type, are last
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert parameter.opts[-1] in done.stdout
        else:
            assert (parameter.name or "").upper() in done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"completion"}))
def test_options_are_called_as_the_functions_parameters(name: str) -> None:
    """--json, --html and --debug are about printing, and so are inspect's views; the library has no such parameters."""
    printing = {"as_json", "debug", "html", "view", "wide", "quiet", "verbose"} | (
        {*VIEW_FLAGS, "name"} if name == "inspect" else set()
    )
    printing |= {"part", "ray_address"}  # further values of SRC and --ray
    function = python_inspect.signature(getattr(api, name)).parameters
    command = {p.name for p in _command(name).params}
    decided = {"extract": "framework", "stats": "magnitudes"}  # the form of the output decides
    assert command - printing == set(function) - {"progress", decided.get(name)}
    for option in _command(name).params:
        if isinstance(option, click.Option) and option.name not in printing:
            called = (option.name or "").replace("_", "-")
            # An option that may be repeated is called as one, the parameter as all of them.
            assert option.opts[-1] in {f"--{called}", *([f"--{called.removesuffix('s')}"] if option.multiple else [])}
            assert option.default in {None, False, ()} or option.required or repr(option.default).endswith("UNSET")


# ------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_json_of_every_kind_of_checkpoint(name: str, tmp_path: Path) -> None:
    told = _json("inspect", source(name))
    assert list(told) == [
        "version", "location", "root", "tag", "format", "stage", "topology", "mesh", "dtype", "deepspeed_version",
        "step", "skipped_steps", "nbytes",
        "parameters", "buffers", "aliases", "groups", "unsliceable", "scheduler", "data_states", "loss_scaler",
        "client_state",
        "metrics", "provenance", "thin", "ds_config", "files", "notes", "remarks",
    ]  # fmt: skip
    assert told["location"] == tag_directory(name)
    assert list(told["topology"]) == ["data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel"]
    assert list(told["parameters"][0]) == ["name", "shape", "numel", "group", "frozen", "states", "numbers"]
    assert list(told["files"][0]) == ["name", "nbytes", "kind", "rank", "model_rank"]
    assert [list(g) for g in told["groups"][:1]] in ([], [["parameters", "hyperparameters", "scalars"]])
    one = _json("inspect", source(name), "--param", told["parameters"][0]["name"])
    assert list(one) == ["version", "name", "states"]
    state = next(iter(one["states"].values()))
    assert list(state) == ["dtype", "shape", "nbytes", "extents"]
    assert list(state["extents"][0])[:7] == [
        "file", "rank", "offset", "nbytes", "start", "numel", "padding",
    ]  # fmt: skip
    assert list(_json("verify", source(name), "--deep")) == [
        "version", "sound", "location", "tag", "deep", "files", "nbytes", "tensors", "records_checked",
        "records_unrecorded", "unplaced", "findings", "notes",
    ]  # fmt: skip
    written = _json("consolidate", source(name), tmp_path / "out", "--to", "safetensors")
    assert list(written) == ["version", "written", "tensors", "elements", "dtype", "tied", "sidecars", "notes"]
    assert list(written["written"]) == [
        "out", "dry_run", "there", "files", "nbytes_read", "nbytes_written", "overflowed", "seconds", "digest",
        "checks", "needs", "kept",
    ]  # fmt: skip


def _json(*arguments: object) -> Any:
    done = ckpttool(*arguments, "--json")
    assert (done.code, done.stderr) == (0, "")
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------------- streams


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
@pytest.mark.parametrize("name", ["zero3-dp4-bf16", "zero2-dp2-bf16-trainer"])
def test_pipe_gets_whole_names_and_no_decoration(name: str, view: tuple[str, ...]) -> None:
    if "trainer" in name and "--param" in view:
        view = ("--param", "model.layers.0.self_attn.q_proj.weight")
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "20", "TERM": "xterm-256color"}
    done = ckpttool_process("inspect", source(name), *view, env=environment)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == ckpttool("inspect", source(name), *view).stdout
    assert all(line == line.rstrip() and line.isprintable() for line in done.stdout.splitlines())
    if view == ("--params",):
        names = [p["name"] for p in _json("inspect", source(name))["parameters"]]
        assert [line.split()[0] for line in done.stdout.splitlines()[1 : len(names) + 1]] == names
    if view == ("--ranks",):
        assert ("pp_rank_3_mp_rank_00_optim_states.pt" in done.stdout) == (name == "zero3-dp4-bf16")


@pytest.mark.slow
def test_narrow_terminal_shortens_what_does_not_fit() -> None:
    wide = in_terminal("inspect", source("zero3-dp4-bf16"), "--files", columns=200)
    name = "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    assert name in wide
    assert "\x1b[1m" in wide
    narrow = plain(in_terminal("inspect", source("zero3-dp4-bf16"), "--files", columns=40))
    assert max(map(len, narrow.splitlines())) <= 45
    assert name not in narrow
    assert "--wide" in narrow
    for view in VIEWS:
        assert in_terminal("inspect", ZERO3, *view, columns=1)
    assert "ZeRO-3 over 2 ranks" in in_terminal("inspect", ZERO3, columns=80)


def test_views_are_printed_one_after_another() -> None:
    each = [ckpttool("inspect", ZERO3, f"--{view}").stdout for view in VIEW_FLAGS]
    assert ckpttool("inspect", ZERO3, "--map", "--files", "--params", "--ranks").stdout == "\n".join(each)


def test_terminal_gets_no_codes_from_names(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero3-dp2-bf16")
    damage.rename_parameter(root, "up.weight", "\x1b[2J[bold]x[/bold]")
    shown = in_terminal("inspect", root, "--params", columns=200)
    assert "\\x1b[2J[bold]x[/bold]" in shown
    assert "\x1b[2J" not in shown


def test_no_color_is_respected(checkpoint_copy: Callable[[str], Path]) -> None:
    assert "\x1b[32m" in in_terminal("verify", ZERO3, "--deep", columns=80)
    shown = in_terminal("verify", ZERO3, "--deep", columns=80, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*m", shown), "only a slow run's progress may move the cursor"


def test_progress_is_printed_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "SECONDS_BETWEEN_LINES", 0)
    for arguments in (["verify", ZERO3, "--deep"], ["consolidate", ZERO3, tmp_path / "out", "--to", "safetensors"]):
        done = ckpttool(*arguments, "--json")
        assert done.code == 0
        assert json.loads(done.stdout)
        lines = done.stderr.splitlines()
        assert all(re.fullmatch(rf"{arguments[0]}: \d+ % \([\d.]+ k?B of [\d.]+ kB\)", line) for line in lines), lines
        assert int(lines[-1].split()[1]) > 90


def test_bar_is_drawn_on_stderr_for_work_that_takes_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[str] = []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            bars.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Terminal())
    with _output.progress_bar("verify") as progress:
        progress(1, 2000)
    assert bars == []
    monkeypatch.setattr(_output, "SECONDS_BEFORE_BAR", 0)
    with _output.progress_bar("verify") as progress:
        progress(1000, 2000)
    assert "1.0/2.0 kB" in "".join(bars)


def test_reader_that_has_seen_enough_is_no_error() -> None:
    for arguments in (["inspect", ZERO3, "--json"], ["inspect", ZERO3, "--params"], ["inspect", ZERO3]):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "ckpttool", *arguments]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
        os.close(write)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    arguments = [["inspect", ZERO3], ["consolidate", ZERO3, str(tmp_path / "out"), "--to", "torch"], ["verify", ZERO3]]
    for n, argument in enumerate([*arguments, ["inspect", str(tmp_path / "nothing")], ["inspect"], ["--help"]]):
        command = shlex.join([sys.executable, "-m", "ckpttool", *argument])
        done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, check=False)
        assert done.returncode == (0, 0, 0, 3, 2, 0)[n]
        assert "Traceback" not in done.stdout + done.stderr
        assert bool(done.stdout) == (n not in {3, 4} and closed == "2>&-")
        assert bool(done.stderr) == (n in {3, 4} and closed == ">&-")
    assert api.verify(tmp_path / "out", deep=True).findings == ()


def test_stdout_on_a_full_disk_is_an_error() -> None:
    for arguments in (["inspect", ZERO3, "--json"], ["verify", ZERO3]):
        command = [sys.executable, "-m", "ckpttool", *arguments]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 3
        assert (
            done.stderr
            == "Error: standard output: no space left on the device; free some space or choose another place\n"
        )


def test_terminal_without_unicode_gets_escapes(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero3-dp2-bf16")
    damage.rename_parameter(root, "up.weight", "é")
    done = ckpttool_process("inspect", root, "--params", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.code == 0
    assert "\n\\xe9 " in done.stdout


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PlanError("a", "is", "pass overwrite=True", ("overwrite",)), "a: is; pass --overwrite"),
        (PlanError("a; exclude", "is", "no exclude", ("exclude",)), "a; exclude: is; no --exclude"),
        (PlanError("a", "is", 'write to="zero"', ("to",)), "a: is; write --to zero"),
        (PlanError("a", "is", "check exclude, exclude_frozen", ("exclude",)), "a: is; check --exclude, exclude_frozen"),
        (PlanError("a", "is", "check storage_options", ("storage_options",)), "a: is; check --storage-option"),
        (PlanError("a", "is", "pass overwrite=True"), "a: is; pass overwrite=True"),
        (ArgumentError("world_size", "is missing", "give it"), "--world-size: is missing; give it"),
        (ArgumentError("root", "is an empty name", "name a directory"), "ROOT: is an empty name; name a directory"),
    ],
)
def test_hints_name_flags_on_the_command_line_alone(error: CkptError, line: str) -> None:
    assert with_flags(error) == line
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), with_flags(copy)) == (type(error), str(error), line)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("to", lambda untyped, out: untyped.consolidate(ZERO3, out, to="onnx")),
        ("dtype", lambda untyped, out: untyped.consolidate(ZERO3, out, to="torch", dtype="int8")),
        ("weights_from", lambda untyped, out: untyped.consolidate(ZERO3, out, to="torch", weights_from="both")),
        ("max_shard_size", lambda untyped, out: untyped.consolidate(ZERO3, out, to="torch", max_shard_size="lots")),
        ("check", lambda untyped, out: untyped.consolidate(ZERO3, out, to="torch", check="all")),
        ("memory", lambda untyped, out: untyped.consolidate(ZERO3, out, to="torch", memory="none")),
        ("jobs", lambda untyped, out: untyped.consolidate(ZERO3, out, to="torch", jobs=0)),
        ("adapter_only", lambda untyped, out: untyped.consolidate(ZERO3, out, to="torch", adapter_only=True)),
        ("to", lambda untyped, out: untyped.convert(ZERO3, out, to="onnx")),
        ("dtype", lambda untyped, out: untyped.convert(ZERO3, out, to="zero", world_size=2, dtype="int8")),
        ("world_size", lambda untyped, out: untyped.convert(ZERO3, out, to="zero")),
        ("world_size", lambda untyped, out: untyped.convert(ZERO3, out, to="zero", world_size=0)),
        ("stage", lambda untyped, out: untyped.convert(ZERO3, out, to="zero", world_size=2, stage=4)),
        ("stage", lambda untyped, out: untyped.convert(ZERO3, out, to="dcp", stage=2)),
        ("check", lambda untyped, out: untyped.convert(ZERO3, out, to="dcp", check="all")),
        ("memory", lambda untyped, out: untyped.cp(ZERO3, out, memory="none")),
        ("check", lambda untyped, out: untyped.extract(ZERO3, "up.weight", check="all")),
        ("framework", lambda untyped, out: untyped.extract(ZERO3, "up.weight", framework="jax")),
        ("index", lambda untyped, out: untyped.extract(ZERO3, "up.weight", index=(0, 0, 0))),
        ("index", lambda untyped, out: untyped.extract(ZERO3, "up.weight", out / "x.npy", index=slice(0, 4, 2))),
        ("jobs", lambda untyped, out: untyped.verify(ZERO3, jobs=0)),
        ("jobs", lambda untyped, out: untyped.digest(ZERO3, jobs=True)),
        ("rtol", lambda untyped, out: untyped.diff(ZERO3, ZERO3, rtol=-1.0)),
        ("keep_last", lambda untyped, out: untyped.prune(out, keep_last=0)),
        ("keep_best", lambda untyped, out: untyped.prune(out, keep_best=":")),
        ("keep_best", lambda untyped, out: format_best("loss")),  # type: ignore[arg-type]
        ("keep_for", lambda untyped, out: untyped.prune(out, keep_for="a while")),
        ("grace", lambda untyped, out: untyped.prune(out, torn=True, grace="soon")),
        ("why", lambda untyped, out: untyped.pin(ZERO3, why=" ")),
        ("world_size", lambda untyped, out: untyped.convert(ZERO3, out / "x", to="zero", world_size=1 << 21)),
        ("expert_parallel", lambda untyped, out: untyped.convert(
            ZERO3, out / "x", to="zero", world_size=2, expert_parallel=4)),
        ("dtype", lambda untyped, out: untyped.load_state_dict(ZERO3, dtype="int8")),
        ("check", lambda untyped, out: untyped.load_state_dict(ZERO3, check="some")),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_class_of_error(name: str, call: Callable[[Any, Path], object], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(api, tmp_path)
    assert caught.value.path == name
    assert caught.value.hint
    assert isinstance(caught.value, ValueError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["", None, 3], ids=repr)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("out", lambda untyped, value: untyped.consolidate(ZERO3, value, to="torch")),
        ("out", lambda untyped, value: untyped.convert(ZERO3, value, to="zero", world_size=2)),
        ("out", lambda untyped, value: untyped.extract(ZERO3, "up.weight", value or "")),
        ("out", lambda untyped, value: untyped.cp(ZERO3, value)),
        ("root", lambda untyped, value: untyped.ls(value)),
        ("root", lambda untyped, value: untyped.prune(value, keep_last=1)),
        ("root", lambda untyped, value: untyped.CheckpointManager(value)),
        ("src", lambda untyped, value: untyped.inspect(value)),
        ("src", lambda untyped, value: untyped.verify(value)),
        ("src", lambda untyped, value: untyped.cp(value, "x")),
    ],
)  # fmt: skip
def test_a_path_that_is_none_is_refused(
    name: str, call: Callable[[Any, Any], object], value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(ArgumentError) as caught:
        call(api, value)
    assert caught.value.path == name
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- imports


def test_public_names_can_be_imported() -> None:
    names: dict[str, Any] = {}
    exec("from ckpttool import *", names)  # noqa: S102
    assert set(names) - {"__builtins__"} == set(dir(api)) > {"__version__", "inspect", "Checkpoint", "ArgumentError"}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = getattr(api, "nothing")  # noqa: B009  type checkers know that it is missing


def _callables() -> list[tuple[str, Callable[..., Any]]]:
    """The public functions, and the public methods of the public classes; those of storages are for developers."""
    found = []
    for name in dir(api):
        value = getattr(api, name)
        has_methods = (
            python_inspect.isclass(value) and not is_dataclass(value) and not getattr(value, "_is_protocol", False)
        )
        members = vars(value) if has_methods else {}
        found += [(f"{name}.{key}", member) for key, member in members.items() if python_inspect.isfunction(member)]
        found += [(name, value)] if python_inspect.isfunction(value) else []
    of_integrations = {f"CheckpointManager.{name}" for name in ("save_into", "begin_restore", "restore_first")}
    return [
        (n, value) for n, value in found if n not in of_integrations and not re.search(r"\._(?!_init__)|\.blocks$", n)
    ]


def test_names_in_signatures_and_raises_can_be_imported() -> None:
    """From ``ckpttool`` or ``ckpttool.errors``."""
    missing = {}
    for name, function in _callables():
        used = {*re.findall(r"(?m)^ +(\w+Error): ", function.__doc__ or "")}
        used |= {*re.findall(r"\b[A-Z]\w+", " ".join(map(str, function.__annotations__.values())))}
        private = (used & _names_of_the_package(function.__module__)) - {*dir(api), *dir(errors)}
        if private:
            missing[name] = private
    assert missing == {}


@functools.cache
def _names_of_the_package(module: str) -> set[str]:
    """Names that a module imports from the package, or defines."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("ckpttool")]
    return {a.name for n in imports for a in n.names} | {*vars(sys.modules[module])} - {*vars(typing)}


HEAVY = ["torch", "deepspeed", "ray", "s3fs", "fsspec", "transformers", "safetensors", "pandas", "rich.table"]


SMALL = ["zero2-dp2-bf16", "zero3-dp4-bf16", "moe-zero2-dp4-ep2-bf16", "pipeline-zero1-pp2-dp2-bf16",
         "universal-zero2-dp2-bf16", "zero0-dp2-bf16", "autotp-zero2-tp2-dp2-bf16-fused",
         "autoep-zero2-dp2-ep2-bf16", "megatron-zero1-tp2-dp2-bf16"]  # fmt: skip
"""One checkpoint of each layout whose rows nothing needs before a conversion."""
WRITERS = ["ctypes", "logging", "ckpttool.plan", "ckpttool.commit.manifest", "ckpttool.storage.local_writer"]


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("import ckpttool", ["numpy", "click"]),
        ("import ckpttool.cli", ["numpy", "rich"]),
        ("run(['--help'])", ["numpy", "rich", "dataclasses", "ckpttool.formats", "ckpttool.model"]),
        *((f"run(['inspect', {source(name)!r}])", ["numpy", "rich", "json", *WRITERS]) for name in SMALL),
        ("run(['inspect', SRC, '--params'])", ["numpy", "rich"]),
        ("run(['inspect', SRC, '--json'])", ["numpy", "rich"]),
        ("run(['inspect', SRC, '--param', 'embed.weight'])", ["rich"]),
        ("run(['verify', SRC, '--deep'])", ["rich"]),
        ("run(['consolidate', SRC, OUT, '--to', 'safetensors'])", ["rich"]),
    ],
)
def test_little_is_imported(code: str, more: list[str], tmp_path: Path) -> None:
    program = f"""
import sys
SRC, OUT = {ZERO3!r}, {str(tmp_path / "out")!r}
def run(arguments):
    import ckpttool.cli
    from ckpttool.cli._errors import invoke
    assert invoke(ckpttool.cli.cli, arguments) == 0
{code}
print([name for name in {HEAVY + more!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "logs"),
    [(["--help"], False), (["ls", "-h"], False), ([], False), (["inspect", ZERO3], False), (["ls", ZERO3], True)],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else None,
)
def test_only_commands_whose_libraries_log_import_logging(arguments: list[str], logs: bool) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ckpttool", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("logging" in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}) is logs


def test_a_duration_needs_a_unit(tmp_path: Path) -> None:
    done = ckpttool("prune", tmp_path, "--torn", "--grace", "5")
    assert done.code == 2
    assert "'5' has no unit; write 5d, 5h, 5min or 5s" in done.stderr


@pytest.mark.parametrize("arguments", [["inspect"], ["convert", ZERO3, "out", "--to", "zeroo"], ["ls", "--no-such"]])
def test_wrong_usage_is_told_as_json_too(arguments: list[str]) -> None:
    done = ckpttool(*arguments, "--json")
    told = json.loads(done.stdout)
    assert (done.code, told["path"]) == (2, f"ckpttool {arguments[0]}")
    assert told["error"] in done.stderr
    assert told["hint"] == f"see ckpttool {arguments[0]} --help"
