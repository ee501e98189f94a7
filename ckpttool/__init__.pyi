"""The public names; ``__init__.py`` reads them from this file. The classes are for type checkers alone."""

import collections.abc
import typing

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
from ckpttool.api.consolidate import consolidate as consolidate
from ckpttool.api.convert import ConvertReport as ConvertReport
from ckpttool.api.convert import convert as convert
from ckpttool.api.cp import CpReport as CpReport
from ckpttool.api.cp import cp as cp
from ckpttool.api.keeping import ls as ls
from ckpttool.api.keeping import pin as pin
from ckpttool.api.keeping import prune as prune
from ckpttool.api.keeping import unpin as unpin
from ckpttool.api.reading import ExtractReport as ExtractReport
from ckpttool.api.reading import diff as diff
from ckpttool.api.reading import digest as digest
from ckpttool.api.reading import extract as extract
from ckpttool.api.reading import inspect as inspect
from ckpttool.api.reading import verify as verify
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
from ckpttool.extensions.merging.api import average as average
from ckpttool.extensions.proof.api import Proof as Proof
from ckpttool.extensions.proof.api import live_digest as live_digest
from ckpttool.extensions.proof.api import prove as prove
from ckpttool.extensions.proof.state_digest import StateDigest as StateDigest
from ckpttool.extensions.stats.api import stats as stats
from ckpttool.extensions.stats.statistics import Statistics as Statistics
from ckpttool.extensions.stats.statistics import TensorStats as TensorStats
from ckpttool.formats import Source as Source
from ckpttool.integrations.live.load import load as load
from ckpttool.integrations.live.manager import CheckpointManager as CheckpointManager
from ckpttool.integrations.live.report import LoadReport as LoadReport
from ckpttool.integrations.live.report import SaveReport as SaveReport
from ckpttool.integrations.torch.rng import derive_rng_state as derive_rng_state
from ckpttool.integrations.torch.rng import rng_state as rng_state
from ckpttool.integrations.torch.rng import set_rng_state as set_rng_state
from ckpttool.integrations.torch.state_dict import Incompatible as Incompatible
from ckpttool.integrations.torch.state_dict import LazyStateDict as LazyStateDict
from ckpttool.integrations.torch.state_dict import load_state_dict as load_state_dict
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

class _CheckpointManagerOptions(typing.TypedDict, total=False):
    """Options of ``CheckpointManager`` that extensions add."""

    thin: str | None
    thin_every: int | None

class _PruneOptions(typing.TypedDict, total=False):
    """Options of ``prune`` that extensions add."""

    thin: str | None
    thin_every: int | None

class _ConsolidateOptions(typing.TypedDict, total=False):
    """Options of ``consolidate`` that extensions add."""

    merge_lora: bool
    base: Source | None
    adapter: collections.abc.Sequence[str]
    ray: bool | str | None

class _LoadOptions(typing.TypedDict, total=False):
    """Options of ``load`` that extensions add."""

    prove: bool | None

class _CheckpointManagerRestoreOptions(_LoadOptions): ...
class _RayTrainCheckpointsRestoreOptions(_LoadOptions): ...
class _PrepareOptions(_LoadOptions): ...
class _CkptCallbackOptions(_LoadOptions): ...
class _CkptSavesOptions(_LoadOptions): ...

class _ConvertOptions(typing.TypedDict, total=False):
    """Options of ``convert`` that extensions add."""

    mesh: collections.abc.Mapping[str, int] | collections.abc.Sequence[int] | None
    device: str | None
    torch: typing.Literal["2.6", "2.13"] | None
    ray: bool | str | None

class _AverageOptions(typing.TypedDict, total=False):
    """Options of ``average`` that other extensions add."""

    ray: bool | str | None
