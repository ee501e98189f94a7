"""The extensions: features beside the core, each in one folder ``ckpttool/extensions/NAME`` with one row here.

The core imports no extension. It finds their commands, options, formats and public names by these rows, which are plain
values: an extension is imported when it is used. Without its folder, its addresses and its row, the core is whole.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckpttool.options import Option, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

F = TypeVar("F", bound="Callable[..., Any]")


class Command(NamedTuple):
    """A command of an extension."""

    name: str
    """The command, and the name of its ``click.Command`` in the module."""
    section: str
    """Section of ``ckpttool --help``."""
    after: str
    """The command of the core that the help lists before it."""
    module: str
    """Module to import when the command is called."""
    words: tuple[str, ...] = ()
    """Names of the command in other tools, for which the command line suggests it."""


class Format(NamedTuple):
    """A format that is read."""

    reader: str
    """Module and function that reads a checkpoint of the format. It takes the storage, the location of the checkpoint
    and a function for findings, and returns None if the files have another format."""
    kinds: Mapping[str, str]
    """Values of ``Checkpoint.format`` and their titles, with ``{stage}`` and ``{ranks}`` in them."""
    tagged: bool = False
    """Whether a root may contain several checkpoints, each in the directory of its tag."""
    marker: str = ""
    """A file (or, with a final slash, a directory) that only this format has; "" if file names identify it."""
    last: tuple[str, ...] = ()
    """Files to write last, because readers take them as the sign of a complete checkpoint."""
    numbered: bool = False
    """Whether files may number the optimizer's parameters: then the reader takes their order."""


class Target(NamedTuple):
    """A format that ``convert`` writes."""

    name: str
    """Value of ``to``."""
    planner: str
    """Module and function that plans the output: see ``targets.table.plan``."""
    loader: str
    """Name of what loads it."""
    options: tuple[str, ...] = ()
    """Parameters of ``convert`` that only this target and a few others have."""
    layouts: tuple[str, ...] = ()
    """Values of ``layout``."""
    checker: str = ""
    """Module and function that checks the options before the source is opened; "" without such a check."""
    holds_any_shape: bool = False
    """Whether it holds states of other shapes than their parameters."""


class Retention(NamedTuple):
    """An action on checkpoints that no retention rule keeps, instead of their removal."""

    rules: tuple[str, ...]
    """Its options of ``prune`` and ``CheckpointManager``; their code makes a ``catalog.actions.Action``."""
    marker: str
    """The file that claims a directory while the action changes it."""
    recover: str
    """Module and function that finishes or undoes the work of a killed process, by that file."""


class Extension(NamedTuple):
    """The row of an extension. Its names in ``ckpttool`` are in the stub beside ``ckpttool``."""

    name: str
    """Name of its folder."""
    commands: tuple[Command, ...] = ()
    """Its commands."""
    options: tuple[Option, ...] = ()
    """Its options of functions and commands of the core, in the order in which they are listed."""
    notebook: str = ""
    """Function that returns a ``Checkpoint`` as HTML for a notebook."""
    addresses: tuple[str, ...] = ()
    """Modules in other packages that only export its public names. They are removed with it."""
    formats: tuple[Format, ...] = ()
    """Formats that it reads; they are tried before the formats of the core without a marker."""
    targets: tuple[Target, ...] = ()
    """Formats that it writes."""
    retention: Retention | None = None
    """Its action on old checkpoints."""
    hooks: str = ""
    """Module with functions that every rank calls: ``after_capture`` of a save returns a ``ManifestRecord`` of
    ``saving.two_phase``, ``before_load`` may raise an error, ``after_load`` returns the report."""


EXTENSIONS: tuple[Extension, ...] = (
    Extension("accelerate", addresses=("ckpttool.integrations.accelerate",)),
    Extension("huggingface", addresses=("ckpttool.integrations.huggingface",)),
    Extension(
        "merging",
        commands=(Command("average", "Export", "consolidate", "ckpttool.extensions.merging.command", ("mean", "ema")),),
        options=(
            Option(
                "merge_lora", ("consolidate",), "ckpttool.extensions.merging.merge.Merge",
                before="rename", annotation="bool", default=False,
                text="Merge the trained LoRA or DoRA adapter into the base model's weights, in fp32, as PEFT does; the "
                "output has the base model's names.",
                after="adapter_only", section="LoRA",
                help="Merge the trained LoRA adapter into the base model, as PEFT does.",
            ),
            Option(
                "base", ("consolidate",), "ckpttool.extensions.merging.merge.Merge",
                before="rename", annotation="Source | None",
                text="The base model, a path that ``src`` may have; default: the frozen weights in the checkpoint.",
                after="merge_lora", section="LoRA", metavar="SRC",
                help="The base model for --merge-lora.  [default: the frozen weights in the checkpoint]",
            ),
            Option(
                "adapter", ("consolidate",), "ckpttool.extensions.merging.merge.Merge",
                before="rename", annotation="Sequence[str]", default=(),
                text="Names of the adapters to merge, if there are several.",
                after="base", section="LoRA", metavar="NAME",
                help="Adapter to merge, if there are several (repeatable).",
            ),
        ),
    ),
    Extension("lightning", addresses=("ckpttool.integrations.lightning",)),
    Extension(
        "pages",
        options=tuple(
            Option("html", commands, "ckpttool.extensions.pages.html.Html", help=told, metavar="FILE")
            for commands, told in (
                (("inspect", "verify", "diff", "ls"),
                 "Write a self-contained HTML page (- for stdout); replaces an earlier page."),
                (("prune",), "With --dry-run, write the decisions as an HTML page; replaces an earlier page."),
                (("stats",),
                 "Write a self-contained HTML page (- for stdout), with the series over the steps of several SRC; "
                 "replaces an earlier page."),
            )
        ),
        notebook="ckpttool.extensions.pages.checkpoint.notebook_frame",
    ),
    Extension(
        "proof",
        options=tuple(
            Option(
                "prove", functions, "ckpttool.extensions.proof.hooks.after_load", before, "bool | None", None,
                "Whether to digest the live state after each load, in place, and compare it with the saved one; a "
                "difference raises a ``ProofError``, see ``ckpttool.prove``. Default: if the save recorded digests and "
                "the state is on an accelerator.",
            )
            for before, functions in (
                ("timeout", ("load",)),
                ("staged", ("CheckpointManager.restore", "RayTrainCheckpoints.restore")),
                ("allow", ("prepare", "CkptCallback", "CkptSaves")),
            )
        ),
        hooks="ckpttool.extensions.proof.hooks",
    ),
    Extension(
        "rank_files",
        formats=(
            Format(
                "ckpttool.extensions.rank_files.reader.read_rank_files",
                {"rank files": "FSDP2 files of single ranks, over {ranks}"}, numbered=True,
            ),
        ),
        targets=(
            Target(
                "ranks", "ckpttool.extensions.rank_files.conversion.plan", "the ranks of FSDP2",
                options=("world_size", "buffers", "layout", "mesh", "device", "torch"),
                layouts=("verl", "accelerate"), checker="ckpttool.extensions.rank_files.conversion.check",
            ),
        ),
        options=(
            Option(
                "mesh", ("convert",),
                before="prove", annotation="Mapping[str, int] | Sequence[int] | None",
                text='For "ranks", sizes of the run\'s device mesh by name, such as ``{"ddp": 2, "fsdp": 4}``, or of '
                "one without names, such as ``[4]``: the last dimension shards, the others replicate. Default: one "
                'dimension, with the source\'s name, otherwise "fsdp" for verl and no name for Accelerate.',
                after="layout", section="The run that will load it",
                help="Device mesh of that run, for ranks; its last dimension shards; N without names.  "
                "[default: WORLD_SIZE ranks, named as in SRC, or fsdp for verl]",
                metavar="NAME=N,NAME=N", parser="ckpttool.extensions.rank_files.conversion.parse_mesh",
            ),
            Option(
                "device", ("convert",),
                before="prove", annotation="str | None",
                text='For "ranks", the type of the run\'s devices; default: the source\'s, otherwise "cuda".',
                after="mesh", section="The run that will load it",
                help="Its device type, for ranks.  [default: the source's, or cuda]",
                choices=("cpu", "cuda", "hpu", "mps", "npu", "xpu"),
            ),
            Option(
                "torch", ("convert",),
                before="prove", annotation="Literal['2.6', '2.13'] | None",
                text='For "ranks", the run\'s torch: "2.6" for 2.6 to 2.9, "2.13" for 2.13 and later; default: the '
                'source\'s, otherwise "2.13". The files load in no other release.',
                after="device", section="The run that will load it",
                help="torch of that run, for ranks: 2.6 to 2.9, or 2.13 and later.  [default: the source's, or 2.13]",
                choices=("2.6", "2.13"),
            ),
        ),
    ),
    Extension(
        "ray_cluster",
        options=(
            Option(
                "ray", ("consolidate", "convert", "average"), "ckpttool.extensions.ray_cluster.cluster.OnCluster",
                before="progress", annotation="bool | str | None",
                text="Address of a Ray cluster that does the work, or True for the one that Ray finds or starts.",
                after="memory", section="Resources", help="Spread the work over a Ray cluster.",
            ),
            Option(
                "ray_address", ("consolidate", "convert", "average"), after="ray", section="Resources",
                metavar="ADDRESS", sets="ray",
                help="Address of the Ray cluster, such as auto or head:6379.  [default: the one that Ray finds, or a "
                "new one]",
            ),
        ),
    ),
    Extension("sampler", addresses=("ckpttool.data",)),
    Extension("stats", commands=(Command("stats", "Look", "diff", "ckpttool.extensions.stats.command"),)),
    Extension(
        "thinning",
        retention=Retention(
            ("thin", "thin_every"), ".ckpttool-thinning", "ckpttool.extensions.thinning.replacement.recover"
        ),
        options=(
            Option(
                "thin", ("prune",), "ckpttool.extensions.thinning.action.Thin",
                before="torn", annotation="str | None",
                text='Thin those that no rule keeps, with weights of this type: "bf16" or "fp32".',
                after="keep_for", choices=("bf16", "fp32"),
                help="Instead of deleting a checkpoint, keep its weights in this dtype and delete its optimizer "
                "states.",
            ),
            Option(
                "thin_every", ("prune",), "ckpttool.extensions.thinning.action.Thin",
                before="torn", annotation="int | None",
                text="Thin only those whose step is a multiple of this, and remove the others, thin ones included.",
                after="thin", metavar="K",
                help="Thin only those whose step is a multiple of K, and delete the others.  [default dtype: bf16]",
            ),
            Option(
                "thin", ("CheckpointManager",), "ckpttool.extensions.thinning.action.Thin",
                before="layout", annotation="str | None",
                text='Instead of deleting a checkpoint that no rule keeps, keep its weights in this type: "bf16" or '
                '"fp32". The first rank writes them after a save, with ``async_save`` in the background.',
            ),
            Option(
                "thin_every", ("CheckpointManager",), "ckpttool.extensions.thinning.action.Thin",
                before="layout", annotation="int | None",
                text="Keep the weights of those whose step is a multiple of this, in bf16 unless ``thin`` says "
                "otherwise, and remove the others, thin ones included.",
            ),
        ),
    ),
)  # fmt: skip
"""One row for each extension."""
_FOLDER = f"{__package__}.extensions"


def is_present(module: str) -> bool:
    """Return whether a module belongs to the core, or to an extension that has a row."""
    return not module.startswith(f"{_FOLDER}.") or module.split(".")[2] in {one.name for one in EXTENSIONS}


def with_extensions(sections: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return the modules of commands by section and command: the given ones, and each of an extension at its place."""
    commands = [command for extension in EXTENSIONS for command in extension.commands]
    found: dict[str, dict[str, str]] = {section: {} for section in sections}
    for section, modules in sections.items():
        for name, module in modules.items():
            found[section][name] = module
            found[section] |= {c.name: c.module for c in commands if (c.section, c.after) == (section, name)}
    return found


def actions() -> list[Retention]:
    """Return the actions on checkpoints that no retention rule keeps."""
    return [extension.retention for extension in EXTENSIONS if extension.retention is not None]


def hooks(name: str) -> list[Callable[..., Any]]:
    """Return the functions of a name that extensions have for saves and loads."""
    return [imported(f"{one.hooks}.{name}") for one in EXTENSIONS if one.hooks]


def options_of(function: str) -> list[Option]:
    """Return the options that extensions add to a function, or to the command of its name."""
    return [option for extension in EXTENSIONS for option in extension.options if function in option.functions]


def parameters_of(function: str) -> list[Option]:
    """Return the options that are parameters of a function, not of its command alone."""
    return [option for option in options_of(function) if option.before]


def with_options(function: F) -> F:
    """Complete a function, or a class and its constructor, by the rows of its options.

    The signature gets the options of extensions, which it takes as ``**given``. The docstring gets their texts, and the
    texts of the core's rows for other parameters that it does not list.
    """
    import inspect

    called: Any = vars(function)["__init__"] if isinstance(function, type) else function
    signature, name = inspect.signature(called), function.__qualname__
    parameters = [one for one in signature.parameters.values() if one.name != "given"]
    added = parameters_of(name)
    for option in added:
        place = [one.name for one in parameters].index(option.before)
        kind, default, annotation = inspect.Parameter.KEYWORD_ONLY, option.default, option.annotation
        parameters.insert(place, inspect.Parameter(option.name, kind, default=default, annotation=annotation))
    called.__signature__ = signature.replace(parameters=parameters)
    called.__annotations__ |= {one.name: one.annotation for one in parameters if one.annotation is not one.empty}
    called.__annotations__.pop("given", None)
    names = [one.name for one in parameters]
    texts = {one: row.text for one in names if (row := row_of(one, name))} | {one.name: one.text for one in added}
    function.__doc__ = _completed(function.__doc__ or "", names, texts)
    return function


def _completed(text: str, names: Sequence[str], texts: Mapping[str, str]) -> str:
    """Return a docstring that lists all parameters in their order; it already lists those without one of the texts."""
    import re

    if re.search(r"(?m)^ *Args:\n", text) is None:
        text = re.sub(r"(?m)^( *)(Returns|Raises):\n", r"\1Args:\n\n\g<0>", text, count=1)
    section = re.search(r"(?m)^( *)Args:\n((?: *\S.*\n)*)", text)
    if section is None:  # Python may run without docstrings
        return text
    indent = f"{section[1]}    "
    entries = re.split(rf"(?m)^{indent}(?=\S)", section[2])[1:]
    listed = {entry.partition(":")[0]: f"{indent}{entry}" for entry in entries}
    listed = {one: _entry(one, told, indent) for one, told in texts.items()} | listed
    entries = [listed[one] for one in names if one in listed]
    return f"{text[: section.start(2)]}{''.join(entries)}{text[section.end() :]}"


@functools.cache
def _entry(name: str, text: str, indent: str) -> str:
    """Return the lines of a parameter in a docstring; Python 3.13 removes four columns before them."""
    import textwrap

    width = 120 if len(indent) > 4 else 116
    wrapper = textwrap.TextWrapper(width, indent, f"{indent}    ", break_on_hyphens=False)
    return f"{wrapper.fill(f'{name}: {text}')}\n"


def values_of(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options that extensions add to a function, by name.

    Args:
        function: Its qualified name.
        given: The options that it took as ``**given``.

    Raises:
        TypeError: No extension that is present has an option of that name.
    """
    options = {option.name: option.default for option in parameters_of(function)}
    for name in given:
        if name not in options:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return options | dict(given)


def carry_out(function: str, given: Mapping[str, Any]) -> list[Any]:
    """Call the code of the given options of a function; return the result of each. Arguments as for ``values_of``."""
    values = values_of(function, given)
    calls: dict[str, dict[str, Any]] = {}
    for option in parameters_of(function):
        value = values[option.name]
        if option.code and (type(value) is not type(option.default) or value != option.default):
            calls.setdefault(option.code, {})[option.name] = values[option.name]
    return [imported(code)(**values) for code, values in calls.items()]


def imported(code: str) -> Any:
    """Import a function or class by its address."""
    module, _, name = code.rpartition(".")
    return getattr(importlib.import_module(module), name)
