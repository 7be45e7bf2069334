"""KIVI in NumPy, from its paper (arXiv 2402.02750) and public code: one sequence, one key/value head, by tokens."""

from __future__ import annotations

import numpy as np


def quantize(x: np.ndarray, bits: int, one_bit: str = "improved") -> tuple[np.ndarray, np.generic, np.generic]:
    """Quantizes a group x [n] -> codes u32[n], scale, lo; each operation is rounded to the dtype of x.

    KIVI: lo = min, s = (max - min) / (2^b - 1), code = round(clamp((x - lo) / s, 0, 2^b - 1)), half to even. One bit,
    improved (SpeCache, arXiv 2503.16163, equation 3): lo = (3 min + max) / 4, s = (max - min) / 2, and the code
    is 1 from the middle on. A group without spread has codes 0, and its value is lo.
    """
    dtype = x.dtype.type
    low, high = min(x), max(x)
    improved = bits == 1 and one_bit == "improved"
    levels = dtype(2**bits - 1)
    if low == high:
        return np.zeros(len(x), np.uint32), dtype(0), low
    if improved:
        lo = (dtype(3) * low + high) / dtype(4)
        scale = (high - low) / dtype(2)
    else:
        lo = low
        scale = (high - low) / levels
    codes = []
    for value in x:
        if scale == 0:
            codes.append(0)
        elif improved:
            codes.append(int(value >= (low + high) / dtype(2)))
        else:
            steps = (value - lo) / scale
            codes.append(round(float(min(max(steps, dtype(0)), levels))))
    assert type(scale) is type(lo) is dtype
    return np.array(codes, np.uint32), scale, lo


def dequantize(codes: np.ndarray, scale: np.generic, lo: np.generic) -> np.ndarray:
    """Decodes u32[n] to [n] in the dtype of scale: the product is rounded, then the sum."""
    dtype = type(scale)
    return np.array([dtype(int(c)) * scale + lo for c in codes], np.dtype(dtype))


def fake_quantize(x: np.ndarray, bits: int, one_bit: str = "improved") -> np.ndarray:
    """Quantizes and dequantizes a group x [n]."""
    return dequantize(*quantize(x, bits, one_bit))


def pack(codes: list[int], bits: int) -> list[int]:
    """Packs codes into 32-bit words; element j of a word starts at bit bits * j."""
    codes_per_word = 32 // bits
    return [
        sum(c << (bits * j) for j, c in enumerate(codes[i : i + codes_per_word]))
        for i in range(0, len(codes), codes_per_word)
    ]


def softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max())
    return e / e.sum()


class KiviCache:
    """The cache of one key/value head of a sequence, in the order of KIVI's code: append, attend, flush."""

    def __init__(self, k: np.ndarray, v: np.ndarray, bits: int, group: int, residual: int, one_bit: str = "improved"):
        """k, v [T0 H]: the prompt. A prompt of T0 leaves T0 mod R keys and min(T0, R) values as they are."""
        self.bits, self.group, self.residual, self.one_bit = bits, group, residual, one_bit
        self.k, self.v = list(k), list(v)  # all tokens, exact
        self.low_k: dict[int, np.ndarray] = {}  # token -> its quantized key
        self.low_v: dict[int, np.ndarray] = {}
        while len(self.k) - len(self.low_k) >= residual:
            self._flush_keys()
        while len(self.v) - len(self.low_v) > residual:
            self._flush_value()

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None) -> np.ndarray:
        """Decodes one token, q [G H], k, v [H], and stores it -> [G H]."""
        self.append(k, v)
        out = np.stack([p @ self.visible_values() for p in self.weights(q, window)])
        self.flush()
        return out

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        self.k.append(k)
        self.v.append(v)

    def weights(self, q: np.ndarray, window: int | None = None) -> np.ndarray:
        """The softmax of each query head over the stored tokens, f64[G n]."""
        keys = self.visible_keys()
        out = np.zeros((len(q), len(keys)))
        first = 0 if window is None else max(0, len(keys) - window)
        for g in range(len(q)):
            out[g, first:] = softmax(np.array([k @ q[g] for k in keys[first:]]) / np.sqrt(keys.shape[1]))
        return out

    def visible_keys(self) -> np.ndarray:
        """The keys f64[n H]: the low-bit key of each token that has one, else the exact key."""
        return np.array([self.low_k.get(i, k) for i, k in enumerate(self.k)]).astype(np.float64)

    def visible_values(self) -> np.ndarray:
        return np.array([self.low_v.get(i, v) for i, v in enumerate(self.v)]).astype(np.float64)

    def flush(self) -> None:
        """Quantizes after a step: a full block of keys, and the value that has left the window."""
        if len(self.k) - len(self.low_k) == self.residual:
            self._flush_keys()
        if len(self.v) - len(self.low_v) == self.residual + 1:
            self._flush_value()

    def _flush_keys(self) -> None:
        first = len(self.low_k)
        for start in range(first, first + self.residual, self.group):
            tokens = range(start, start + self.group)
            block = np.stack([self.k[i] for i in tokens])
            low = np.stack([fake_quantize(block[:, h], self.bits, self.one_bit) for h in range(block.shape[1])], 1)
            self.low_k.update(zip(tokens, low, strict=True))

    def _flush_value(self) -> None:
        i = len(self.low_v)
        groups = self.v[i].reshape(-1, self.group)
        self.low_v[i] = np.concatenate([fake_quantize(x, self.bits, self.one_bit) for x in groups])


def fake_quantize_pages(
    k: np.ndarray, v: np.ndarray, bits: int, group: int, one_bit: str = "improved"
) -> tuple[np.ndarray, ...]:
    """Quantizes and dequantizes the tokens of one head, k, v [n H] in order, in the groups of its pages.

    A page holds whole groups, so `group` consecutive tokens share a scale in each channel of the keys; the last group
    of a head has the remaining tokens. Values share a scale in `group` channels of each token. No token is exact.
    """
    keys, values = np.array(k), np.array(v)
    for start in range(0, len(k), group):
        for channel in range(k.shape[1]):
            keys[start : start + group, channel] = fake_quantize(k[start : start + group, channel], bits, one_bit)
    for token in range(len(v)):
        for start in range(0, v.shape[1], group):
            values[token, start : start + group] = fake_quantize(v[token, start : start + group], bits, one_bit)
    return keys, values
