"""Write the support matrix from the bundled checkpoints themselves.

For each fixture: the facts in the files (release, stage, ranks, type, states), how it was trained (the recipe and its
options), how many tensors equal the live engine's bit for bit (``fixtures/truth``), and which conversions succeed. No
entry is written by hand, and a tensor that differs stops the build.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ckpttool

from . import support_features

ROOT = Path(__file__).resolve().parent.parent.parent
FIXTURES = ROOT / "fixtures"
PINNED = re.findall(r"^deepspeed==(\S+)", (ROOT / "requirements" / "dev.in").read_text(encoding="utf-8"), re.MULTILINE)[
    0
]
"""DeepSpeed of the development environment, which made the fixtures that name no other."""


@dataclass
class Row:
    """One bundled checkpoint."""

    name: str
    recipe: str
    """Module of ``fixtures/recipes`` that trains it."""
    options: dict[str, Any]
    """Additions of the recipe to DeepSpeed's configuration."""
    special: str
    """The description in ``fixtures/README.md``."""
    checkpoint: ckpttool.Checkpoint | None = None
    equal: int = 0
    """Tensors that equal the live engine's, bit for bit."""
    absent: Counter[str] = field(default_factory=Counter)
    """Tensors of the engine that the checkpoint does not hold, by state."""
    refused: str = ""
    """Why it cannot be read."""
    facts: dict[str, str] = field(default_factory=dict)
    """Stage, type and DeepSpeed release of the run."""
    targets: dict[str, str] = field(default_factory=dict)
    """Target to the reason why it is refused; empty if it is written."""


def read_row(name: str, recipe: str, options: dict[str, Any], special: str) -> Row:
    """Open one fixture, compare it with its truth, and plan every conversion.

    Raises:
        AssertionError: A tensor differs from the live engine's.
    """
    row = Row(name, recipe, options, special)
    source = FIXTURES / "checkpoints" / name
    facts, tensors = _truth(name)
    row.facts = {key: str(facts[key]) for key in ("stage", "dtype")}
    row.facts["release"] = facts.get("release") or name.partition("-ds")[2] or PINNED
    try:
        row.checkpoint = ckpttool.inspect(source)
    except ckpttool.CkptError as error:
        row.refused = error.problem
        return row
    for key, expected in tensors.items():
        state, _, tensor = key.partition("/")
        try:
            held = ckpttool.extract(
                row.checkpoint, tensor, state="weights" if state == "buffer" else state, check="off"
            )
        except ckpttool.CkptError:
            row.absent[state] += 1
            continue
        if tensor in facts.get("vocabulary", {}):  # rows that only pad a vocabulary are left out on purpose
            expected = expected[: held.nbytes]
        assert held.tobytes() == expected, f"{name}: {key} differs from the engine's"  # noqa: S101
        row.equal += 1
    for target, problem in _targets(source, row.checkpoint).items():
        row.targets[target] = problem
    return row


def _targets(source: Path, checkpoint: ckpttool.Checkpoint) -> dict[str, str]:
    """Plan every output without writing it: target to the reason of a refusal, or an empty text."""
    result = {}
    ranks = 2 * checkpoint.topology.data_parallel  # which expert parallelism divides, too
    for target in ("safetensors", "zero", "universal", "dcp"):
        try:
            if target == "safetensors":
                ckpttool.consolidate(source, "planned", to="safetensors", dry_run=True, check="off")
            elif target == "zero":
                stage = checkpoint.stage or 2
                ckpttool.convert(source, "planned", to="zero", world_size=ranks, stage=stage, dry_run=True, check="off")
            else:
                ckpttool.convert(source, "planned", to=target, dry_run=True, check="off")  # type: ignore[arg-type]
            result[target] = ""
        except ckpttool.CkptError as error:
            result[target] = error.problem
    return result


def _truth(name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Facts and tensors of the live engine, by "state/name"."""
    data = (FIXTURES / "truth" / f"{name}.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    facts = {key: _json(value) for key, value in header.pop("__metadata__", {}).items()}
    facts = facts.get("truth", facts) if isinstance(facts.get("truth"), dict) else facts
    body = data[8 + length :]
    return facts, {key: body[slice(*entry["data_offsets"])] for key, entry in header.items()}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_rows() -> list[Row]:
    """Every fixture, in the order of ``fixtures/README.md``."""
    sys.path.insert(0, str(FIXTURES))
    try:
        from make import CASES
    finally:
        sys.path.remove(str(FIXTURES))
    text = (FIXTURES / "README.md").read_text(encoding="utf-8")
    described = dict(re.findall(r"^\| `([^`]+)` \|.*\|([^|]*)\|$", text, re.MULTILINE))
    rows = []
    for name in described:
        case = CASES[name]
        options = {**case.zero_options, **{k: v for k, v in case.config.items() if v is not None}, **case.options}
        rows.append(read_row(name, case.train.__module__.rpartition(".")[2], options, described[name]))
    return rows


def write(directory: Path) -> None:
    """Write the table of features and the matrix, as fragments of a page."""
    lines = [
        "| checkpoint | DeepSpeed | stage | ranks | type | optimizer states | tensors equal | zero | universal | dcp |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = read_rows()
    notes: dict[str, str] = {}
    lines += [_line(row, notes) for row in rows]
    lines += ["", f"{len(rows)} checkpoints; {sum(r.equal for r in rows):,} tensors compared, all equal.", ""]
    lines += ["Why a conversion is refused:", "", *(f"* **{mark}**: {text}" for text, mark in notes.items()), ""]
    lines += ["## Each checkpoint", ""]
    for row in rows:
        lines += [f"(fixture-{row.name})=", "", f"`{row.name}`", f": {_upper(row.special)}. {_how(row)}", ""]
    (directory / "matrix.md").write_text("\n".join(lines), encoding="utf-8")
    (directory / "features.md").write_text("\n".join(support_features.table(rows)), encoding="utf-8")


def _line(row: Row, notes: dict[str, str]) -> str:
    link = f"[{row.name}](#fixture-{row.name})"
    c = row.checkpoint
    if c is None:
        return f"| {link} | | | | | | refused: {row.refused} | | | |"
    names = {key for p in c.parameters for key in p.optimizer_states}
    t = c.topology
    kinds = {"tp": t.tensor_parallel, "pp": t.pipeline_parallel, "ep": t.expert_parallel}
    ranks = str(t.data_parallel) + "".join(f", {kind} {n}" for kind, n in kinds.items() if n > 1)
    absent = "; not saved: " + ", ".join(f"{n} {key}" for key, n in row.absent.items()) if row.absent else ""
    targets = [_cell(row.targets[target], notes) for target in ("zero", "universal", "dcp")]
    assert not row.targets["safetensors"], row.targets  # noqa: S101  (every checkpoint that is read gives weights)
    return (
        f"| {link} | {c.deepspeed_version or ''} | {'' if c.stage is None else c.stage} | {ranks} | {_type(c.dtype)} "
        f"| {', '.join(sorted(names)) or 'none'} | {row.equal}{absent} | {' | '.join(targets)} |"
    )


def _cell(problem: str, notes: dict[str, str]) -> str:
    if not problem:
        return "yes"
    return f"no ({notes.setdefault(problem, chr(ord('a') + len(notes)))})"


def _how(row: Row) -> str:
    options = {k: v for k, v in row.options.items() if not callable(v)}
    text = f"Trained by `fixtures/recipes/{row.recipe}.py`"
    return text + (f" with `{json.dumps(options, default=str)}`." if options else ".")


def _upper(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] if text else "The usual case"


def _type(dtype: str) -> str:
    return {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(dtype, dtype)
