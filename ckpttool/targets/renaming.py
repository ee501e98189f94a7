"""Rename the tensors of an output: by substitutions, by a table, or by ready-made maps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.errors import ArgumentError, PlanError
from ckpttool.messages import brief
from ckpttool.targets.weights import WeightSelection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_NAME = 4096
"""Maximum length of a new name: a substitution of a hostile name must not fill memory."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """One rule for names. Names that it does not match stay as they are."""

    text: str
    """The rule as the user wrote it."""
    apply: Callable[[str], str]
    """Returns the new name."""
    ready_made: bool = False
    """Whether it is one of READY_MADE. Unlike a substitution, it may match no name."""


def _substitutions(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """Return a function that replaces every match of each pattern, in order."""
    compiled = [(re.compile(pattern), new) for pattern, new in pairs]

    def apply(name: str) -> str:
        for pattern, new in compiled:
            name = pattern.sub(new, name)
        return name

    return apply


# Source: torch 2.13, nn/parallel/distributed.py, _dynamo/eval_frame.py (``OptimizedModule``), distributed/fsdp/
# _common_utils.py (``FSDP_WRAPPED_MODULE``) and distributed/algorithms/_checkpoint/checkpoint_wrapper.py; peft 0.21,
# peft_model.py and tuners/tuners_utils.py (``base_layer``).
READY_MADE: dict[str, Callable[[str], str]] = {
    "module": _substitutions((r"^module\.", "")),
    "compile": _substitutions((r"(^|\.)_orig_mod\.", r"\1")),
    "fsdp": _substitutions((r"(^|\.)_fsdp_wrapped_module\.", r"\1"), (r"(^|\.)_checkpoint_wrapped_module\.", r"\1")),
    "peft": _substitutions((r"^base_model\.model\.", ""), (r"\.base_layer\.", ".")),
}
"""Ready-made maps by name, of the wrappers around a module."""


def parse_renamings(rules: Sequence[str]) -> list[Renaming]:
    """Parse rules: names of READY_MADE, or substitutions like sed's with Python's regular expressions.

    Raises:
        ArgumentError: A rule is neither.
    """
    rules = [rules] if isinstance(rules, str) else rules
    return [
        Renaming(rule, READY_MADE[rule], ready_made=True) if rule in READY_MADE else _substitution(rule)
        for rule in rules
    ]


def _substitution(rule: str) -> Renaming:
    hint = f"write 's/PATTERN/REPLACEMENT/', or one of {', '.join(READY_MADE)}"
    mark = rule[1:2]
    if not rule.startswith("s") or not mark or mark.isalnum() or mark in {"\\", "_", " "}:
        raise ArgumentError("rename", f"is {brief(rule)}, which is no rule", hint)
    # The separator is escaped by a backslash inside the pattern and the replacement.
    parts = re.split(rf"(?<!\\){re.escape(mark)}", rule[2:])
    if len(parts) != 3 or not set(parts[2]) <= {"g", "i"}:
        raise ArgumentError("rename", f"is {brief(rule)}, which does not have two parts and then g or i", hint)
    pattern, new = (part.replace(f"\\{mark}", mark) for part in parts[:2])
    try:
        compiled = re.compile(pattern, re.IGNORECASE if "i" in parts[2] else 0)
        compiled.sub(new, "")  # parses the replacement
    except (re.error, IndexError) as error:
        raise ArgumentError("rename", f"is {brief(rule)}, which is no regular expression: {error}", hint) from None
    count = 0 if "g" in parts[2] else 1
    return Renaming(rule, lambda name: compiled.sub(new, name, count=count))


def renamed(
    selection: WeightSelection, table: Mapping[str, str], rules: Sequence[Renaming], location: str
) -> tuple[WeightSelection, list[str]]:
    """Return the same tensors under new names, and a note on each ready-made map that changed nothing.

    Args:
        selection: The tensors; tied names are renamed too.
        table: New names by old ones; applied first.
        rules: Applied in order.
        location: Path of the checkpoint, for errors.

    Raises:
        PlanError: Two tensors would have one name, a name would be empty, or a rule or an entry matches nothing.
    """
    names = [*(w.name for w in selection.weights), *selection.aliases]
    if unknown := [name for name in table if name not in set(names)]:
        problem = f"holds no {unknown[0]}, which the table of new names lists"
        raise PlanError(location, problem, "correct rename_map; inspect lists the names", ("rename_map",))
    new = {name: table.get(name, name) for name in names}
    notes = []
    for rule in rules:
        applied = {name: rule.apply(current) for name, current in new.items()}
        if applied == new and rule.ready_made:
            notes.append(f"rename {rule.text} changes no name")
        elif applied == new:
            problem = f"holds no name that {brief(rule.text)} changes"
            raise PlanError(location, problem, "correct rename, or leave it out; inspect lists the names", ("rename",))
        new = applied
    _check_names(new, selection.aliases, location)
    aliases = {new[a]: new[n] for a, n in selection.aliases.items() if new[a] != new[n]}
    return WeightSelection(tuple(w.renamed(new[w.name]) for w in selection.weights), aliases), notes


def _check_names(new: Mapping[str, str], aliases: Mapping[str, str], location: str) -> None:
    """Refuse new names that are empty, too long or the same.

    Raises:
        PlanError: There is one.
    """
    owners: dict[str, str] = {}
    for name, made in new.items():
        if made != name and (not made or len(made) > MAX_NAME):
            problem = f"would have {name} renamed to {brief(made) if made else 'nothing'}"
            raise PlanError(location, problem, "correct rename", ("rename",))
        other = owners.setdefault(made, name)
        if other != name and aliases.get(name, name) != aliases.get(other, other):
            problem = f"would have both {other} and {name} renamed to {made}"
            raise PlanError(location, problem, "correct rename, or leave one out with exclude", ("rename", "exclude"))
