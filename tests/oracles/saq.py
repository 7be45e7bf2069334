"""Staircase adaptive quantization in NumPy, from its listing (arXiv 2410.18441): the tokens of one head by blocks."""

from __future__ import annotations

import numpy as np

from tests.oracles.kivi import fake_quantize


def fake_quantize_block(block: np.ndarray, bits: int, group: int, axis: str) -> np.ndarray:
    """Quantizes and dequantizes a block of tokens [n H], in groups within a channel or within a token."""
    vectors = block.T if axis == "channel" else block
    quantized = np.stack(
        [np.concatenate([fake_quantize(x, bits) for x in vector.reshape(-1, group)]) for vector in vectors]
    )
    return quantized.T if axis == "channel" else quantized


def reconstruct(
    x: np.ndarray, prompt: int, bits: tuple[int, ...], group: int, block_tokens: int, axis: str
) -> np.ndarray:
    """The stored tokens [n H] after the last was written; the first `prompt` were the prompt."""
    out, last_level = x.copy(), len(bits) - 1
    blocks = prompt // block_tokens
    levels = {j: min(blocks - 1 - j, last_level) for j in range(blocks)}  # block -> the level that it is at
    for j, i in levels.items():
        out[j * block_tokens : (j + 1) * block_tokens] = fake_quantize_block(
            x[j * block_tokens : (j + 1) * block_tokens], bits[i], group, axis
        )
    for newest in range(blocks, max((len(x) - 1) // block_tokens, blocks)):
        for j in range(newest):
            if levels[j] < last_level:
                levels[j] += 1
                tokens = slice(j * block_tokens, (j + 1) * block_tokens)
                out[tokens] = fake_quantize_block(out[tokens], bits[levels[j]], group, axis)
        levels[newest] = 0
        tokens = slice(newest * block_tokens, (newest + 1) * block_tokens)
        out[tokens] = fake_quantize_block(out[tokens], bits[0], group, axis)
    return out
