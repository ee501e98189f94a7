"""Pages: one HTML file with data, style and scripts in it, which needs no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from functools import cache
from importlib.resources import files
from typing import Any

from ckpttool._version import __version__
from ckpttool.messages import hide_secrets, printable

PLAIN_BYTES = 150_000
"""Longest data that a page contains as readable JSON; longer data is compressed."""
CHARTS = ("vendor/uPlot.iife.min.js", "charts.js")
"""Scripts of pages with charts."""
CHARTS_STYLES = ("vendor/uPlot.min.css",)
"""Styles of pages with charts."""
BEGIN = "<!doctype html>\n<!-- A page of ckpttool. -->\n"
"""First characters of every page; a page replaces only a file that begins with them."""
_TEMPLATE = """<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-{digest}'; \
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main><noscript>This page draws with JavaScript. The same values: ckpttool, with --json.</noscript></main>
<div id="live" class="silent" role="status" aria-live="polite"></div>
<footer>ckpttool {version}</footer>
<script type="application/json" id="data" data-encoding="{encoding}">{data}</script>
<script>{script}</script>
<!--
{licenses}
-->
</body>
</html>
"""


def page(
    view: str,
    title: str,
    data: dict[str, Any],
    *,
    scripts: tuple[str, ...],
    styles: tuple[str, ...] = (),
) -> bytes:
    """Build a page.

    Args:
        view: Name of a function in the last script.
        title: Title of the page.
        data: Plain values for JSON, without NaN and infinity.
        scripts: Files in ``static`` to run after ``page.js``, in order.
        styles: Files in ``static`` to use after ``page.css``.

    Returns:
        The file. Its only script is the one whose digest its security policy names, so that no text in the data runs.
    """
    script = _script(scripts)
    encoding, text = _encoded({"view": view, "title": title} | data)
    return (
        BEGIN.encode()
        + _TEMPLATE.format(
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            title=html.escape(printable(title, 300)),
            style="\n".join(_static(name) for name in ("page.css", *styles)),
            version=__version__,
            encoding=encoding,
            data=text,
            licenses=_static("vendor/LICENSES.txt").strip(),
            script=script,
        ).encode()
    )


def _encoded(data: dict[str, Any]) -> tuple[str, str]:
    """Return the data as text that cannot end its element, and the name of its encoding."""
    text = hide_secrets(json.dumps(data, separators=(",", ":"), allow_nan=False))
    if len(text) > PLAIN_BYTES:
        return "gzip", base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return "json", text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _script(names: tuple[str, ...]) -> str:
    script = "\n".join([*map(_static, ("page.js", *names)), "page.start();"])
    if "</script" in script or "<!--" in script:
        raise ValueError("a script of the page would end its element")
    return script


@cache
def _static(name: str) -> str:
    return files(__package__).joinpath("static", *name.split("/")).read_text(encoding="utf-8")
