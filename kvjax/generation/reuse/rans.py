"""Range coding of many streams side by side, each symbol in about as many bits as its distribution says (rANS).

Duda 2013, arXiv 1311.2540: a stream's state is one number, into which symbols are pushed and from which they are popped
in the opposite order. A state stays in 2^16 .. 2^32-1: where a push would lead above that, its low 16 bits become the
next word. So NumPy takes one step of all lanes at once, and the words of all lanes share one array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.errors import KvjaxError

BITS = 12  # of the frequencies, which sum to 2^BITS
TOTAL = 1 << BITS
WORD = 16
LOWEST = 1 << WORD  # the least state
ROOM = 32 - BITS  # a state below frequency << ROOM has room for a symbol of that frequency


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """Distributions of symbols 0..A-1, and which of them each lane follows."""

    counts: np.ndarray  # [D A], how often each symbol occurs in each of D distributions
    lanes: np.ndarray  # i64[C], the distribution of each lane

    @property
    def first(self) -> np.ndarray:
        """i64[C], where each lane's distribution begins in the flat arrays."""
        return self.lanes * self.counts.shape[1]

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """(frequencies u64[D*A], the sums of those before them in the same distribution u64[D*A])."""
        each = frequencies(self.counts)
        before = np.cumsum(each, axis=1) - each
        return each.ravel().astype(np.uint64), before.ravel().astype(np.uint64)


def frequencies(counts: np.ndarray) -> np.ndarray:
    """Counts [D A] as i64[D A] that sum to TOTAL in each distribution, at least 1 where a symbol occurs."""
    counts = counts.astype(np.int64)
    occurs = (counts > 0).astype(np.int64)
    spare = TOTAL - occurs.sum(1, keepdims=True)
    found = occurs + counts * spare // np.maximum(counts.sum(1, keepdims=True), 1)
    found[np.arange(len(found)), found.argmax(1)] += TOTAL - found.sum(1)
    return found


def encode(parts: Sequence[tuple[np.ndarray, Tables]]) -> tuple[np.ndarray, np.ndarray]:
    """Parts (symbols u8[n C], their tables), to be read one after the other, as (words u16[W], states u32[C])."""
    state = np.full(parts[0][0].shape[1], LOWEST, np.uint64)
    words = [np.zeros(0, np.uint16)]
    for symbols, tables in reversed(parts):
        first, (frequency, before) = tables.first, tables.flat()
        for row in symbols[::-1]:
            at = first + row
            often = frequency[at]
            full = state >= often << ROOM
            words.append(state[full].astype(np.uint16))
            state[full] >>= WORD
            times, rest = np.divmod(state, often)
            state = (times << BITS) + rest + before[at]
    return np.concatenate(words[::-1]), state.astype(np.uint32)


def decode(words: np.ndarray, states: np.ndarray, parts: Sequence[tuple[int, Tables]]) -> list[np.ndarray]:
    """The symbols u8[n C] of each part (n, its tables); raises KvjaxError for words that nothing encoded so."""
    state, used, found = states.astype(np.uint64), 0, []
    for n, tables in parts:
        symbols = np.empty((n, len(state)), np.uint8)
        first, (frequency, before) = tables.first, tables.flat()
        begins = _in_one_line(before, tables)
        for row in symbols:
            slot = state & (TOTAL - 1)
            at = np.searchsorted(begins, tables.lanes * TOTAL + slot.astype(np.int64), "right") - 1
            row[:] = at - first
            state = frequency[at] * (state >> BITS) + slot - before[at]
            empty = np.flatnonzero(state < LOWEST)
            more = words[used : used + len(empty)]
            if len(more) < len(empty):
                raise KvjaxError("the coded symbols end too early: the file is damaged; write it again")
            state[empty] = (state[empty] << WORD) | more
            used += len(empty)
        found.append(symbols)
    if used < len(words) or (state != LOWEST).any():
        raise KvjaxError("the coded symbols do not end where they should: the file is damaged; write it again")
    return found


def _in_one_line(before: np.ndarray, tables: Tables) -> np.ndarray:
    """i64[D*A], where each symbol's slots begin if the TOTAL slots of all distributions lie one behind the other."""
    D, A = tables.counts.shape
    return before.astype(np.int64) + TOTAL * np.repeat(np.arange(D), A)
