"""A toy model, a dense attention oracle, and a search for full copies in a compiled program."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kvjax.models.config import Config
from kvjax.models.model import Model, random_model


def toy_model(seed: int = 0, **changes: Any) -> Model:
    """Returns a random decoder small enough for unit tests: grouped heads, three layers, 97 tokens.

    Args:
      seed: of the weights.
      **changes: fields of `Config` with other values.
    """
    sizes = {"vocab_size": 97, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_width": 48}
    return random_model(Config.llama(**{**sizes, **changes}), seed)


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_pos: np.ndarray,
    window: int | None = None,
    *,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Computes the attention of one sequence in NumPy, float64, without any trick.

    Args:
      q: [N T H], queries.
      k: [K S H], keys at positions 0..S-1; query head n reads key/value head n // (N / K).
      v: [K S V], values.
      q_pos: [T], positions of the queries.
      window: tokens that a query sees, itself included; None for all before it.
      soft_cap: c in c * tanh(s / c), which bounds the logits s; None for none.
      sinks: [N], a logit of each query head that takes weight and gives no value; None for none.

    Returns:
      [N T V].

    Reference:
      Scaled dot-product attention, Vaswani et al. 2017, section 3.2.1
    """
    groups = q.shape[0] // k.shape[0]
    pos = np.arange(k.shape[1])
    out = np.empty((*q.shape[:2], v.shape[-1]))
    for n in range(q.shape[0]):
        for t, at in enumerate(q_pos):
            visible = (pos <= at) if window is None else (pos <= at) & (pos > at - window)
            logits = k[n // groups, visible].astype(np.float64) @ q[n, t] / np.sqrt(q.shape[-1])
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            sink = -np.inf if sinks is None else float(sinks[n])
            top = max(logits.max(), sink)
            p = np.exp(logits - top)
            out[n, t] = (p / (p.sum() + np.exp(sink - top))) @ v[n // groups, visible]
    return out


def full_copies(program_text: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the instructions of a compiled program that copy or convert an array of exactly this shape."""
    dims = re.escape("[" + ",".join(map(str, shape)) + "]")
    copies = re.compile(dims + r"\{[^}]*\} (copy|convert|copy-start|transpose)\(")
    return [line.strip()[:160] for line in program_text.splitlines() if copies.search(line)]
