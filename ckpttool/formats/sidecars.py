"""Files beside the tensors of a checkpoint: sidecar files of its root (configuration, tokenizer), and rank states.

A rank state is an object of each rank, saved with ``rank_state=`` in a file of its own.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE
from ckpttool.model import Checkpoint, CheckpointFile
from ckpttool.storage import LATEST, LATEST_UNIVERSAL, MANIFEST, connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.formats.location import Location
    from ckpttool.storage import Entry, Storage, StorageSpec


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
OWN = (LATEST, LATEST_UNIVERSAL, MANIFEST, "zero_to_fp32.py", "zero_to_torch.py", ".*")
"""Files of DeepSpeed, ckpttool or the system, from which no framework resumes."""
HUGGINGFACE = "huggingface"
"""Subdirectory of the sidecar files of verl."""
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


def sidecar_directory(checkpoint: Checkpoint) -> str:
    """Return the directory of the sidecar files: the root, or the checkpoint's own if it has some.

    A save of a torch run under the Trainer or Accelerate has them in its own: the folder is the tag.
    """
    own = connect(checkpoint.storage).listing(checkpoint.location) if checkpoint.location != checkpoint.root else ()
    has_some = any(_is_one(entry, (*RESUME_FILES, *RANDOM)) for entry in own)
    return checkpoint.location if has_some else checkpoint.root


def _is_one(entry: Entry, patterns: Sequence[str]) -> bool:
    return not entry.is_dir and any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in patterns)


def find_sidecars(checkpoint: Checkpoint, patterns: Sequence[str] = PATTERNS) -> tuple[SidecarFile, ...]:
    """List the sidecar files of a checkpoint, and those in the subdirectory that verl has for them.

    Args:
        checkpoint: The checkpoint.
        patterns: Globs on file names.

    Raises:
        StorageError: The directory or ``config.json`` cannot be read.
    """
    storage, root = connect(checkpoint.storage), sidecar_directory(checkpoint)
    found: dict[str, SidecarFile] = {}
    for directory in (root, posixpath.join(root, HUGGINGFACE)):
        if directory != root and not storage.is_dir(directory):
            continue
        for entry in storage.listing(directory):
            if entry.nbytes > MAX_BYTES or not _is_one(entry, patterns) or entry.name in found:
                continue
            path = posixpath.join(directory, entry.name)
            with storage.open(path) as reader:
                nbytes, version = reader.nbytes, reader.version
            text = storage.read_text(path) if entry.name == "config.json" else None
            found[entry.name] = SidecarFile(entry.name, path, nbytes, version, storage.spec, text)
    return tuple(found.values())


KIND = "rank state"
"""``CheckpointFile.kind`` of these files."""
MAX_NAMED = 20
"""Maximum number of missing files named one by one."""
_NAME = re.compile(r"ckpttool_rank_state_(\d{5,7})\.pt")


def rank_state_name(rank: int) -> str:
    """Return the file name of a rank's state. No pattern of DeepSpeed's loaders and scripts matches it."""
    return f"ckpttool_rank_state_{rank:05d}.pt"


def is_rank_state(name: str) -> bool:
    """Return whether a file name is the name of a rank state."""
    return _NAME.fullmatch(posixpath.basename(name)) is not None


def with_rank_states(checkpoint: Checkpoint, storage: Storage, location: Location) -> Checkpoint:
    """Add the rank states in a checkpoint's directories to its files; none is opened.

    Args:
        checkpoint: The checkpoint as DeepSpeed's files describe it.
        storage: Its storage.
        location: Its directories.
    """
    found: dict[int, CheckpointFile] = {}
    for directory in (location.directory, *location.others):
        elsewhere = None if directory == location.directory else directory
        for entry in storage.listing(directory):
            match = _NAME.fullmatch(entry.name)
            if match is None or entry.is_dir or entry.name != rank_state_name(int(match[1])):
                continue
            rank = int(match[1])
            file = CheckpointFile(entry.name, entry.nbytes, KIND, rank, entry.version, directory=elsewhere)
            found.setdefault(rank, file)
    if not found:
        return checkpoint
    files = [found[rank] for rank in sorted(found)]
    missing = [rank for rank in range(min(max(found), len(found) + MAX_NAMED)) if rank not in found]
    notes = tuple(
        LayoutError(f"{location.directory}/{rank_state_name(rank)}", "is missing, others have theirs", RESTORE)
        for rank in missing[:MAX_NAMED]
    )
    return replace(checkpoint, files=(*checkpoint.files, *files), notes=(*checkpoint.notes, *notes))


def rank_state_indexes(checkpoint: Checkpoint) -> list[int]:
    """Return the indexes of the rank states in ``Checkpoint.files``, in the order of the ranks."""
    return [index for index, file in enumerate(checkpoint.files) if file.kind == KIND]
