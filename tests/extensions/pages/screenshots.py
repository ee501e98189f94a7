"""Take the pictures of pages that the documentation shows, with Chromium, playwright and pillow.

    python tests/extensions/pages/screenshots.py     # writes docs/_static/page-*.png

The pictures are committed: the documentation is built without a browser.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
STATIC = ROOT / "docs" / "_static"
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))


def pages(directory: Path) -> dict[str, Path]:
    """Make the pages to be seen."""
    import scale

    import ckpttool
    from ckpttool.extensions.pages.checkpoint import checkpoint_page

    fixtures = ROOT / "fixtures" / "checkpoints"
    scale.DATA = directory / "large"
    scale.make(64, 32, 4096)
    large = ckpttool.inspect(str(scale.DATA))
    grid = str(fixtures / "pipeline-zero1-pp2-tp2-bf16")
    made = {
        "large": checkpoint_page(dataclasses.replace(large, location="/runs/large/global_step1")),
        "small": checkpoint_page(ckpttool.inspect(str(fixtures / "zero2-dp2-bf16-trainer"))),
        "grid": checkpoint_page(ckpttool.inspect(grid)),
    }
    files = {}
    for name, data in made.items():
        files[name] = directory / f"{name}.html"
        files[name].write_bytes(data.replace(str(directory).encode(), b"/runs").replace(str(ROOT).encode(), b"/runs"))
    return files


SHOTS: dict[str, tuple[str, str, int, int, str]] = {
    "page-layout": ("small", "light", 1180, 550, "page.state.view.choose(6)"),
    "page-ranks": ("large", "dark", 1180, 900, ""),
    "page-grid": ("grid", "light", 430, 900, ""),
}
"""Page, colour scheme, width, height and a script to run first, of each picture."""


def take(browser: Any, path: Path, out: Path, scheme: str, size: tuple[int, int], script: str) -> None:
    """Take one picture, with few colours: it is a third of the size."""
    from PIL import Image

    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(color_scheme=scheme, viewport=viewport)
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready='1']")
    if script:
        page.evaluate(script)
    page.wait_for_timeout(400)
    page.screenshot(path=str(out))
    context.close()
    with Image.open(out) as picture:
        small = picture.convert("RGB").quantize(200, dither=Image.Dither.NONE)
    small.save(out, optimize=True)


def main() -> None:
    """Make the pages, and take all pictures."""
    from playwright.sync_api import sync_playwright

    program = next(path for name in ("chromium", "google-chrome") if (path := shutil.which(name)))
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        files = pages(Path(temporary))
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (page, scheme, width, height, script) in SHOTS.items():
            take(browser, files[page], STATIC / f"{name}.png", scheme, (width, height), script)
        browser.close()


if __name__ == "__main__":
    main()
