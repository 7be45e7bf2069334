"""rANS: range coding of many lanes in parallel, each symbol in about -log2 of its probability bits.

Duda 2013, arXiv 1311.2540: a lane's state is one number, onto which symbols are pushed and from which they are popped
in the opposite order. A state stays in 2^16 .. 2^32-1: where a push would exceed that, its low 16 bits become the next
word. NumPy takes one step of all lanes at once, and the words of all lanes share one array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.errors import KvjaxError

FREQUENCY_BITS = 12  # the frequencies of a distribution sum to 2^12
TOTAL_FREQUENCY = 1 << FREQUENCY_BITS
WORD_BITS = 16
MIN_STATE = 1 << WORD_BITS
PUSH_SHIFT = 32 - FREQUENCY_BITS  # a state below frequency << PUSH_SHIFT can take a symbol of that frequency


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """Distributions of symbols 0..A-1, and the distribution of each lane."""

    counts: np.ndarray  # [D A], occurrences of each symbol in each of D distributions
    lanes: np.ndarray  # i64[C], the distribution of each lane

    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the flat index of each lane's first symbol i64[C], frequencies u64[D*A], and their sums so far."""
        each = frequencies(self.counts)
        before = np.cumsum(each, axis=1) - each
        return self.lanes * self.counts.shape[1], each.ravel().astype(np.uint64), before.ravel().astype(np.uint64)


def frequencies(counts: np.ndarray) -> np.ndarray:
    """Scales counts [D A] to i64[D A] that sum to TOTAL_FREQUENCY, at least 1 where a symbol occurs."""
    counts = counts.astype(np.int64)
    occurs = (counts > 0).astype(np.int64)
    spare = TOTAL_FREQUENCY - occurs.sum(1, keepdims=True)
    scaled = occurs + counts * spare // np.maximum(counts.sum(1, keepdims=True), 1)
    # The most frequent symbol takes what rounding down has left over.
    scaled[np.arange(len(scaled)), scaled.argmax(1)] += TOTAL_FREQUENCY - scaled.sum(1)
    return scaled


def encode(parts: Sequence[tuple[np.ndarray, Tables]]) -> tuple[np.ndarray, np.ndarray]:
    """Encodes parts (symbols u8[n C], their tables), which are decoded in this order: words u16[W], states u32[C]."""
    state = np.full(parts[0][0].shape[1], MIN_STATE, np.uint64)
    words = [np.zeros(0, np.uint16)]
    for symbols, tables in reversed(parts):
        first, frequency, before = tables.flat()
        for row in symbols[::-1]:
            at = first + row
            symbol_frequency = frequency[at]
            is_full = state >= symbol_frequency << PUSH_SHIFT
            words.append(state[is_full].astype(np.uint16))
            state[is_full] >>= WORD_BITS
            quotient, remainder = np.divmod(state, symbol_frequency)
            state = (quotient << FREQUENCY_BITS) + remainder + before[at]
    return np.concatenate(words[::-1]), state.astype(np.uint32)


def decode(words: np.ndarray, states: np.ndarray, parts: Sequence[tuple[int, Tables]]) -> list[np.ndarray]:
    """Decodes the symbols u8[n C] of each part (n, its tables); raises KvjaxError for damaged words."""
    state, used, decoded = states.astype(np.uint64), 0, []
    for n, tables in parts:
        symbols = np.empty((n, len(state)), np.uint8)
        first, frequency, before = tables.flat()
        # The slots of all distributions end to end: one sorted array, in which every lane finds its symbol.
        D, A = tables.counts.shape
        first_slots = before.astype(np.int64) + TOTAL_FREQUENCY * np.repeat(np.arange(D), A)
        for row in symbols:
            slot = state & (TOTAL_FREQUENCY - 1)
            at = np.searchsorted(first_slots, tables.lanes * TOTAL_FREQUENCY + slot.astype(np.int64), "right") - 1
            row[:] = at - first
            state = frequency[at] * (state >> FREQUENCY_BITS) + slot - before[at]
            needs_word = np.flatnonzero(state < MIN_STATE)
            more = words[used : used + len(needs_word)]
            # Too few words leave states too small, and the check at the end finds that they are not where coding began.
            state[needs_word[: len(more)]] = (state[needs_word[: len(more)]] << WORD_BITS) | more
            used += len(needs_word)
        decoded.append(symbols)
    if used != len(words) or (state != MIN_STATE).any():
        raise KvjaxError("the coded symbols do not end where they should: the file is damaged; write it again")
    return decoded
