"""The public names: ``__init__.py`` reads them in the lines with ``as``. The rest is for type checkers and editors."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch

from ckpttool._version import __version__ as __version__
from ckpttool.analysis.diff import Difference as Difference
from ckpttool.analysis.diff import DiffReport as DiffReport
from ckpttool.analysis.diff import OtherDifference as OtherDifference
from ckpttool.analysis.digest import Digest as Digest
from ckpttool.analysis.verify import Finding as Finding
from ckpttool.analysis.verify import VerifyReport as VerifyReport
from ckpttool.api._run import Written as Written
from ckpttool.api._run import WrittenFile as WrittenFile
from ckpttool.api.consolidate import ConsolidateReport as ConsolidateReport
from ckpttool.api.consolidate import consolidate as _consolidate
from ckpttool.api.convert import ConvertReport as ConvertReport
from ckpttool.api.convert import convert as _convert
from ckpttool.api.cp import CpReport as CpReport
from ckpttool.api.cp import cp as _cp
from ckpttool.api.keeping import ls as _ls
from ckpttool.api.keeping import pin as _pin
from ckpttool.api.keeping import prune as _prune
from ckpttool.api.keeping import unpin as _unpin
from ckpttool.api.reading import ExtractReport as ExtractReport
from ckpttool.api.reading import diff as _diff
from ckpttool.api.reading import digest as _digest
from ckpttool.api.reading import extract as _extract
from ckpttool.api.reading import inspect as _inspect
from ckpttool.api.reading import verify as _verify
from ckpttool.catalog.listing import Catalog as Catalog
from ckpttool.catalog.listing import CatalogEntry as CatalogEntry
from ckpttool.catalog.retention import Decision as Decision
from ckpttool.catalog.retention import Decisions as Decisions
from ckpttool.commit.marks import Pin as Pin
from ckpttool.errors import ArgumentError as ArgumentError
from ckpttool.errors import ChecksumError as ChecksumError
from ckpttool.errors import CkptError as CkptError
from ckpttool.errors import ContainerError as ContainerError
from ckpttool.errors import LayoutError as LayoutError
from ckpttool.errors import LinkError as LinkError
from ckpttool.errors import PlanError as PlanError
from ckpttool.errors import ProofError as ProofError
from ckpttool.errors import PruneError as PruneError
from ckpttool.errors import StorageError as StorageError
from ckpttool.errors import TruncatedError as TruncatedError
from ckpttool.execution.checks import Check as Check
from ckpttool.execution.checks import ReadReport as ReadReport
from ckpttool.execution.destination import Needs as Needs
from ckpttool.extensions.merging.api import AveragedSource as AveragedSource
from ckpttool.extensions.merging.api import AverageReport as AverageReport
from ckpttool.extensions.merging.api import average as _average
from ckpttool.extensions.proof.api import Proof as Proof
from ckpttool.extensions.proof.api import live_digest as _live_digest
from ckpttool.extensions.proof.api import prove as _prove
from ckpttool.extensions.proof.state_digest import StateDigest as StateDigest
from ckpttool.extensions.stats.api import stats as _stats
from ckpttool.extensions.stats.statistics import Statistics as Statistics
from ckpttool.extensions.stats.statistics import TensorStats as TensorStats
from ckpttool.formats import Source as Source
from ckpttool.integrations.live.load import load as _load
from ckpttool.integrations.live.manager import CheckpointManager as CheckpointManager
from ckpttool.integrations.live.report import LoadReport as LoadReport
from ckpttool.integrations.live.report import SaveReport as SaveReport
from ckpttool.integrations.torch.rng import derive_rng_state as _derive_rng_state
from ckpttool.integrations.torch.rng import rng_state as _rng_state
from ckpttool.integrations.torch.rng import set_rng_state as _set_rng_state
from ckpttool.integrations.torch.state_dict import Incompatible as Incompatible
from ckpttool.integrations.torch.state_dict import LazyStateDict as LazyStateDict
from ckpttool.integrations.torch.state_dict import load_state_dict as _load_state_dict
from ckpttool.model import Buffer as Buffer
from ckpttool.model import Checkpoint as Checkpoint
from ckpttool.model import CheckpointFile as CheckpointFile
from ckpttool.model import Parameter as Parameter
from ckpttool.model import ParamGroup as ParamGroup
from ckpttool.model import Replica as Replica
from ckpttool.model import State as State
from ckpttool.model import Topology as Topology
from ckpttool.model.items import TensorDigest as TensorDigest
from ckpttool.saving.coordination import RankError as RankError
from ckpttool.storage.base import Storage as Storage
from ckpttool.storage.base import StorageSpec as StorageSpec
from ckpttool.storage.base import WritableStorage as WritableStorage
from ckpttool.units import Progress as Progress

class _CheckpointManagerOptions(TypedDict, total=False):
    """Options of ``CheckpointManager`` that extensions add."""

    thin: str | None
    thin_every: int | None

class _LoadOptions(TypedDict, total=False):
    """Options of restores that extensions add."""

    prove: bool | None

class _CheckpointManagerRestoreOptions(_LoadOptions): ...
class _RayTrainCheckpointsRestoreOptions(_LoadOptions): ...
class _PrepareOptions(_LoadOptions): ...
class _CkptCallbackOptions(_LoadOptions): ...
class _CkptSavesOptions(_LoadOptions): ...

# Written by python -m tests.golden.stub.

def consolidate(
    src: Source,
    out: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "torch"],
    tag: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    weights_from: Literal["masters", "module"] = "masters",
    max_shard_size: int | str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    exclude_frozen: bool = False,
    adapter_only: bool = False,
    optimizer: bool = False,
    merge_lora: bool = False,
    base: Source | None = None,
    adapter: Sequence[str] = (),
    rename: Sequence[str] = (),
    rename_map: Mapping[str, str] | str | os.PathLike[str] | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    ray: bool | str | None = None,
    progress: Progress | None = None,
    allow_partial: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> ConsolidateReport:
    """Merge the shards of a checkpoint into whole weights; the output appears whole or not at all.

    Trainable parameters come from the fp32 master weights, frozen ones from the model's copy; buffers keep their type.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        out: Directory to write: ``model.safetensors`` or ``pytorch_model.bin``, or shards of them with an index.
        to: Kind of file.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        dtype: Type of the parameters, cast bit for bit as torch does.
        weights_from: The optimizer's fp32 master weights, or the model's own 16-bit copies (saved at stages 1 and 2).
        max_shard_size: Bytes, or a text like "5GB"; a larger model is split into several files.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        exclude_frozen: Leave out frozen parameters.
        adapter_only: Write the trained PEFT adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.
        optimizer: Also write the optimizer's states, for "safetensors": ``optimizer.safetensors``, from which
            ``convert`` makes a checkpoint to resume from. Weights in fp32 are the master weights; beside others it
            contains these as well.
        merge_lora: Merge the trained LoRA or DoRA adapter into the base model's weights, in fp32, as PEFT does; the
            output has the base model's names.
        base: The base model, a path that ``src`` may have; default: the frozen weights in the checkpoint.
        adapter: Names of the adapters to merge, if there are several.
        rename: Rules for the names in the output, applied in order: "s/PATTERN/REPLACEMENT/" with Python's regular
            expressions (flags g, i), or the name of a ready-made map, such as "module" or "peft".
        rename_map: New names by old ones, or the path or URL of a JSON file of them; applied before ``rename``.
        prove: Digest the source and the output, and commit only if they are equal.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none.
        dry_run: Plan, but write nothing; the report has the disk space and memory of a run.
        resume: Reuse files that an interrupted run completed. Not safe after a power failure: files are not synced.
        overwrite: Allow an ``out`` with files, but without a checkpoint: weights of the same kind in it are replaced,
            other files are kept. A replaced sidecar file that differs from the new one is kept as ``NAME.replaced``.
        jobs: Threads. Default: one for each core, at most 4; 16 where a storage is remote.
        memory: Bytes, or "256MB" (the default), that requests in flight to remote storages may take.
        ray: Address of a Ray cluster that does the work, or True for the one that Ray finds or starts.
        progress: Called with (bytes done, bytes in all).
        allow_partial: Accept a source whose files cannot be proven to be all: safetensors of single ranks.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: A wrong argument, no sound checkpoint, ``out`` not writable, no match, or a checksum that differs.
    """

def convert(
    src: Source,
    out: str | os.PathLike[str],
    *,
    to: Literal["zero", "universal", "dcp", "ranks"],
    tag: str | None = None,
    world_size: int | None = None,
    stage: int | None = None,
    sub_group_size: int | None = None,
    round_robin: bool | None = None,
    expert_parallel: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    buffers: Sequence[str] | None = None,
    layout: Literal["nested", "flat", "app", "accelerate", "torchtitan", "lightning", "verl"] | None = None,
    mesh: Mapping[str, int] | Sequence[int] | None = None,
    device: str | None = None,
    torch: Literal["2.6", "2.13"] | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    ray: bool | str | None = None,
    progress: Progress | None = None,
    allow_partial: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> ConvertReport:
    """Rewrite a checkpoint for another number of ranks, another ZeRO stage, or another loader.

    fp32 master weights, optimizer states, steps, hyper-parameters of each group, loss scale, scheduler, client state,
    frozen parameters and buffers are copied bit for bit. The output appears whole or not at all.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        out: Directory to write: a checkpoint root, with ``latest`` (or ``latest_universal``), or a DCP directory.
        to: "zero" for native files that ``engine.load_checkpoint`` reads on ``world_size`` ranks; "universal" for
            DeepSpeed's ``load_universal``; "dcp" for ``torch.distributed.checkpoint``.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names. The output has the same.
        world_size: Data-parallel ranks that will load the output; needed for "zero".
        stage: 1, 2 or 3, for "zero"; default: the source's.
        sub_group_size: Stage 3: as in the configuration of the run that loads it; default: the source's or DeepSpeed's.
        round_robin: Whether that run has ``round_robin_gradients``; default: as in the source's configuration.
        expert_parallel: Ranks that it spreads each layer's experts over; default: the source's.
        dtype: Type that run computes in, for "zero" where the source does not record it: DCP, or only weights.
        buffers: Patterns of the names of buffers, for "zero" where the source does not distinguish buffers and frozen
            parameters: DCP, or only weights; stage 3 needs the distinction. Empty if there are none.
        layout: For "dcp", the names and the nesting that a loader requires: "nested" (default) and "flat" as
            ``get_state_dict`` has them, under ``model`` and ``optim``; "app" for the same under ``app``, with
            numbers and texts of the client state, as torch's tutorial and Ray's FSDP2 template have them;
            "accelerate" for Accelerate's and the Trainer's FSDP2; "torchtitan" for one step of torchtitan, without
            dataloader and scheduler; "lightning" for Lightning's ``ModelParallelStrategy``, from a checkpoint of
            Lightning with one optimizer. For "ranks": "verl" or "accelerate".
        mesh: For "ranks", sizes of the run's device mesh by name, such as ``{"ddp": 2, "fsdp": 4}``, or of one without
            names, such as ``[4]``: the last dimension shards, the others replicate. Default: one dimension, with the
            source's name, otherwise "fsdp" for verl and no name for Accelerate.
        device: For "ranks", the type of the run's devices; default: the source's, otherwise "cuda".
        torch: For "ranks", the run's torch: "2.6" for 2.6 to 2.9, "2.13" for 2.13 and later; default: the source's,
            otherwise "2.13". The files load in no other release.
        prove: Digest the source and the output, and commit only if they are equal.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none.
        dry_run: Plan, but write nothing; the report has the disk space and memory of a run.
        resume: Reuse files that an interrupted run completed. Not safe after a power failure: files are not synced.
        jobs: Threads. Default: one for each core, at most 4; 16 where a storage is remote.
        memory: Bytes, or "256MB" (the default), that requests in flight to remote storages may take.
        ray: Address of a Ray cluster that does the work, or True for the one that Ray finds or starts.
        progress: Called with (bytes done, bytes in all).
        allow_partial: Accept a source whose files cannot be proven to be all: safetensors of single ranks.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: A wrong argument, a source that is not sound or fits no such output, or ``out`` not writable.
    """

def cp(
    src: Source,
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    prove: bool = False,
    check: Check = "read",
    resume: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> CpReport:
    """Copy a whole checkpoint from one storage to another; ``latest`` is written last.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage). Several
            directories become one.
        out: The root that gets a directory of the same tag and the sidecar files; for a format without tags, the
            directory itself.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        prove: Digest the checkpoint and the copy, and commit only if they are equal.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none.
        resume: Reuse files that an interrupted run completed. Not safe after a power failure: files are not synced.
        jobs: Threads. Default: one for each core, at most 4; 16 where a storage is remote.
        memory: Bytes, or "256MB" (the default), that requests in flight to remote storages may take.
        progress: Called with (bytes done, bytes in all).
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        ArgumentError: An argument is outside its range.
        CkptError: The checkpoint is not whole, or the copy cannot be written or differs.
    """

def ls(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Catalog:
    """List the checkpoints in a directory, sorted by step, and whether each is whole.

    Args:
        root: A checkpoint root, or a directory of a trainer's ``checkpoint-N``.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: The directory cannot be read, or contains no checkpoint.
    """

def pin(
    src: Source,
    *,
    why: str,
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Pin:
    """Pin a checkpoint: no rule of ``prune``, ``CheckpointManager`` or a trainer's rotation removes or thins it.

    The pin is a small file in its directory. It replaces an earlier pin, and is removed with the directory: a save that
    replaces the checkpoint removes it.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``.
        why: The reason, for people.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: The checkpoint is missing or damaged, another process removes or thins it, the reason is empty, or
            the pin cannot be written.
    """

def prune(
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    keep_for: float | str | None = None,
    thin: str | None = None,
    thin_every: int | None = None,
    torn: bool = False,
    grace: float | str = "1h",
    dry_run: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Decisions:
    """Remove the checkpoints of a root that no rule keeps, or thin them: remove only their optimizer states.

    Only whole saves of runs are removed or thinned: of ZeRO, and distributed checkpoints of torch with an optimizer,
    also such as a framework has saved. It always keeps the newest of them, the one that ``latest`` names, those in the
    snapshot of a Ray Train run, and pinned ones. A thin checkpoint replaces a whole one when its weights have been read
    back and have the digest of the source. The next ``prune`` deletes the leftovers of a killed one.

    Args:
        root: A checkpoint root, or a directory of a trainer's ``checkpoint-N``.
        keep_last: Number of newest checkpoints to keep.
        keep_every: Keep those whose step is a multiple of this.
        keep_best: Keep the one with the smallest value of this number in its client state ("loss", "eval.loss"); with
            the suffix ":max", the largest.
        keep_for: Keep those younger than this: seconds, or a text like "7d".
        thin: Thin those that no rule keeps, with weights of this type: "bf16" or "fp32".
        thin_every: Thin only those whose step is a multiple of this, and remove the others, thin ones included.
        torn: Remove incomplete and uncommitted checkpoints too, unless a save may still write them.
        grace: With ``torn``, the least age of their newest file: seconds, or a text like "1h".
        dry_run: Decide, but change nothing.
        jobs: Threads. Default: one for each core, at most 4; 16 where a storage is remote.
        memory: Bytes, or "256MB" (the default), that requests in flight to remote storages may take.
        progress: Called with (bytes of thin checkpoints written, bytes in all).
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Returns:
        A decision with its reason for each checkpoint, oldest first.

    Raises:
        ArgumentError: No rule is given, or one is malformed.
        CkptError: The directory cannot be read, or no checkpoint has the number; nothing was changed.
        PruneError: A checkpoint cannot be removed or thinned; the others were. Its ``decisions`` have the results.
    """

def unpin(
    src: Source,
    *,
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Pin:
    """Remove the pin of a checkpoint; return it.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        PlanError: The checkpoint is not pinned.
        CkptError: The checkpoint is missing, or the pin cannot be removed.
    """

def diff(
    a: Source,
    b: Source,
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    all: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> DiffReport:
    """Compare two checkpoints of any formats and topologies: names, shapes, weights and optimizer states.

    Both are read once, in small parts. Weights are the fp32 master weights where a checkpoint has them. Element x of
    ``a`` equals element y of ``b`` if ``|x - y| <= atol + rtol * |y|``, or if both are NaN.

    Args:
        a: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        b: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag_a: Tag of the checkpoint in a.
        tag_b: Tag of the checkpoint in b.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        all: Also compare steps, hyper-parameters (learning rates), the scheduler, the loss scale and client state.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        ArgumentError: A tolerance is negative or not finite.
        CkptError: One of them is not sound, or cannot be read.
    """

def digest(
    src: Source,
    *,
    tag: str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Digest:
    """Digest the values of a checkpoint; sharding and file format make no difference.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """

def extract(
    src: Source | Checkpoint,
    name: str,
    out: str | os.PathLike[str] | None = None,
    *,
    tag: str | None = None,
    state: str = "weights",
    index: Any = None,
    framework: Literal["numpy", "torch"] = "numpy",
    check: Check = "read",
    overwrite: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Any:
    """Read one tensor, or a slice of it, and return it or write it to a file; only its bytes are read.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage), or the
            ``Checkpoint`` that ``inspect`` returned.
        name: Parameter or buffer, by its own or a tied name.
        out: File to write, of the kind of its suffix: ``.safetensors``, ``.npy`` or ``.pt``; default: none.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        state: "weights" for the fp32 master weights, or else the model's own copy; or the name of a state in the
            checkpoint: "fp32", "module", "exp_avg", ...
        index: As in ``tensor[index]``: integers and slices of step 1, one for each dimension from the first on;
            default: the whole tensor.
        framework: Type of the result: "numpy" for an array (bf16 as ``ml_dtypes`` has it), "torch" for a tensor.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none.
        overwrite: Replace ``out`` if it exists.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Returns:
        The tensor in its type and shape, which owns its memory; with ``out`` an ``ExtractReport``.

    Raises:
        ArgumentError: An argument is outside its range, or ``index`` does not fit the shape.
        ChecksumError: The bytes read differ from those saved.
        CkptError: The checkpoint is not sound, contains no such tensor, or the file cannot be written.
    """

def inspect(
    src: Source,
    *,
    tag: str | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Checkpoint:
    """Read the layout of a checkpoint; no weights are read and no code in it is run.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: The checkpoint is missing or damaged; names the file, the problem and the next step.
    """

def verify(
    src: Source,
    *,
    tag: str | None = None,
    deep: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> VerifyReport:
    """Check that a checkpoint is whole and sound; lists every finding instead of raising.

    A finding is about a checkpoint that exists; a missing one raises an error.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        deep: Read every byte: compare checksums, look for NaN and infinity, compare 16-bit copies with the fp32
            master weights.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        StorageError: ``src`` does not exist, or it or a file in it cannot be read, and no other defect was found.
        LayoutError: ``src`` contains no checkpoint, or none of this tag.
    """

def average(
    src: Sequence[Source],
    out: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "zero"],
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    schedule: Literal["constant", "linear", "cosine", "1-sqrt"] | None = None,
    accumulate: Literal["fp32", "fp64"] = "fp32",
    tag: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    max_shard_size: int | str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    world_size: int | None = None,
    stage: int | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    ray: bool | str | None = None,
    progress: Progress | None = None,
    allow_partial: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> AverageReport:
    """Write the weighted mean of several checkpoints of one model; the output appears whole or not at all.

    The mean is w[0] * x[0] + w[1] * x[1] + ..., divided by the sum of the weights. Each product, sum and quotient is
    rounded to ``accumulate``, in the order of ``src``, as torch does it. fp32 master weights are averaged, or else the
    weights, and floating-point buffers; other buffers are copied from the newest source.

    Args:
        src: The checkpoints, of any formats, stages and numbers of ranks; each is a path that ``inspect`` takes, or
            several if each contains the files of some ranks.
        out: Directory to write.
        to: "safetensors" for weights as ``consolidate`` writes them; "zero" for a checkpoint that
            ``engine.load_checkpoint`` reads, with the optimizer of the newest source.
        weights: One number for each checkpoint. Default: all equal.
        ema: Decay of an exponential moving average, which begins at the first checkpoint.
        schedule: Decay of the learning rate that the mean replaces: WSM's weights, for checkpoints at equal distances.
            "linear" weighs all equally, "constant" takes only the newest.
        accumulate: Type to compute in.
        tag: Tag of each checkpoint; default: the one that ``latest`` names.
        dtype: Type of the parameters, default "fp32"; for "zero" the type that the run computes in.
        max_shard_size: Bytes, or a text like "5GB"; a larger model is split into several files.
        include: Globs: only tensors whose name matches one; for "zero" the others are copied from the newest source.
        exclude: Globs: no tensors whose name matches one.
        world_size: Data-parallel ranks that will load the output; default: the newest source's.
        stage: ZeRO stage, 1, 2 or 3; default: the newest source's.
        prove: Compute the mean again, digest it and the output, and commit only if they are equal.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none.
        dry_run: Plan, but write nothing; the report has the disk space and memory of a run.
        overwrite: Allow an ``out`` with files, but without a checkpoint: weights of the same kind in it are replaced,
            other files are kept. A replaced sidecar file that differs from the new one is kept as ``NAME.replaced``.
            Not for "zero".
        jobs: Threads. Default: one for each core, at most 4; 16 where a storage is remote.
        memory: Bytes, or "256MB" (the default), that requests in flight to remote storages may take.
        ray: Address of a Ray cluster that does the work, or True for the one that Ray finds or starts.
        progress: Called with (bytes done, bytes in all).
        allow_partial: Accept a source whose files cannot be proven to be all: safetensors of single ranks.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs, for all checkpoints and ``out``: keys, an endpoint, ...
            Default: fsspec's own configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: A wrong argument, sources that are not sound or do not fit, or ``out`` not writable.
    """

def live_digest(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    timeout: float = 1800.0,
) -> StateDigest:
    """Digest the live state of a run in place; call it on every rank.

    The same state has the same digests on any number of ranks, under plain torch, DDP, FSDP2, HSDP, tensor parallelism
    and DeepSpeed at any ZeRO stage.

    Args:
        model: A DeepSpeed engine, or a torch module: plain, DDP, or with DTensors.
        optimizer: The module's optimizer, or a list of several; an engine has its own.
        scheduler: The learning-rate scheduler of the module, or of an engine that has none.
        timeout: Seconds that a rank may lag.

    Returns:
        The digests. Parts of the state that cannot be digested, such as lists of tensors, are named in the log.

    Raises:
        ProofError: Ranks have different values of the same part, or their parts do not cover a tensor once.
        CkptError: The state cannot be digested; on every rank.
    """

def prove(
    model: Any,
    src: Source,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    tag: str | None = None,
    weights_only: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    trust_names: bool = False,
    timeout: float = 1800.0,
) -> Proof:
    """Prove that the live state of a run equals a checkpoint; call it on every rank, before the next step.

    The live state is digested in place, on the device that has it, and no tensor is gathered. It is compared with the
    digests that the save recorded in the manifest; without those, with digests of the files.

    Args:
        model: A DeepSpeed engine, or a torch module: plain, DDP, or with DTensors; or several modules by name.
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        optimizer: The module's optimizer, or a list of several; an engine has its own. Without it, only weights and
            buffers of a torch module are compared.
        scheduler: The learning-rate scheduler of the module, or several by name; or of an engine that has none.
        extra: Of a torch model, the other objects that were saved with it, by name.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        weights_only: Whether to compare only weights and buffers.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        timeout: Seconds that a rank may lag.

    Returns:
        The proof; printed, it is one line.

    Raises:
        ProofError: A part of the state differs; names the first one, and its rank and elements. On every rank.
        CkptError: The checkpoint is damaged, or the state cannot be digested; on every rank.
    """

def stats(
    src: Source,
    *,
    tag: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    optimizer: bool = False,
    magnitudes: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Statistics:
    """Compute extremes, mean, norm and counts of NaN, infinity and zero of every tensor, reading small parts.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        optimizer: Also the optimizer's states.
        magnitudes: Also count the values by power of two (``TensorStats.magnitudes``), which takes as long as the rest.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """

def load(
    engine: Any,
    src: Source,
    *,
    tag: str | None = None,
    strict: bool = True,
    weights_only: bool = False,
    optimizer: Any = True,
    scheduler: Any = True,
    extra: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    staged: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    memory: int | str | None = None,
    check: Check = "read",
    trust_names: bool = False,
    allow: Collection[str] = (),
    prove: bool | None = None,
    timeout: float = 1800.0,
) -> LoadReport:
    """Load any checkpoint into a live run of DeepSpeed or torch, on any number of ranks and at any ZeRO stage.

    Call it on every rank, like ``engine.load_checkpoint``. If ranks, stage and parameters match the save, DeepSpeed
    gets the content of its own files; otherwise each rank reads its ranges from the files of all ranks. Unlike
    ``engine.load_checkpoint`` it runs no pickle: ckpttool parses the files and builds the objects in them.

    A torch model may be plain, or under DDP, FSDP2, HSDP or tensor parallelism. Its parameters, buffers and optimizer
    states are filled in place, in the types that the run has. No step is taken, no hook is called, and gradients are
    dropped.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned, or a torch model, or several torch models by name.
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        strict: Whether checkpoint and engine must have the same parameters and buffers. If not, missing ones keep the
            engine's values, and unexpected ones are left out; the report names both.
        weights_only: Load weights, fp32 master weights and buffers from any source, and leave the optimizer's states,
            the counters and the scheduler unchanged. The report has the client state.
        optimizer: Of a torch model, its optimizer, or several in a list or by the names of their models. Of an engine,
            whether to restore the optimizer's states and hyper-parameters. False: only weights, fp32 master weights,
            buffers, counters and the scheduler are restored.
        scheduler: Of a torch model, its learning-rate scheduler, or several by name. Of an engine, whether to restore
            it.
        extra: Of a torch model, the other objects that were saved, by name; a GradScaler also gets the loss scale of
            DeepSpeed.
        dry_run: Report the result of a load, without reading weights or changing the run.
        staged: Whether to read the new state into host memory beside the run's, so that a failed load leaves the run
            unchanged. False: read it straight into the run, without a second copy. Names, shapes, types and options are
            compared before; an error after that says that the run is half loaded.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.
        memory: Bytes of requests in flight on each rank, for a remote source: a number, or "256MB" (default). Also a
            limit of the buffer of ``staged=False``, which has at most 16 MB.
        check: Recorded CRC-32 to compare with the bytes of all ranks, before the engine changes: of records read
            "read" whole, "full" also of partly read ones, "off" none. With a manifest, every byte is compared with its
            checksums.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        allow: Classes ("module.Class") of objects in the client state to build, which runs their code. Plain data,
            tensors, numpy arrays, paths and dates are always built.
        prove: Whether to digest the live state after each load, in place, and compare it with the saved one; a
            difference raises a ``ProofError``, see ``ckpttool.prove``. Default: if the save recorded digests and the
            state is on an accelerator.
        timeout: Seconds that a rank may lag.

    Returns:
        A report of the restored state; its ``client_state`` is the state saved by the user's code.

    Raises:
        CkptError: The checkpoint is damaged or does not fit the engine, or an argument is wrong; on every rank.
    """

def derive_rng_state(
    states: Iterable[Mapping[str, Any]],
    rank: int,
    world_size: int,
    *,
    shared: Collection[str] = (),
) -> dict[str, Any]:
    """Derive the random number state of a rank from the states of all ranks of a run with another number of ranks.

    Seeds come from the SHA-256 of all states and the number of ranks. So the same checkpoint gives the same streams,
    and the next one others, also after several resumes. No two ranks share a stream: ranks and generators of torch get
    consecutive numbers from there on (its CPU generator takes only 32 bits of a seed), Python's and numpy's get hashes
    of 256 bits.

    Args:
        states: States of ``rng_state`` from all ranks that saved, by rank.
        rank: This rank.
        world_size: Number of ranks now.
        shared: Generators, by their names in the state, that get one stream for all ranks: for decisions that all ranks
            must take alike, such as layers to skip under ZeRO-3.

    Returns:
        A state for ``set_rng_state`` in this process: with "cuda" where CUDA is in use, with "deepspeed" if the saved
        states have it.

    Raises:
        ArgumentError: An argument is outside its range, or a state is not one of ``rng_state``.
        PlanError: numpy's global generator was not the default one.
    """

def rng_state() -> dict[str, Any]:
    """Return the state of every random number generator that a train loop uses on this rank.

    Pass it to ``CheckpointManager.save`` as (a part of) ``rank_state``. The state contains numbers, text, tuples,
    mappings and ``torch.uint8`` or ``torch.int64`` tensors in host memory.

    Returns:
        "python": the generator of the module ``random``. "numpy": the legacy global generator of ``numpy.random``.
        "torch": the default generator of the CPU. With CUDA in use, "cuda": the states of all visible devices, and the
        number of the current one. If DeepSpeed's activation checkpointing has a tracker, "deepspeed": its states by
        name. Generators that the program itself has created are not included.
    """

def set_rng_state(
    state: Mapping[str, Any],
) -> None:
    """Set the random number generators of this rank to a state of ``rng_state`` or ``derive_rng_state``.

    Call it as the last step before the train loop continues: a constructor of a model draws numbers, too. A generator
    that the state or this process lacks (CUDA, DeepSpeed's tracker) is not changed.

    Args:
        state: The state. Devices of CUDA are set by number; with another number of visible devices, the current device
            gets the state of the device that was current.

    Raises:
        ArgumentError: It is not such a state.
    """

def load_state_dict(
    src: Source,
    *,
    tag: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    check: Check = "read",
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> LazyStateDict:
    """Return the weights and buffers of any checkpoint as a lazy mapping; ZeRO of any stage and number of ranks too.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names.
        dtype: Type of the parameters: "fp32", "bf16", "fp16" or one of torch's. Default: fp32, as ``consolidate``
            writes. Buffers keep their own.
        device: Device of the tensors; default: host memory.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none. A
            record shared by several tensors is compared when the last of them is read.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: The checkpoint is damaged, nothing matches, or a parameter cannot be cast.
    """
