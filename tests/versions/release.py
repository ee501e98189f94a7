"""Check that the files of a release agree: ``python tests/versions/release.py [TAG]``.

Version, changelog, citation and tag must name one version, and the changelog its date; the workflows must be valid, if
``actionlint`` or ``npx`` is installed. Exits with an error that names each disagreement.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def disagreements(tag: str | None) -> list[str]:
    """Return one line for each."""
    version = _only(r'__version__ = "(.+)"', "ckpttool/_version.py")
    dated, date = re.findall(r"(?m)^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[0]
    found = []
    if dated != version:
        found.append(f"CHANGELOG.md: the first section is of {dated}, not of {version}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        found.append(f"CHANGELOG.md: {version} has no date: {date}")
    if (cited := _only(r"(?m)^version: (.+)$", "CITATION.cff")) != version:
        found.append(f"CITATION.cff: names {cited}, not {version}")
    if (released := _only(r"(?m)^date-released: (.+)$", "CITATION.cff")) != date:
        found.append(f"CITATION.cff: names {released}, CHANGELOG.md {date}")
    if tag and tag != f"v{version}":
        found.append(f"the tag is {tag}, not v{version}")
    return found


def _only(pattern: str, path: str) -> str:
    (found,) = re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"))
    return str(found)


def check_workflows() -> list[str]:
    """Run actionlint over the workflows; return the lines that it prints, or a note that it is missing."""
    if shutil.which("actionlint") is None:
        print("actionlint is not installed: the workflows are not checked")
        return []
    done = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() + done.stderr.splitlines()


def main() -> None:
    """Check everything."""
    found = disagreements(next(iter(sys.argv[1:]), None)) + check_workflows()
    if found:
        sys.exit("\n".join(found))
    print("the files of the release agree")


if __name__ == "__main__":
    main()
