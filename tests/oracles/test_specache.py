"""SpeCache equals its NumPy oracle step by step, with drafts and without, on ragged sequences (C7).

SpeCache in NumPy, from its paper (arXiv 2503.16163, section 3.3): one sequence, one key/value head, step by step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import methods
from tests.contract import layer
from tests.oracles import kivi
from tests.oracles.test_kivi import STEPS, B, G, H, K, R, bind, oracle_outputs, prefill, random_batch


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


SPECS = [(1, 8, 1, "improved", "mean"), (1, 8, 3, "original", "max"), (2, 4, 5, "improved", "mean")]


def shift_batch(batch: layer.SequenceBatch, tokens) -> layer.SequenceBatch:
    return layer.SequenceBatch(batch.q, batch.k, batch.v, batch.lengths + np.asarray(tokens, np.int32))


def pair_with_drafts(batch: layer.SequenceBatch, drafts: layer.SequenceBatch) -> tuple:
    """The tokens of STEPS steps: each true token with a draft of the next one, which is always wrong."""
    true_token, drafted = layer.stack_steps(batch, STEPS), layer.stack_steps(shift_batch(drafts, 1), STEPS)
    q = jnp.concatenate([true_token[0], drafted[0]], 4)
    return q, jax.tree.map(lambda x, y: jnp.concatenate([x, y], 3), true_token[1], drafted[1])


@functools.cache
def _compile_speculation(method):
    def step(state, new):
        out, state, _ = bind(method).extend(state, *new, 1, None)
        return state, out

    def run(state, first, new):
        out, state, _ = bind(method).extend(state, *first, 0, None)
        state, outs = jax.lax.scan(step, state, new)
        return out, jnp.moveaxis(outs, 0, 3), state

    return jax.jit(run)


def speculate(method, batch: layer.SequenceBatch, drafts: layer.SequenceBatch, state=None):
    """Runs the pre-decode step and all steps -> f32[B K G 1 H], f32[B K G STEPS 2 H], state."""
    state = prefill(method, batch) if state is None else state
    return _compile_speculation(method)(state, batch.token(0), pair_with_drafts(batch, drafts))


def oracle_cache(batch: layer.SequenceBatch, b: int, h: int, spec: tuple) -> tuple:
    """The oracle after the prompt, and a function from a position to q, k, v of sequence b and head h."""
    bits, group, topk, one_bit, reduce = spec
    q, k, v = (np.asarray(x[b, h]) for x in (batch.q, batch.k, batch.v))
    n = batch.lengths[b]

    def token(pos):
        return q[:, pos], k[pos], v[pos]

    return SpeCache(k[:n], v[:n], bits, group, topk, R, one_bit, reduce), token


def make_specache(spec: tuple, **more):
    bits, group, topk, one_bit, reduce = spec
    return methods.specache(bits, group, topk, R, one_bit=one_bit, reduce=reduce, **more)


def speculative_outputs(
    batch: layer.SequenceBatch, drafts: layer.SequenceBatch, spec: tuple, num_rounds: int = 1
) -> tuple:
    """Runs the paper's speculative loop -> pre-decode f64[rounds B K G H], steps f64[rounds B K G STEPS 2 H]."""
    first, out = np.zeros((num_rounds, B, K, G, H)), np.zeros((num_rounds, B, K, G, STEPS, 2, H))
    for b, h in np.ndindex(B, K):
        cache, true_token = oracle_cache(batch, b, h, spec)
        _, draft_token = oracle_cache(drafts, b, h, spec)
        for i in range(num_rounds):
            pos = batch.lengths[b] + i * STEPS
            first[i, b, h] = cache.pre_decode(*true_token(pos))
            for t in range(STEPS):
                out[i, b, h, :, t, 0], out[i, b, h, :, t, 1] = cache.step(
                    *true_token(pos + t), draft_token(pos + t + 1)
                )
    return first, out


@pytest.mark.parametrize("spec", SPECS)
def test_the_speculative_loop_equals_the_paper(spec):
    batch, drafts = random_batch(seed=1), random_batch(seed=2, num_new=STEPS + 1)
    first, out, _ = speculate(make_specache(spec), batch, drafts)
    expected_first, expected = speculative_outputs(batch, drafts, spec)
    np.testing.assert_allclose(first[:, :, :, 0], expected_first[0], atol=3e-6)
    np.testing.assert_allclose(out, expected[0], atol=3e-6)


def test_a_second_turn_goes_on_from_the_first():
    """It begins with a pre-decode step of its own; one sequence is at the end of a block of keys."""
    spec = SPECS[1]
    batch, drafts, method = (
        random_batch(seed=3, num_new=2 * STEPS),
        random_batch(seed=4, num_new=2 * STEPS + 1),
        make_specache(spec),
    )
    expected_first, expected = speculative_outputs(batch, drafts, spec, 2)
    state = speculate(method, batch, drafts)[2]
    first, out, _ = speculate(method, shift_batch(batch, STEPS), shift_batch(drafts, STEPS), state)
    np.testing.assert_allclose(first[:, :, :, 0], expected_first[1], atol=3e-6)
    np.testing.assert_allclose(out, expected[1], atol=3e-6)


@functools.cache
def _compile_chunk(method):
    return layer.compile_extend(bind(method), STEPS)


def test_without_speculation_it_equals_the_paper():
    spec, batch = SPECS[1], random_batch(seed=5)
    method = make_specache(spec, speculative=False)
    out, _ = _compile_chunk(method)(prefill(method, batch), batch.tokens(0, STEPS))
    expected = np.zeros((B, K, G, STEPS, H))
    for b, h in np.ndindex(B, K):
        cache, true_token = oracle_cache(batch, b, h, spec)
        for t in range(STEPS):
            expected[b, h, :, t] = cache.step_without_draft(*true_token(batch.lengths[b] + t))
    np.testing.assert_allclose(out, expected, atol=3e-6)


def test_without_a_guess_the_token_itself_chooses_the_next_fetch():
    """A plain ragged chunk has counts[b] tokens of sequence b; padding neither counts nor fetches."""
    spec = SPECS[1]
    batch, method = random_batch(seed=6), make_specache(spec)
    state = prefill(method, batch, padding=np.inf)
    counts, done = [2, 0, 9, 8, STEPS, 1, 7], np.zeros(B, np.int32)
    caches = {(b, h): oracle_cache(batch, b, h, spec) for b, h in np.ndindex(B, K)}
    for part in (counts, [STEPS - c for c in counts]):
        rest = shift_batch(batch, done)
        out, state = _compile_chunk(method)(state, layer.truncate_chunk(rest.tokens(0, STEPS), part))
        for (b, h), (cache, true_token) in caches.items():
            for t in range(part[b]):
                expected, _ = cache.step(*true_token(rest.lengths[b] + t))
                np.testing.assert_allclose(out[b, h, :, t], expected, atol=3e-6)
        done += np.array(part, np.int32)


def test_when_all_rows_are_fetched_it_is_exact_attention():
    batch, drafts = random_batch(seed=7), random_batch(seed=8, num_new=STEPS + 1)
    exact = oracle_outputs(batch, 1, 8, residual=1000)
    _, out, _ = speculate(methods.specache(1, 8, 50, R), batch, drafts)
    np.testing.assert_allclose(out[:, :, :, :, 0], exact, atol=3e-6)


def test_the_oracle_by_hand():
    """Keys 0 and 4 (in the first channel) are 1 and 3 in one bit; the token that a draft prefers is read exactly."""

    def ask(x):
        return np.array([[x * 2**0.5, 0]])

    def key(x):
        return np.array([x, 0.0])

    def value(x):
        return np.array([x, x])

    e, close = np.exp, functools.partial(np.testing.assert_allclose, rtol=1e-12)
    cache = SpeCache(np.stack([key(0.0), key(4.0)]), np.stack([value(10.0), value(20.0)]), 1, 2, 1, 2)
    out = cache.pre_decode(ask(1), key(0.0), value(0.0))
    close(out[0], (e(1) * 10 + e(3) * 20) / (e(1) + e(3) + 1))
    assert cache.fetched == [1] and len(cache.low.k) == 2, "the token is not kept yet"
    out, ahead = cache.step(ask(1), key(0.0), value(0.0), (ask(-1), key(2.0), value(5.0)))
    close(out[0], (e(1) * 10 + e(4) * 20) / (e(1) + e(4) + 1))
    close(ahead[0], (e(-1) * 10 + e(-4) * 20 + e(-2) * 5) / (e(-1) + e(-4) + 1 + e(-2)))
    assert cache.fetched == [0] and len(cache.low.k) == 3, "the guess is not kept"
    cache.step(ask(1), key(9.0), value(0.0), (ask(1), key(0.0), value(0.0)))
    assert cache.fetched == [3], "the block that this step completed is a candidate"
    cache.step(ask(1), key(10.0), value(0.0), (ask(1), key(0.0), value(0.0)))
    assert cache.fetched == [3], "what stays exact is not"


def test_the_oracle_sees_each_choice():
    """Every parameter changes the oracle's outputs on this data, so equality with them means something."""
    batch, drafts = random_batch(seed=1), random_batch(seed=2, num_new=STEPS + 1)
    base = (1, 8, 2, "improved", "mean")
    others = [(2, *base[1:]), (1, 4, *base[2:]), (1, 8, 3, *base[3:])]
    others += [(*base[:3], "original", "mean"), (*base[:4], "max")]
    out = speculative_outputs(batch, drafts, base)[1][0]
    for other in others:
        assert np.abs(speculative_outputs(batch, drafts, other)[1][0] - out).max() > 1e-3
    assert np.abs(out[..., 0, :] - oracle_outputs(batch, 1, 8)).max() > 1e-3, "and so does fetching"
    assert (
        np.abs(
            speculative_outputs(batch, random_batch(seed=20, num_new=STEPS + 1), base)[1][0][..., 0, :] - out[..., 0, :]
        ).max()
        > 1e-3
    )
