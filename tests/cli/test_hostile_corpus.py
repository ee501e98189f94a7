"""Every command on every hostile checkpoint, within limits; the opened files are recorded."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.registry import options_of
from tests import sampling
from tests.cli.command import EXTENSIONS_READING, ckpttool
from tests.hostile_corpus import GOOD, corpus
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

SECONDS = 10
NBYTES = 500 << 20
FILES = 10
CORPUS = corpus()
PICKLES = ("pickle: ", "dcp: ", "attack: ")
TRIED = [n for n in CORPUS if not n.startswith(PICKLES)]
TRIED += sampling.some([n for n in CORPUS if n.startswith(PICKLES)], 3)
LARGE = 1 << 18
"""Bytes of a file that takes seconds to refuse: not every command is tried on it, as all read it by the same code."""
WATCHED = {
    "open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.rmtree", "shutil.copyfile",
}  # fmt: skip
FORBIDDEN = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "ctypes.dlopen")
OURS = tuple(dict.fromkeys(map(os.path.realpath, (sys.prefix, sys.base_prefix, os.getcwd()))))
"""The interpreter and ckpttool itself."""
HARMLESS = ("/proc/self/", "/dev/null")


def _commands(src: Path, out: Path) -> list[tuple[object, ...]]:
    return [
        ("inspect", src),
        ("inspect", src, "--json"),
        ("inspect", src, "--map"),
        *(("verify", src, f"--{o.name}", out / o.name) for o in options_of("verify")),
        ("verify", src),
        ("ls", src),
        ("prune", src, "--keep-last", "1", "--dry-run"),
        *((name, src) for name in EXTENSIONS_READING),
        ("diff", src, src),
        ("extract", src, "up.weight", out / "x.npy"),
        ("consolidate", src, out / "a", "--to", "safetensors"),
        ("convert", src, out / "b", "--to", "dcp"),
        ("cp", src, out / "c"),
    ]


def _watch(allowed: tuple[str, ...], touched: list[str]) -> None:
    """Note what this process does to files elsewhere; there is no way to stop it."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(FORBIDDEN) and arguments != (None,):  # the C library, which is loaded already
            touched.append(f"{event} {arguments!r:.200}")
        if event not in WATCHED:
            return
        path = arguments[0] if arguments else None
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor
        text = os.fsdecode(path)
        if "/" not in text:
            return  # relative to a directory that was opened
        if not text.startswith(HARMLESS) and not os.path.realpath(text).startswith(allowed):
            touched.append(f"{event} {text!r:.200}")

    sys.addaudithook(hook)


def _in_child(run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """What a forked child returns, and its peak memory beyond what this process has."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            os.write(write, json.dumps(run()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        data = pipe.read()
    _, status, usage = os.wait4(child, 0)
    assert data, f"it was killed by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return json.loads(data), usage.ru_maxrss << 10


def _limited(command: tuple[object, ...], allowed: tuple[str, ...]) -> dict[str, Any]:
    count = max(map(int, os.listdir("/proc/self/fd"))) + 1 + FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
    resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
    touched: list[str] = []
    _watch(allowed, touched)
    began = time.process_time()
    try:
        done = ckpttool(*command)
    except BaseException as error:
        return {
            "code": -1,
            "stderr": f"{type(error).__name__}: {error}"[:500],
            "touched": touched,
            "stdout": "",
            "s": 0,
        }
    seconds = time.process_time() - began
    return {
        "code": done.code, "stderr": done.stderr[:50_000], "stdout": done.stdout[:50_000], "touched": touched[:5],
        "s": seconds, "long": len(done.stderr),
    }  # fmt: skip


def _files(root: Path) -> dict[str, tuple[int, int, int]]:
    """What tells whether anything below a directory was changed; links are not followed."""
    found = {}
    for above, directories, names in os.walk(root):
        for name in (*directories, *names):
            info = os.lstat(os.path.join(above, name))
            found[os.path.join(above, name)] = (info.st_size, info.st_mtime_ns, info.st_mode)
    return found


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the commands import, once and not in every child."""
    out = tmp_path_factory.mktemp("good")
    for command in _commands(Path(source(GOOD)), out):
        assert ckpttool(*command).code == 0
    gc.collect()
    gc.freeze()  # else a child collects what other tests have left: closing s3fs waits for a thread that it lacks
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # there are threads, but none that the child needs
@pytest.mark.parametrize("name", TRIED)
def test_hostile_checkpoint_harms_nobody(name: str, tmp_path: Path) -> None:
    src, out, outside = tmp_path / "src", tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("cAnArY")
    CORPUS[name](src, outside)
    before = _files(src), _files(outside)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    commands = _commands(src, out)
    is_large = any(size > LARGE for size, _, _ in before[0].values())
    commands = sampling.some(commands, 1 if is_large else 2 if name.startswith(PICKLES) else 3, key=name)
    for command in commands:
        out.mkdir()
        done, memory = _in_child(lambda c=command: _limited(c, (str(src), str(out), *OURS)))  # type: ignore[misc]
        assert done["code"] in {0, 1, 3}, (command, done)
        assert done["touched"] == [], command
        assert done["s"] < SECONDS, command
        assert memory - base < NBYTES, command
        assert "cAnArY" not in done["stdout"] + done["stderr"], command
        assert "bug" not in done["stderr"], command
        if done["code"] and command[0] != "verify":
            assert done["stderr"].startswith("Error: "), (command, done)
            assert done["stderr"].rstrip("\n").isprintable(), command
            assert done["long"] < 20_000, command
            assert _files(out) == {}, command
        assert (_files(src), _files(outside)) == before, command
        _remove(out)


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path)
