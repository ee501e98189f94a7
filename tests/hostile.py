"""Files that mean harm, and good files damaged in a named way: shared by every test that reads what others wrote.

Nothing here is a checkpoint from outside; each is put together opcode by opcode or made from a good file.
"""

from __future__ import annotations

import functools
import io
import itertools
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpttool.ranges import ByteRange


class BytesReader:
    """A file that is a bytes object; it counts what is read of it."""

    def __init__(self, data: bytes, path: str = "run/file.pt", *, remote: bool = False) -> None:
        self.remote = remote
        self.data = data
        self.path = path
        self.nbytes = len(data)
        self.version = str(zlib.crc32(data))
        self.bytes_read = 0

    def read(self, start: int, end: int) -> bytes:
        if not 0 <= start <= end <= self.nbytes:
            raise StorageError(self.path, f"ended at byte {self.nbytes} while it was being read", "try again")
        self.bytes_read += end - start
        return self.data[start:end]

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        return [self.read(r.start, r.end) for r in ranges]

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------- envelopes


def zip_file(pickled: bytes, storages: dict[str, bytes] | None = None, *, prefix: str = "archive") -> bytes:
    """A stored archive as ``torch.save`` lays it out, around any pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{prefix}/data.pkl", pickled)
        archive.writestr(f"{prefix}/byteorder", b"little")
        for key, data in (storages or {}).items():
            archive.writestr(f"{prefix}/data/{key}", data)
        archive.writestr(f"{prefix}/version", b"3\n")
    return out.getvalue()


LEGACY_HEAD = (
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
    b"\x80\x02M\xe9\x03."
    b"\x80\x02}q\x00(X\x10\x00\x00\x00protocol_versionq\x01M\xe9\x03X\r\x00\x00\x00little_endianq\x02\x88u."
)


def legacy_file(pickled: bytes, keys: bytes = b"\x80\x02].", payload: bytes = b"") -> bytes:
    """The form before ZIP, around any pickle."""
    return LEGACY_HEAD + pickled + keys + payload


# ------------------------------------------------------------------------------------------------- opcodes


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def call(module: str, attribute: str, *args: str | bytes) -> bytes:
    """Opcodes of a call with texts, or with whatever opcodes are given."""
    return name(module, attribute) + b"(" + b"".join(text(a) if isinstance(a, str) else a for a in args) + b"tR"


def proto2(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def storage(key: str = "0", numel: int = 4, cls: str = "FloatStorage", location: str = "cpu") -> bytes:
    """Opcodes of a storage's persistent id."""
    return b"(" + text("storage") + name("torch", cls) + text(key) + text(location) + integer(numel) + b"tQ"


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def integers(*values: int) -> bytes:
    """Opcodes of a tuple."""
    return b"(" + b"".join(map(integer, values)) + b"t"


def tensor(stored: bytes, offset: int, shape: bytes, stride: bytes) -> bytes:
    hooks = name("collections", "OrderedDict") + b")R"
    arguments = stored + integer(offset) + shape + stride + b"\x89" + hooks
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


# ------------------------------------------------------------------------------------------------- code execution


def attacks(marker: str) -> dict[str, bytes]:
    """Pickles that would create the file ``marker``, or import the module ``antigravity``, if they were obeyed."""
    touch = f"touch {marker}"
    write = f"open({marker!r}, 'w').close()"
    shell = b"(" + text("/bin/sh") + text("-c") + text(touch) + b"l"
    importing = call("importlib", "import_module", "antigravity")
    return {
        "os.system": proto2(call("os", "system", touch)),
        "posix.system": proto2(call("posix", "system", touch)),
        "os.system in protocol 0": b"cos\nsystem\n(S'" + touch.encode() + b"'\ntR.",
        "os.system by STACK_GLOBAL": b"\x80\x04" + text("os") + text("system") + b"\x93" + text(touch) + b"\x85R.",
        "os.system by INST": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "os.system by OBJ": b"(" + name("os", "system") + text(touch) + b"o.",
        "os.system under a key": proto2(b"}" + text("module") + call("os", "system", touch) + b"s"),
        "os.system then a good value": proto2(call("os", "system", touch) + b"0}"),
        "builtins.eval": proto2(call("builtins", "eval", write)),
        "__builtin__.eval": proto2(call("__builtin__", "eval", write)),
        "builtins.exec": proto2(call("builtins", "exec", write)),
        "builtins.open": proto2(call("builtins", "open", marker, "w")),
        "builtins.__import__": proto2(call("builtins", "__import__", "antigravity")),
        "subprocess.Popen": proto2(call("subprocess", "Popen", shell)),
        "subprocess.Popen by NEWOBJ": proto2(name("subprocess", "Popen") + shell + b"\x85\x81"),
        "subprocess.Popen by NEWOBJ_EX": b"\x80\x04" + name("subprocess", "Popen") + shell + b"\x85}\x92.",
        "pty.spawn": proto2(call("pty", "spawn", shell)),
        "importlib.import_module": proto2(importing),
        "a module imported by name alone": proto2(name("antigravity", "geohash")),
        "runpy.run_path": proto2(call("runpy", "_run_code", write)),
        "functools.partial": proto2(call("functools", "partial", name("os", "system"), touch) + b")R"),
        "functools.partial of partial": proto2(
            call("functools", "partial", call("functools", "partial", name("os", "system")), touch) + b")R"
        ),
        "functools.reduce": proto2(call("functools", "reduce", name("os", "system"), b"(" + text(touch) + b"l")),
        "builtins.getattr": proto2(
            call("builtins", "getattr", call("builtins", "__import__", "os"), "system") + text(touch) + b"\x85R"
        ),
        "builtins.getattr of a class": proto2(
            call("builtins", "getattr", name("os", "environ"), "__class__") + text(touch) + b"\x85R"
        ),
        "builtins.map": proto2(call("builtins", "list", call("builtins", "map", name("os", "system"), shell))),
        "operator.attrgetter": proto2(call("operator", "attrgetter", "system") + name("os", "path") + b"\x85R"),
        "operator.methodcaller": proto2(call("operator", "methodcaller", "system", touch) + name("os", "") + b"\x85R"),
        "copyreg.__newobj__": proto2(call("copyreg", "__newobj__", name("subprocess", "Popen"), shell)),
        "copy_reg._reconstructor": proto2(
            call("copy_reg", "_reconstructor", name("antigravity", "fly"), name("__builtin__", "object"), b"N")
        ),
        "an extension code": b"\x80\x02\x82\x01.",
        "a state that is code": proto2(
            name("types", "SimpleNamespace") + b")\x81" + call("os", "system", touch) + b"b"
        ),
        "a class changed by its state": proto2(
            name("torch", "Tensor") + b"}" + text("__reduce__") + name("os", "system") + b"sb"
        ),
        "numpy.f2py": proto2(call("numpy.testing._private.utils", "runstring", write)),
        "numpy.load": proto2(call("numpy", "load", marker)),
        "torch.load": proto2(call("torch", "load", marker)),
        "torch.storage._load_from_bytes": proto2(
            call("torch.storage", "_load_from_bytes", b"C" + bytes([len(_TOUCH)]) + _TOUCH)
        ),
        "torch.hub.load": proto2(call("torch.hub", "load", "a/b", "c")),
        "torch.jit.unsupported": proto2(call("torch.jit._script", "unpackage_script_module", b"N", b"N", "a", "b")),
        "a tensor rebuilt by os.system": proto2(
            call("torch._tensor", "_rebuild_from_type_v2", name("os", "system"), name("torch", "Tensor"))
        ),
        "a tensor class of one's own": proto2(
            call(
                "torch._tensor",
                "_rebuild_from_type_v2",
                name("os", "system"),
                name("antigravity", "Tensor"),
                b"(" + text(touch) + b"t",
                b"}",
            )
        ),
        "a persistent id that is code": proto2(call("os", "system", touch) + b"Q"),
        "a storage class of one's own": proto2(
            b"(" + text("storage") + name("antigravity", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
        ),
        "a dict key that is code": proto2(b"}" + call("os", "system", touch) + b"Ns"),
        "pickle in pickle": proto2(call("pickle", "loads", b"C" + bytes([len(_TOUCH)]) + _TOUCH)),
    }


_TOUCH = b"cos\nsystem\n(S'touch pwned'\ntR."


# ------------------------------------------------------------------------------------------------- exhaustion


class Made(Mapping[str, bytes]):
    """Bytes by name, each made when it is asked for: some take a second."""

    def __init__(self, makers: dict[str, Callable[[], bytes]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> bytes:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@functools.cache
def bombs() -> Made:
    """Small pickles that ask for endless time, memory or stack. Each must end quickly, one way or the other."""
    deep = 1_000_000
    return Made(
        {
            # Nesting.
            "lists in lists": lambda: proto2(b"]" * deep + b"a" * (deep - 1)),
            "tuples in tuples": lambda: proto2(b")" + b"\x85" * deep),
            "tuples in tuples as a key": lambda: proto2(b"})" + b"\x85" * 100_000 + b"Ns"),
            "dicts in dicts": lambda: proto2(b"}N" * 100_000 + b"}" + b"s" * 100_000),
            "states in states": lambda: proto2(name("a", "b") + b"q\x000" + b"h\x00)\x81" * 100_000 + b"b" * 99_999),
            "arguments in arguments": lambda: proto2(name("a", "b") + b"q\x00" + b"\x85q\x010h\x00h\x01\x81" * 100_000),
            "calls of calls": lambda: proto2(name("a", "b") + b")R" * 100_000),
            "attributes of tensors": lambda: proto2(_tensors_in_tensors(20_000)),
            "frozensets in frozensets": lambda: b"\x80\x04" + b"(" * 100_000 + b"\x91" * 100_000 + b".",
            "a deep list met first near the top": lambda: proto2(_listed_chain(300_000)),
            # What is shared counts once for us, and 2**n times for whoever forgets that.
            "billion laughs in lists": lambda: proto2(_laughs(b"]", b"a")),
            "billion laughs in tuples": lambda: proto2(b")q\x00" + b"0h\x00h\x00\x86q\x00" * 150),
            "billion laughs in keys": lambda: proto2(b")q\x00" + b"0h\x00h\x00\x86q\x00" * 150 + b"0}h\x00Ns"),
            "billion laughs in wide keys": lambda: proto2(
                b"Nq\x00" + (b"0(" + b"h\x00" * 60 + b"tq\x00") * 4 + b"0}h\x00Ns"
            ),
            "billion laughs in arguments": lambda: proto2(
                b")q\x00" + (b"0" + name("a", "b") + b"h\x00h\x00\x86Rq\x00") * 60
            ),
            "one huge key used often": lambda: proto2(
                b"(" + b"N" * 500_000 + b"tq\x000}(" + b"h\x00N" * 500_000 + b"u"
            ),
            "one huge list made a set often": lambda: proto2(
                b"]q\x00("
                + b"".join(b"M" + struct.pack("<H", i) for i in range(50_000))
                + b"e0"
                + name("builtins", "set")
                + b"q\x010h\x00\x85q\x020]("
                + b"h\x01h\x02R" * 200_000
                + b"e"
            ),
            "one huge list of pairs made a dict often": lambda: proto2(
                b"](K\x00N\x86q\x00"
                + b"h\x00" * 200_000
                + b"e\x85q\x020"
                + name("collections", "OrderedDict")
                + b"q\x010]("
                + b"h\x01h\x02R" * 200_000
                + b"e"
            ),
            "one huge text encoded often": lambda: proto2(
                name("_codecs", "encode")
                + b"q\x010"
                + text("x" * 1_000_000)
                + text("latin1")
                + b"\x86q\x020("
                + b"h\x01h\x02R" * 200_000
                + b"t"
            ),
            "one huge state given often": lambda: proto2(
                b"(" + b"N" * 200_000 + b"lq\x000" + name("a", "b") + b"q\x010(" + b"h\x01)\x81h\x00b" * 50_000 + b"t"
            ),
            "one huge tuple of arguments given often": lambda: proto2(
                b"(" + b"N" * 200_000 + b"tq\x000" + name("a", "b") + b"q\x010(" + b"h\x01h\x00R" * 50_000 + b"t"
            ),
            "one huge size": lambda: proto2(
                b"("
                + b"K\x01" * 500_000
                + b"t\x85q\x000"
                + name("torch", "Size")
                + b"q\x010("
                + b"h\x01h\x00R" * 99_999
                + b"t"
            ),
            "names that grow": lambda: proto2(
                text("x" * 100_000)
                + b"q\x000"
                + name("__builtin__", "getattr")
                + b"q\x010"
                + name("a", "b")
                + b"q\x02"
                + (b"0h\x01h\x02h\x00\x86Rq\x02") * 100_000
            ),
            "a tensor rebuilt from itself": lambda: proto2(_rebuild_in_rebuild(50_000)),
            # Lengths that lie.
            "BINBYTES8": lambda: b"\x80\x04\x8e" + b"\xff" * 8 + b".",
            "BINBYTES8 of a terabyte": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
            "BINUNICODE8": lambda: b"\x80\x04\x8d" + b"\xff" * 8 + b".",
            "BYTEARRAY8": lambda: b"\x80\x05\x96" + b"\xff" * 8 + b".",
            "BINUNICODE": lambda: proto2(b"X\xff\xff\xff\xff"),
            "BINSTRING of negative length": lambda: proto2(b"T\xff\xff\xff\xff"),
            "FRAME": lambda: b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
            "LONG4": lambda: proto2(b"\x8b\xff\xff\xff\x7f"),
            "LONG4 of negative length": lambda: proto2(b"\x8b\xff\xff\xff\xff"),
            "a long integer in digits": lambda: b"L" + b"9" * 5_000_000 + b"L\n.",
            "an integer in digits": lambda: b"I" + b"9" * 5_000_000 + b"\n.",
            "a float in digits": lambda: b"F" + b"9" * 5_000_000 + b"\n.",
            "a memo index in digits": lambda: b"Np" + b"9" * 5_000_000 + b"\n.",
            "long integers, often": lambda: proto2(b"(" + (b"\x8a\xff" + b"\x7f" * 255) * 20_000 + b"t"),
            # Keys with one hash.
            "integers with one hash": lambda: proto2(
                b"}(" + b"".join(integer(k * ((1 << 61) - 1)) + b"N" for k in range(200_000)) + b"u"
            ),
            "pairs with one hash": lambda: proto2(b"}(" + _colliding_pairs(100_000) + b"u"),
            "long keys that differ at their ends, often": lambda: proto2(
                _long_keys(60) + b"}(" + _gets(60) * 4000 + b"u"
            ),
            "pairs with one hash in a set": lambda: b"\x80\x04\x8f(" + _colliding_pairs(100_000, then=b"") + b"\x90.",
            "complex numbers with one hash": lambda: proto2(_colliding_complex(100_000)),
        }
    )


@functools.cache
def greedy(count: int) -> dict[str, bytes]:
    """Pickles that ask for as much memory as they can for each byte of theirs."""
    cls = name("a", "b") + b"q\x000"
    numbers = range(count)
    return {
        "nothing": proto2(b"(" + b"N" * count + b"t"),
        "lists": proto2(b"(" + b"]" * count + b"t"),
        "lists of one": proto2(b"(" + b"]Na" * count + b"t"),
        "dicts": proto2(b"(" + b"}" * count + b"t"),
        "dicts of one": proto2(b"(" + b"}NNs" * count + b"t"),
        "sets": b"\x80\x04(" + b"\x8f" * count + b"t.",
        "frozensets": b"\x80\x04(" + b"(\x91" * count + b"t.",
        "tuples": proto2(b"(" + b"N\x85" * count + b"t"),
        "ordered dicts": proto2(name("collections", "OrderedDict") + b"q\x000(" + b"h\x00)R" * count + b"t"),
        "ordered dicts of one": proto2(name("collections", "OrderedDict") + b"q\x000(" + b"h\x00)RNNs" * count + b"t"),
        "attributes": proto2(name("collections", "OrderedDict") + b"q\x000(" + b"h\x00)R}b" * count + b"t"),
        "calls": proto2(cls + b"(" + b"h\x00)R" * count + b"t"),
        "objects": proto2(cls + b"(" + b"h\x00)\x81" * count + b"t"),
        "objects with a state": proto2(cls + b"(" + b"h\x00)\x81}b" * count + b"t"),
        "objects with items": proto2(cls + b"(" + b"h\x00)\x81NNsNa" * count + b"t"),
        "marks": proto2(b"(" * count),
        "memo entries": b"\x80\x04N" + b"\x94" * count + b".",
        "numbers": proto2(b"(" + b"M\xff\x7f" * count + b"t"),
        "long integers": proto2(b"(" + b"\x8a\x01\x7f" * count + b"t"),
        "decimals": proto2(b"(" + (b"G" + bytes(8)) * count + b"t"),
        "texts": proto2(b"(" + b"X\x02\0\0\0\xc3\xbf" * count + b"t"),
        "wide texts": proto2(b"(" + ("X\4\0\0\0\U0001f600").encode() * count + b"t"),
        "byte strings": b"\x80\x04(" + b"C\x02ab" * count + b"t.",
        "byte arrays": b"\x80\x05(" + (b"\x96\x02" + bytes(7) + b"ab") * count + b"t.",
        "old strings": proto2(b"(" + b"U\x02ab" * count + b"t"),
        "keys": proto2(b"}(" + b"".join(integer(k) + b"N" for k in numbers) + b"u"),
        "keys one by one": proto2(b"}" + b"".join(integer(k) + b"Ns" for k in numbers)),
        "ordered keys": proto2(
            call("collections", "OrderedDict") + b"(" + b"".join(integer(k) + b"N" for k in numbers) + b"u"
        ),
        "keys that are tuples": proto2(b"}(" + b"".join(integers(k) + b"N" for k in numbers) + b"u"),
        "keys that are decimals": proto2(
            b"}(" + b"".join(b"G" + struct.pack(">d", k / 3) + b"N" for k in numbers) + b"u"
        ),
        "members of a set": b"\x80\x04\x8f(" + b"".join(integer(k) for k in numbers) + b"\x90.",
        "classes": proto2(b"(" + b"".join(name("a", f"b{k}") for k in numbers) + b"t"),
        "storages": proto2(b"(" + b"".join(storage(str(k)) for k in numbers) + b"t"),
        "tensors": proto2(b"(" + tensor(storage(), 0, integers(2, 2), integers(2, 1)) * count + b"t"),
        "sizes": proto2(b"(" + (name("torch", "Size") + integers(2, 2) + b"\x85R") * count + b"t"),
        "complex numbers": proto2(b"(" + call("builtins", "complex", b"G" + bytes(8)) * count + b"t"),
    }


def _laughs(new: bytes, add: bytes) -> bytes:
    out = bytearray(new + b"q\x00")
    for i in range(150):
        here, there = bytes([i]), bytes([i + 1])
        out += b"0" + new + b"q" + there + b"h" + here + add + b"h" + here + add
    return bytes(out)


def _listed_chain(count: int) -> bytes:
    """A list that holds each link of a long chain of lists, the last first, so that each seems to lie near the top."""
    out = bytearray(b"]q\x00]r\x01\x00\x00\x00")
    for i in range(2, count):
        out += b"]r" + struct.pack("<I", i) + b"j" + struct.pack("<I", i - 1) + b"a"
    out += b"0" * (count - 1) + b"("
    for i in range(1, count):
        out += b"j" + struct.pack("<I", i)
    return bytes(out + b"e")


def _tensors_in_tensors(count: int) -> bytes:
    rebuild = name("torch._tensor", "_rebuild_from_type_v2")
    arguments = b"(" + storage() + b"K\x00" + integers(4) + integers(1) + b"\x89Nt"
    out = rebuild + b"q\x000" + name("torch._utils", "_rebuild_tensor_v2") + b"q\x010" + name("torch", "Tensor")
    out += b"q\x020" + arguments + b"q\x030" + text("a") + b"q\x040Nq\x05"
    return out + b"0h\x00(h\x01h\x02h\x03}h\x04h\x05stRq\x05" * count


def _rebuild_in_rebuild(count: int) -> bytes:
    out = name("torch._tensor", "_rebuild_from_type_v2") + b"q\x000" + name("torch", "Tensor") + b"q\x010)q\x02"
    return out + b"0(h\x00h\x01h\x02}tq\x02" * count + b"0h\x00h\x02R"


@functools.cache
def _colliding(count: int) -> list[tuple[int, int]]:
    """Pairs of one hash: the second undoes what the first did. Source: CPython, Objects/tupleobject.c (xxHash)."""
    p1, p2, p5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    mask = (1 << 64) - 1
    inverse = pow(p2, -1, 1 << 64)

    def after(value: int) -> int:
        sum_ = (p5 + value * p2) & mask
        return (((sum_ << 31) | (sum_ >> 33)) & mask) * p1 & mask

    wanted = after(1)
    found = ((a, (wanted - after(a)) * inverse & mask) for a in itertools.count(2))
    return list(itertools.islice((pair for pair in found if pair[1] < 1 << 60), count))


def _colliding_pairs(count: int, then: bytes = b"N") -> bytes:
    return b"".join(integers(*pair) + then for pair in _colliding(count))


def _long_keys(count: int) -> bytes:
    """Keys of two hundred values that differ in the last two alone, all of one hash, in the memo."""
    long = b"(" + b"K\x00" * 198 + b"t"
    return b"".join(long + integers(*pair) + b"\x86q" + bytes([i]) + b"0" for i, pair in enumerate(_colliding(count)))


def _gets(count: int) -> bytes:
    return b"".join(b"h" + bytes([i]) + b"N" for i in range(count))


def _colliding_complex(count: int) -> bytes:
    """Source: CPython, Objects/complexobject.c: the sum of the real part's hash and 1000003 times the other's."""
    out = bytearray(b"}q\x00" + name("builtins", "complex") + b"q\x010(")
    for k in range(count):
        out += b"h\x01G" + struct.pack(">d", 2.0**50 - 1000003 * k) + b"G" + struct.pack(">d", float(k)) + b"\x86RN"
    return bytes(out + b"u")


# ------------------------------------------------------------------------------------------------- tensors that lie


def lying_tensors() -> dict[str, bytes]:
    """Pickles over one storage "0" of four floats, each of them wrong."""
    good = storage()
    big = 1 << 61
    return {
        "longer than its storage": tensor(good, 0, integers(5), integers(1)),
        "beyond the end by its offset": tensor(good, 1, integers(4), integers(1)),
        "beyond the end by its stride": tensor(good, 0, integers(2, 2), integers(3, 1)),
        "an offset without end": tensor(good, big, integers(4), integers(1)),
        "a product that overflows 64 bits": tensor(good, 0, integers(1 << 32, 1 << 32), integers(0, 0)),
        "a product of hundreds of bits": tensor(good, 0, integers(*[big] * 60), integers(*[0] * 60)),
        "a stride without end": tensor(good, 0, integers(2), integers(big)),
        "a negative size": tensor(good, 0, integers(-4), integers(1)),
        "a negative stride": tensor(good, 3, integers(4), integers(-1)),
        "a negative offset": tensor(good, -1, integers(4), integers(1)),
        "more strides than sizes": tensor(good, 0, integers(4), integers(1, 1)),
        "sizes that are text": tensor(good, 0, b"(" + text("4") + b"t", integers(1)),
        "sizes that are true": tensor(good, 0, b"\x88\x85", integers(1)),
        "sizes that are no tuple": tensor(good, 0, integer(4), integers(1)),
        "a hundred dimensions": tensor(good, 0, integers(*[1] * 100), integers(*[1] * 100)),
        "a storage that is none": tensor(text("0"), 0, integers(4), integers(1)),
        "a storage that is missing": tensor(storage("1"), 0, integers(4), integers(1)),
        "a storage with more elements than bytes": tensor(storage(numel=5), 0, integers(4), integers(1)),
        "a storage with fewer elements than bytes": tensor(storage(numel=3), 0, integers(3), integers(1)),
        "a storage of wider elements": tensor(storage(cls="DoubleStorage"), 0, integers(4), integers(1)),
        "a storage of negative length": tensor(storage(numel=-4), 0, integers(4), integers(1)),
        "a storage of endless length": tensor(storage(numel=1 << 80), 0, integers(4), integers(1)),
        "a storage of unknown class": tensor(storage(cls="QInt8Storage"), 0, integers(4), integers(1)),
        "a storage whose key climbs": tensor(storage("../0"), 0, integers(4), integers(1)),
        "two sizes of one storage": good + b"0" + tensor(storage(numel=2), 0, integers(1), integers(1)),
        "a persistent id that is text": text("storage") + b"Q",
        "a persistent id that is short": b"(" + text("storage") + b"tQ",
        "a view of a storage": good[:-2] + integers(0, 4) + b"tQ",
    }


# ------------------------------------------------------------------------------------------------- damage


def truncate(data: bytes, nbytes: int) -> bytes:
    return data[:nbytes]


def flip(data: bytes, position: int, mask: int = 0xFF) -> bytes:
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


def overwrite(data: bytes, position: int, by: bytes) -> bytes:
    return data[:position] + by + data[position + len(by) :]


def without_checksum(data: bytes) -> bytes:
    """The same archive as if its writer had not computed checksums, so that damage is not caught by them."""
    out = bytearray(data)
    at = 0
    while (at := out.find(b"PK\x01\x02", at)) >= 0:
        out[at + 16 : at + 20] = bytes(4)
        at += 4
    return bytes(out)


def raw_zip(entries: list[tuple[str, bytes, dict[str, int]]], **lies: int) -> bytes:
    """An archive written field by field, so that any of them can lie.

    Args:
        entries: Name, payload, and fields that lie: header, nbytes, packed, method, flags, local_method, crc.
        lies: Fields of the end record that lie: count, directory_nbytes, directory_start.
    """
    body, central = bytearray(), bytearray()
    for entry_name, data, fields in entries:
        raw = entry_name.encode()
        header, crc = len(body), fields.get("crc", zlib.crc32(data))
        local_method = fields.get("local_method", fields.get("method", 0))
        local = (b"PK\x03\x04", 20, fields.get("flags", 0), local_method, 0, 0, crc, len(data), len(data), len(raw), 0)
        body += struct.pack("<4s5H3I2H", *local) + raw + data
        sizes = (fields.get("packed", len(data)), fields.get("nbytes", len(data)))
        row = (b"PK\x01\x02", 20, 20, fields.get("flags", 0), fields.get("method", 0), 0, 0, crc, *sizes, len(raw), 0)
        central += struct.pack("<4s6H3I2H", *row) + bytes(10) + struct.pack("<I", fields.get("header", header)) + raw
    start = lies.get("directory_start", len(body))
    count, nbytes = lies.get("count", len(entries)), lies.get("directory_nbytes", len(central))
    return bytes(body + central) + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, nbytes, start, 0)
