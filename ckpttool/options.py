"""The options of functions and commands that are declared once, in a row: the shared ones of the core.

The rows of an extension are in ``registry``. All are plain values: neither numpy nor click is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option of functions, and of the commands of their names.

    An extension adds it to functions of the core. A row of the core is about the parameters of its name that functions
    list themselves: it has their text, and ``cli._options.shared`` makes the option of a command from it.
    """

    name: str
    """The parameter."""
    functions: tuple[str, ...] = ()
    """Qualified names of the functions that have it; () for all that list a parameter of this name."""
    code: str = ""
    """Function or class that is for it: ``carry_out`` calls it with all given options that have it; a function of a row
    for loads finds them in ``LoadOptions.given``. "" if a target or another option takes the value."""
    before: str = ""
    """The parameter of the core before which signature and docstring list it. "" if only commands have it: the code,
    a ``cli._output.Output``, then writes their report."""
    annotation: str = "str"
    """Type of the parameter. Of a command, "bool" in the first place makes a flag, "int" a whole number above 0, "int |
    str" a size, "Sequence" an option that may be repeated."""
    default: Any = None
    """Value that means that it is not given."""
    text: str = ""
    """Text of the docstring."""
    after: str = ""
    """The option after which the help of a command lists it; "" for the last one."""
    section: str = "Options"
    """Section of that help."""
    help: str = ""
    """Text of that help."""
    metavar: str | None = None
    """Its value in that help."""
    choices: tuple[str, ...] | range = ()
    """All values that a command accepts; () for any."""
    parser: str = ""
    """Function that makes the value from the text of a command, and raises a ``ValueError`` that says how to write it;
    "" if the text is the value."""
    sets: str = ""
    """Another option of the same extension, whose value this option of a command gives; it has no code."""
    singular: str = ""
    """Its name in a command where it may be repeated; "" for the name of the parameter."""
    envvar: str | None = None
    """Environment variable that gives a command its value."""


CHECKS = ("read", "full", "off")
"""The values of ``check``."""
_ROOT = (
    "A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a universal "
    "checkpoint; a directory of ``torch.distributed.checkpoint``"
)
OPTIONS: tuple[Option, ...] = (
    Option("src", ("pin", "unpin"), annotation="Source", text=f"{_ROOT}."),
    *(
        Option(
            name, annotation="Source",
            text=f"{_ROOT}; safetensors, or ``torch.save`` files of weights. Several directories if each contains the "
            "files of some ranks (node-local storage).",
        )
        for name in ("src", "a", "b")
    ),
    Option(
        "root", annotation="str | os.PathLike[str]",
        text="A checkpoint root, or a directory of a trainer's ``checkpoint-N``.",
    ),
    Option(
        "tag", annotation="str | None", text="Tag of the checkpoint in a root; default: the one that ``latest`` names.",
        help="Tag of the checkpoint in a root.  [default: the tag in latest]", metavar="TAG",
    ),
    Option(
        "max_shard_size", annotation="int | str", default="5GB",
        text='Bytes, or a text like "5GB"; a larger model is split into several files.',
        help="Split into files of at most this size.  [default: 5GB]",
    ),
    Option(
        "include", annotation="Sequence[str]", default=(),
        text="Globs: only parameters and buffers whose full name matches one.",
        section="Choice of tensors", help="Only tensors whose name matches (repeatable).", metavar="GLOB",
    ),
    Option(
        "exclude", annotation="Sequence[str]", default=(),
        text="Globs: no parameter or buffer whose full name matches one.",
        section="Choice of tensors", help="No tensors whose name matches (repeatable).", metavar="GLOB",
    ),
    Option(
        "overwrite", annotation="bool", default=False,
        text="Allow an ``out`` with files, but without a checkpoint: weights of the same kind in it are replaced, "
        "other files are kept. A replaced sidecar file that differs from the new one is kept as ``NAME.replaced``.",
        section="Output", help="Replace weights in OUT.",
    ),
    Option(
        "dry_run", annotation="bool", default=False,
        text="Plan, but write nothing; the report has the disk space and memory of a run.",
        section="Output", help="Print the planned files and the needed space and memory, and write nothing.",
    ),
    Option(
        "prove", annotation="bool", default=False,
        text="Digest the source and the output, and commit only if they are equal.",
        section="Output", help="Digest the source and the output, and commit only if they are equal.",
    ),
    Option(
        "resume", annotation="bool", default=False,
        text="Reuse files that an interrupted run completed. Not safe after a power failure: files are not synced.",
        section="Output", help="Reuse files that an interrupted run with --resume and the same SRC completed.",
    ),
    Option(
        "allow_partial", annotation="bool", default=False,
        text="Accept a source whose files cannot be proven to be all: safetensors of single ranks.",
        section="Output", help="Accept a source whose files cannot be proven to be all.",
    ),
    Option(
        "check", annotation="Check", default="read",
        text='Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none.',
        section="Output", choices=CHECKS,
        help="Compare the CRC-32 of records read whole (read), or also of those read in part (full).  [default: read]",
    ),
    Option(
        "jobs", ("consolidate", "convert", "cp", "prune"), annotation="int | None",
        text="Threads. Default: one for each core, at most 4; 16 where a storage is remote.",
    ),
    Option(
        "jobs", annotation="int | None", text="Threads. Default: one for each core, up to four.",
        section="Resources", help="Threads.  [default: automatic]", choices=range(1, 257), envvar="CKPTTOOL_JOBS",
    ),
    Option(
        "memory", annotation="int | str | None",
        text='Bytes, or "256MB" (the default), that requests in flight to remote storages may take.',
        section="Resources", envvar="CKPTTOOL_MEMORY",
        help="Memory for requests in flight to or from remote storages.  [default: 256MB]",
    ),
    Option("progress", annotation="Progress | None", text="Called with (bytes done, bytes in all)."),
    Option(
        "trust_names", annotation="bool", default=False,
        text="Accept renamed files (the name recorded inside differs). By default they are refused.",
        section="Rare", help="Accept renamed files (the name recorded inside differs).",
    ),
    Option(
        "storage_options", annotation="Mapping[str, Any] | None",
        text="Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own configuration.",
        section="Resources", metavar="KEY=VALUE", singular="storage_option", envvar="CKPTTOOL_STORAGE_OPTIONS",
        help="Option of the fsspec class of a URL, such as endpoint_url=http://host:9000 (repeatable).",
        parser="ckpttool.cli._options.parse_storage_options",
    ),
    Option(
        "follow_links", annotation="bool", default=False,
        text="Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.",
        section="Rare", help="Follow links that leave a checkpoint's root, to any file you may read.",
    ),
)  # fmt: skip
"""The shared options of the core, in the order in which functions list them."""


def row_of(name: str, function: str) -> Option | None:
    """Return the row of a parameter of a function; None without one."""
    rows = (row for row in OPTIONS if row.name == name and (not row.functions or function in row.functions))
    return next(rows, None)
