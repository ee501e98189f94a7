"""What is said of mistyped names, and the completion of a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest

from ckpttool.cli import COMMANDS, MEANT, cli
from ckpttool.cli._examples import DOCS
from tests.cli.command import Outcome, ckpttool
from tests.truth import HERE, source

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT = source("zero2-dp2-bf16")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("inspekt", CHECKPOINT), "inspect?"),
        (("verfy",), "verify?"),
        (("export", CHECKPOINT), "consolidate?"),
        (("merge",), "consolidate?"),
        (("inspect", CHECKPOINT, "--param", "head.wieght"), "did you mean head.weight?"),
        (("extract", CHECKPOINT, "up.wight", "OUT"), "did you mean up.weight?"),
        (("inspect", CHECKPOINT, "--tag", "global_step33"), "did you mean global_step3?"),
        (("inspect", HERE / "checkpoints/zero2-dp2-bf1"), "did you mean zero2-dp2-bf16?"),
        (("inspect", "s3:/models/x"), "did you mean s3://models/x?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistyped_name_gets_a_suggestion(arguments: tuple[object, ...], meant: str) -> None:
    done = ckpttool(*arguments)
    assert done.code in {2, 3}
    assert meant in done.stderr


def test_an_unlike_name_gets_none() -> None:
    assert "did you mean" not in ckpttool("inspect", CHECKPOINT, "--param", "zzz").stderr
    assert ckpttool("qqqq").stderr.endswith("Error: no command 'qqqq'; see ckpttool --help\n")
    assert set(MEANT.values()) <= COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"completion"}))
def test_the_examples_of_the_help_parse_and_its_page_exists(name: str) -> None:
    shown, more = ckpttool(name, "--help").stdout.rsplit(f"\nMore: {DOCS}/", 1)
    page = more.replace(".html\n", ".md")
    assert [place for place in ("docs", "ckpttool/extensions/*/docs") if [*HERE.parent.glob(f"{place}/howto/{page}")]]
    lines = shown.rpartition("Examples:\n")[2].splitlines()
    assert len(lines) == 3
    for line in lines:
        program, called, *arguments = shlex.split(line)
        assert (program, called) == ("ckpttool", name)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        command.make_context(name, arguments)  # raises for wrong usage


def test_the_environment_gives_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTTOOL_JOBS", "many")
    assert "Invalid value for '--jobs'" in ckpttool("verify", CHECKPOINT).stderr
    monkeypatch.setenv("CKPTTOOL_JOBS", "2")
    assert ckpttool("verify", CHECKPOINT).code == 0
    monkeypatch.setenv("CKPTTOOL_STORAGE_OPTIONS", "nonsense")
    assert "is not KEY=VALUE" in ckpttool("verify", CHECKPOINT).stderr


def test_quiet_prints_errors_and_json_alone(tmp_path: Path) -> None:
    assert ckpttool("verify", CHECKPOINT, "-q") == Outcome(0, "", "")
    assert ckpttool("digest", CHECKPOINT, "-q").stdout == ""
    assert ckpttool("inspect", CHECKPOINT, "-q", "--json").stdout == ckpttool("inspect", CHECKPOINT, "--json").stdout
    assert "does not exist" in ckpttool("inspect", tmp_path / "gone", "-q").stderr


def test_help_is_a_command_too() -> None:
    assert ckpttool("help").stdout == ckpttool("--help").stdout
    assert ckpttool("help", "digest").stdout == ckpttool("digest", "--help").stdout
    assert ckpttool("-V").stdout == ckpttool("--version").stdout


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "bf16"])
def test_the_types_of_torch_are_accepted(name: str, tmp_path: Path) -> None:
    done = ckpttool("consolidate", CHECKPOINT, tmp_path / "out", "--to", "torch", "--dtype", name, "--dry-run")
    assert done.code == 0
    assert "parameters in bf16" in done.stdout


def test_the_source_as_output_is_said_to_be_the_source() -> None:
    for command in ("consolidate", "convert"):
        done = ckpttool(command, CHECKPOINT, CHECKPOINT, "--to", "torch" if command == "consolidate" else "dcp")
        assert (
            done.error
            == f"Error: {CHECKPOINT}: would be written over the checkpoint in {CHECKPOINT}; choose another OUT"
        )


def _completed(words: str) -> list[str]:
    """What a shell suggests at the end of some words."""
    asked = {"COMP_WORDS": f"ckpttool {words}", "COMP_CWORD": str(words.count(" ") + 1)}
    environment = os.environ | {"_CKPTTOOL_COMPLETE": "bash_complete"} | asked
    command = [sys.executable, "-c", "import sys; sys.argv = ['ckpttool']; from ckpttool.cli import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(",")[2] for line in done.stdout.split()]


def test_a_shell_completes_commands_tags_and_names(tmp_path: Path) -> None:
    for step in (3, 6):
        shutil.copytree(f"{CHECKPOINT}/global_step3", tmp_path / f"global_step{step}")
    assert _completed("ins") == ["inspect"]
    assert sorted(_completed(f"inspect {tmp_path} --tag glob")) == ["global_step3", "global_step6"]
    assert _completed(f"inspect {CHECKPOINT} --param he") == ["head.weight"]
    assert _completed(f"extract {CHECKPOINT} norm.") == ["norm.weight", "norm.bias"]
    assert _completed(f"inspect {tmp_path / 'gone'} --param he") == []
    for shell in ("bash", "zsh", "fish"):
        assert "_CKPTTOOL_COMPLETE" in ckpttool("completion", shell).stdout


def test_completion_after_help_and_after_a_mistyped_command_is_no_error() -> None:
    assert _completed("help con") == ["consolidate", "convert"]
    assert "inspect" in _completed("inpsect ")


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["consolidate"], "Missing argument 'SRC' and argument 'OUT' and option '--to'."),
        (["consolidate", "a"], "Missing argument 'OUT' and option '--to'."),
        (["pin", "a"], "Missing option '--why'."),
    ],
)
def test_all_missing_arguments_are_named(arguments: list[str], missing: str) -> None:
    done = ckpttool(*arguments)
    assert done.code == 2
    assert missing in done.stderr
