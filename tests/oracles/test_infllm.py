"""C7 and the layer contract for InfLLM, on ragged sequences, the prompt chunk by chunk.

InfLLM in NumPy, float64, from its paper (arXiv 2402.04617, section 3): one sequence, one chunk at a time.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.compose import compose
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core import memory
from kvjax.core.attention import Rule
from kvjax.core.memory import array_bytes
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.infllm import infllm
from kvjax.registry.strings import parse
from kvjax.testing import full_copies, toy_model
from tests.oracles.online import rope, softmax


def oracle_infllm(q, k, v, chunks, block: int, sinks: int, local: int, topk: int, representatives: int, per_head=False):
    """Runs q [K G S H], k, v [K S H] before RoPE in chunks -> (outputs [K G S H], blocks before the last chunk).

    A far token has a key without RoPE and a query at position local - 1. A block key per query head is the mean key of
    the tokens that received the most attention while they were less than `local` tokens before the query.
    """
    K, G, S, H = q.shape
    sink_tokens, remainder, blocks = [], [], []
    mass, out, start = np.zeros((K, G, S)), np.empty(q.shape), 0
    for size in chunks:
        tokens, num_blocks = list(range(start, start + size)), len(blocks)
        remainder += tokens
        far_q = rope(q[:, :, tokens], np.full(size, local - 1))
        chosen = select_blocks(far_q.mean(2), blocks, topk, per_head)
        for head in range(K):
            fetched = [s for i in chosen[head] for s in blocks[i][0]]
            for i, t in enumerate(tokens):
                near = [s for s in range(t + 1) if t - s < local]
                far = [s for s in sink_tokens + remainder if t - s >= local] + fetched
                assert not set(near) & set(far)
                near_q = rope(q[head, :, t : t + 1], np.array([t]))[:, 0]
                logits = np.concatenate([near_q @ rope(k[head, near], near).T, far_q[head, :, i] @ k[head, far].T], 1)
                weights = softmax(logits / np.sqrt(H))
                out[head, :, t] = weights @ v[head, near + far]
                mass[head][:, near] += weights[:, : len(near)]
        start += size
        while len(sink_tokens) < sinks and len(remainder) > local:
            sink_tokens.append(remainder.pop(0))
        while len(remainder) - block >= local:
            block_tokens, remainder = remainder[:block], remainder[block:]
            keys = np.empty((K, G, H))
            for head in range(K):
                for g in range(G):
                    best = np.argsort(-mass[head, g, block_tokens], kind="stable")[:representatives]
                    keys[head, g] = k[head, np.array(block_tokens)[best]].mean(0)
            blocks.append((block_tokens, keys))
    return out, num_blocks


def select_blocks(queries, blocks, topk: int, per_head: bool) -> list[list[int]]:
    """Selects the blocks of each head by the product of queries [K G H] and block keys, summed over the query heads."""
    K = queries.shape[0]
    scores = np.array([(queries * keys).sum((1, 2)) for _, keys in blocks]).reshape(-1, K)
    if not per_head:
        scores = np.repeat(scores.sum(1, keepdims=True), K, 1)
    return [list(np.argsort(-scores[:, h], kind="stable")[:topk]) for h in range(K)]


B, K, G, H = 3, 2, 2, 8
LENGTHS = np.array([33, 2, 19])
STEPS = 9
SLOTS = 48
SMALL = {"block": 4, "sinks": 3, "local": 6, "topk": 2, "representatives": 2, "chunk": 5}


def bind_method(method: Method, window: int | None = None) -> MethodLayer:
    """Binds a method to the only layer of a model."""
    return dataclasses.replace(method, windowed="method").bind(
        LayerSpec(index=0, num_layers=1, num_kv_heads=K, num_groups=G, head_dim=H, rope=Rope(H), rule=Rule(window))
    )


def bind_infllm(window: int | None = None, **changes) -> MethodLayer:
    return bind_method(infllm(**{**SMALL, **changes}), window)


METHOD = bind_infllm()


def empty_state(method: MethodLayer, num_sequences: int, slots: int, dtype):
    """An empty state with this number of slots for each sequence."""
    no_tokens = jnp.zeros((num_sequences, K, 0, H), dtype)
    return method.prefill(KVBlock(no_tokens, no_tokens, jnp.zeros((num_sequences, 1, 0), jnp.int32)), None, slots)


def random_sequences(seed: int = 0, lengths=LENGTHS, steps: int = STEPS):
    """Per sequence q [K G S H], k, v [K S H] before RoPE, with S = prompt + steps."""
    rng = np.random.default_rng(seed)
    sizes = [n + steps for n in lengths]
    return [tuple(rng.normal(size=shape) * 1.5 for shape in ((K, G, S, H), (K, S, H), (K, S, H))) for S in sizes]


def token_chunk(sequences, first, count, padding: float = 0.0):
    """The count[b] tokens of each sequence from first[b] on, as `extend` takes them: rotated and padded."""
    T = int(max(count))
    out = [np.full((len(sequences), *shape, T, H), padding, np.float32) for shape in ((K, G), (K,), (K,))]
    pos = np.full((len(sequences), T), -1, np.int32)
    for b, sequence in enumerate(sequences):
        num_tokens, token_pos = count[b], first[b] + np.arange(count[b])
        pos[b, :num_tokens] = token_pos
        for i, x in enumerate(sequence):
            out[i][b, ..., :num_tokens, :] = rope(x[..., token_pos, :], token_pos) if i < 2 else x[..., token_pos, :]
    return *out, pos


def extend_layer(method, state, new, commit):
    """Extends a state with new tokens (q, k, v, positions) -> (out, state)."""
    q, k, v, pos = new
    return method.extend(state, q, KVBlock(k, v, pos[:, None]), commit, None)[:2]


extend = functools.partial(jax.jit, static_argnums=(0, 3))(extend_layer)


def decode(method, sequences, lengths=LENGTHS, steps: int = STEPS, padding: float = 0.0):
    """Runs the prompt in one call, then single steps -> (outputs of each sequence [K G S H], the last state)."""
    state = empty_state(method, len(sequences), SLOTS, jnp.float32)
    out, state = extend(method, state, token_chunk(sequences, 0 * lengths, lengths, padding), int(lengths.max()))
    outs = [[sequence_outs[:, :, :n]] for sequence_outs, n in zip(np.asarray(out), lengths, strict=True)]
    for t in range(steps):
        out, state = extend(method, state, token_chunk(sequences, lengths + t, np.ones_like(lengths)), 1)
        for sequence_outs, x in zip(outs, np.asarray(out), strict=True):
            sequence_outs.append(x)
    return [np.concatenate(sequence_outs, 2) for sequence_outs in outs], state


def chunk_lengths(n: int, chunk: int, steps: int = STEPS) -> list[int]:
    return [chunk] * int(n // chunk) + ([int(n % chunk)] if n % chunk else []) + [1] * steps


@pytest.mark.parametrize(
    "changes",
    [{}, {"per_head": True, "topk": 1, "representatives": 3, "sinks": 0, "block": 3, "chunk": 6}],
    ids=str,
)
def test_infllm_equals_the_paper(changes):
    args, sequences = {**SMALL, **changes}, random_sequences(len(changes))
    out, state = decode(bind_infllm(**changes), sequences)
    chunk = args.pop("chunk")
    for b, n in enumerate(LENGTHS):
        expected, blocks = oracle_infllm(*sequences[b], chunk_lengths(n, chunk), **args)
        np.testing.assert_allclose(out[b], expected, atol=2e-5)
        assert int(state.reader_state.num_blocks[b]) == blocks


def test_chunks_of_more_queries_than_are_attended_at_once():
    lengths, args = np.array([150]), {"block": 8, "sinks": 5, "local": 80, "topk": 3, "representatives": 2}
    sequences = random_sequences(3, lengths, 0)
    method = bind_method(infllm(**args, chunk=70))
    state = empty_state(method, 1, 150, jnp.float32)
    out, _ = extend(method, state, token_chunk(sequences, [0], lengths), 150)
    np.testing.assert_allclose(out[0], oracle_infllm(*sequences[0], [70, 70, 10], **args)[0], atol=2e-5)


def test_c4_extend_is_a_fixed_point_and_copies_no_buffer():
    sequences = random_sequences()
    _, state = decode(METHOD, sequences, steps=0)
    new = jax.tree.map(lambda *x: np.stack(x), *[token_chunk(sequences, LENGTHS + t, [1, 1, 1]) for t in range(STEPS)])

    def loop(state, new):
        return lax.scan(lambda s, x: extend_layer(METHOD, s, x, 1)[::-1], state, new)

    compiled = jax.jit(loop, donate_argnums=0).lower(state, new).compile()
    for x in (state.k.data, state.v.data, state.reader_state.k.data):
        assert full_copies(compiled.as_text(), x.shape) == []

    def kinds(state):
        return jax.tree.map(lambda x: (jax.typeof(x), x.sharding.memory_kind), state)

    before = kinds(state)
    after, out = compiled(state, new)
    assert kinds(after) == before and before.k.data[1] == "pinned_host"
    expected, _ = decode(METHOD, sequences)
    for b, n in enumerate(LENGTHS):
        np.testing.assert_allclose(np.asarray(out)[:, b, :, :, 0], np.moveaxis(expected[b][:, :, n:], 2, 0), atol=2e-5)


def selected_block(sequences, num_kept: int):
    """A block of `num_kept` prompt tokens of each head and sequence, in order, with other tokens in other heads."""
    chosen = np.full((B, K, num_kept), -1, np.int32)
    for b, n in enumerate(LENGTHS):
        for head in range(K):
            idx = np.random.default_rng(head).permutation(n)[:num_kept]
            chosen[b, head, : len(idx)] = np.sort(idx)
    k, v = (np.full((B, K, num_kept, H), np.inf, np.float32) for _ in range(2))
    for b, head, i in np.argwhere(chosen >= 0):
        s = chosen[b, head, i]
        k[b, head, i] = rope(sequences[b][1][head, s : s + 1], [s])[0]
        v[b, head, i] = sequences[b][2][head, s]
    return KVBlock(*map(jnp.asarray, (k, v, chosen)))


def test_behind_a_selection_its_blocks_are_those_of_the_tokens_that_are_left():
    sequences, num_kept = random_sequences(), 16
    block = selected_block(sequences, num_kept)
    state = METHOD.prefill(block, None, num_kept + STEPS)
    np.testing.assert_array_equal(state.reader_state.num_blocks, [1, 0, 1])  # (16 - 3 sinks - 6) // 4
    for b, head in ((0, 0), (2, 1)):
        pos = np.asarray(block.pos[b, head, 3:7])
        for group in range(G):
            np.testing.assert_allclose(
                state.reader_state.keys[b, head, group, 0], sequences[b][1][head, pos].mean(0), atol=1e-5
            )
    out, _ = extend(METHOD, state, token_chunk(sequences, LENGTHS, [1, 1, 1]), 1)
    for b, n in enumerate(LENGTHS):
        for head in range(K):
            without_selection = np.asarray(block.pos[b, head])
            without_selection = [*without_selection[without_selection >= 0], n]
            near, far = without_selection[-6:], without_selection[:-6]
            q, k, v = sequences[b]
            for group in range(G):
                near_q = rope(q[head, group, [n]], [n])[0]
                far_q = rope(q[head, group, [n]], [5])[0]
                logits = np.concatenate([rope(k[head, near], near) @ near_q, k[head, far] @ far_q])
                expected = softmax(logits / np.sqrt(H)) @ v[head, near + far]
                np.testing.assert_allclose(out[b, head, group, 0], expected, atol=2e-5)


@pytest.mark.parametrize("selection", ["snapkv:budget=9,window=2,kernel=3", "keynorm:budget=9"])
def test_behind_a_selection_with_a_window_for_all_it_reads_what_is_left(selection):
    sequences = random_sequences()
    limit = infllm(**{**SMALL, "local": 60})
    method, plain = (bind_method(compose(parse(selection), x)) for x in (limit, Method()))
    assert method.needs.prompt_chunk == 0  # the prompt's attention is exact
    block = selected_block(sequences, 9)
    bias = jnp.where(block.pos >= 0, (block.pos % 3).astype(jnp.float32), 0.0)
    outs = []
    for bound_layer in (method, plain):
        without_selection = dataclasses.replace(
            bound_layer, method=dataclasses.replace(bound_layer.method, select=None)
        )
        state = without_selection.prefill(dataclasses.replace(block, bias=bias).clean(), None, 9 + STEPS)
        outs.append(extend(without_selection, state, token_chunk(sequences, LENGTHS, [4, 4, 4]), 4)[0])
    np.testing.assert_allclose(*outs, atol=2e-5)


def test_rows_held_in_low_bits_are_fetched_from_there():
    sequences = random_sequences()
    method = bind_method(compose(infllm(**SMALL), parse("kivi:bits=8,group=4,residual=4")))
    out, _ = decode(method, sequences, steps=0)
    for b, n in enumerate(LENGTHS):  # single steps
        expected, _ = oracle_infllm(
            *(x[..., :n, :] for x in sequences[b]), [1] * n, **{k: v for k, v in SMALL.items() if k != "chunk"}
        )
        np.testing.assert_allclose(out[b], expected, atol=0.05)


def test_a_whole_model_reads_its_prompt_through_it():
    model, prompts = toy_model(layers=2), [[5, 6, 7, 8, 9, 3, 2, 11, 12, 13, 14], [4, 1, 2]]
    method = infllm(**{**SMALL, "topk": 99, "chunk": 4})
    _, cache = kvjax.prefill(model, prompts, method, capacity=64)
    planned = kvjax.planned_bytes(method, model.config, 11, capacity=64, batch=2, dtype=model.dtype)
    assert planned.total == array_bytes(cache)
    at_once, _ = kvjax.extend(model, [[1, 2, 3, 4, 5], [7, 8]], cache)
    for t in range(5):
        single_out, cache = kvjax.extend(model, [[1 + t], [(7, 8)[t % 2]]], cache)
        np.testing.assert_allclose(single_out[0, 0], at_once[0, t], atol=1e-4)
        if t < 2:
            np.testing.assert_allclose(single_out[1, 0], at_once[1, t], atol=1e-4)


def test_a_prompt_that_fills_its_cache_is_held_whole():
    """Its last chunk must not be padded beyond the last slot."""
    model, prompts = toy_model(layers=1), [[t % 90 for t in range(63)], [4, 1, 2]]
    tokens = [kvjax.prefill(model, prompts, method, capacity=64)[1].layers[0] for method in (infllm(**SMALL), Method())]
    actual, expected = (memory.unpack(state.k) for state in tokens)
    np.testing.assert_array_equal(tokens[0].pos, tokens[1].pos)
    for b, n in enumerate(map(len, prompts)):
        np.testing.assert_allclose(actual[b, :, :n], expected[b, :, :n], atol=1e-5)


def test_bfloat16_stays_close_to_the_paper():
    sequences = [
        tuple(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in sequence)
        for sequence in random_sequences(5)
    ]
    state = empty_state(METHOD, B, SLOTS, jnp.bfloat16)

    def half(tokens):
        q, k, v, pos = tokens
        return *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), pos

    out, state = extend(METHOD, state, half(token_chunk(sequences, 0 * LENGTHS, LENGTHS)), int(LENGTHS.max()))
    expected, _ = oracle_infllm(
        *(x[..., :19, :] for x in sequences[2]),
        chunk_lengths(19, 5, 0),
        **{k: v for k, v in SMALL.items() if k != "chunk"},
    )
    np.testing.assert_allclose(out[2, :, :, :19], expected, atol=0.08)


def test_a_prompt_is_committed_whole():
    chunk = token_chunk(random_sequences()[:1], [0], [7])
    with pytest.raises(KvjaxError, match="got commit=1 of 7"):
        extend(METHOD, empty_state(METHOD, 1, 9, jnp.float32), chunk, 1)
