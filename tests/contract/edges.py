"""Sequences that break naive code, such as zeros, equal tokens and a single token."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from tests.contract import layer

CASES = {
    "zero queries": 9,
    "zero keys": 9,
    "all zeros": 9,
    "one key for all tokens": 9,
    "all tokens alike": 9,
    "all channels alike": 9,
    "a channel of zeros": 9,
    "large keys and values": 9,
    "tiny keys and values": 9,
    "a single token": 1,
    "a single token, and all that follow like it": 1,
    "a single token of zeros": 1,
}
"""The prompt tokens of each edge case."""


def apply_case(case: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Changes one sequence, q [K G S H], k, v [K S H], into the edge case."""
    match case:
        case "zero queries":
            return 0 * q, k, v
        case "zero keys":
            return q, 0 * k, v
        case "all zeros" | "a single token of zeros":
            return 0 * q, 0 * k, 0 * v
        case "one key for all tokens":
            return q, 0 * k + k[:, :1], v
        case "all tokens alike" | "a single token, and all that follow like it":
            return 0 * q + q[:, :, :1], 0 * k + k[:, :1], 0 * v + v[:, :1]
        case "all channels alike":
            return q, 0 * k + k[..., :1], 0 * v + v[..., :1]
        case "a channel of zeros":
            others = np.arange(layer.H) != 3
            return q * others, k * others, v * others
        case "large keys and values":
            return q, 1e3 * k, 1e3 * v
        case "tiny keys and values":
            return q, 1e-30 * k, 1e-30 * v
    return q, k, v


@functools.cache
def batches() -> list[tuple[list[str], layer.SequenceBatch]]:
    """Batches of the battery's size, each with the names of its cases."""
    template, case_batches = layer.random_batch(), []
    for first in range(0, len(CASES), layer.B):
        cases = list(CASES)[first : first + layer.B]
        # Every case changes the battery's longest sequence, which has no padding.
        longest = [np.asarray(x[0]) for x in (template.q, template.k, template.v)]
        sequences = [apply_case(case, *longest) for case in cases]
        q, k, v = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*sequences, strict=True))
        lengths = np.array([CASES[case] for case in cases], np.int32)
        case_batches.append((cases, layer.SequenceBatch(q, k, v, lengths)))
    return case_batches


def non_finite_cases(numbers: np.ndarray, cases: Iterable[str]) -> list[str]:
    """The cases whose sequence has a non-finite number in an array."""
    return [case for case, sequence in zip(cases, numbers, strict=True) if not np.isfinite(sequence).all()]
