"""Values come from devices to the host by `core.mesh.to_numpy` alone, as an array may lie in several processes.

A type checker cannot tell: `Array` and `np.ndarray` meet in one expression, and NumPy takes both. So this follows names
through the source: what is annotated as an array of JAX, what a function of JAX returns, and what is computed of either
is on a device, and what has been through `to_numpy` is not.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "kvjax/testing/rules.py": "the rules of `kvjax check` run a toy model on the first device",
    "kvjax/explore/": "the page is made of one sequence on the first device",
}
"""Files that may read arrays directly, and why; `kvjax/core/` may, too."""

IS_ARRAY = re.compile(r"\b(Array|KVBlock|Partial|Cache|LayerState|DecodeState|SpeculationState|LayerPrompt|FullKV)\b")
OF_JAX = {"jnp", "jax", "lax"}
# What these functions of JAX return is no array.
HOST_FUNCTIONS = set(
    "dtype finfo iinfo issubdtype result_type eval_shape structure devices device_count default_backend typeof "
    "make_jaxpr keystr process_index process_count Mesh is_initialized cached wraps lower".split()
)
STATIC = set(
    "shape ndim size dtype nbytes sharding itemsize is_fully_addressable config plan name capacity model".split()
)
OF_SHAPES = {"shape", "ndim", "size", "result_type", "issubdtype", "dtype", "broadcast_shapes"}  # in NumPy


@functools.cache
def sources() -> dict[str, ast.Module]:
    return {str(x.relative_to(ROOT)): ast.parse(x.read_text()) for x in sorted((ROOT / "kvjax").rglob("*.py"))}


@functools.cache
def device_names() -> tuple[set[str], set[str]]:
    """Fields, and functions and methods, that all definitions in the package annotate as arrays of JAX."""
    every: tuple[dict[str, set[bool]], dict[str, set[bool]]] = {}, {}
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                every[0].setdefault(node.target.id, set()).add(is_array(node.annotation))
            elif isinstance(node, ast.FunctionDef):
                every[1].setdefault(node.name, set()).add(is_array(node.returns))
    fields, functions = ({name for name, kinds in x.items() if kinds == {True}} for x in every)
    # Those are names of NumPy's and of Python's own, too.
    return fields, {name for name in functions if not hasattr(np.ndarray, name) and not hasattr(builtins, name)}


def is_array(annotation: ast.expr | None) -> bool:
    text = "" if annotation is None else ast.unparse(annotation)
    return bool(IS_ARRAY.search(text)) and not re.search("ndarray|Callable|Mapping|dict", text)


class Reads(ast.NodeVisitor):
    """Collects the places of a file where NumPy or Python reads an array of JAX."""

    def __init__(self) -> None:
        self.fields, self.functions = device_names()
        self.known: list[dict[str, bool]] = [{}]
        self.found: list[str] = []

    def is_on_device(self, x: ast.expr) -> bool:
        match x:
            case ast.Name(id=name):
                return next((known[name] for known in reversed(self.known) if name in known), False)
            case ast.Attribute(value=value, attr=attr):
                return attr not in STATIC and (attr in self.fields or self.is_on_device(value))
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
                return self.is_on_device(value)
            case ast.Call():
                return self.returns_array(x)
            case ast.BinOp(left=left, right=right):
                return self.is_on_device(left) or self.is_on_device(right)
            case ast.UnaryOp(operand=operand):
                return not isinstance(x.op, ast.Not) and self.is_on_device(operand)
            case ast.Compare(left=left, comparators=others, ops=ops):
                is_plain = all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in ops)
                return not is_plain and any(map(self.is_on_device, (left, *others)))
            case ast.IfExp(body=body, orelse=other):
                return self.is_on_device(body) or self.is_on_device(other)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.BoolOp(values=parts):
                return any(map(self.is_on_device, parts))
            case ast.ListComp(elt=part, generators=loops) | ast.GeneratorExp(elt=part, generators=loops):
                with_targets: dict[str, bool] = {}
                self.known.append(with_targets)
                for loop in loops:
                    self.bind(loop.target, loop.iter)
                result = self.is_on_device(part)
                self.known.pop()
                return result
        return False

    def returns_array(self, call: ast.Call) -> bool:
        names = ast.unparse(call.func).split(".")
        if names[0] in OF_JAX:
            if names[1:2] == ["tree"]:  # leaves are what they were, unless a function of them reads them
                return any(map(self.is_on_device, call.args)) and "to_numpy" not in ast.unparse(call)
            return names[-1] not in HOST_FUNCTIONS and not any(name[:1].isupper() for name in names[1:])
        if names[-1] == "zip" or names == ["enumerate"]:
            return any(map(self.is_on_device, call.args))
        if names[0] == "np" or names[-1] in ("to_numpy", "tolist", "item", "len"):
            return False
        if isinstance(call.func, ast.Attribute) and self.is_on_device(call.func.value):
            return names[-1] not in ("check_usable", "index", "items", "keys")
        return names[-1] in self.functions

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        """Notes what an assignment, or a loop over `value`, makes of its targets."""
        match target, value:
            case ast.Name(id=name), _:
                self.known[-1][name] = self.is_on_device(value)
            case (ast.Tuple(elts=targets), ast.Tuple(elts=values)) if len(targets) == len(values):
                for x, y in zip(targets, values, strict=True):
                    self.bind(x, y)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=values) if len(targets) == len(values):
                for x, y in zip(targets, values, strict=True):
                    self.bind(x, y)
            case ast.Tuple(elts=[number, x]), ast.Call(func=ast.Name(id="enumerate"), args=[y, *_]):
                self.known[-1] |= {n.id: False for n in ast.walk(number) if isinstance(n, ast.Name)}
                self.bind(x, y)
            case ast.Tuple(elts=targets), _:
                for x in targets:
                    self.bind(x, value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.known.append({x.arg: is_array(x.annotation) for x in arguments})
        self.generic_visit(node)
        self.known.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.known.append({x.arg: False for x in node.args.args})
        self.generic_visit(node)
        self.known.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self.bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.known[-1][node.target.id] = is_array(node.annotation)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self.bind(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehensions(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp) -> None:
        self.known.append({})
        for loop in node.generators:
            self.bind(loop.target, loop.iter)
        self.generic_visit(node)
        self.known.pop()

    visit_ListComp = visit_GeneratorExp = visit_SetComp = visit_DictComp = visit_comprehensions

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        names, is_read = ast.unparse(node.func).split("."), False
        if names[-1] == "device_get":
            is_read = True
        elif names[0] == "np":
            is_read = names[-1] not in OF_SHAPES and any(map(self.is_on_device, node.args))
        elif names[0] in ("float", "int", "bool") and len(names) == 1:
            is_read = any(map(self.is_on_device, node.args))
        elif names[-1] in ("item", "tolist") and isinstance(node.func, ast.Attribute):
            is_read = self.is_on_device(node.func.value)
        if is_read:
            self.found.append(f"{node.lineno}: {ast.unparse(node)}")


def reads_of(tree: ast.AST) -> list[str]:
    visitor = Reads()
    visitor.visit(tree)
    return visitor.found


def files_to_check() -> Iterator[str]:
    for path in sources():
        if not path.startswith(("kvjax/core/", *ALLOWED)):
            yield path


def test_no_file_reads_an_array_but_by_to_numpy():
    found = [f"{path}:{read}" for path in files_to_check() for read in reads_of(sources()[path])]
    assert not found, "read these by kvjax.core.mesh.to_numpy:\n" + "\n".join(found)


FAULTS = (
    "def f(cache: Cache):\n    return np.asarray(cache.length).tolist()",
    "def f(cache: Cache):\n    used = cache.length\n    return int(np.max(used))",
    "def f(logits: Array):\n    return [float(x) for x in logits]",
    "def f(out: Float[Array, 'B V']):\n    for i, row in enumerate(out):\n        print(row.tolist())",
    "def f(x):\n    y = jnp.sum(x)\n    return y.item()",
    "def f(x):\n    a, (b, c) = 1, jax.nn.softmax(x)\n    return bool(b > 0)",
    "def f(layer, state):\n    return np.asarray(layer.positions(state))",
    "class A:\n    def f(self):\n        return np.isfinite(self.state.done)",
    "def f(x):\n    return jax.device_get(x)",
    "def f(x: Array):\n    while (n := x.sum()) is not None:\n        return int(n)",
)
SOUND = (
    "def f(cache: Cache):\n    return np.asarray(to_numpy(cache.length)).tolist()",
    "def f(x: Array):\n    return int(x.shape[0]), float(jnp.finfo(x.dtype).max), np.zeros(x.size)",
    "def f(ids: list):\n    return np.asarray(ids), [int(x) for x in ids]",
    "def f(x: Array | None):\n    return bool(x is None)",
    "def f(x: np.ndarray):\n    lengths = np.asarray(x)\n    return lengths.tolist(), int(lengths.max())",
    "def f(x):\n    y = to_numpy(jnp.sum(x))\n    return float(y)",
)


@pytest.mark.parametrize("code", FAULTS)
def test_a_seeded_read_is_found(code):
    assert reads_of(ast.parse(code))


@pytest.mark.parametrize("code", SOUND)
def test_a_read_of_the_host_is_none(code):
    assert not reads_of(ast.parse(code))


COLLECTIVES = {"to_numpy", "require_agreement", "require_same_call", "broadcast", "process_allgather", "state_bytes"}
GUARDED = {"kvjax/generation/context.py": "a context of several processes is shown without what would be gathered"}
"""Files with a `__repr__` that asks first whether this process has all of the array."""


def misplaced_collectives(node: ast.AST, place: str = "") -> list[str]:
    """Calls that all processes must reach, in places that only some of them may."""
    found = []
    if isinstance(node, ast.Call) and place and ast.unparse(node.func).split(".")[-1] in COLLECTIVES:
        found.append(f"{node.lineno}: {ast.unparse(node)}, {place}")
    if isinstance(node, ast.If | ast.IfExp | ast.While) and re.search(
        "is_writer|process_index", ast.unparse(node.test)
    ):
        place = "in some of the processes only"
    elif isinstance(node, ast.ExceptHandler):
        place = "where an exception is handled"
    elif isinstance(node, ast.FunctionDef):
        place = "in a repr" if node.name in ("__repr__", "__str__") else ""
    return found + [x for child in ast.iter_child_nodes(node) for x in misplaced_collectives(child, place)]


def test_no_collective_stands_where_some_processes_do_not_come():
    found = [
        f"{path}:{x}" for path, tree in sources().items() for x in misplaced_collectives(tree) if path not in GUARDED
    ]
    assert not found, "all processes have to reach these:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "if processes.is_writer():\n    print(to_numpy(x))",
        "def f(x):\n    return to_numpy(x) if process_index() == 0 else None",
        "if not is_writer():\n    pass\nelse:\n    require_agreement(a=1)",
        "try:\n    run()\nexcept ValueError:\n    show(mesh.to_numpy(x))",
        "class A:\n    def __repr__(self):\n        return str(state_bytes(self.cache))",
    ],
)
def test_a_seeded_misplacement_is_found(code):
    assert misplaced_collectives(ast.parse(code))


def test_exceptions_are_needed():
    """An entry of the list whose files read nothing any more is taken off."""
    for prefix in ALLOWED:
        assert any(reads_of(tree) for path, tree in sources().items() if path.startswith(prefix)), prefix
