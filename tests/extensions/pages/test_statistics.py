"""The page of statistics: series without steps, odd values, many tensors, and sketches that tell their scale."""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckpttool as api
from ckpttool.extensions.pages.statistics import MAX_ENTRIES, stats_page
from tests import synthetic
from tests.cli.command import ckpttool
from tests.extensions.pages.test_other_pages import cells, torn_run
from tests.extensions.pages.test_shared import nothing_is_cut_on_paper
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tests.extensions.pages.browser import Opened

    Open = Callable[..., Opened]

pytest.importorskip("ckpttool.extensions.stats", reason="the page shows its results")
from ckpttool import TensorStats

ZERO2 = source("zero2-dp2-bf16")


def _facts(page: Opened) -> dict[str, list[str]]:
    found: dict[str, list[str]] = page.run(
        "Object.fromEntries([...document.querySelectorAll('.facts div')].map((d) => {"
        "const [key, ...rest] = d.innerText.split('\\n'); return [key, rest]; }))"
    )
    return found


def _random(names: Iterable[tuple[str, tuple[int, ...]]], states: Sequence[str]) -> list[TensorStats]:
    """Statistics as of weights and moments of a large model: forty exponents, counts without any order."""
    draw = np.random.default_rng(0)
    found = []
    for name, shape in names:
        numel = math.prod(shape)
        for state in states:
            counts = zip(range(-38, 2), *draw.integers(0, numel // 80 + 1, (2, 40)).tolist(), strict=True)
            low, high, mean, norm = np.abs(draw.standard_normal(4)).tolist()
            found.append(TensorStats(name, state, "F32", shape, numel, -low, high, mean, norm, 0, 0, 0, tuple(counts)))
    return found


@pytest.mark.parametrize(
    ("ranks", "layers", "hidden", "experts"),
    [
        (64, 80, 8192, 0),
        (64, 12, 7168, 256),
        pytest.param(1024, 100, 28_000, 0, marks=pytest.mark.thorough),
        pytest.param(64, 61, 7168, 256, marks=pytest.mark.thorough),
    ],
)
def test_the_page_of_a_large_model_is_small(ranks: int, layers: int, hidden: int, experts: int, opened: Open) -> None:
    shapes = synthetic.shapes_of(layers, hidden, experts)
    found = _random(shapes.items(), ("weights", "exp_avg", "exp_avg_sq"))
    checkpoint = synthetic.large(ranks, 1, 64)
    data = stats_page([(checkpoint, found)])
    assert len(data) < 1_000_000
    page = opened(data)
    rows = page.run(
        "JSON.parse(JSON.stringify(page.charts.length)) && document.querySelectorAll('#tensors tbody tr').length"
    )
    assert rows == 150
    assert ("are one row" in page.text("main")) == (len(found) > MAX_ENTRIES)
    assert _facts(page)["values"] == [page.run("page.short", sum(t.numel for t in found))]
    page.sound()


def test_folded_statistics_are_those_of_all_elements(opened: Open) -> None:
    values = {f"model.layers.{i}.{n}.weight": np.arange(1.0, 5.0) * (i + 1) for i in range(3) for n in ("up", "down")}
    values["model.layers.1.up.weight"][0] = 0
    found = [
        TensorStats(n, "weights", "F32", v.shape, v.size, v.min(), v.max(), v.mean(), float(np.linalg.norm(v)),
                    int((v == 0).sum()), 0, 0, tuple((int(math.log2(x)), 0, 1) for x in v if x))
        for n, v in values.items()
    ]  # fmt: skip
    page = opened(stats_page([(synthetic.large(2, 1, 64), found)], max_entries=4))
    rows = page.run(
        "[...document.querySelectorAll('#tensors tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    assert [row[0] for row in rows] == [f"model.layers.{i}.*" for i in range(3)]
    for i, row in enumerate(rows):
        held = np.concatenate([v for n, v in values.items() if n.startswith(f"model.layers.{i}.")])
        assert (row[1], row[5]) == ("2", "8")
        shown = [float(text) for text in row[6:10]]
        assert shown == pytest.approx([held.min(), held.max(), held.mean(), np.linalg.norm(held)], rel=1e-3)
        assert row[11] == ("1" if i == 1 else "")
    page.sound()


def _weights(path: Path, **tensors: Any) -> Path:
    safetensors = pytest.importorskip("safetensors.numpy")
    path.mkdir()
    safetensors.save_file(tensors, str(path / "model.safetensors"))
    return path


def test_sources_without_steps_keep_their_order_and_get_none(opened: Open, tmp_path: Path) -> None:
    paths = [_weights(tmp_path / name, w=np.full(4, value, np.float32)) for name, value in (("b", 3), ("a", 1))]
    assert ckpttool("stats", *paths, "--html", tmp_path / "page.html").code == 0
    page = opened(tmp_path / "page.html")
    assert page.run("page.charts[1].data") == [[0, 1], [6, 2]]
    labels = page.run("page.charts[1].plot().root.querySelector('.u-legend').innerText")
    assert "step" not in labels
    assert page.run("[...document.querySelectorAll('#checkpoints tbody tr')].map((r) => r.cells[2].innerText)") == [
        "",
        "",
    ]
    assert "step" not in _facts(page)
    page.sound()


def test_steps_of_their_own_are_an_axis_in_ascending_order(opened: Open) -> None:
    found = api.stats(ZERO2, magnitudes=True)
    runs = [(synthetic.made([], [], ranks=1, step=step, tag=f"s{step}"), found) for step in (30, 10, 20)]
    page = opened(stats_page(runs))
    assert page.run("page.charts[1].data[0]") == [10, 20, 30]
    page.sound()


def test_odd_values_of_every_checkpoint_are_told(opened: Open, tmp_path: Path) -> None:
    odd = np.array([1, math.nan, math.inf, math.nan], np.float32)
    paths = [
        _weights(tmp_path / "first", w=odd, v=np.ones(3, np.float32)),
        _weights(tmp_path / "second", w=np.ones(4, np.float32), v=np.ones(3, np.float32)),
    ]
    assert ckpttool("stats", *paths, "--html", tmp_path / "page.html").code == 0
    page = opened(tmp_path / "page.html")
    facts = _facts(page)
    assert facts["NaN"] == ["2", "in 1 of 2 checkpoints"]
    assert facts["infinite"] == ["1", "in 1 of 2 checkpoints"]
    notes = page.run("[...document.querySelectorAll('.note.bad')].map((n) => n.innerText)")
    assert len(notes) == 1
    assert "first" in notes[0]
    assert "w (weights)" in notes[0]
    assert "leave out" in notes[0]
    page.sound()


def test_a_sketch_tells_its_scale_and_small_values_break_nothing(opened: Open, tmp_path: Path) -> None:
    path = _weights(
        tmp_path / "m", tiny=np.array([1e-30, -1e-28], np.float32), count=np.arange(2000), mask=np.ones(3, bool)
    )
    assert ckpttool("stats", path, "--html", tmp_path / "page.html").code == 0
    page = opened(tmp_path / "page.html")
    labels = page.run(
        "Object.fromEntries([...document.querySelectorAll('#tensors tbody tr')].map("
        "(r) => [r.cells[0].innerText, r.querySelector('svg').getAttribute('aria-label')]))"
    )
    low, high = math.floor(math.log2(1e-30)), math.floor(math.log2(1e-28))
    assert labels["tiny"] == f"values by magnitude, from 2 to the {low} to 2 to the {high + 1}"
    assert labels["count"] == labels["mask"] == "values by magnitude, from 2 to the 0 to 2 to the 11"
    assert f"weights from 2^{low} to 2^{high + 1}" in page.run("document.querySelector('main').innerText")
    page.sound()


def test_thousands_of_rows_are_added_some_at_a_time(opened: Open) -> None:
    found = _random([(f"t{i}.weight", (100,)) for i in range(900)], ["weights"])
    page = opened(stats_page([(synthetic.large(2, 1, 64), found)]))
    counted = page.run(
        """async () => {
          const rows = () => document.querySelectorAll('#tensors tbody tr').length;
          const start = rows();
          document.querySelector('#tensors .more button').click();
          const first = rows();
          while (rows() < 900) await new Promise((done) => setTimeout(done, 5));
          return [start, first];
        }"""
    )
    assert counted[0] == 150
    assert counted[1] < 900
    page.page.click("#tensors th:first-child button")  # sorted while all are shown
    page.run(
        "(async () => { while (document.querySelectorAll('#tensors tbody tr').length < 900)"
        " await new Promise((done) => setTimeout(done, 5)); })()"
    )
    assert page.run("document.querySelector('#tensors .more').innerText") == ""
    page.sound()


def _norms(norms: dict[str, float]) -> list[TensorStats]:
    """Statistics of tensors, each a layer, with these norms."""
    return [
        TensorStats(f"{name}.w", "weights", "F32", (4,), 4, 0.0, 1.0, 0.5, norm, 0, 0, 0, ((0, 0, 4),))
        for name, norm in norms.items()
    ]


def _labels(page: Opened, at: int) -> list[str]:
    """Labels of the vertical axis of a chart."""
    found: list[str] = page.run("(at) => page.charts[at].plot().axes[1]._values", at)
    return [text for text in found if text]


@pytest.mark.parametrize(("low", "high"), [(1e-40, 1e39), (31.0, 2.4e39), (1e-9, 3.0), (1e-3, 9e5)])
def test_a_logarithmic_axis_has_labels(low: float, high: float, opened: Open) -> None:
    page = opened(stats_page([(synthetic.large(2, 1, 64), _norms({"a": low, "b": high}))]))
    labels = _labels(page, 0)
    assert 5 <= len(labels) <= 10
    powers = [math.log10(float(text.replace(",", ""))) for text in labels]
    assert len({round(b - a) for a, b in itertools.pairwise(powers)}) == 1
    page.sound()


def test_norms_that_hardly_change_are_not_a_flat_line(opened: Open) -> None:
    runs = [
        (synthetic.made([], [], ranks=1, step=step, tag=f"s{step}"), _norms({"a": norm}))
        for step, norm in ((1, 31.03), (2, 30.98), (3, 30.9))
    ]
    page = opened(stats_page(runs))
    low, high = page.run("(() => { const { y } = page.charts[1].plot().scales; return [y.min, y.max]; })()")
    assert 30 < low < 30.9 < 31.03 < high < 32
    labels = _labels(page, 1)
    assert len(set(labels)) == len(labels) >= 3
    page.sound()


def test_the_numbers_of_one_tensor_are_in_a_table(opened: Open) -> None:
    runs = [(synthetic.made([], [], ranks=1, step=s, tag=f"s{s}"), _norms({"a": 2.5 * s})) for s in (1, 2)]
    page = opened(stats_page(runs))
    page.page.click(".numbers summary")
    page.wait_for("document.querySelector('.numbers tbody tr')")
    rows = page.run(
        "[...document.querySelectorAll('.numbers tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    assert rows == [["1", "2.5"], ["2", "5"]]
    page.sound()


def _tensor(name: str, magnitudes: dict[int, int], *, nan: int = 0, zeros: int = 0, norm: float = 1.0) -> TensorStats:
    """Statistics of a tensor whose values, all positive, have these counted exponents."""
    numel = sum(magnitudes.values()) + nan + zeros
    counts = tuple((e, 0, n) for e, n in magnitudes.items())
    return TensorStats(name, "weights", "F32", (numel,), numel, 0.0, 1.0, 0.5, norm, zeros, nan, 0, counts)


def test_a_norm_of_no_finite_value_is_undefined_and_not_zero(opened: Open) -> None:
    found = [
        _tensor("a.w", {0: 4}, norm=2.0),
        _tensor("z.w", {}, zeros=4, norm=0.0),
        _tensor("n.w", {}, nan=4, norm=0.0),
        _tensor("m.w", {}, nan=2, zeros=2, norm=0.0),
        _tensor("b.w", {10: 4}, norm=2000.0),
    ]
    page = opened(stats_page([(synthetic.large(2, 1, 64), found)]))
    assert page.text(".left-out") == (
        "Not in this chart: 0 (no place on a logarithmic axis) at layers z, m; "
        "undefined (all values are NaN or infinite) at layer n."
    )
    norms = page.run("[...document.querySelectorAll('#tensors tbody tr')].map((r) => r.cells[8].innerText)")
    assert norms == ["2", "0", "undefined", "0", "2,000"]
    page.sound()


def test_older_checkpoints_have_undefined_norms_too(opened: Open) -> None:
    odd, sound = [_tensor("a.w", {}, nan=4, norm=0.0)], [_tensor("a.w", {0: 4})]
    runs = [(synthetic.made([], [], ranks=1, step=s, tag=f"s{s}"), t) for s, t in ((1, odd), (2, sound))]
    page = opened(stats_page(runs))
    assert page.run("page.charts[2].data[1]") == [None, 1]
    assert "undefined" in page.text("#checkpoints tbody tr")
    page.sound()


def _sketches(page: Opened) -> dict[str, str]:
    found: dict[str, str] = page.run(
        "Object.fromEntries([...document.querySelectorAll('#tensors tbody tr')].map("
        "(r) => [r.cells[0].innerText, r.querySelector('svg').getAttribute('aria-label')]))"
    )
    return found


def test_few_values_far_off_do_not_squeeze_the_sketches(opened: Open) -> None:
    found = [_tensor("bulk", {-3: 50_000, 0: 50_000}), _tensor("far", {0: 100, 127: 5})]
    page = opened(stats_page([(synthetic.large(2, 1, 64), found)]))
    scale = "values by magnitude, from 2 to the -3 to 2 to the 1"
    beyond = "5 values of magnitude 2^1 or more, in the outer bars"
    assert _sketches(page) == {"bulk": scale, "far": f"{scale}; {beyond}"}
    assert page.run("[...document.querySelectorAll('.sketch .beyond')].length") == 1
    assert page.run("document.querySelector('#tensors td [title]').title") == beyond
    assert "A triangle marks" in page.text("main")
    page.sound()


def test_tensors_that_differ_much_have_scales_of_their_own(opened: Open) -> None:
    found = [_tensor("small", {-20: 50, -9: 50}), _tensor("large", {116: 50, 127: 50})]
    page = opened(stats_page([(synthetic.large(2, 1, 64), found)]))
    assert _sketches(page) == {
        "small": "values by magnitude, from 2 to the -20 to 2 to the -8",
        "large": "values by magnitude, from 2 to the 116 to 2 to the 128",
    }
    assert "Each tensor of weights has a scale of its own" in page.text("main")
    assert "A triangle marks" not in page.text("main")
    page.sound()


def test_statistics_of_one_checkpoint(opened: Open, tmp_path: Path) -> None:
    out = tmp_path / "stats.html"
    assert ckpttool("stats", ZERO2, "--optimizer", "--html", out).code == 0
    found = api.stats(ZERO2, optimizer=True, magnitudes=True)
    page = opened(out)
    assert cells(page, "tensors", 0) == [t.name for t in found]
    assert page.run("document.querySelectorAll('#tensors svg').length") == len(found)
    held = page.run("JSON.parse(document.getElementById('data').textContent).series[0].tensors")
    told = json.loads(ckpttool("stats", ZERO2, "--optimizer", "--json").stdout)
    assert [held] == [one["tensors"] for one in told["checkpoints"]]
    norms = page.run("page.charts[0].data")
    floats = [t for t in found if t.dtype[0] in "FB" and t.dtype != "BOOL"]
    assert len(floats) < len(found)  # positions and masks have no norm
    layers = list(dict.fromkeys(t.name.partition(".")[0] for t in floats))
    assert len(norms[0]) == len(layers)
    for at, layer in enumerate(layers):
        for k, state in enumerate(dict.fromkeys(t.state for t in found)):
            held = [t.norm for t in floats if t.state == state and t.name.partition(".")[0] == layer]
            assert norms[1 + k][at] == (pytest.approx(math.hypot(*held), rel=1e-9) if held else None)
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert cells(page, "norms", 0) == layers
    weights = [
        math.hypot(*(t.norm for t in floats if t.state == "weights" and t.name.split(".")[0] == n)) for n in layers
    ]
    assert [float(text.replace(",", "")) for text in cells(page, "norms", 1)] == pytest.approx(weights, rel=1e-3)
    page.sound()


def test_a_series_over_steps(opened: Open, tmp_path: Path) -> None:
    out = tmp_path / "stats.html"
    run_root = torn_run(tmp_path)
    tags = [run_root / "global_step10", run_root / "global_step20"]
    assert ckpttool("stats", *tags, "--html", out).code == 0
    page = opened(out, scheme="dark")
    assert page.run("page.charts.map((c) => c.data[0].length)")[1:] == [2, 2]
    assert page.run("page.charts[1].data[0]") == [0, 1]  # both copies are of step 3
    page.page.select_option("#tensor", "3")
    page.sound()


def test_nothing_is_cut_on_paper(opened: Open) -> None:
    checkpoint = api.inspect(name := source("pipeline-zero1-pp2-tp2-bf16"))
    found = api.stats(name, optimizer=True, magnitudes=True)
    nothing_is_cut_on_paper(opened(stats_page([(checkpoint, found), (checkpoint, found)])))
