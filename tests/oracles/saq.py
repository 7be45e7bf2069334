"""Staircase adaptive quantisation in NumPy: the tokens of one head, block by block (arXiv 2410.18441, its listing)."""

from __future__ import annotations

import numpy as np

from tests.oracles.kivi import through


def coded(block: np.ndarray, bits: int, group: int, axis: str) -> np.ndarray:
    """A block of tokens [n H] in groups of tokens of a channel, or of channels of a token."""
    lines = block.T if axis == "channel" else block
    low = np.stack([np.concatenate([through(x, bits) for x in line.reshape(-1, group)]) for line in lines])
    return low.T if axis == "channel" else low


def held(x: np.ndarray, prompt: int, bits: tuple[int, ...], group: int, every: int, axis: str) -> np.ndarray:
    """Tokens [n H], the first of them a prompt, as they are held once the last of them has been written."""
    out, last = x.copy(), len(bits) - 1
    blocks = prompt // every
    step = {j: min(blocks - 1 - j, last) for j in range(blocks)}  # of each block: where it is
    for j, i in step.items():
        out[j * every : (j + 1) * every] = coded(x[j * every : (j + 1) * every], bits[i], group, axis)
    for new in range(blocks, max((len(x) - 1) // every, blocks)):
        for j in range(new):
            if step[j] < last:
                step[j] += 1
                tokens = slice(j * every, (j + 1) * every)
                out[tokens] = coded(out[tokens], bits[step[j]], group, axis)
        step[new] = 0
        tokens = slice(new * every, (new + 1) * every)
        out[tokens] = coded(out[tokens], bits[0], group, axis)
    return out
