"""The baseline of the shipped model on source code: an interpolated modified Kneser-Ney byte model.

python -m experiments.testbed.ngram [--order 5] prints held-out bits per byte by order, trained on all training files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import numpy as np

from kvjax.testbed import corpus
from kvjax.testbed.vocab import END

TOKEN_BITS = 9  # so a gram of up to 7 tokens fits in one int64


def _grams(tokens: np.ndarray, order: int) -> np.ndarray:
    """Packs the `order` tokens that end at each position from order - 1 on; the newest token has the lowest bits."""
    n = len(tokens) - order + 1
    codes = np.zeros(n, np.int64)
    for i in range(order):
        codes = codes << TOKEN_BITS | tokens[i : i + n].astype(np.int64)
    return codes


def _look_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The values of queries among sorted keys, 0 for a query that is no key."""
    at = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[at] == queries, values[at], 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """Counts of one order."""

    grams: np.ndarray
    discounted: np.ndarray  # count of each gram
    contexts: np.ndarray
    total: np.ndarray  # count of each context
    left: np.ndarray  # mass of each context for the lower order

    @classmethod
    def fit(cls, grams: np.ndarray, count: np.ndarray) -> Level:
        """Discounts counts of 1, 2 and 3+ (Chen & Goodman, 1999, equation 26)."""
        # At least 1 of each: a tiny corpus may have no gram that occurs twice.
        n1, n2, n3, n4 = (max(1, int((count == c).sum())) for c in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        rate = np.clip([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3], 0, [0, 1, 2, 3])
        discount = rate[np.minimum(count, 3)]
        contexts, first = np.unique(grams >> TOKEN_BITS, return_index=True)
        return cls(grams, count - discount, contexts, np.add.reduceat(count, first), np.add.reduceat(discount, first))

    def probability(self, codes: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probability of each gram's newest token given the others, interpolated with the lower order's."""
        total = _look_up(self.contexts, self.total, codes >> TOKEN_BITS)
        own = _look_up(self.grams, self.discounted, codes)
        left = _look_up(self.contexts, self.left, codes >> TOKEN_BITS)
        return np.where(total > 0, (own + left * lower) / np.maximum(total, 1), lower)


@dataclasses.dataclass(frozen=True, eq=False)
class KneserNey:
    """Levels of orders 1 to n over an alphabet of bytes and END."""

    levels: tuple[Level, ...]

    @classmethod
    def fit(cls, tokens: np.ndarray, order: int = 5) -> KneserNey:
        """Counts occurrences in the highest order, different left neighbors in the lower ones (Kneser & Ney, 1995)."""
        levels, (grams, count) = [], np.unique(_grams(tokens, order), return_counts=True)
        for k in range(order, 0, -1):
            levels.append(Level.fit(grams, count))
            grams, count = np.unique(grams & (1 << TOKEN_BITS * (k - 1)) - 1, return_counts=True)
        return cls(tuple(levels[::-1]))

    def probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Probability of every token given the tokens before it, f64[n]; the first tokens have shorter contexts."""
        p = np.full(len(tokens), 1 / (END + 1))
        for k, level in enumerate(self.levels, 1):
            p[k - 1 :] = level.probability(_grams(tokens, k), p[k - 1 :])
        return p


def bits(tokens: np.ndarray, order: int = 5) -> np.ndarray:
    """Bits of each token under a model of all training files."""
    return -np.log2(KneserNey.fit(corpus.load("train").tokens, order).probabilities(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", type=int, default=5, choices=range(1, 8))
    highest = parser.parse_args().order
    train, held_out = corpus.load("train").tokens, corpus.load("held_out").tokens
    result = {n: float(bits(held_out, n).mean()) for n in range(1, highest + 1)}
    print(f"{len(train):,} training and {len(held_out):,} held-out bytes")
    for n, b in result.items():
        print(f"{n}-gram  {b:.3f} bits per byte")
    document = {"train_bytes": len(train), "held_out_bytes": len(held_out), "bits_per_byte": result}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
