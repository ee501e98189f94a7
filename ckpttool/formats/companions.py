"""The small files beside a checkpoint that make weights a model: configuration, tokenizer, generation settings."""

from __future__ import annotations

import fnmatch
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpttool.storage import LocalStorage

# Source: transformers 5, what ``save_pretrained`` of models, tokenizers and processors writes.
PATTERNS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "*.model",
    "sentencepiece.bpe.model", "configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py",
)  # fmt: skip
MAX_BYTES = 1 << 28
"""Larger files are no companions."""


@dataclass(frozen=True, slots=True)
class Companion:
    """One file to carry along."""

    name: str
    """File name."""
    path: str
    """Where it lies."""
    nbytes: int
    """Size in bytes."""
    version: str
    """Differs when the file was written anew; see ``storage.RangeReader``."""
    text: str | None
    """Content of ``config.json``, which is edited; the others are copied."""


def find_companions(storage: LocalStorage, root: str) -> tuple[Companion, ...]:
    """The companions in a directory.

    Raises:
        StorageError: The directory or ``config.json`` cannot be read.
    """
    found = []
    for entry in storage.list(root):
        if entry.is_dir or entry.nbytes > MAX_BYTES or not any(fnmatch.fnmatchcase(entry.name, p) for p in PATTERNS):
            continue
        path = posixpath.join(root, entry.name)
        with storage.open(path) as reader:
            nbytes, version = reader.nbytes, reader.version
        text = storage.read_text(path) if entry.name == "config.json" else None
        found.append(Companion(entry.name, path, nbytes, version, text))
    return tuple(found)
