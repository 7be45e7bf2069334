"""Reads the tokens of one head from a layer's slots, for tests that compare them with an oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.core import memory


def head_slots(state: Any, b: int, head: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Positions, keys and values of a head of sequence b, in the order of positions; for plain codecs."""
    pos = np.asarray(state.pos[b, head if state.pos.shape[1] > 1 else 0])
    order = [slot for slot in np.argsort(pos, kind="stable") if pos[slot] >= 0]
    keys, values = (np.asarray(memory.unpack(x)[b, head])[order] for x in (state.k, state.v))
    return pos[order].tolist(), keys, values
