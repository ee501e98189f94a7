"""``read_objects`` returns the objects of ``torch.load``, without running code from the file."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import pathlib
import random
import re
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.containers.torch_file import read_torch_file
from ckpttool.errors import CkptError, ContainerError, PlanError
from ckpttool.execution.virtual_file import StoredFile
from ckpttool.integrations.torch.objects import read_objects, unknown_classes
from ckpttool.storage import LOCAL
from tests import sampling
from tests.hostile import attacks, zip_file
from tests.truth import HERE
from tests.wording import refused

MEMORY = 1 << 20
SOUND = sorted(
    p for p in (HERE / "checkpoints").rglob("*.pt") if "ds0." not in str(p) or "ds0.18" in str(p)
)  # older files name classes that have moved since, which torch.load itself cannot import
BUNDLED = sorted({p.relative_to(HERE / "checkpoints").parts[0] for p in SOUND})


def _read(path: Path, allow: tuple[str, ...] = ()) -> Any:
    with LOCAL.open(str(path)) as reader:
        return read_objects(StoredFile(reader, memory=MEMORY), allow)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same in type and content."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad)
        return bool(
            alike and torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))
        )
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(_same(k, m) and _same(v, w) for (k, v), (m, w) in pairs) and _attributes(a, b)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) and a.dtype == object:
        return a.shape == b.shape and _same(a.tolist(), b.tolist())
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if str(type(a).__module__).startswith("deepspeed") or isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return _attributes(a, b)
    return bool(a == b)


def _attributes(a: Any, b: Any) -> bool:
    return not hasattr(a, "__dict__") or _same(vars(a), vars(b))


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", sampling.some(BUNDLED, 37, key="objects"))
def test_every_bundled_file_is_what_torch_makes_of_it(name: str) -> None:
    for path in SOUND:
        if path.relative_to(HERE / "checkpoints").parts[0] == name:
            assert _same(_read(path), torch.load(path, map_location="cpu", weights_only=False)), path


def _shared() -> dict[str, Any]:
    whole = torch.arange(12.0)
    numbers = [1, 2]
    return {"a": whole[2:8].view(2, 3).t(), "b": whole[4:], "c": whole, "numbers": numbers, "again": numbers}


VALUES: dict[str, Any] = {
    "plain": {"n": [1, 2.5, None, True, "text", b"bytes", 3 + 4j, 2**200], (1, "k"): {1, 2}, "f": frozenset({"x"})},
    "python's random state": random.Random(3).getstate(),  # noqa: S311
    "numpy's random state": np.random.RandomState(3).get_state(),
    "numpy's generator": np.random.default_rng(3).bit_generator.state,
    "arrays": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(["ab", "c"]),
               np.arange(3, dtype=">i4"), np.array(True), np.zeros((0, 4), np.float16), np.array([b"x", b"yz"]),
               np.datetime64("2026-01-02"), np.float64(1.5), np.int8(-3), np.array([1 + 2j])],
    "arrays of objects": [np.array([{"a": 1}, None, "x", [2]], dtype=object),
                          np.array([[1, "b"], [None, 2.5]], object).T,
                          np.array("alone", dtype=object), np.zeros((0, 2), object)],
    "structured arrays": [np.array([(1, 2.5, b"x"), (3, 4, b"y")], dtype=[("a", "i4"), ("b", ">f8"), ("c", "S3")]),
                          np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
                          np.ones(3, [("m", "f4", (2, 2)), ("n", [("k", "u2")])])],
    "torch's": {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cuda", 1),
                "rng": torch.get_rng_state(), "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
                "scalar": torch.tensor(1e-2), "empty": torch.zeros(0, 3), "grad": torch.ones(2, requires_grad=True)},
    "parts": [slice(1, None, 2), range(3), range(0, 9, 3), ...],
    "ordered": collections.OrderedDict(b=1, a=2),
    "collections": [collections.Counter("abca"), collections.deque([1, 2], 5),
                    collections.defaultdict(list, {"a": [1]})],
    "dates": [datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.date(2026, 1, 2),
              datetime.timedelta(seconds=3)],
    "others": [pathlib.PurePosixPath("/a/b"), decimal.Decimal("1.5")],
    "namespaces": [argparse.Namespace(lr=0.1, layers=[1, 2]), types.SimpleNamespace(a=1)],
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_usual_client_state_comes_back(value: Any, form: str, tmp_path: Path) -> None:
    torch.save({"value": value}, tmp_path / "f.pt", _use_new_zipfile_serialization=form == "zip")
    assert _same(_read(tmp_path / "f.pt")["value"], value)


def test_values_that_are_shared_stay_shared(tmp_path: Path) -> None:
    torch.save(_shared(), tmp_path / "f.pt")
    found = _read(tmp_path / "f.pt")
    assert _same(found, _shared())
    assert found["numbers"] is found["again"]
    found["c"][4] = -1
    assert found["b"][0] == -1
    assert found["a"][2, 0] == -1


def test_a_list_that_holds_itself(tmp_path: Path) -> None:
    value: list[Any] = [1]
    value.append({"self": value})
    torch.save(value, tmp_path / "f.pt")
    found = _read(tmp_path / "f.pt")
    assert found[1]["self"] is found


@dataclass
class Own:
    """A class of the user's."""

    count: int
    more: list[int] = field(default_factory=list)


class OwnWithState:
    """One that says itself how it is kept."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": [*self.seen, "saved"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seen = [*state["kept"], "set"]


def _function() -> None: ...


class Zone(datetime.tzinfo):
    """A user's own time zone."""

    def utcoffset(self, _: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(0)

    def dst(self, _: datetime.datetime | None) -> None: ...

    def tzname(self, _: datetime.datetime | None) -> str:
        return "zone"


TIME = datetime.datetime(2026, 1, 2, tzinfo=Zone())
UNKNOWN = {"object": Own(3, [1]), "own state": OwnWithState(), "function": _function, "class": Own,
           "exception": ValueError("x"), "array of objects": np.array([{}, Own(1)], dtype=object),
           "method": "text".upper, "structured": np.zeros(2, dtype=[("a", "O")]), "time zone": TIME}  # fmt: skip


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_other_classes_are_refused_by_name(value: Any, tmp_path: Path) -> None:
    torch.save({"here": [value]}, tmp_path / "f.pt")
    with refused(PlanError) as error:
        _read(tmp_path / "f.pt")
    with LOCAL.open(str(tmp_path / "f.pt")) as reader:
        names = unknown_classes(read_torch_file(reader).root)
    assert any(f'"{name}"' in str(error.value) for name in names)


def test_a_class_that_the_error_names_can_be_allowed(tmp_path: Path) -> None:
    value = [Own(1), ValueError("x", 3), max, _function, TIME, np.array([Own(2)], dtype=object)]
    torch.save(value, tmp_path / "f.pt")
    allow: tuple[str, ...] = ()
    for _ in range(10):
        try:
            found = _read(tmp_path / "f.pt", allow)
            break
        except PlanError as error:
            allow += tuple(re.findall(r'allow=\["(.*)"\]', str(error)))
    assert [found[0], found[1].args, *found[2:4]] == [Own(1), ("x", 3), max, _function]
    assert isinstance(found[4].tzinfo, Zone)
    assert found[5][0] == Own(2)
    assert {"builtins.ValueError", "builtins.max"} <= set(allow)


def test_they_are_built_where_the_user_allows_them(tmp_path: Path) -> None:
    torch.save({"own": Own(3, [1]), "state": OwnWithState()}, tmp_path / "f.pt")
    names = (f"{Own.__module__}.Own", f"{Own.__module__}.OwnWithState")
    with LOCAL.open(str(tmp_path / "f.pt")) as reader:
        root = read_torch_file(reader).root
    assert unknown_classes(root) == list(names)
    assert unknown_classes(root, names[:1]) == [names[1]]
    with refused(PlanError):
        _read(tmp_path / "f.pt", names[:1])
    found = _read(tmp_path / "f.pt", names)
    assert found["own"] == Own(3, [1])
    assert found["state"].seen == ["saved", "set"]


@pytest.mark.parametrize("name", attacks("x"))
def test_nothing_of_a_hostile_file_is_run(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "obeyed"
    (tmp_path / "f.pt").write_bytes(zip_file(attacks(str(marker))[name]))
    with contextlib.suppress(CkptError):  # one does its harm first, and then leaves a good value
        _read(tmp_path / "f.pt")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.optim.lr_scheduler", "warnings.sys.modules"), ("torch.optim.optimizer", "torch.hub.load"),
        ("torch.optim", "lr_scheduler"), ("torch.optim.adam", "torch.serialization.load"),
        ("datetime", "datetime.now"), ("pathlib", "Path.unlink"), ("torch", "device.__subclasses__"),
        ("builtins", "eval"), ("deepspeed.runtime.lr_schedules", "logging.os.system"),
    ],
)  # fmt: skip
def test_a_name_leads_to_nothing_of_another_module(module: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(zip_file(b"\x80\x02]c" + f"{module}\n{name}\n".encode() + b"a."))
    with pytest.raises((PlanError, ContainerError)):
        _read(tmp_path / "f.pt")


def test_a_function_of_a_scheduler_comes_back(tmp_path: Path) -> None:
    from torch.optim.swa_utils import SWALR

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    state = SWALR(optimizer, swa_lr=0.05).state_dict()
    torch.save(state, tmp_path / "f.pt")
    assert _same(_read(tmp_path / "f.pt"), state)
