"""The page of a checkpoint in a real browser: every extent is drawn, can be found, and is told truly."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool as api
from ckpttool.analysis.json_report import JSON_VERSION
from ckpttool.analysis.layout import expand, layout
from ckpttool.extensions.pages.checkpoint import checkpoint_page
from ckpttool.model import Buffer, CheckpointFile, Parameter, ParamGroup, State
from ckpttool.model.places import Contiguous
from tests import damage, synthetic
from tests.cli.command import ckpttool, ckpttool_process, remains
from tests.sampling import some
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.extensions.pages.browser import Opened
    from tests.storage.server import Bucket

    Open = Callable[..., Opened]

FIXTURES = [
    "zero1-dp2-bf16", "zero2-dp2-bf16", "zero3-dp4-bf16", "moe-zero2-dp4-ep2-bf16", "pipeline-zero1-pp2-tp2-bf16",
    "universal-zero2-dp2-bf16", "autotp-zero2-tp2-dp2-bf16-fused", "zero0-dp2-fp32", "autoep-zero3-dp4-ep2-bf16",
]  # fmt: skip
DRAWN = "[page.state.layout.drawn, page.state.layout.data.layout.extents]"
HACK = "window.hacked=1"
HOSTILE = [
    f"<script>{HACK}</script>", f"</script><script>{HACK}</script>", f'"><img src=x onerror="{HACK}">', "'; alert(1)",
    "x" * 10_000, "\u202egnp.thgiew\u2066", "a\x00b\x1b[31m\n\r\t", "${window.hacked=1}", "<!--", "]]>", "&lt;b&gt;",
    f"javascript:{HACK}", "", "🙂" * 50, "\ud800lone", "__proto__", "constructor", "%3Cscript%3E", "*.[a-z]?\\",
]  # fmt: skip
"""Names that a file may hold."""


PIXELS = """() => {
  const { layout, view } = page.state, { width, height } = view.canvas, ratio = devicePixelRatio;
  const copy = Object.assign(document.createElement('canvas'), { width, height }).getContext('2d');
  copy.drawImage(view.canvas, 0, 0);
  const pixels = copy.getImageData(0, 0, width, height).data;
  const { expert, kind } = layout.tensors;
  let right = 0, wrong = 0;
  for (const place of view.places) for (const panel of place.panels) place.lanes.forEach((lane, row) => {
    const cell = layout.cell(panel.s, lane);
    for (let k = 0; k < cell.n; k++) {
      const r = cell.row[k], t = layout.rows.tensor[r], [x, w] = view.across(panel, cell, k);
      const held = cell.held[k] / cell.all[k] * w;
      if (held < 4 || expert[t] || kind[t] === 'frozen' || layout.rows.replica[r]) continue;
      const [left, top] = [x + held / 2, place.y + row * place.pitch + 1].map((v) => Math.floor(v * ratio));
      const colour = [...pixels.slice(4 * (top * width + left), 4 * (top * width + left) + 3)];
      const shown = '#' + colour.map((v) => v.toString(16).padStart(2, '0')).join('');
      if (shown === view.paint[r]) right += 1; else wrong += 1;
    }
  });
  return [right, wrong];
}"""
"""Number of extents whose colour is in the picture where they should be, and of those where another one is."""


@pytest.mark.parametrize("name", some(FIXTURES, 3))
def test_every_extent_is_drawn(name: str, opened: Open) -> None:
    checkpoint = api.inspect(source(name))
    page = opened(checkpoint_page(checkpoint))
    drawn, told = page.run(DRAWN)
    replicas = sum(row["replica"] for row in expand(layout(checkpoint)["rows"]))
    assert drawn == told == sum(len(state.extents) for _, _, state in checkpoint.states()) + replicas
    page.page.select_option("#axis", "model")
    assert page.run(DRAWN) == [told, told]
    for colour in ("group", "dtype", "state", "kind", "layer"):
        page.page.select_option("#colour", colour)
        assert page.run(DRAWN) == [told, told]
        page.page.select_option("#axis", "file")
        right, wrong = page.run(PIXELS)
        assert wrong == 0
        assert right >= 5
        page.page.select_option("#axis", "model")
    page.sound()


CENTRE = """([file, offset]) => {
  const { layout, view } = page.state;
  for (const place of view.places) for (const panel of place.panels) for (const lane of place.lanes) {
    const cell = layout.cell(panel.s, lane);
    for (let k = 0; k < cell.n; k++) {
      const r = cell.row[k], i = cell.step[k], { rows } = layout;
      if (rows.file[r] + i * rows.file_step[r] !== file) continue;
      if (rows.offset[r] + i * rows.offset_step[r] !== offset) continue;
      const [x, w] = view.across(panel, cell, k);
      const row = place.lanes.indexOf(lane), held = cell.held[k] / cell.all[k] * w;
      return w < 2 ? null : [x + Math.min(w, held) / 2, place.y + (row + 0.4) * place.pitch];
    }
  }
}"""
"""The middle of an extent in the picture; null if it is narrower than two pixels."""


@pytest.mark.parametrize("name", some(FIXTURES, 2, key="hover"))
def test_hover_tells_where_the_bytes_lie(name: str, opened: Open) -> None:
    checkpoint = api.inspect(source(name))
    page = opened(checkpoint_page(checkpoint))
    extents = [
        (owner, state, row)
        for owner, _, state in checkpoint.states()
        for row in state.extents
        if row["runs"] == 1 and row["numel"]
    ]
    seen = 0
    for owner, state, row in some(extents, 12, key=name):
        offset, numel = int(row["offset"]), int(row["numel"])
        centre = page.run(CENTRE, [int(row["file"]), offset])
        if centre is None:
            continue
        seen += 1
        page.page.hover("figure canvas", position={"x": centre[0], "y": centre[1]})
        told = page.text("#tip")
        assert owner in told
        assert f"{int(row['start']):,} to {int(row['start']) + numel:,} of {state.numel:,}" in told
        assert f"{offset:,} to {offset + numel * state.nbytes // state.numel:,}" in told
        assert checkpoint.files[int(row["file"])].name in told
    assert seen >= 3
    page.sound()


def test_search_finds_what_the_glob_matches(opened: Open) -> None:
    checkpoint = api.inspect(source("moe-zero2-dp4-ep2-bf16"))
    names = [*(p.name for p in checkpoint.parameters), *(b.name for b in checkpoint.buffers)]
    page = opened(checkpoint_page(checkpoint))
    for glob in ("*.experts.*", "norm.?ias", "*", "nothing.*"):
        page.page.fill("#search", glob)
        matching = [name for name in names if fnmatch.fnmatchcase(name, glob)]
        assert page.text(".tools .hint") == f"{len(matching)} of {len(names)}"
        assert page.run("[...document.querySelectorAll('#parameters .link')].map((e) => e.textContent)") == matching
        assert page.run("page.state.layout.drawn") == page.run("page.state.layout.data.layout.extents")
    page.page.keyboard.press("Escape")
    assert page.run("page.state.layout.match") is None
    page.sound()


def test_the_keyboard_reaches_every_extent(opened: Open) -> None:
    checkpoint = api.inspect(source("zero2-dp2-bf16"))
    page = opened(checkpoint_page(checkpoint))
    page.page.keyboard.press("/")
    assert page.run("document.activeElement.id") == "search"
    page.page.keyboard.press("Escape")
    page.page.focus("figure canvas")
    held = sorted((int(s.extents[0]["offset"]), name) for name, key, s in checkpoint.states() if key == "module")
    for _, name in held:
        page.page.keyboard.press("ArrowRight")
        assert page.text("#live").startswith(f"{name}, state module, bf16")
    page.page.keyboard.press("ArrowRight")
    assert "state buffer" in page.text("#live")
    page.page.keyboard.press("ArrowDown")
    assert "held by rank 0" in page.text("#live")
    page.page.keyboard.press("Enter")
    chosen = page.text(".detail h3")
    places = sum(len(s.extents) for name, _, s in checkpoint.states() if name == chosen)
    assert len(page.page.query_selector_all("#places tbody tr")) == places
    page.page.keyboard.press("+")
    assert page.run("page.state.layout.zoom") == [0.25, 0.75]
    page.page.keyboard.press("0")
    assert page.run("page.state.layout.zoom") == [0, 1]
    page.page.keyboard.press("Escape")
    assert page.page.is_hidden(".detail")
    page.sound()


def test_a_double_click_zooms_to_the_parameter(opened: Open) -> None:
    checkpoint = api.inspect(source("zero3-dp4-bf16"))
    page = opened(checkpoint_page(checkpoint))
    page.page.select_option("#axis", "model")
    state = next(p for p in checkpoint.parameters if p.name == "up.weight").states["fp32"]
    row = state.extents[1]
    x, y = page.run(CENTRE, [int(row["file"]), int(row["offset"])])
    page.page.dblclick("figure canvas", position={"x": x, "y": y})
    low, high = page.run("page.state.layout.zoom")
    numel = sum(p.numel for p in checkpoint.parameters) + sum(b.state.numel for b in checkpoint.buffers)
    before = 0
    for parameter in checkpoint.parameters:
        if parameter.name == "up.weight":
            break
        before += parameter.numel
    assert low < before / numel < low + 0.1
    assert high - 0.1 < (before + state.numel) / numel < high
    assert page.text(".detail h3") == "up.weight"
    page.sound()


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 390)])
def test_both_colour_schemes_wide_and_narrow(scheme: str, width: int, opened: Open) -> None:
    page = opened(checkpoint_page(api.inspect(source("pipeline-zero1-pp2-tp2-bf16"))), scheme=scheme, width=width)
    lightness = page.run(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    assert (lightness > 600) == (scheme == "light")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(DRAWN)[0] == page.run(DRAWN)[1]
    page.page.emulate_media(media="print")
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.page.is_hidden(".tools")
    page.run("dispatchEvent(new Event('afterprint'))")
    page.sound()


def test_a_grid_of_many_ranks_fits_a_narrow_window(opened: Open) -> None:
    page = opened(checkpoint_page(api.inspect(source("universal-pipeline-zero1-pp2-tp2-bf16"))), width=390)
    assert page.run("document.querySelectorAll('.grid button').length") == 4
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.sound()


# ------------------------------------------------------------------------------------------------- large


@pytest.mark.parametrize(
    ("ranks", "layers", "hidden", "experts"),
    [
        (64, 12, 7168, 40),
        pytest.param(64, 80, 8192, 0, marks=pytest.mark.thorough),
        pytest.param(64, 61, 7168, 40, marks=pytest.mark.thorough),
        pytest.param(1024, 100, 28_000, 0, marks=pytest.mark.thorough),
    ],
)
def test_the_page_of_a_large_checkpoint_is_small(
    ranks: int, layers: int, hidden: int, experts: int, opened: Open
) -> None:
    checkpoint = synthetic.large(ranks, layers, hidden, experts)
    data = checkpoint_page(checkpoint)
    assert len(data) < 1_000_000
    page = opened(data)
    extents = ranks * 3 * len(checkpoint.parameters)
    assert page.run(DRAWN) == [extents, extents]
    page.page.fill("#search", "model.layers.7.*")
    assert page.text(".tools .hint").split()[0] != "0"
    page.page.focus("figure canvas")
    page.page.keyboard.press("ArrowDown")
    assert "held by rank 0" in page.text("#live")
    page.page.click("#zoom-in")
    page.page.focus("figure canvas")
    for key, shown in (("PageDown", "rank 9"), ("End", "rank 9"), ("ArrowDown", "rank 10")):
        page.page.keyboard.press(key)
        assert f"held by {shown}," in page.text("#live")
    lanes = len(page.run("page.state.view.places[0].lanes"))
    assert lanes == ranks // 2
    for _ in range(lanes // 9 + 2):
        page.page.keyboard.press("PageDown")
    assert page.run("page.state.layout.blocks[0].range")[0] > 0
    page.sound()


# ------------------------------------------------------------------------------------------------- hostile and damaged


def _state(file: int, offset: int) -> State:
    return State((4,), "F32", Contiguous(4, file, offset))


def _hostile(name: str) -> api.Checkpoint:
    """A checkpoint in which every text is this one; its parameters have all hostile names."""
    parameters = [
        Parameter(other, (4,), 0, {"fp32": _state(i % 2, 16 * i), name: _state(i % 2, 512 + 16 * i)})
        for i, other in enumerate(HOSTILE)
    ]
    files = [CheckpointFile(f"{name}.{i}", 4096, name, i, "") for i in range(2)]
    checkpoint = synthetic.made(
        parameters, files, ranks=2, tag=name or "tag", location=f"/{name}", aliases={f"tied {name}": name},
        buffers=(Buffer(f"buffer {name}", State((1,), "F32", Contiguous(1, 0, 2048))),),
        client_state={name: [name, {name: name}]}, scheduler={"a": name}, ds_config={name: name}, remarks=(name,),
        deepspeed_version=name,
    )  # fmt: skip
    group = ParamGroup((name,), {name: name, "lr": name}, {})
    return dataclasses.replace(checkpoint, groups=(group,))


def test_hostile_names_run_nothing(opened: Open) -> None:
    for number, name in enumerate(some(HOSTILE, 2)):
        page = opened(checkpoint_page(_hostile(name)))
        page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        page.page.focus("figure canvas")
        page.page.keyboard.press("ArrowRight")
        page.page.keyboard.press("Enter")
        page.page.fill("#search", name[:50].replace("\x00", "").replace("\ud800", ""))
        assert page.run("window.hacked === undefined && !document.querySelector('img, iframe, b > *')"), number
        assert page.run("document.scripts.length") == 2
        assert page.run("document.documentElement.scrollWidth") <= 1280, number
        assert page.run("page.state.layout.data.checkpoint.parameters.length") == len(HOSTILE)
        page.sound()


def test_the_policy_of_the_page_lets_no_other_script_run(opened: Open) -> None:
    page = opened(checkpoint_page(api.inspect(source("zero2-dp2-bf16"))))
    page.run(f"const s = document.createElement('script'); s.textContent = '{HACK}'; document.body.append(s)")
    page.run("const i = new Image(); i.src = 'http://localhost:1/x.png'; document.body.append(i)")
    assert page.run("window.hacked") is None
    assert len(page.complaints) == 2
    assert all("Content Security Policy" in text for text in page.complaints)


def test_a_damaged_checkpoint_has_a_page_of_findings(
    opened: Open, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    damage.optimizer_file(root).unlink()
    out = tmp_path / "page.html"
    error = ckpttool("inspect", root, "--html", out).error
    assert "is missing" in error
    assert not out.exists()
    done = ckpttool("verify", root, "--html", out)
    assert (done.code, done.stderr) == (1, "")
    page = opened(out)
    findings = api.verify(root).findings
    shown = page.page.query_selector_all(".note.bad")
    assert [f.problem in e.inner_text() for f, e in zip(findings, shown, strict=True)] == [True] * len(findings)
    assert findings
    there = page.run("[...document.querySelectorAll('#files tbody tr')].map((r) => r.cells[0].textContent)")
    assert sorted(there) == [*(f"global_step3/{name}" for name in remains(root / "global_step3")), "latest"]
    page.sound()


def test_findings_of_a_checkpoint_that_opens_are_shown_beside_its_layout(
    opened: Open, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    state = next(p for p in api.inspect(root).parameters if p.name == "up.weight").states["module"]
    checkpoint = api.inspect(root)
    (row,) = state.extents
    with open(checkpoint.path(int(row["file"])), "r+b") as file:
        file.seek(int(row["offset"]))
        file.write(b"\xff" * state.nbytes)
    done = ckpttool("verify", root, "--html", tmp_path / "page.html")
    assert done.code == 1
    page = opened(tmp_path / "page.html")
    assert "up.weight" in page.text(".note.bad")
    assert page.run(DRAWN)[0] == page.run(DRAWN)[1] > 0
    page.sound()


# ------------------------------------------------------------------------------------------------- the command


def test_a_page_replaces_an_earlier_one(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = ckpttool("inspect", source("zero2-dp2-bf16"), "--html", out)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == f"{out}: wrote a page\n"
    first = out.read_bytes()
    assert ckpttool("inspect", source("zero3-dp4-bf16"), "--html", out).code == 0
    assert out.read_bytes() != first
    assert remains(tmp_path) == ["page.html"]
    error = ckpttool("inspect", source("zero2-dp2-bf16"), "--html", "").error
    assert error == "Error: --html: is an empty name; name a file, such as page.html"
    assert ckpttool("inspect", source("zero2-dp2-bf16"), "--html", tmp_path).error.endswith("such as page.html")


def test_the_page_of_a_torn_tag_shows_the_files_of_the_tag(opened: Open, tmp_path: Path) -> None:
    from tests.extensions.pages.test_other_pages import torn_run

    root = torn_run(tmp_path)
    (torn,) = (entry for entry in api.ls(root).entries if not entry.whole)
    out = tmp_path / "page.html"
    assert ckpttool("verify", root, "--tag", torn.name, "--html", out).code == 1
    page = opened(out)
    there = page.run("[...document.querySelectorAll('#files tbody tr')].map((r) => r.cells[0].textContent)")
    assert sorted(there) == remains(root / torn.name)
    assert f"{torn.path} cannot be opened" in page.page.title()
    page.sound()


def test_the_page_may_lie_in_a_bucket(s3: Bucket) -> None:
    url = s3.url("pages/checkpoint.html")
    arguments = ["inspect", source("zero2-dp2-bf16"), "--html", url]
    done = ckpttool(*arguments)
    assert (done.code, done.stdout) == (0, f"{url}: wrote a page\n")
    assert s3.get("pages/checkpoint.html") == checkpoint_page(api.inspect(source("zero2-dp2-bf16")))
    s3.put("pages/checkpoint.html", b"<!doctype html><p>mine</p>")
    assert "exists already and is not a page" in ckpttool(*arguments).error


def test_the_page_holds_what_json_prints(tmp_path: Path, opened: Open) -> None:
    name = source("zero2-dp2-bf16-trainer")
    assert ckpttool("inspect", name, "--html", tmp_path / "page.html").code == 0
    told: dict[str, Any] = json.loads(ckpttool("inspect", name, "--json").stdout)
    page = opened(tmp_path / "page.html")
    held = page.run("page.state.layout.data")
    assert held["checkpoint"] | {"files": held["layout"]["files"], "version": JSON_VERSION} == told


def test_a_notebook_shows_the_page_in_a_frame_that_cannot_reach_it(opened: Open) -> None:
    checkpoint = api.inspect(source("zero2-dp2-bf16"))
    hostile = dataclasses.replace(checkpoint, tag='"></iframe><script>window.hacked = 1</script>')
    for number, shown in enumerate((checkpoint, hostile)):
        frame = shown._repr_html_()
        assert frame is not None
        page = opened(f"<!doctype html><html data-ready='1'><body>{frame}</body></html>".encode())
        (inner,) = (f for f in page.page.frames if f != page.page.main_frame)
        inner.wait_for_selector("html[data-ready='1']", timeout=60_000)
        drawn, told = inner.evaluate(DRAWN)
        assert drawn == told > 0, number
        assert page.run("window.hacked") is None
        assert page.complaints == []


@pytest.mark.parametrize("name", ["latest", "global_step3/mp_rank_00_model_states.pt", "notes.html"])
def test_only_a_page_is_replaced(name: str, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    (root / "notes.html").write_text("<!doctype html><p>mine</p>")
    before = (root / name).read_bytes()
    error = ckpttool("inspect", root, "--html", root / name).error
    assert error == f"Error: {root / name}: exists already and is not a page of ckpttool; choose another name"
    assert (root / name).read_bytes() == before


def test_the_page_goes_to_the_standard_output_alone(tmp_path: Path) -> None:
    done = ckpttool_process("inspect", source("zero2-dp2-bf16"), "--html", "-", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.encode() == checkpoint_page(api.inspect(source("zero2-dp2-bf16")))
    assert remains(tmp_path) == []


def test_a_directory_is_no_page(s3: Bucket, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    for out in (tmp_path / "pages", f"{tmp_path}/pages/", f"{tmp_path}/new/", s3.url("pages/")):
        error = ckpttool("inspect", source("zero2-dp2-bf16"), "--html", out).error
        assert error.endswith("is a directory; name a file, such as page.html")
    assert s3.keys() == []
    assert remains(tmp_path) == ["pages"]


def test_a_page_needs_a_directory_before_anything_is_read(tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    error = ckpttool("inspect", "/nowhere", "--html", out).error
    assert error == f"Error: {out}: cannot be written: its directory does not exist; create {tmp_path / 'new'} first"
    done = ckpttool_process("inspect", source("zero2-dp2-bf16"), "--html", "page.html", cwd=tmp_path)
    assert (done.code, done.stdout) == (0, "page.html: wrote a page\n")


def test_a_browser_shows_a_page_of_a_bucket(s3: Bucket) -> None:
    for _ in range(2):
        assert ckpttool("inspect", source("zero2-dp2-bf16"), "--html", s3.url("page.html")).code == 0
    kind = s3.boto.head_object(Bucket=s3.name, Key="page.html")["ContentType"]
    assert kind == "text/html; charset=utf-8"


LIT = """() => {
  const { layout, view } = page.state, ratio = devicePixelRatio, g = view.canvas.getContext("2d");
  const colours = new Set(view.paint.filter((_, r) => layout.match[layout.rows.tensor[r]]));
  const { width, height } = view.canvas, { data } = g.getImageData(0, 0, width, height);
  return view.places.flatMap((place) => place.lanes.flatMap((_, k) => place.panels.map((panel) => {
    const y = Math.round((place.y + (k + 0.4) * place.pitch) * ratio);
    const [from, to] = [Math.round(panel.x * ratio), Math.round((panel.x + panel.w) * ratio)];
    let lit = 0;
    for (let i = 4 * (y * width + from); i < 4 * (y * width + to); i += 4) {
      const hex = "#" + [...data.slice(i, i + 3)].map((v) => v.toString(16).padStart(2, "0")).join("");
      if (colours.has(hex)) lit += 1;
    }
    return lit;
  })));
}"""


@pytest.mark.parametrize("pattern", ["t.29*", "t.7", "last"])
def test_matches_too_narrow_to_draw_light_up_in_every_panel(pattern: str, opened: Open) -> None:
    names = ["emb", *(f"t.{i}" for i in range(300)), "last"]
    sizes = {"emb": 3_000_000, "last": 1000}
    parameters, at = [], 0
    for name in names:
        numel = sizes.get(name, 3)
        states = {key: State((numel,), "F32", synthetic.Shares(numel, 2, at + k * 8_000_000))
                  for k, key in enumerate(synthetic.STATES)}  # fmt: skip
        parameters.append(Parameter(name, (numel,), 0, states))
        at += -(-numel // 2) * 4
    files = [CheckpointFile(f"rank{r}", 24_000_000, "optimizer", r, "") for r in range(2)]
    page = opened(checkpoint_page(synthetic.made(parameters, files, ranks=2)))
    page.page.fill("#search", pattern)
    page.wait_for("page.state.layout.match?.filter(Boolean).length < 12")
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    lit = page.run(LIT)
    assert len(lit) == 6
    assert min(lit) >= 2
    page.sound()
