"""C7 and the layer contract for StreamingLLM, H2O and Scissorhands, on ragged sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax.cache.method import Method
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import array_bytes
from kvjax.core.rope import rotate
from kvjax.core.types import KVBlock
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.methods import h2o, scissorhands, streaming_llm
from kvjax.testing import full_copies
from tests.contract.layer import bind, spec
from tests.oracles import online as oracle

B, K, G, H = 3, 2, 2, 8
LENGTHS = np.array([9, 1, 14])
STEPS = 12


def bind_method(method, window=None):
    return bind(method, window, H)


def random_sequences(seed: int = 0, lengths=LENGTHS, steps: int = STEPS, dtype=jnp.float32):
    """Per sequence q [K G S H], k, v [K S H] before RoPE, with S = prompt + steps."""
    rng = np.random.default_rng(seed)
    sequences = []
    for n in lengths:
        S = n + steps
        shapes = ((K, G, S, H), (K, S, H), (K, S, H))
        sequences.append(tuple(np.asarray(jnp.asarray(rng.normal(size=s) * 1.5, dtype), np.float64) for s in shapes))
    return sequences


def rotated_batch(sequences, lengths=LENGTHS, padding: float = 0.0, dtype=jnp.float32, apply_rope: bool = True):
    """Sequences as the library takes them: rotated to true positions, left-aligned, followed by `padding`."""
    S = max(sequence[1].shape[1] for sequence in sequences)

    def stack(i):
        out = []
        for sequence in sequences:
            x = oracle.rope(sequence[i], np.arange(sequence[i].shape[-2])) if apply_rope and i < 2 else sequence[i]
            fill = [(0, 0)] * (x.ndim - 2) + [(0, S - x.shape[-2]), (0, 0)]
            out.append(np.pad(x, fill, constant_values=padding))
        return np.asarray(jnp.asarray(np.stack(out), dtype))

    return stack(0), stack(1), stack(2), np.asarray(lengths)


@functools.partial(jax.jit, static_argnums=0)
def prefill_state(method, q, k, v, pos):
    return method.prefill(KVBlock(k, v, pos[:, None]), Observation(q, pos), method.num_slots(99, 0))


def prefill_batch(method, batch, padding: float = 0.0):
    q, k, v, lengths = batch
    T = int(lengths.max())
    pos = np.where(np.arange(T) < lengths[:, None], np.arange(T), -1).astype(np.int32)
    is_token = (pos >= 0)[:, None, :, None]

    def pad_prompt(x, is_token):
        return np.where(is_token, x[..., :T, :], np.asarray(padding, x.dtype))

    return prefill_state(
        method, pad_prompt(q, is_token[:, None]), pad_prompt(k, is_token), pad_prompt(v, is_token), pos
    )


def next_tokens(batch, step: int, count: int = 1):
    """The next `count` tokens of each sequence, as `extend` takes them."""
    q, k, v, lengths = batch
    pos = (lengths[:, None] + step + np.arange(count)).astype(np.int32)
    idx = np.minimum(pos, k.shape[2] - 1)

    def take(x):
        return np.take_along_axis(x, idx.reshape(len(x), *(1,) * (x.ndim - 3), -1, 1), -2)

    return take(q), take(k), take(v), pos


@functools.partial(jax.jit, static_argnums=(0, 6))
def extend(method, state, q, k, v, q_pos, commit):
    return method.extend(state, q, KVBlock(k, v, q_pos[:, None]), commit, None)[:2]


def decode(method, batch, steps: int = STEPS, state=None):
    """Decodes in single steps -> (f32[B K G steps H], the last state)."""
    state = prefill_batch(method, batch) if state is None else state
    outs = []
    for t in range(steps):
        out, state = extend(method, state, *next_tokens(batch, t), 1)
        outs.append(out)
    return np.concatenate(outs, 3), state


METHODS = {
    "streaming": bind_method(streaming_llm(recent=5, sinks=2)),
    "h2o": bind_method(h2o(heavy=3, recent=4)),
    "scissorhands": bind_method(scissorhands(budget=8, history=4, recent=2, drop=0.4)),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


@pytest.mark.parametrize(
    "sinks, recent, reindex", [(2, 5, True), (2, 5, False), (0, 3, True), (4, 0, True), (3, 40, True)]
)
def test_streaming_equals_the_paper(sinks, recent, reindex):
    sequences = random_sequences(sinks)
    out, _ = decode(bind_method(streaming_llm(recent, sinks, reindex)), rotated_batch(sequences))
    for b, (q, k, v) in enumerate(sequences):
        for h in range(K):
            expected = oracle.streaming_llm(q[h], k[h], v[h], LENGTHS[b], sinks, recent, reindex)
            np.testing.assert_allclose(out[b, h], expected, atol=5e-6)


def test_streaming_runs_on_in_constant_memory():
    n, lengths = 2500, np.array([3])
    sequences = random_sequences(1, lengths, n)
    q, k, v, _ = rotated_batch(sequences, lengths, apply_rope=False)
    angles = spec(head_dim=H).rope.angles(jnp.arange(n + 3)[None])  # as the decoder rotates them
    angles = [a.reshape(n + 3, -1) for a in angles]
    rotated = (rotate(x, *(jnp.expand_dims(a, range(x.ndim - 2)) for a in angles)) for x in (q, k))
    batch = (*map(np.asarray, rotated), v, lengths)
    method = bind_method(streaming_llm(recent=6, sinks=2))
    state = prefill_batch(method, batch)

    def step(state, xs):
        q, k, v, pos = xs
        out, state, _ = method.extend(state, q, KVBlock(k, v, pos[:, None]), 1, None)
        return state, out[:, :, :, 0]

    q, k, v, pos = next_tokens(batch, 0, n)
    xs = (np.moveaxis(q, 3, 0)[:, :, :, :, None], np.moveaxis(k, 2, 0)[:, :, :, None])
    xs += (np.moveaxis(v, 2, 0)[:, :, :, None], pos.T[:, :, None])
    after, out = jax.jit(lambda s, x: lax.scan(step, s, x))(state, xs)
    assert array_bytes(after) == array_bytes(state) == {"device": 2 * K * 9 * H * 4 + 4 * 9, "pinned_host": 0}
    assert set(np.asarray(after.pos).ravel().tolist()) == {-1, 0, 1, *range(n + 3 - 6, n + 3)}
    q, k, v = sequences[0]
    expected = np.stack([oracle.streaming_llm(q[h], k[h], v[h], 3, 2, 6, True) for h in range(K)])
    np.testing.assert_allclose(np.moveaxis(np.asarray(out), 0, 3)[0], expected, atol=2e-5)


def test_streaming_in_bfloat16_loses_one_rounding_per_key():
    sequences = random_sequences(3, dtype=jnp.bfloat16)
    batch = rotated_batch(sequences, dtype=jnp.bfloat16)
    method = bind_method(streaming_llm(recent=5, sinks=2))
    out, state = decode(method, batch)
    assert state.k.dtype == "bfloat16"
    for b, (q, k, v) in enumerate(sequences):
        expected = np.stack([oracle.streaming_llm(q[h], k[h], v[h], LENGTHS[b], 2, 5, True) for h in range(K)])
        np.testing.assert_allclose(out[b], expected, atol=0.05)


@each_method
def test_a_decode_loop_copies_no_buffer(method):
    batch = rotated_batch(random_sequences())
    state = prefill_batch(method, batch)
    new = jax.tree.map(lambda *x: jnp.stack(x), *[next_tokens(batch, t) for t in range(4)])
    one = functools.partial(extend.__wrapped__, method)
    loop = jax.jit(lambda s, f: lax.scan(lambda s, x: one(s, *x, 1)[::-1], s, f), donate_argnums=0)
    text = loop.lower(state, new).compile().as_text()
    assert full_copies(text, state.k.data.shape) == []


@pytest.mark.parametrize(
    "heavy, recent, more",
    [
        (3, 4, {}),
        (0, 5, {}),
        (4, 1, {"decay": 0.7}),
        (4, 2, {"normalise": "visible-count", "granularity": "layer"}),
    ],
    ids=str,
)
def test_h2o_equals_the_paper(heavy, recent, more):
    sequences = random_sequences(heavy + recent)
    out, state = decode(bind_method(h2o(heavy, recent, **more)), rotated_batch(sequences, apply_rope=False))
    args = {**more, "layer": more.get("granularity") == "layer"}
    args.pop("granularity", None)
    for b, (q, k, v) in enumerate(sequences):
        expected, cached = oracle.h2o(q, k, v, int(LENGTHS[b]), heavy, recent, **args)
        assert [set(np.asarray(x)) - {-1} for x in state.pos[b]] == cached
        np.testing.assert_allclose(out[b], expected, atol=5e-6)


def test_h2o_evicts_the_older_of_equals():
    sequences = [(q, 0 * k, v) for q, k, v in random_sequences()]
    method = bind_method(h2o(2, 2, decay=0.0))
    batch = rotated_batch(sequences, apply_rope=False)
    assert set(np.asarray(prefill_batch(method, batch).pos[2, 0])) == {-1, 10, 11, 12, 13}
    _, state = decode(method, batch, 3)
    assert set(np.asarray(state.pos[2, 0])) == {-1, 13, 14, 15, 16}


@pytest.mark.parametrize("budget, history, recent, drop", [(8, 4, 2, 0.4), (6, 400, 1, 0.5), (5, 3, 5, 0.0)])
def test_scissorhands_equals_the_paper(budget, history, recent, drop):
    sequences = random_sequences(budget)
    method = bind_method(scissorhands(budget, history, recent, drop))
    out, state = decode(method, rotated_batch(sequences, apply_rope=False))
    assert (np.asarray((state.pos >= 0).sum(2)) <= budget).all()
    for b, (q, k, v) in enumerate(sequences):
        for h in range(K):
            expected, sizes = oracle.scissorhands(q[h], k[h], v[h], int(LENGTHS[b]), budget, history, recent, drop)
            assert int((state.pos[b, h] >= 0).sum()) == sizes[-1]
            np.testing.assert_allclose(out[b, h], expected, atol=5e-6)


def test_scissorhands_needs_no_more_than_its_last_queries():
    method, batch = METHODS["scissorhands"], rotated_batch(random_sequences())
    q, k, v, lengths = batch
    T = int(lengths.max())
    at = lengths[:, None] - method.needs.observed_queries + np.arange(method.needs.observed_queries)
    pos = np.where(np.arange(T) < lengths[:, None], np.arange(T), -1).astype(np.int32)[:, None]
    few = np.take_along_axis(q, np.maximum(at, 0)[:, None, None, :, None], 3)
    observation = Observation(few, np.maximum(at, -1).astype(np.int32))
    assert method.needs.observed_queries == 4
    state = jax.jit(lambda *x: method.prefill(KVBlock(*x), observation, method.num_slots(99, 0)))(
        k[:, :, :T], v[:, :, :T], pos
    )
    np.testing.assert_array_equal(state.pos, prefill_batch(method, batch).pos)
    np.testing.assert_array_equal(state.policy_state, prefill_batch(method, batch).policy_state)


ONE = KVBlock(np.ones((1, 1, 1, 8), np.float32), np.ones((1, 1, 1, 8), np.float32), np.zeros((1, 1, 1), np.int32))


def test_h2o_needs_what_the_prompt_observed():
    with pytest.raises(KvjaxError, match="H2O needs all queries of the prompt in `observation`, got None"):
        bind_method(h2o(3, 2)).prefill(ONE, None, 6)


def test_positions_in_the_cache_need_something_that_evicts():
    with pytest.raises(IncompatibleMethod, match="where no token leaves it; compose `positions` with a method that ev"):
        bind_method(Method(positions="cache"))
