"""The most bytes that a traced function holds at once, with what a compiler fuses left out."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

INLINED = ("pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
"""Primitives that are nothing but a call of the function in them."""
LOOPS = ("scan", "while", "cond", "shard_map")
RENAMED = ("reshape", "squeeze", "expand_dims", "bitcast_convert_type", "stop_gradient", "optimization_barrier")
"""Primitives whose results are the bytes of their operands."""
WRITTEN = (
    *("sort", "top_k", "approx_top_k", "gather", "scatter", "scatter-add", "concatenate", "dynamic_update_slice"),
    *("cumsum", "cumlogsumexp", "cummax", "cumprod", "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"),
    *("dot_general", "ragged_dot_general", "device_put", "qr", "svd", "eigh", "cholesky", "triangular_solve", "lu"),
)
"""Primitives whose results are written to memory; XLA computes others, element by element, where they are read."""
WHOLE_OPERANDS = ("dot_general", "sort", "top_k", "qr", "svd", "eigh", "cholesky", "device_put")
"""Primitives of `WRITTEN` that read their operands from memory, so that what makes these is written, too."""


class _Value(NamedTuple):
    """What a variable is computed from."""

    arrays: frozenset[int] = frozenset()  # indices of written arrays
    is_array: bool = True  # whether it stands in memory itself, and is not computed where it is read


def count_live_bytes(jaxpr: Any, num_arguments: int = 0) -> int:
    """Counts the most bytes that are alive at once, in the order of the equations, without the results.

    Args:
      jaxpr: of the function.
      num_arguments: how many arguments count, the first ones, each until it was read for the last time; one that is
        returned is a result.
    """
    sizes: list[int] = []  # of each array that is written
    uses: list[list[int]] = []  # the steps at which each of them is written and read
    inner: list[int] = []  # bytes that each step itself holds
    copied: set[int] = set()  # arrays that are copied to the host, which is waited for at the end

    def write(size: int) -> _Value:
        sizes.append(size)
        uses.append([len(inner)])
        return _Value(frozenset([len(sizes) - 1]))

    def run(jaxpr: Any, arguments: Sequence[_Value]) -> list[_Value]:
        """Follows what each variable is computed from."""
        known = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(x: Any) -> _Value:
            return _Value() if isinstance(x, Literal) else known.get(x, _Value())

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            bodies = [getattr(x, "jaxpr", x) for x in _functions_of(eqn)]
            operands = [read(x) for x in eqn.invars]
            if name in INLINED and bodies and len(bodies[0].invars) == len(eqn.invars):
                known |= zip(eqn.outvars, run(bodies[0], operands), strict=True)
                continue
            if name in WHOLE_OPERANDS:
                for i, (x, value) in enumerate(zip(eqn.invars, operands, strict=True)):
                    if not value.is_array:
                        operands[i] = _Value(write(_size(x)).arrays | value.arrays)
            arrays = frozenset().union(*(value.arrays for value in operands))
            for i in arrays:
                uses[i].append(len(inner))
            if name == "device_put":
                copied.update(arrays)
            if name in WRITTEN or name in LOOPS or bodies:
                known |= {x: write(_size(x)) for x in eqn.outvars}
            elif _is_renaming(eqn):
                known |= zip(eqn.outvars, operands, strict=False)
            else:
                known |= dict.fromkeys(eqn.outvars, _Value(arrays, is_array=False))
            inner.append(max(map(count_live_bytes, bodies), default=0))
        return [read(x) for x in jaxpr.outvars]

    counted = [write(_size(x)) for x in jaxpr.invars[:num_arguments]]
    results: set[int] = set()
    values = run(jaxpr, counted + [_Value()] * (len(jaxpr.invars) - len(counted)))
    for x, value in zip(jaxpr.outvars, values, strict=True):
        if value.is_array:
            results |= value.arrays
        else:  # computed in the place of one array of its size
            replaced = (i for i in sorted(value.arrays) if i >= len(counted) and sizes[i] == _size(x))
            results.update([i for i in replaced if i not in results][:1])
    live = list(inner) or [0]
    for i in copied:
        uses[i].append(len(live) - 1)
    for i, (size, steps) in enumerate(zip(sizes, uses, strict=True)):
        if i not in results:
            for step in range(steps[0], max(steps) + 1):
                live[min(step, len(live) - 1)] += size
    return max(live)


def count_condition_bytes(jaxpr: Any) -> int:
    """Counts the most bytes of arrays that one condition gets and returns, changed or not: XLA copies these."""
    most = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            most = max(most, _count_passed_through(eqn))
        for body in _functions_of(eqn):
            most = max(most, count_condition_bytes(getattr(body, "jaxpr", body)))
    return most


def _count_passed_through(condition: Any) -> int:
    """Counts the bytes of results for which there is an operand of the same shape and dtype."""
    operands = collections.Counter((x.aval.shape, x.aval.dtype) for x in condition.invars)
    total = 0
    for x in condition.outvars:
        kind = x.aval.shape, x.aval.dtype
        if operands[kind]:
            operands[kind] -= 1
            total += _size(x)
    return total


def _is_renaming(eqn: Any) -> bool:
    """Whether an equation changes no byte of its operand: padding by nothing, for example."""
    name = eqn.primitive.name
    if name in RENAMED:
        return True
    if name == "pad":
        return not any(any(axis) for axis in eqn.params["padding_config"])
    if name not in ("slice", "dynamic_slice", "broadcast_in_dim", "convert_element_type"):
        return False
    operand, result = eqn.invars[0].aval, eqn.outvars[0].aval
    return operand.size == result.size and operand.dtype == result.dtype


def _functions_of(eqn: Any) -> list[Any]:
    """Returns the functions among an equation's parameters."""
    values = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else (value,))]
    return [x for x in values if hasattr(getattr(x, "jaxpr", x), "eqns")]


def _size(x: Any) -> int:
    itemsize = getattr(x.aval.dtype, "itemsize", 0)
    return math.prod(x.aval.shape) * itemsize
