"""The most bytes that a traced function holds at once, with what a compiler fuses left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

INLINED = ("pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
"""Primitives that are nothing but a call of the function in them."""
LOOPS = ("scan", "while", "cond", "shard_map")
WRITTEN = (
    *("sort", "top_k", "approx_top_k", "gather", "scatter", "scatter-add", "concatenate", "dynamic_update_slice"),
    *("cumsum", "cumlogsumexp", "cummax", "cumprod", "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"),
    *("dot_general", "ragged_dot_general", "device_put", "qr", "svd", "eigh", "cholesky", "triangular_solve", "lu"),
)
"""Primitives whose results are written to memory; XLA computes others, element by element, where they are read."""
WHOLE_OPERANDS = ("dot_general", "sort", "top_k", "qr", "svd", "eigh", "cholesky", "device_put")
"""Primitives of `WRITTEN` that read their operands from memory, so that what makes these is written, too."""


def count_live_bytes(jaxpr: Any, num_arguments: int = 0) -> int:
    """Counts the most bytes that are alive at once, in the order of the equations, without the results.

    Args:
      jaxpr: of the function.
      num_arguments: how many arguments count, the first ones, each until it was read for the last time.
    """
    sizes: list[int] = []  # of each array that is written
    uses: list[list[int]] = []  # the steps at which each of them is written and read
    inner: list[int] = []  # bytes that each step itself holds

    def write(size: int) -> frozenset[int]:
        sizes.append(size)
        uses.append([len(inner)])
        return frozenset([len(sizes) - 1])

    def run(jaxpr: Any, arguments: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        """Follows what each variable is computed from: indices of arrays that are written."""
        known = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(x: Any) -> frozenset[int]:
            return frozenset() if isinstance(x, Literal) else known.get(x, frozenset())

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            bodies = [getattr(x, "jaxpr", x) for x in _functions_of(eqn)]
            if name in INLINED and bodies and len(bodies[0].invars) == len(eqn.invars):
                known |= zip(eqn.outvars, run(bodies[0], [read(x) for x in eqn.invars]), strict=True)
                continue
            operands = [read(x) for x in eqn.invars]
            if name in WHOLE_OPERANDS:
                pairs = zip(eqn.invars, operands, strict=True)
                operands = [write(_size(x)) | roots if _is_in(x, fused) else roots for x, roots in pairs]
            for root in frozenset().union(*operands):
                uses[root].append(len(inner))
            if name in WRITTEN or name in LOOPS or bodies:
                known |= {x: write(_size(x)) for x in eqn.outvars}
            else:
                known |= dict.fromkeys(eqn.outvars, frozenset().union(*operands))
                fused.update(eqn.outvars)
            if name == "device_put":  # a copy to the host is waited for at the end
                copied.update(frozenset().union(*operands))
            inner.append(max(map(count_live_bytes, bodies), default=0))
        return [read(x) for x in jaxpr.outvars]

    fused: set[Any] = set()
    copied: set[int] = set()
    counted = [write(_size(x)) for x in jaxpr.invars[:num_arguments]]
    results = frozenset().union(*run(jaxpr, counted + [frozenset()] * (len(jaxpr.invars) - len(counted))))
    results -= frozenset().union(*counted)
    live = list(inner) or [0]
    for root in copied:
        uses[root].append(len(live) - 1)
    for root, (size, steps) in enumerate(zip(sizes, uses, strict=True)):
        if root not in results:
            for step in range(steps[0], max(steps) + 1):
                live[min(step, len(live) - 1)] += size
    return max(live)


def _is_in(x: Any, variables: set[Any]) -> bool:
    return not isinstance(x, Literal) and x in variables


def _functions_of(eqn: Any) -> list[Any]:
    """Returns the functions among an equation's parameters."""
    values = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else (value,))]
    return [x for x in values if hasattr(getattr(x, "jaxpr", x), "eqns")]


def _size(x: Any) -> int:
    itemsize = getattr(x.aval.dtype, "itemsize", 0)
    return math.prod(x.aval.shape) * itemsize
