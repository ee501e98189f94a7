"""Describes the public interface: exported names with their signatures, and what the commands print as JSON.

    python -m tests.golden.interface     # writes interface.json anew, after a change of the interface that is meant

The names, the options and the JSON of an extension are in ``interface.json`` in the directory of its tests.

``test_interface_file.py`` compares. Nothing here needs torch, DeepSpeed or Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ckpttool
from ckpttool.cli import COMMANDS, cli
from ckpttool.cli._errors import invoke
from ckpttool.registry import EXTENSIONS, options_of
from tests.cli.command import EXTENSIONS_READING
from tests.rooms import present
from tests.truth import source

GOLDEN = Path(__file__).with_name("interface.json")
OF_EXTENSIONS = Path(__file__).resolve().parents[1] / "extensions"
ZERO2, ZERO3, OTHER = source("zero2-dp2-bf16"), source("zero3-dp2-bf16"), source("universal-zero3-dp2-bf16")


def describe() -> dict[Path, dict[str, Any]]:
    """The whole interface, as plain values by golden file; a file without a name and a command is left out."""
    found: dict[Path, dict[str, Any]] = {GOLDEN: {"names": {}, "json": {}}}
    names, modules = ckpttool.__dir__(), vars(ckpttool)["_modules"]
    for name in names:
        described = _describe_name(getattr(ckpttool, name))
        _golden(found, modules[name])["names"][name] = described
    for row in EXTENSIONS:
        for option in (one for one in row.options if one.before):
            told = f"{option.annotation} = {option.default!r}, before {option.before}"
            own = _golden(found, f"ckpttool.extensions.{row.name}.").setdefault("options", {})
            own |= {f"{function} {option.name}": told for function in option.functions}
    for key, schema in _outputs().items():
        _golden(found, COMMANDS[key.partition(" ")[0]])["json"][key] = schema
    return found


def _golden(found: dict[Path, dict[str, Any]], module: str) -> dict[str, Any]:
    """The description in the golden file of a module."""
    _, package, name, *_ = f"{module}..".split(".")
    path = OF_EXTENSIONS / name / GOLDEN.name if package == OF_EXTENSIONS.name else GOLDEN
    return found.setdefault(path, {"names": {}, "json": {}})


# ------------------------------------------------------------------------------------------------- names


def _describe_name(value: Any) -> Any:
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        return {"class": bases, "members": _members(value)}
    return f"{value.__name__}{_signature(value)}" if inspect.isfunction(value) else type(value).__name__


def _members(cls: type) -> dict[str, str]:
    """Fields, properties and methods without an underscore, and how it is made; inherited ones of this package too."""
    found: dict[str, str] = {}
    if not _is_foreign(inspect.getattr_static(cls, "__init__")):
        found["__init__"] = _signature(cls)
    if dataclasses.is_dataclass(cls):
        found |= {f.name: str(f.type) for f in dataclasses.fields(cls)}
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_") or name in found or _is_foreign(member):
            continue
        if isinstance(member, property) or hasattr(member, "func"):
            getter: Any = member.fget if isinstance(member, property) else member.func
            found[name] = f"property -> {inspect.signature(getter).return_annotation}"
        elif isinstance(member, classmethod | staticmethod):
            found[name] = f"{type(member).__name__} {_signature(member.__func__)}"
        elif inspect.isfunction(member):
            found[name] = _signature(member)
    return dict(sorted(found.items()))


def _is_foreign(member: Any) -> bool:
    """Whether it is inherited from Python itself."""
    inner = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    return callable(inner) and not str(getattr(inner, "__module__", "")).startswith("ckpttool")


def _signature(function: Any) -> str:
    """Parameters of the core with annotations as they are written, which is the same for every release of Python."""
    signature, added = inspect.signature(function), {option.name for option in options_of(function.__qualname__)}
    own = [parameter for parameter in signature.parameters.values() if parameter.name not in added]
    written = str(signature.replace(parameters=own)).replace("'", "").replace('"', "")
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", written)


# ------------------------------------------------------------------------------------------------- JSON


def _outputs() -> dict[str, Any]:
    """Keys and types of what every command with --json prints."""
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary, "runs")
        _many_tags(runs)
        calls: dict[str, list[list[Any]]] = {
            "inspect": [["inspect", path] for path in (ZERO2, ZERO3, OTHER)],
            "inspect --param": [["inspect", ZERO3, "--param", "up.weight"]],
            "digest": [["digest", ZERO3]],
            "verify": [["verify", ZERO3], ["verify", _damaged(Path(temporary)), "--deep"]],
            "diff": [["diff", ZERO3, OTHER], ["diff", ZERO3, ZERO2]],
            "ls": [["ls", runs]],
            "extract": [["extract", ZERO3, "up.weight", Path(temporary, "up.npy")]],
            "cp": [["cp", ZERO3, Path(temporary, "copied")]],
            "pin": [["pin", runs / "global_step1", "--why", "it is in the paper"]],
            "prune": [["prune", runs, "--keep-last", "1", *["--thin-every", "2"] * present("thinning"), "--dry-run"]],
            "unpin": [["unpin", runs / "global_step1"]],
            "consolidate": [["consolidate", ZERO3, Path(temporary, "weights"), "--to", "safetensors"]],
            "convert": [["convert", ZERO3, Path(temporary, "zero"), "--to", "zero", "--world-size", "1"]],
        }
        calls |= {name: [[name, ZERO3]] for name in EXTENSIONS_READING}
        calls |= {name: [[name, *given, Path(temporary, name)]] for name, given in _calls_of_extensions().items()}
        with_json = {name for name in COMMANDS if "as_json" in {p.name for p in _command(name).params}}
        covered = {key.partition(" ")[0] for key in calls}
        assert covered == with_json, f"--json is not described for {with_json ^ covered}"
        # In this order: some read what others wrote.
        found = {key: _merged([_schema(_run([*call, "--json"])) for call in calls[key]]) for key in calls}
        return {key: found[key] for key in sorted(found)}


def _calls_of_extensions() -> dict[str, list[Any]]:
    """Commands that need more than a checkpoint, and their arguments before OUT: of the tests of their extension."""
    modules = [f"tests.extensions.{row.name}.calls" for row in EXTENSIONS]
    found = [importlib.import_module(module) for module in modules if find_spec(module) is not None]
    return {name: arguments for module in found for name, arguments in module.CALLS.items()}


def _command(name: str) -> Any:
    import click

    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def _many_tags(root: Path) -> None:
    """A root of three checkpoints."""
    for step in (1, 2, 3):
        shutil.copytree(Path(ZERO2, Path(ZERO2, "latest").read_text()), root / f"global_step{step}")
    (root / "latest").write_text("global_step3")


def _damaged(directory: Path) -> str:
    """A checkpoint with findings."""
    root = directory / "damaged"
    shutil.copytree(ZERO2, root)
    next(iter(sorted(root.rglob("*optim_states.pt")))).unlink()
    return str(root)


def _run(arguments: list[Any]) -> Any:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = invoke(cli, [os.fspath(a) for a in arguments])
    assert code in {0, 1}, err.getvalue()
    assert out.getvalue(), err.getvalue()
    return json.loads(out.getvalue())


FREE = {"states", "aliases", "tied"}
"""Mappings from names in the checkpoint; their values alone are described."""
TYPES = {type(None): "null", bool: "boolean", str: "string", int: "integer", float: "number"}
OPAQUE = {
    "client_state",
    "ds_config",
    "hyperparameters",
    "scalars",
    "scheduler",
    "data_states",
    "loss_scaler",
    "metrics",
    "provenance",
}
"""Mappings that are copied from the checkpoint as they are."""


def _schema(value: Any, key: str = "") -> Any:
    """What a value of JSON is: a mapping by keys, a list by its merged elements, else the name of its type."""
    if isinstance(value, dict):
        if key in OPAQUE:
            return {"object"}
        if key in FREE:
            return {"*": _merged([_schema(each) for each in value.values()])}
        return {name: _schema(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_merged([_schema(each, key) for each in value])] if value else []
    return {TYPES[type(value)]}


def _merged(schemas: list[Any]) -> Any:
    """One schema that says what several values of the same place are."""
    sets = [schema for schema in schemas if isinstance(schema, set)]
    mappings = [schema for schema in schemas if isinstance(schema, dict)]
    lists = [schema for schema in schemas if isinstance(schema, list)]
    plain = set().union(*sets)
    if mappings:
        names = list(dict.fromkeys(name for mapping in mappings for name in mapping))
        merged: Any = {name: _merged([mapping[name] for mapping in mappings if name in mapping]) for name in names}
    elif lists:
        inner = [schema for each in lists for schema in each]
        merged = [_merged(inner)] if inner else []
    else:
        return plain
    return {"either": [merged, plain]} if plain else merged


def texts() -> dict[Path, str]:
    """The content of each golden file."""
    return {
        path: json.dumps(described, indent=1, default=lambda kinds: " or ".join(sorted(kinds))) + "\n"
        for path, described in describe().items()
    }


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
