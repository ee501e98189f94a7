"""Arguments of the commands of the extension, before OUT."""

from __future__ import annotations

from tests.truth import source

CALLS = {"average": ["--to", "safetensors", source("zero2-dp2-bf16"), source("universal-zero3-dp2-bf16")]}
