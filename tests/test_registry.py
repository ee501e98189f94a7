"""Options of extensions: rows of the registry, in commands and functions of the core."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest

import ckpttool
from ckpttool.cli import COMMANDS, cli
from ckpttool.cli._errors import invoke
from ckpttool.cli._options import Command
from ckpttool.cli._output import Output, show
from ckpttool.options import Option
from ckpttool.registry import EXTENSIONS, Extension, carry_out, hooks, options_of, values_of, with_options

STUB = Path(ckpttool.__file__).with_suffix(".pyi")
MANY = Option(
    "names",
    ("Holder.write", "write"),
    f"{__name__}.changed",
    before="last",
    annotation="Sequence[str]",
    default=(),
    text=f"Names of those to write, {'and a text that is longer than a line ' * 2}can be.",
    after="first",
    section="Names",
    help="One to write (repeatable).",
    metavar="NAME",
)
FLAG = MANY._replace(name="twice", annotation="bool", default=False, text="Write twice.", after="names", metavar=None)


def changed(**given: Any) -> dict[str, Any]:
    """Does what the options of an extension ask for."""
    return given


class Page(Output):
    """What a report is written to."""

    printed: ClassVar[list[Any]] = []

    def __init__(self, out: str) -> None:
        self.out = out

    def check(self, context: click.Context) -> None:
        if self.out == "no":
            raise click.UsageError("not there")
        self.printed.append("checked")

    def show(self, report: Any, context: click.Context) -> None:
        self.printed.append((self.out, report))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.registry.EXTENSIONS", (Extension("a", options=(MANY, FLAG)),))


def _holder() -> Any:
    """A class with a method that takes options of extensions."""

    class Holder:
        def write(self, first: int = 0, *, last: int = 1, **given: Any) -> list[Any]:
            """Write.

            Args:
                first: The first.
                last: The last.
            """
            return carry_out("Holder.write", given)

    Holder.write.__qualname__ = "Holder.write"
    with_options(Holder.write)
    return Holder()


@pytest.mark.usefixtures("rows")
def test_a_function_has_the_options_of_its_rows() -> None:
    function = _holder().write
    assert str(inspect.signature(function)) == (
        "(first: 'int' = 0, *, names: 'Sequence[str]' = (), twice: 'bool' = False, last: 'int' = 1) -> 'list[Any]'"
    )
    assert list(function.__annotations__) == ["first", "last", "return", "names", "twice"]
    assert inspect.cleandoc(function.__doc__).splitlines()[3:] == [
        "    first: The first.",
        "    names: Names of those to write, and a text that is longer than a line and a text that is longer than a",
        "        line can be.",
        "    twice: Write twice.",
        "    last: The last.",
    ]


def read(src: str, *, jobs: int, tag: str) -> None:
    """Read.

    Args:
        jobs: Number
            of threads.

    Raises:
        ValueError: Never.
    """


def count(*, jobs: int) -> int:
    """Count.

    Returns:
        The number.

    Raises:
        ValueError: Never.
    """
    return jobs


COMPLETED = {
    read: """Read.

Args:
    src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
        universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
        of weights. Several directories if each contains the files of some ranks (node-local storage).
    jobs: Number
        of threads.
    tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.

Raises:
    ValueError: Never.""",
    count: """Count.

Args:
    jobs: Threads. Default: one for each core, up to four.

Returns:
    The number.

Raises:
    ValueError: Never.""",
}


@pytest.mark.parametrize("indent", ["", "    "], ids=["Python 3.13", "before"])
@pytest.mark.parametrize("function", [read, count])
def test_a_docstring_gets_the_texts_of_the_core_for_parameters_that_it_does_not_list(
    function: Any, indent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = textwrap.indent(inspect.getdoc(function) or "", indent)
    monkeypatch.setattr(function, "__doc__", f"{written.strip()}\n{indent}")
    with_options(function)
    assert inspect.getdoc(function) == COMPLETED[function]


def test_a_function_without_options_of_extensions_refuses_them() -> None:
    function = _holder().write
    assert str(inspect.signature(function)) == "(first: 'int' = 0, *, last: 'int' = 1) -> 'list[Any]'"
    assert function(1, last=2) == []
    with pytest.raises(TypeError) as caught:
        function(twice=True)
    assert str(caught.value) == "Holder.write() got an unexpected keyword argument 'twice'"


@pytest.mark.usefixtures("rows")
def test_the_code_of_given_options_is_called_with_them() -> None:
    function = _holder().write
    assert function(1, names=("a",), twice=True) == [{"names": ("a",), "twice": True}]
    assert function(1, names=("a",), twice=False) == [{"names": ("a",)}]
    assert function(1, names=(), twice=False) == []
    with pytest.raises(TypeError, match="unexpected keyword argument 'thrice'"):
        function(1, thrice=True)


def test_an_option_of_a_command_sets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    place = FLAG._replace(name="place", annotation="str", before="", after="twice", sets="twice", metavar="PLACE")
    twice = FLAG._replace(annotation="bool | str | None", default=None, after="first")
    monkeypatch.setattr("ckpttool.registry.EXTENSIONS", (Extension("a", options=(twice, place)),))
    calls: list[dict[str, Any]] = []
    command = Command("write", params=[click.Option(["--first"])], callback=lambda **given: calls.append(given))
    for arguments in ([], ["--twice"], ["--twice", "--place", "x"], ["--place", "x"], ["--place", "", "--twice"]):
        assert invoke(command, arguments) == 0
    assert [given["twice"] for given in calls] == [None, True, "x", "x", True]
    assert all(given.keys() == {"first", "twice", "storage_options", "follow_links"} for given in calls)


@pytest.mark.usefixtures("rows")
def test_a_function_gets_the_values_of_all_its_options() -> None:
    assert values_of("write", {"twice": True}) == {"names": (), "twice": True}
    assert values_of("read", {}) == {}
    with pytest.raises(TypeError) as caught:
        values_of("write", {"thrice": True})
    assert str(caught.value) == "write() got an unexpected keyword argument 'thrice'"


def test_a_class_has_the_options_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        """Holds.

        Args:
            first: The first.
            last: The last.
        """

        def __init__(self, first: int = 0, *, last: int = 1, **others: Any) -> None:
            """Keep what is given."""

    Holder.__qualname__ = "Holder"
    row = Extension("a", options=(FLAG._replace(functions=("Holder",)),))
    monkeypatch.setattr("ckpttool.registry.EXTENSIONS", (row,))
    with_options(Holder)
    assert str(inspect.signature(Holder)) == (
        "(first: 'int' = 0, *, twice: 'bool' = False, last: 'int' = 1, **others: 'Any') -> 'None'"
    )
    assert inspect.cleandoc(Holder.__doc__ or "").splitlines()[-2:] == [
        "    twice: Write twice.",
        "    last: The last.",
    ]


def test_hooks_are_functions_of_the_modules_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Extension("a"), Extension("b", hooks="posixpath"))
    monkeypatch.setattr("ckpttool.registry.EXTENSIONS", rows)
    assert [hook("x", "y") for hook in hooks("join")] == ["x/y"]
    for row in EXTENSIONS:
        assert not row.hooks or row.hooks.startswith(f"ckpttool.extensions.{row.name}.")


@pytest.mark.usefixtures("rows")
def test_a_command_has_the_options_of_its_rows() -> None:
    options = [click.Option(["--first"], help="F."), click.Option(["--last"], help="L.")]
    command = Command("write", params=[*options], callback=lambda **given: click.echo(given))
    of_all = [one.name for one in Command("other").params]
    assert [one.name for one in command.params] == ["first", "names", "twice", "last", *of_all]
    text = command.get_help(click.Context(command))
    assert "Names:\n  --names NAME  One to write (repeatable).\n  --twice       One to write (repeatable).\n" in text
    given = command.make_context("write", ["--names", "a", "--names", "b", "--twice"]).params
    of_storages = {"storage_options": None, "follow_links": False}
    assert given == {"first": None, "names": ("a", "b"), "twice": True, "last": None} | of_storages


def test_an_output_of_an_extension_is_no_argument_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Option("page", ("write",), f"{__name__}.Page", help="A page.")
    monkeypatch.setattr("ckpttool.registry.EXTENSIONS", (Extension("a", options=(row,)),))
    command = Command("write", params=[click.Option(["--first"])], callback=lambda first, **_: show(f"report {first}"))
    printed: list[Any] = []
    monkeypatch.setattr(Page, "printed", printed)
    assert invoke(command, ["--first", "1", "--page", "out"]) == 0
    assert printed == ["checked", ("out", "report 1")]
    assert invoke(command, ["--first", "1", "--page", "no"]) == 2


@pytest.mark.parametrize("row", EXTENSIONS, ids=[row.name for row in EXTENSIONS])
def test_rows_are_listed_where_they_say(row: Extension) -> None:
    for option in row.options:
        own = [one.name for one in row.options if one.before]
        of_targets = [name for target in row.targets for name in target.options]
        assert (
            option.code.startswith(f"ckpttool.extensions.{row.name}.")
            if option.code
            else option.name in of_targets or option.sets in own
        )
        for name in option.functions:
            if name in COMMANDS and option.help:
                command = cli.get_command(click.Context(cli), name)
                assert command is not None
                assert option.name in [one.name for one in command.params]


def test_the_stub_lists_the_options_of_each_class_and_method() -> None:
    """Extensions that are removed stay in it; ``golden/test_stub.py`` compares functions."""
    stub: dict[tuple[str, str], str] = {}
    text = STUB.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            stub |= {(node.name, name): annotation for (one, name), annotation in stub.items() if one in bases}
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            stub |= {(node.name, ast.unparse(field.target)): ast.unparse(field.annotation) for field in fields}
    functions = {name for extension in EXTENSIONS for option in extension.options for name in option.functions}
    for name in sorted(functions - {*re.findall(r" import (\w+) as _", text)}):
        class_name = "".join(word[0].upper() + word[1:] for word in re.split(r"[._]", name))
        for option in (one for one in options_of(name) if one.before):
            assert stub[f"_{class_name}Options", option.name] == option.annotation
