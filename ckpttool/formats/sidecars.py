"""Sidecar files: small files in the root of a checkpoint, such as configuration, tokenizer, generation settings."""

from __future__ import annotations

import fnmatch
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.storage import LATEST, LATEST_UNIVERSAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.storage import Storage, StorageSpec

# Source: transformers 5, ``save_pretrained`` of models, tokenizers and processors.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.model",
    "sentencepiece.bpe.model",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
    "processing_*.py",
)
RESUME_FILES = (
    *PATTERNS,
    "trainer_state.json",
    "training_args.bin",
    "scheduler.pt",
    "scheduler.bin",
    "sampler*.bin",
    "custom_checkpoint_*.pkl",
    "adapter_config.json",
)
"""Sidecar files from which a framework resumes; they do not depend on the number of ranks."""
RANDOM = ("rng_state.pth", "rng_state_*.pth", "random_states_*.pkl")
"""Random number states, one file for each rank (Hugging Face Trainer, Accelerate)."""
POSITION = ("dl_state_dict*.bin",)
"""Positions of Accelerate's data loaders, counted in batches of all ranks."""
STEPS_OF_RANKS = "scheduler.bin"
"""State of Accelerate's scheduler: one step per rank (``AcceleratedScheduler.step``), unless it splits batches."""
OWN = (LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py", ".*")
"""Files of DeepSpeed or of the system, from which no framework resumes."""
MAX_BYTES = 1 << 28
"""Maximum size of a sidecar file in bytes."""


@dataclass(frozen=True, slots=True)
class SidecarFile:
    """One sidecar file."""

    name: str
    """File name."""
    path: str
    """Its full path or URL."""
    nbytes: int
    """Size in bytes."""
    version: str
    """Etag or modification time; see ``storage.Entry``."""
    storage: StorageSpec
    """Its storage, as data."""
    text: str | None
    """Content of ``config.json``, which is edited; None for files that are copied."""
    changed: bool = False
    """Whether ``text`` already differs from the file."""


def find_sidecars(storage: Storage, root: str, patterns: Sequence[str] = PATTERNS) -> tuple[SidecarFile, ...]:
    """List the sidecar files in a directory.

    Args:
        storage: Its storage.
        root: The directory.
        patterns: Globs on file names.

    Raises:
        StorageError: The directory or ``config.json`` cannot be read.
    """
    found = []
    for entry in storage.listing(root):
        if entry.is_dir or entry.nbytes > MAX_BYTES or not any(fnmatch.fnmatchcase(entry.name, p) for p in patterns):
            continue
        path = posixpath.join(root, entry.name)
        with storage.open(path) as reader:
            nbytes, version = reader.nbytes, reader.version
        text = storage.read_text(path) if entry.name == "config.json" else None
        found.append(SidecarFile(entry.name, path, nbytes, version, storage.spec, text))
    return tuple(found)
