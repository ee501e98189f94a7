"""Object keys that are not file paths are ignored, or refused in one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from tests.cli.command import ckpttool as command
from tests.truth import source

if TYPE_CHECKING:
    from tests.storage.server import Bucket

SRC = "zero2-dp2-bf16"
NO_PATH = 'cannot be copied as a file: a component of its key is empty, "." or ".."'
DIRECTORY = "cannot be copied as a file: mp_rank_00_model_states.pt is a file too"
COPIED = ""
KEYS = {
    "global_step3/../x": NO_PATH,
    "global_step3/..": NO_PATH,
    "global_step3/./x": NO_PATH,
    "global_step3//x": NO_PATH,
    "global_step3/sub/": NO_PATH,  # not empty, as those are that consoles leave
    "global_step3/a/../../../x": NO_PATH,
    "../global_step3/x": COPIED,  # not in the checkpoint
    "/global_step9/mp_rank_00_model_states.pt": COPIED,
    "global_step3": COPIED,
    "global_step3/\x1b[2Ja": COPIED,
    "global_step3/\u202e\r\x01": COPIED,
    "global_step3/a?b#c%2e%2e%2f": COPIED,
    f"global_step3/{'x' * 1000}": "file name too long",
    f"{'x' * 500}/{'y' * 480}": COPIED,
    "global_step3/mp_rank_00_model_states.pt/x": DIRECTORY,
}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key)[:30])
def test_keys_that_are_no_paths(key: str, s3: Bucket, tmp_path: Path) -> None:
    s3.upload(Path(source(SRC)), "run")
    s3.put(f"run/{key}", b"x")
    run, out = s3.url("run"), tmp_path / "in/out"
    for line in (("inspect", run), ("ls", run), ("prune", run, "--keep-last", "1", "--dry-run")):
        done = command(*line)
        assert done.code == 0, (line, done)
        assert all(text.isprintable() for text in (*done.stdout.splitlines(), *done.stderr.splitlines())), line
        assert "global_step3" in done.stdout, line
    done = command("cp", run, out)
    if not KEYS[key]:
        assert done.code == 0, done
        assert ckpttool.inspect(out).tag == "global_step3"
    else:
        assert done.code == 3
        assert KEYS[key] in done.error
        assert done.stderr.startswith("Error: ")
        assert done.stderr.rstrip("\n").isprintable()
        assert len(done.stderr) < 5000
        assert "bug" not in done.stderr
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert [p for p in tmp_path.iterdir() if p.name != "in"] == []
