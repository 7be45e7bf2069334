"""SpeCache in NumPy, from its paper (arXiv 2503.16163, section 3.3): one sequence, one key/value head, step by step."""

from __future__ import annotations

import numpy as np

from tests.oracles import kivi


class SpeCache:
    """All exact keys and values (the host's copy), a KIVI copy of them, and the fetched tokens."""

    def __init__(
        self,
        k: np.ndarray,
        v: np.ndarray,
        bits: int,
        group: int,
        topk: int,
        residual: int,
        one_bit: str = "improved",
        reduce: str = "mean",
    ):
        """Stores the prompt, k, v [T0 H]; nothing is fetched yet."""
        self.low = kivi.KiviCache(k, v, bits, group, residual, one_bit)
        self.topk, self.residual, self.reduce = topk, residual, reduce
        self.fetched: list[int] = []

    def pre_decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Runs the extra step on the first new token, q [G H], k, v [H] -> [G H]; it only chooses the first fetch."""
        out, weights = self._attend(q, [(k, v)])
        self.fetched = self._choose(weights, len(self.low.k) // self.residual * self.residual)
        return out

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, draft: tuple | None = None) -> tuple:
        """Decodes a true token and a draft (its q, k, v) -> both outputs [G H]; only the true one is stored.

        Without a draft the true token chooses the next fetch.
        """
        self.low.append(k, v)
        out, weights = self._attend(q, [])
        draft_out = None
        if draft is not None:
            draft_out, weights = self._attend(draft[0], [draft[1:]])
        self.fetched = self._choose(weights, len(self.low.k) // self.residual * self.residual)
        self.low.flush()
        return out, draft_out

    def step_without_draft(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Runs the ablation of section 4.5: the query itself chooses the fetch, and attention runs again after it."""
        self.low.append(k, v)
        self.fetched = []
        _, weights = self._attend(q, [])
        self.fetched = self._choose(weights, len(self.low.low_k))
        out, _ = self._attend(q, [])
        self.low.flush()
        return out

    def _attend(self, q: np.ndarray, extra: list) -> tuple[np.ndarray, np.ndarray]:
        """Attends with q [G H] to the cache and `extra` pairs (k, v), which are not stored -> [G H], weights [G n]."""
        keys, values = self.low.visible_keys(), self.low.visible_values()
        for i in self.fetched:
            keys[i], values[i] = self.low.k[i], self.low.v[i]
        for k, v in extra:
            keys, values = np.concatenate([keys, k[None]]), np.concatenate([values, v[None]])
        weights = np.stack([kivi.softmax(keys @ query.astype(np.float64) / np.sqrt(len(query))) for query in q])
        return weights @ values, weights

    def _choose(self, weights: np.ndarray, num_candidates: int) -> list[int]:
        """The heaviest of the first tokens, whose keys will be quantized; ties go to the earlier token."""
        ranking = weights.mean(0) if self.reduce == "mean" else weights.max(0)
        return sorted(range(num_candidates), key=lambda i: (-ranking[i], i))[: self.topk]
