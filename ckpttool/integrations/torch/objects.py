"""Build the objects in files of ``torch.save`` without running code from the file.

ckpttool's own unpickler reads the structure. Plain data is not changed, tensors get their bytes, and this module builds
objects of the classes listed here. It refuses any other class by name, unless the caller allows it.

Source: torch 2.13, torch/_utils.py and torch/_tensor.py (the rebuilders); numpy 2, numpy/_core/src/multiarray
(``array_setstate``); CPython, Lib/copyreg.py.
"""

from __future__ import annotations

import _compat_pickle
import collections
import enum
import importlib
import importlib.util
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.arguments import check_installed
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.values import Opaque, OrderedDict, Size, StorageRef, TensorRef, TorchDType, walk
from ckpttool.dtypes import DTYPES, numpy_dtype
from ckpttool.errors import CkptError, ContainerError, PlanError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import StoredFile
from ckpttool.integrations.torch.memory import empty
from ckpttool.plan.builder import source_files
from ckpttool.storage import RangeReader

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.execution.virtual_file import RangeFile
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.model import Checkpoint


def as_torch(values: NDArray[Any]) -> Any:
    """Return the values as a ``torch.Tensor``.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    check_installed("a tensor of torch")
    import torch

    name = next(d.torch for d in DTYPES.values() if numpy_dtype(d.name) == values.dtype)
    raw = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, name)).reshape(values.shape)


ALLOW = 'if you trust its author, allow its class: allow=["{}"]'

STATED = {
    "argparse.Namespace",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""Classes whose objects are built from their attributes, without a call."""
CALLED = {
    "datetime.date",
    "datetime.datetime",
    "datetime.time",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    "pathlib._local.PurePosixPath",
    "torch.device",
}
"""Classes whose constructors take plain data and have no side effects."""
FACTORIES = {"dict", "float", "int", "list", "set", "str", "tuple"}
"""Accepted factories of a ``defaultdict``."""
FUNCTIONS = ("torch.optim.", "deepspeed.runtime.lr_schedules.")
"""Modules whose functions a scheduler's state may name; this module does not call them."""
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")


class UnknownClassError(Exception):
    """A file has an object of a refused class; the class name is the only argument."""


def read_structure(file: RangeFile) -> TorchFile:
    """Return the structure of a file of ``torch.save``, and the place of its storages.

    Raises:
        ContainerError: The file is damaged.
        StorageError: It cannot be read.
    """
    return read_torch_file(_Ranges(file))


def read_file(checkpoint: Checkpoint, index: int, options: LoadOptions) -> Any:
    """Return the root object of a file of a checkpoint, with tensors in host memory.

    Args:
        checkpoint: The checkpoint.
        index: The index of the file in ``checkpoint.files``.
        options: The options of the load: requests in flight, recorded checksums to compare, and trusted classes.

    Raises:
        ChecksumError: Its bytes differ from those saved.
        CkptError: As for ``read_objects``.
    """
    files = source_files(checkpoint)
    with Sources(files, checks_for(files, checkpoint, options.check)) as sources:
        found = read_objects(StoredFile(sources[index], memory=options.memory_bytes), options.allow)
        sources.finish()
    return found


def read_objects(
    file: RangeFile,
    allow: Collection[str] = (),
    *,
    read: TorchFile | None = None,
    own: Mapping[str, Any] | None = None,
) -> Any:
    """Return the root object of a file of ``torch.save``, with tensors in host memory.

    Args:
        file: The file.
        allow: Classes, as "module.Class", whose objects are built from the file, which runs their code.
        read: Its structure, if it is known.
        own: Tensors to return for whole storages, by their keys; these storages are not read.

    Raises:
        PlanError: The file has an object of a class that is neither known nor allowed.
        ContainerError: The file is damaged, or an allowed class cannot be imported or built.
        StorageError: It cannot be read.
    """
    read = read_structure(file) if read is None else read
    try:
        return _Builder(read, file, allow, own).build(read.root)
    except UnknownClassError as error:
        raise unknown_class(read.path, str(error)) from None
    except (CkptError, MemoryError):
        raise
    except Exception as error:  # raised by the code of a class, or for values that it does not accept
        problem = f"holds an object that cannot be built: {type(error).__name__}: {error}"
        raise ContainerError(read.path, problem[:500], "restore it from a copy, or install its packages") from error


def unknown_class(path: str, name: str) -> PlanError:
    """Return the error of a file with an object of a refused class."""
    what = "a sparse tensor" if name == "torch._utils._rebuild_sparse_tensor" else f"an object of {name}"
    return PlanError(path, f"holds {what}, which ckpttool does not build", ALLOW.format(name))


def unknown_classes(root: object, allow: Collection[str] = ()) -> list[str]:
    """Return the classes in a file's structure that ``read_objects`` would refuse, each once, sorted."""
    builder = _Builder(None, None, allow)
    found = set()
    for value in walk(root):
        if isinstance(value, Opaque):
            try:
                builder.build(value)
            except UnknownClassError as error:
                found.add(str(error))
            except Exception:  # noqa: S112  (damaged, or dependent on the file's bytes: ``read_objects`` reports it)
                continue
    return sorted(found)


def _current_name(module: str, name: str) -> tuple[str, str]:
    """Return the current module and name of a class, from those in its pickle.

    Source: CPython, Lib/_compat_pickle.py, which ``pickle`` uses for protocols below 3.
    """
    if module == "pathlib._local":  # Python 3.13
        return "pathlib", name
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    renamed = _compat_pickle.IMPORT_MAPPING.get(module, module)
    # A user's module may have the name of a module of Python 2.
    if renamed == module or importlib.util.find_spec(module.partition(".")[0]) is not None:
        return module, name
    return renamed, name


def _class_name(value: Opaque) -> str:
    """Return the current name of a class, as "module.Class"."""
    return ".".join(_current_name(value.module, value.name))


class _Ranges(RangeReader):
    """Adapt a ``RangeFile`` to the ``Reader`` protocol."""

    def __init__(self, file: RangeFile) -> None:
        self._file = file
        self.path = str(file.name)
        self.nbytes = file.nbytes
        self.version = ""
        self.remote = False  # the file caches repeated reads

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end)."""
        data = bytearray(end - start)
        self._file.seek(start)
        if self._file.readinto(data) != len(data):
            raise ContainerError(self.path, "ends too early", "restore it from a copy, or use another tag")
        return bytes(data)


class _Builder:
    """Build the values of one file; build shared values once.

    Args:
        read: The file's structure; None for a trial without bytes: tensors and objects of allowed classes become None.
        file: The file; None as ``read``.
        allow: Classes trusted by the caller.
        own: As for ``read_objects``.
    """

    def __init__(
        self,
        read: TorchFile | None,
        file: RangeFile | None,
        allow: Collection[str],
        own: Mapping[str, Any] | None = None,
    ) -> None:
        self._read = read
        self._own = own or {}
        self._file = file
        self._allow = frozenset(allow)
        self._built: dict[int, Any] = {}
        """Built values by the identity of the parsed ones."""
        self._storages: dict[str, Any] = {}

    # ---------------------------------------------------------------------------------------------------- plain data

    def build(self, value: Any) -> Any:
        """Return the value, with tensors and objects in place of their parsed forms."""
        if value is None or isinstance(value, bool | int | float | str | bytes | complex):
            return value
        found = self._built.get(id(value))
        if found is not None:
            return found
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, list):
            made: list[Any] = []
            self._built[id(value)] = made  # first: a container may contain itself
            made += map(self.build, value)
            return made
        built = self._value(value)
        self._built[id(value)] = built
        return built

    def _mapping(self, value: dict[Any, Any]) -> Any:
        made: dict[Any, Any] = collections.OrderedDict() if isinstance(value, OrderedDict) else {}
        self._built[id(value)] = made
        for key, item in value.items():
            made[self.build(key)] = self.build(item)
        if isinstance(value, OrderedDict) and value.attributes is not None:
            made.__dict__.update(self.build(value.attributes))
        return made

    def _value(self, value: Any) -> Any:
        import torch

        if isinstance(value, Size):
            return torch.Size(value)
        if isinstance(value, tuple | set | frozenset):
            return type(value)(map(self.build, value))
        if isinstance(value, bytearray):
            return bytearray(value)
        if isinstance(value, TorchDType):
            return getattr(torch, value.name)
        if isinstance(value, TensorRef):
            return self._tensor(value)
        if isinstance(value, StorageRef):
            return self._typed_storage(value)
        if isinstance(value, Opaque):
            return self._object(value)
        raise UnknownClassError(type(value).__name__)

    # ------------------------------------------------------------------------------------------------------- tensors

    def _storage(self, ref: StorageRef) -> Any:
        """Return the bytes of a storage, in memory."""
        assert self._read is not None  # noqa: S101  (``_tensor`` and ``_typed_storage`` look)
        assert self._file is not None  # noqa: S101
        held = self._storages.get(ref.key)
        if held is None:
            where = self._read.storages[ref.key]
            held = empty(where.nbytes)
            if where.nbytes:
                self._file.seek(where.start)
                self._file.readinto(memoryview(held.numpy()))
            held = self._storages[ref.key] = held.untyped_storage()
        return held

    def _typed_storage(self, ref: StorageRef) -> Any:
        import torch

        if self._read is None:
            return None
        storage = self._storage(ref)
        if ref.storage_class == "UntypedStorage":
            return storage
        return torch.storage.TypedStorage(
            wrap_storage=storage, dtype=getattr(torch, DTYPES[ref.dtype].torch), _internal=True
        )

    def _tensor(self, ref: TensorRef) -> Any:
        """Return a tensor over its storage, which other tensors may share.

        Source: torch 2.13, torch/_utils.py (``_rebuild_tensor_v2``, ``_rebuild_parameter_with_state``).
        """
        import torch

        if self._read is None:
            return None
        if ref.storage.key in self._own:
            return self._own[ref.storage.key]
        storage = self._storage(ref.storage)
        made: Any = torch.empty(0, dtype=getattr(torch, DTYPES[ref.dtype].torch), device="cpu")
        made.set_(storage, ref.offset, ref.shape, ref.stride)
        if ref.parameter:
            made = torch.nn.Parameter(made, ref.requires_grad)
        else:
            made.requires_grad = ref.requires_grad
        if ref.attributes:
            made.__dict__.update(self.build(ref.attributes))
        return made

    def _flagged_tensor(self, value: Opaque) -> Any:
        """Return a conjugate or negated view: the parser leaves it, because its values are not its bytes."""
        import torch

        if self._read is None:
            return None
        storage, offset, shape, stride, requires_grad, _, flags = self.build(value.args)
        hooks: Any = collections.OrderedDict()
        return torch._utils._rebuild_tensor_v2(storage, offset, shape, stride, requires_grad, hooks, flags)

    # ------------------------------------------------------------------------------------------------------- objects

    def _object(self, value: Opaque) -> Any:
        """Return an object of a known or allowed class.

        Raises:
            UnknownClassError: The class is neither known nor allowed.
        """
        name = _class_name(value)
        if value.function is None:
            if not self._allow.isdisjoint({name, value.qualified_name}):
                return None if self._read is None else self._allowed(value)
            for kind, builder in self._builders(value):
                if kind == value.how:
                    return builder(value)
        raise UnknownClassError(name)

    def _builders(self, value: Opaque) -> Iterator[tuple[str, Callable[[Opaque], Any]]]:
        """Yield the builders of a class, each with its pickle operation."""
        name = _class_name(value)
        module, _, short = name.rpartition(".")
        if name in STATED:
            yield "new", self._stated
        if name in CALLED:
            yield "call", self._called
        if name in {"collections.defaultdict", "collections.deque", "collections.Counter", "types.SimpleNamespace"}:
            yield "call", getattr(self, f"_{value.name.lower()}")
        if name.rsplit(".", 1)[0] in CALLED:
            yield "global", self._member
        if name.startswith(FUNCTIONS):
            yield "global", self._named
        if module == "builtins":
            if short in FACTORIES | {"Ellipsis", "NotImplemented"}:
                yield "global", self._named
            if short in {"slice", "range"}:
                yield "call", self._called
        if module in _NUMPY and short in {"_reconstruct", "scalar"}:
            yield "call", self._array if short == "_reconstruct" else self._scalar
        if name == "torch._utils._rebuild_tensor_v2":
            yield "call", self._flagged_tensor
        if name == "numpy.dtype":
            yield "call", self._dtype
        if name == "numpy.ndarray":
            yield "global", self._named

    def _named(self, value: Opaque) -> Any:
        """Return a module's own object of this name."""
        module, _ = _current_name(value.module, value.name)
        found = _imported(value)
        home = getattr(found, "__module__", None) or type(found).__module__
        if _current_name(home, "")[0] != module:
            raise UnknownClassError(_class_name(value))
        return found

    def _member(self, value: Opaque) -> Any:
        """Return a member of an enumeration."""
        found = self._named(value)
        if not isinstance(found, enum.Enum):
            raise UnknownClassError(_class_name(value))
        return found

    def _stated(self, value: Opaque) -> Any:
        cls = self._named(value)
        made = self._built[id(value)] = cls.__new__(cls)
        state = self.build(value.state) if value.stated else {}
        if value.args or value.kwargs or not isinstance(state, dict) or not all(isinstance(k, str) for k in state):
            raise UnknownClassError(_class_name(value))
        made.__dict__.update(state)
        return made

    def _called(self, value: Opaque) -> Any:
        for part in walk(value.args):
            if isinstance(part, Opaque) and _class_name(part) not in CALLED:
                self.build(part)  # raises with its name, if it is not known
                raise UnknownClassError(_class_name(value))
        made = self._named(value)(*self.build(value.args))
        if value.stated and value.state is not None:
            raise UnknownClassError(_class_name(value))
        return made

    def _defaultdict(self, value: Opaque) -> Any:
        made: Any = collections.defaultdict(*self.build(value.args))
        self._built[id(value)] = made
        return self._fill(made, value)

    def _counter(self, value: Opaque) -> Any:
        made: Any = collections.Counter(*self.build(value.args))
        self._built[id(value)] = made
        return self._fill(made, value)

    def _deque(self, value: Opaque) -> Any:
        made: Any = collections.deque(*self.build(value.args))
        self._built[id(value)] = made
        return self._fill(made, value)

    def _simplenamespace(self, value: Opaque) -> Any:
        made = self._built[id(value)] = types.SimpleNamespace(*self.build(value.args))
        made.__dict__.update(self.build(value.state) if value.stated else {})
        return made

    def _fill(self, made: Any, value: Opaque) -> Any:
        for key, item in value.items:
            made[self.build(key)] = self.build(item)
        for item in value.appended:
            made.append(self.build(item))
        return made

    # --------------------------------------------------------------------------------------------------------- numpy

    def _dtype(self, value: Opaque) -> Any:
        """Return a numpy dtype.

        Source: numpy 2, numpy/_core/src/multiarray/descriptor.c (``arraydescr_reduce``): (name, align, copy), and a
        state whose second value is the byte order.
        """
        import numpy as np

        code = value.args[0] if value.args else None
        if not isinstance(code, str) or not code.isascii() or len(code) > 20:
            raise UnknownClassError("numpy.dtype")
        state = value.state if isinstance(value.state, tuple) else ()
        _, order, subarray, names, fields = (*state[:5], *(None,) * 5)[:5]
        if subarray is not None:
            return np.dtype((self.build(subarray[0]), subarray[1]))
        if names is not None:
            held = {self.build(name): self.build(field) for name, field in fields.items()}
            return np.dtype(
                {
                    "names": list(names),
                    "formats": [held[name][0] for name in names],
                    "offsets": [held[name][1] for name in names],
                    "itemsize": state[5],
                }
            )
        made = np.dtype(code)
        if made.kind in "mM" and len(state) > 8:
            unit, count = state[8][1][:2]  # unit of datetime64 and timedelta64
            made = np.dtype(f"{code}[{int(count)}{unit.decode('ascii')}]")
        return made.newbyteorder(">") if order == ">" else made

    def _array(self, value: Opaque) -> Any:
        """Build an array from its state: (version, shape, dtype, Fortran order, bytes or a list of objects)."""
        import numpy as np

        state = value.state
        if not (isinstance(state, tuple) and len(state) == 5):
            raise UnknownClassError("numpy.ndarray")
        shape, dtype, order = state[1], self.build(state[2]), "F" if state[3] else "C"
        if isinstance(state[4], list) and dtype.kind == "O":
            made = np.empty(len(state[4]), object)
            for n, item in enumerate(state[4]):
                made[n] = self.build(item)
            return made.reshape(shape)  # a list is in C order, also for Fortran arrays
        if not isinstance(state[4], bytes) or dtype.hasobject:
            raise UnknownClassError("numpy.ndarray")
        return np.frombuffer(state[4], dtype).copy().reshape(shape, order=order)

    def _scalar(self, value: Opaque) -> Any:
        import numpy as np

        dtype, data = self.build(value.args[0]), value.args[1]
        if dtype.kind == "O":
            return self.build(data)
        if not isinstance(data, bytes) or dtype.hasobject:
            raise UnknownClassError("numpy.ndarray")
        return np.frombuffer(data, dtype)[0]

    # ------------------------------------------------------------------------------------------------ allowed classes

    def _allowed(self, value: Opaque) -> Any:
        """Return an object of a trusted class, built like ``pickle`` does.

        Source: CPython, Lib/pickle.py (``load_reduce``, ``load_newobj_ex``, ``load_build``).
        """
        found = _imported(value)
        if value.how == "global":
            return found
        args, kwargs = self.build(value.args), self.build(value.kwargs)
        made = found(*args) if value.how == "call" else found.__new__(found, *args, **kwargs)
        self._built[id(value)] = made
        if value.stated:
            _set_state(made, self.build(value.state))
        return self._fill(made, value)


def _imported(value: Opaque) -> Any:
    """Import the object named in a pickle."""
    module, name = _current_name(value.module, value.name)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _set_state(made: Any, state: Any) -> None:
    """Set the saved state of an object."""
    own = getattr(made, "__setstate__", None)
    if own is not None:
        own(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        made.__dict__.update(state)
    for name, item in (slots or {}).items():
        setattr(made, name, item)
