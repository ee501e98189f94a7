"""List every error message of ckpttool, taken from the source.

Reads the package as syntax trees, finds each construction of an error class, and follows names, constants, functions
and callers until the text of the problem and of the hint is known. Values that are known only at run time become
{placeholders}.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE = Path(__file__).resolve().parent.parent.parent / "ckpttool"
BASE = "CkptError"
UNKNOWN = "{reason}"
"""Placeholder of a text from another library or the operating system."""
DEPTH = 7
"""Most steps from a name to its text."""
MANY = 24
"""Most alternatives of one text."""
SKIPPED = ("ckpttool.testing",)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ASSIGNING = (ast.Assign, ast.NamedExpr, ast.For, ast.comprehension)


@dataclass(frozen=True)
class Message:
    """One message of the package."""

    kind: str
    """Error class."""
    problem: str
    """Text of the problem, with {placeholders}."""
    hints: tuple[str, ...]
    """Next steps, with {placeholders}."""
    places: tuple[str, ...]
    """Modules that raise it."""

    @property
    def anchor(self) -> str:
        """Name of its place on the page: class and words of the problem, which change only when the message does."""
        return f"{slug(public_class(self.kind).removesuffix('Error'))}-{slug(self.problem)}"


@dataclass
class _Module:
    name: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    functions: dict[str, list[FunctionNode]] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    calls: list[ast.Call] = field(default_factory=list)
    classes: list[ast.ClassDef] = field(default_factory=list)


@dataclass(frozen=True)
class _Scope:
    module: _Module
    function: FunctionNode | None


def slug(text: str) -> str:
    """Words of a text, without placeholders, joined by hyphens; at most 70 characters."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\{[^}]*\}", " ", text).lower())
    result = ""
    for word in words:
        if len(result) + len(word) > 70:
            break
        result += f"-{word}" if result else word
    return result or "message-of-another-library"


class _Reader:
    def __init__(self, package: Path) -> None:
        self.modules: dict[str, _Module] = {}
        for path in sorted(package.rglob("*.py")):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith(SKIPPED):
                self.modules[name] = _module(name, ast.parse(path.read_text(encoding="utf-8")))
        self.kinds = self._kinds()
        self.calls: dict[str, list[tuple[ast.Call, _Scope]]] = {}
        for module in self.modules.values():
            for node in module.calls:
                self.calls.setdefault(_name(node.func), []).append((node, _Scope(module, _function(node, module))))

    def _kinds(self) -> dict[str, str]:
        """Error classes of the package: name to the name of the base class that the page groups by."""
        bases = {BASE: ""}
        while True:
            found = {
                node.name: _name(base)
                for module in self.modules.values()
                for node in module.classes
                for base in node.bases[:1]
                if _name(base) in bases and node.name not in bases
            }
            if not found:
                return bases
            bases |= found

    def messages(self) -> list[Message]:
        """Every message, grouped: one for each class and problem."""
        grouped: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
        for kind in self.kinds:
            for call, scope in self.calls.get(kind, []):
                for problem, hint in self._pairs(call, scope):
                    hints, places = grouped.setdefault((kind, _tidy(problem)), ({}, {}))
                    if hint:
                        hints[_tidy(hint)] = None
                    places[scope.module.name] = None
        result = [Message(kind, problem, tuple(h), tuple(p)) for (kind, problem), (h, p) in grouped.items()]
        return sorted(result, key=lambda m: (m.kind, m.problem.lower()))

    def _pairs(self, call: ast.Call, scope: _Scope) -> list[tuple[str, str]]:
        """Problem and hint of one construction."""
        arguments = call.args[1:]
        if arguments and isinstance(arguments[0], ast.Starred):
            return [(t[0], t[1]) for t in self._tuples(arguments[0].value, scope) if len(t) > 1] or [(UNKNOWN, "")]
        if not arguments:
            return [(UNKNOWN, "")]
        problems = self.texts(arguments[0], scope)
        if len(arguments) < 2:
            return [(p, "") for p in problems]
        if isinstance(arguments[1], ast.Starred):
            hints = [t[0] for t in self._tuples(arguments[1].value, scope)] or [UNKNOWN]
        else:
            hints = self.texts(arguments[1], scope)
        if len(problems) == len(hints) and len(problems) > 1:  # alternatives that belong together
            return list(zip(problems, hints, strict=True))
        return [(p, h) for p in problems for h in hints]

    def texts(self, node: ast.expr, scope: _Scope, depth: int = 0) -> list[str]:
        """The texts that an expression can have."""
        return list(dict.fromkeys(self._texts(node, scope, depth)))[:MANY] or [UNKNOWN]

    def _texts(self, node: ast.expr, scope: _Scope, depth: int) -> list[str]:
        if depth > DEPTH:
            return [UNKNOWN]
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return [f"{number:,}"]
            case ast.BinOp(op=ast.LShift() | ast.Mult()) if not any(isinstance(n, ast.Name) for n in ast.walk(node)):
                return [f"{eval(compile(ast.Expression(node), '', 'eval')):,}"]  # noqa: S307  (numbers of our own source)
            case ast.JoinedStr(values=values):
                results = [""]
                for value in values:
                    added = [value.value] if isinstance(value, ast.Constant) else self._inserted(value, scope, depth)
                    results = [r + str(a) for r in results for a in added][:MANY]
                return results
            case ast.IfExp(body=body, orelse=orelse):
                return [*self._texts(body, scope, depth + 1), *self._texts(orelse, scope, depth + 1)]
            case ast.BoolOp(values=values):
                return [t for value in values for t in self._texts(value, scope, depth + 1)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                ends = self._texts(right, scope, depth + 1)
                return [a + b for a in self._texts(left, scope, depth + 1) for b in ends]
            case ast.Name(id=name):
                return self._named(name, scope, depth + 1, node)
            case ast.Subscript(value=value):
                return self._held(value, scope, depth + 1)
            case ast.Call(func=ast.Attribute(value=text, attr="format" | "lower" | "removesuffix")):
                return self._texts(text, scope, depth + 1)
            case ast.Call(func=ast.Name(id=name)) if self._function_of(name, scope):
                return [t for text in self._returns(name, scope, depth + 1) for t in text]
        return [UNKNOWN]

    def _inserted(self, value: ast.expr, scope: _Scope, depth: int) -> list[str]:
        """A replacement field: a text if it is one of the module's constants or a choice of texts, or a placeholder."""
        inner = value.value if isinstance(value, ast.FormattedValue) else value
        if isinstance(inner, ast.Name):
            if self._constant(inner.id, scope.module) is not None or inner.id in {"problem", "hint"}:
                return self._texts(inner, scope, depth + 1)
        elif isinstance(inner, ast.IfExp | ast.Subscript):
            texts = self._texts(inner, scope, depth + 1)
            if UNKNOWN not in texts:
                return texts
        return [_placeholder(inner)]

    def _named(self, name: str, scope: _Scope, depth: int, use: ast.expr | None = None) -> list[str]:
        """A name: assigned in the function, a parameter, or a constant of a module."""
        function = scope.function
        while function is not None:
            inner = _Scope(scope.module, function)
            statements = [s for s in ast.walk(function) if isinstance(s, ASSIGNING) and _gives(s, name)]
            if statements:
                reaching = _reaching(statements, use, scope.module) if use is not None else statements
                return [t for node in reaching for t in self._assigned(node, name, inner, depth)] or [UNKNOWN]
            if name in _parameters(function):
                return self._given(name, function, scope.module, depth)
            function = _function(scope.module.parents.get(function), scope.module)
        constant = self._constant(name, scope.module)
        return [UNKNOWN] if constant is None else self._texts(constant[0], _Scope(constant[1], None), depth)

    def _assigned(self, node: ast.AST, name: str, scope: _Scope, depth: int) -> list[str]:
        """Texts that a statement gives to a name."""
        match node:
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                pass
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                return [UNKNOWN] if any(_name(t) == name for t in ast.walk(target)) else []
            case _:
                return []
        if isinstance(target, ast.Name) and target.id == name:
            return self._texts(value, scope, depth)
        if isinstance(target, ast.Tuple) and name in (names := [_name(t) for t in target.elts]):
            return [t[names.index(name)] for t in self._tuples(value, scope, depth) if len(t) == len(names)] or [
                UNKNOWN
            ]
        return []

    def _given(self, name: str, function: FunctionNode, module: _Module, depth: int) -> list[str]:
        """Texts that callers pass for a parameter."""
        parameters = _parameters(function)
        own = function.name if function.name != "__init__" else _name(module.parents.get(function))
        result: list[str] = []
        for call, scope in self.calls.get(own, []):
            if scope.module is not module and own.startswith("_"):
                continue
            offset = 1 if parameters[:1] in (["self"], ["cls"]) else 0
            position = parameters.index(name) - offset
            passed = [k.value for k in call.keywords if k.arg == name]
            if position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
                passed.append(call.args[position])
            for value in passed:
                result += self._texts(value, scope, depth)
        return result or [UNKNOWN]

    def _tuples(self, node: ast.expr, scope: _Scope, depth: int = 0) -> list[tuple[str, ...]]:
        """The tuples of texts that an expression can be."""
        if depth > DEPTH:
            return []
        match node:
            case ast.Tuple(elts=elements):
                return [tuple(self.texts(e, scope, depth + 1)[0] for e in elements)]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self._tuples(body, scope, depth + 1), *self._tuples(orelse, scope, depth + 1)]
            case ast.Name(id=name):
                constant = self._constant(name, scope.module)
                return [] if constant is None else self._tuples(constant[0], _Scope(constant[1], None), depth + 1)
            case ast.Subscript(value=ast.Name(id=name)):
                constant = self._constant(name, scope.module)
                if constant is not None and isinstance(constant[0], ast.Dict):
                    inner = _Scope(constant[1], None)
                    return [t for value in constant[0].values for t in self._tuples(value, inner, depth + 1)]
            case ast.Call(func=func) if self._function_of(_name(func), scope):
                module, function = self._function_of(_name(func), scope)[0]
                inner = _Scope(module, function)
                returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
                return [t for value in returns for t in self._tuples(value, inner, depth + 1)]
        return []

    def _held(self, node: ast.expr, scope: _Scope, depth: int) -> list[str]:
        """Texts in a constant dictionary or sequence."""
        constant = self._constant(node.id, scope.module) if isinstance(node, ast.Name) else None
        if constant is None:
            return [UNKNOWN]
        inner = _Scope(constant[1], None)
        values = constant[0].values if isinstance(constant[0], ast.Dict) else getattr(constant[0], "elts", [])
        return [t for value in values for t in self._texts(value, inner, depth)] or [UNKNOWN]

    def _returns(self, name: str, scope: _Scope, depth: int) -> list[list[str]]:
        return [
            self._texts(node.value, _Scope(module, function), depth)
            for module, function in self._function_of(name, scope)
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]

    def _function_of(self, name: str, scope: _Scope) -> list[tuple[_Module, FunctionNode]]:
        module, original = self._home(name, scope.module)
        return [(module, f) for f in module.functions.get(original, [])] if module else []

    def _constant(self, name: str, module: _Module) -> tuple[ast.expr, _Module] | None:
        home, original = self._home(name, module)
        return (home.constants[original], home) if home is not None and original in home.constants else None

    def _home(self, name: str, module: _Module) -> tuple[_Module | None, str]:
        """The module that defines a name, and its name there."""
        for _ in range(DEPTH):
            if name not in module.imports:
                return module, name
            home, name = module.imports[name]
            if home not in self.modules:
                return None, name
            module = self.modules[home]
        return None, name


def _module(name: str, tree: ast.Module) -> _Module:
    module = _Module(name, tree)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            module.parents[child] = node
        if isinstance(node, FunctionNode):
            module.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Call):
            module.calls.append(node)
        elif isinstance(node, ast.ClassDef):
            module.classes.append(node)
        elif isinstance(node, ast.ImportFrom) and node.module:
            module.imports |= {a.asname or a.name: (node.module, a.name) for a in node.names}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                module.constants[target] = value
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value):
                module.constants[target] = value
    return module


def _function(node: ast.AST | None, module: _Module) -> FunctionNode | None:
    """The function around a node."""
    node = module.parents.get(node) if node is not None and not isinstance(node, FunctionNode) else node
    while node is not None and not isinstance(node, FunctionNode):
        node = module.parents.get(node)
    return node


def _gives(statement: ast.AST, name: str) -> bool:
    """Whether a statement assigns a name."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(_name(node) == name for t in targets if t is not None for node in ast.walk(t))


def _reaching(statements: Sequence[ast.AST], use: ast.expr, module: _Module) -> list[ast.AST]:
    """The assignments whose value a use can have: those before it, from the last one on that always runs."""
    ancestors: set[ast.AST] = set()
    node: ast.AST | None = use
    while node is not None:
        ancestors.add(node)
        node = module.parents.get(node)
    reaching: list[ast.AST] = []
    for statement in sorted(statements, key=_line):
        if _line(statement) > use.lineno:
            continue
        block = _block(statement, module)
        inside = any(s in ancestors for s in block)
        if isinstance(statement, ast.Assign) and inside:
            reaching = [statement]
        elif inside or not any(isinstance(s, ast.Raise | ast.Return | ast.Continue) for s in block):
            reaching.append(statement)
    return reaching or list(statements)


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0) or getattr(getattr(node, "target", None), "lineno", 0))


def _block(statement: ast.AST, module: _Module) -> list[ast.AST]:
    """The list of statements that a statement is in."""
    node = statement
    while not isinstance(node, ast.stmt):
        node = module.parents[node]
    parent = module.parents.get(node)
    for field_name in ("body", "orelse", "finalbody", "handlers"):
        block = getattr(parent, field_name, None)
        if isinstance(block, list) and node in block:
            return list(block)
    return [node]


def _parameters(function: FunctionNode) -> list[str]:
    a = function.args
    return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


def _name(node: ast.AST | None) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.ClassDef(name=name):
            return name
    return ""


def _placeholder(node: ast.expr) -> str:
    """A value that is known only at run time, by the last name in its expression."""
    while True:
        match node:
            case ast.Call(
                func=ast.Name(id="brief" | "listed" | "str" | "int" | "len" | "min" | "sorted"), args=[first, *_]
            ):
                node = first
            case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[first]):
                node = first
            case ast.Call(func=function):
                return "{" + (_name(function).strip("_") or "value") + "}"
            case ast.Subscript(value=value):
                node = value
            case ast.GeneratorExp(elt=element):
                node = element
            case ast.Attribute(attr=name) | ast.Name(id=name):
                return "{" + name.strip("_").lower() + "}"
            case _:
                return "{value}"


def _tidy(text: str) -> str:
    return re.sub(
        r"\s+", " ", re.sub(r"\{[^{}]*\}", lambda m: "{" + (m[0].strip("{}").strip("_") or "value") + "}", text)
    ).strip()


@functools.cache
def _reader() -> _Reader:
    return _Reader(PACKAGE)


@functools.cache
def read_messages() -> list[Message]:
    """Every message of the package, by class and text."""
    return _reader().messages()


@functools.cache
def _classes() -> tuple[dict[str, str], frozenset[str]]:
    """Base of every error class, and the classes of ``ckpttool.errors``."""
    reader = _reader()
    own = (node.name for node in reader.modules["ckpttool.errors"].tree.body if isinstance(node, ast.ClassDef))
    return reader.kinds, frozenset(own)


def public_class(kind: str) -> str:
    """The class itself if ``ckpttool.errors`` has it, else the one there that it derives from."""
    bases, public = _classes()
    while kind not in public:
        kind = bases[kind]
    return kind


if __name__ == "__main__":
    for message in read_messages():
        print(f"{message.kind}: {message.problem}\n    {' | '.join(message.hints)}   [{', '.join(message.places)}]")  # noqa: T201
