"""C7 and the layer contract for InfLLM, on ragged rows, the prompt chunk by chunk."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax.cache import state_bytes
from kvjax.core.observe import Obs
from kvjax.core.types import Block, KvjaxError
from kvjax.methods.infllm import InfLLM
from kvjax.models.config import Config
from kvjax.testing import dense_attention, full_copies
from tests.oracles import infllm as oracle
from tests.oracles.online import rope

B, K, G, H = 3, 2, 2, 8
LENGTHS = np.array([33, 2, 19])
STEPS = 9
SLOTS = 48
CONFIG = Config(8, K * G * H, 1, K * G, K, H, 8)
SMALL = {"block": 4, "sinks": 3, "local": 6, "topk": 2, "representatives": 2, "chunk": 5}


def planned(**changes) -> InfLLM:
    return InfLLM(**{**SMALL, **changes}).plan(CONFIG)[0]


METHOD = planned()


def make(seed: int = 0, lengths=LENGTHS, steps: int = STEPS):
    """Per row: q [K G S H], k, v [K S H] before RoPE, S = prompt + steps."""
    rng = np.random.default_rng(seed)
    shapes = lambda S: ((K, G, S, H), (K, S, H), (K, S, H))  # noqa: E731
    return [tuple(rng.normal(size=s) * 1.5 for s in shapes(n + steps)) for n in lengths]


def cut(rows, first, count, padding: float = 0.0):
    """Of row b the tokens first[b].. of count[b], as `extend` takes them: rotated, `padding` and -1 at the right."""
    T = int(max(count))
    out = [np.full((len(rows), *shape, T, H), padding, np.float32) for shape in ((K, G), (K,), (K,))]
    pos = np.full((len(rows), T), -1, np.int32)
    for b, row in enumerate(rows):
        n, at = count[b], first[b] + np.arange(count[b])
        pos[b, :n] = at
        for i, x in enumerate(row):
            out[i][b, ..., :n, :] = rope(x[..., at, :], at) if i < 2 else x[..., at, :]
    return *out, pos


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def extend(method, state, fresh, commit, window=None):
    return method.extend(state, *fresh, commit, window)


def run(method, rows, lengths=LENGTHS, steps: int = STEPS, padding: float = 0.0, window=None):
    """The prompt in one call, then single steps -> (the outputs of each row [K G S H], the last state)."""
    state = method.empty(len(rows), SLOTS, jnp.float32)
    out, state = extend(method, state, cut(rows, 0 * lengths, lengths, padding), int(lengths.max()), window)
    outs = [[o[:, :, :n]] for o, n in zip(np.asarray(out), lengths, strict=True)]
    for t in range(steps):
        out, state = extend(method, state, cut(rows, lengths + t, np.ones_like(lengths)), 1, window)
        for o, x in zip(outs, np.asarray(out), strict=True):
            o.append(x)
    return [np.concatenate(o, 2) for o in outs], state


def chunks(n: int, chunk: int, steps: int = STEPS) -> list[int]:
    return [chunk] * int(n // chunk) + ([int(n % chunk)] if n % chunk else []) + [1] * steps


@pytest.mark.parametrize(
    "changes",
    [{}, {"per_head": True, "topk": 1, "representatives": 3, "sinks": 0, "block": 3, "chunk": 6}],
    ids=str,
)
def test_infllm_equals_the_paper(changes):
    args, rows = {**SMALL, **changes}, make(len(changes))
    out, state = run(planned(**changes), rows)
    chunk = args.pop("chunk")
    for b, n in enumerate(LENGTHS):
        want, blocks = oracle.infllm(*rows[b], chunks(n, chunk), **args)
        np.testing.assert_allclose(out[b], want, atol=2e-5)
        assert int(state.formed[b]) == blocks


def test_chunks_of_more_queries_than_are_attended_at_once():
    lengths, args = np.array([150]), {"block": 8, "sinks": 5, "local": 80, "topk": 3, "representatives": 2}
    rows = make(3, lengths, 0)
    method = InfLLM(**args, chunk=70).plan(CONFIG)[0]
    state = method.empty(1, 150, jnp.float32)
    out, _ = extend(method, state, cut(rows, [0], lengths), 150)
    np.testing.assert_allclose(out[0], oracle.infllm(*rows[0], [70, 70, 10], **args)[0], atol=2e-5)


@pytest.mark.parametrize("changes, window", [({"local": 60}, None), ({}, 4)], ids=str)
def test_c1_with_a_window_for_all_it_is_dense_attention(changes, window):
    rows = make()
    out, _ = run(planned(**changes), rows, steps=0, window=window)
    for b, S in enumerate(LENGTHS):
        v = rows[b][2][:, :S]
        q, k, _, _ = cut(rows[b : b + 1], [0], [S])
        want = dense_attention(q[0].reshape(-1, S, H), k[0], v, np.arange(S), window)
        np.testing.assert_allclose(out[b].reshape(want.shape), want, atol=2e-5)


def test_c2_when_all_blocks_are_taken_chunks_do_not_matter():
    rows, method = make(), planned(topk=99, chunk=3)
    args = {**SMALL, "topk": 99}
    args.pop("chunk")
    out, state = run(method, rows, steps=0)
    more, _ = extend(method, state, cut(rows, LENGTHS, [7, 4, 1]), 7)
    for b, n in enumerate([7, 4, 1]):
        got = np.concatenate([out[b], more[b, :, :, :n]], 2)
        want, _ = oracle.infllm(*rows[b], [1] * rows[b][1].shape[1], **args)
        np.testing.assert_allclose(got, want[:, :, : got.shape[2]], atol=2e-5)


def test_c3_rows_are_independent_of_neighbours_and_padding():
    rows = make()
    want, _ = run(METHOD, rows)
    for padding in (1e4, np.inf, np.nan):
        for out, x in zip(run(METHOD, rows, padding=padding)[0], want, strict=True):
            np.testing.assert_array_equal(out, x)
    alone, _ = run(METHOD, rows[:1], LENGTHS[:1], steps=0)
    np.testing.assert_allclose(alone[0], want[0][:, :, :33], atol=2e-5)


def test_c3_only_committed_tokens_are_kept_and_guesses_see_them():
    rows = make()
    want, _ = run(METHOD, rows)
    _, state = run(METHOD, rows, steps=2)
    one, after = extend(METHOD, state, cut(rows, LENGTHS + 2, [1, 1, 1]), 1)
    two, ahead = extend(METHOD, state, cut(rows, LENGTHS + 2, [2, 2, 2]), 1)
    np.testing.assert_allclose(two[:, :, :, :1], one, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after, ahead)
    for b, n in enumerate(LENGTHS):  # no row forms a block between the two
        np.testing.assert_allclose(two[b, :, :, 1], want[b][:, :, n + 3], atol=2e-5)


def test_c4_extend_is_a_fixed_point_and_copies_no_buffer():
    rows = make()
    _, state = run(METHOD, rows, steps=0)
    fresh = jax.tree.map(lambda *x: np.stack(x), *[cut(rows, LENGTHS + t, [1, 1, 1]) for t in range(STEPS)])
    loop = lambda s, f: lax.scan(lambda s, x: METHOD.extend(s, *x, 1)[::-1], s, f)  # noqa: E731
    compiled = jax.jit(loop, donate_argnums=0).lower(state, fresh).compile()
    for x in (state.blocks.data, state.k.data):
        assert full_copies(compiled.as_text(), x.shape) == []
    kinds = lambda s: jax.tree.map(lambda x: (jax.typeof(x), x.sharding.memory_kind), s)  # noqa: E731
    before = kinds(state)
    after, out = compiled(state, fresh)
    assert kinds(after) == before and before.blocks.data[1] == "pinned_host"
    want, _ = run(METHOD, rows)
    for b, n in enumerate(LENGTHS):
        np.testing.assert_allclose(np.asarray(out)[:, b, :, :, 0], np.moveaxis(want[b][:, :, n:], 2, 0), atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_c6_bytes_are_the_recipes(dtype):
    size = jnp.dtype(dtype).itemsize
    state = METHOD.empty(B, SLOTS, dtype)
    ring, blocks = 20, (SLOTS - 3 - 6) // 4  # 6 + 4 - 1 + 2 x 5 tokens, in whole blocks of 4
    S = 3 + ring
    device = B * (2 * K * S * H * size + 4 * S + 4 * K * G * S + K * G * blocks * H * size + 8)
    assert state_bytes(state) == {"device": device, "pinned_host": B * K * blocks * 4 * 2 * H * size}
    assert METHOD.empty(B, 12, dtype).blocks is None


def test_prefill_runs_the_prompt_chunk_by_chunk():
    rows = make()
    q, k, v, pos = cut(rows, 0 * LENGTHS, LENGTHS, np.inf)
    state = jax.jit(lambda q, k, v, pos: METHOD.prefill(Block(k, v, pos[:, None]), SLOTS, Obs(q, pos)))(q, k, v, pos)
    _, want = run(METHOD, rows, steps=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, want)


def test_bfloat16_stays_close_to_the_paper():
    rows = [tuple(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in row) for row in make(5)]
    state = METHOD.empty(B, SLOTS, jnp.bfloat16)
    half = lambda xs: (*(jnp.asarray(x, jnp.bfloat16) for x in xs[:3]), xs[3])  # noqa: E731
    out, state = extend(METHOD, state, half(cut(rows, 0 * LENGTHS, LENGTHS)), int(LENGTHS.max()))
    want, _ = oracle.infllm(
        *(x[..., :19, :] for x in rows[2]), chunks(19, 5, 0), **{k: v for k, v in SMALL.items() if k != "chunk"}
    )
    np.testing.assert_allclose(out[2, :, :, :19], want, atol=0.08)


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda: planned(chunk=7), "must not exceed local=6, got 7; use 6"),
        (lambda: planned(representatives=5), "must not exceed block=4, got 5"),
        (lambda: planned(topk=0), "topk of InfLLM must be at least 1, got 0"),
        (lambda: InfLLM().empty(1, 9, jnp.float32), r"use plan\(config\)\[layer\]"),
        (lambda: METHOD.extend(METHOD.empty(1, 9, jnp.float32), *cut(make()[:1], [0], [7]), 1), "got commit=1 of 7"),
    ],
)
def test_errors_name_the_value_and_the_remedy(wrong, text):
    with pytest.raises(KvjaxError, match=text):
        wrong()
