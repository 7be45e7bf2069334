"""What is recorded of each token, against cases counted by hand, NumPy, and caches that nobody watches."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.attention import causal_attention
from kvjax.engine.positions import token_positions
from kvjax.explore import state
from kvjax.explore.record import explored
from kvjax.models.decoder import Decoder
from kvjax.testing import toy_model
from tests.contract.test_conformance import LastTokens

PROMPT = np.random.default_rng(3).integers(1, 97, 22).tolist()
STEPS = 5
METHODS = (
    "full",
    "snapkv:budget=8,window=2,kernel=3",
    "snapkv:budget=8,window=2,kernel=3 + kvcrush:share=0.5",
    "snapkv:budget=8,window=2,kernel=3 + merging",
    "kivi:bits=2,group=4,residual=8",
    "kivi:bits=4,group=4,residual=8 + offload",
    "kcache:n=4,device_layers=1",
    "streaming_llm:recent=6,sinks=2",
    "adakv + snapkv:budget=8,window=2,kernel=3",
    "mikv:share=0.5",
    "specache:bits=1,group=4,residual=4,topk=3",
    "minicache:start=0",
)
SNAPKV, KVCRUSH, MERGING, KIVI, KIVI_HOST, KCACHE, STREAMING, ADAKV, MIKV, SPECACHE, MINICACHE = METHODS[1:]


@pytest.fixture(scope="module")
def model():
    return toy_model(layers=2)


@pytest.fixture(scope="module")
def found(model):
    own = LastTokens(9)
    said = []
    record = explored(model, PROMPT, [*METHODS, own], STEPS, said.append)
    assert said == ["full", *METHODS, kvjax.name_of(own)]
    return record


@pytest.fixture(scope="module")
def by_name(found):
    return {m.name: m for m in found.methods}


def caches(model, method, found):
    """The caches of a method that nobody watches, after the prompt and after each token of the answer."""
    context = kvjax.read(model, [PROMPT], method, room=STEPS)
    yield context
    for token in found.answer:
        context = context.feed([[token]], decoded=True)
        yield context


def positions(context):
    """bool[L K P]: the positions that a cache holds."""
    held = np.zeros((2, 2, len(PROMPT) + STEPS), bool)
    for layer, (row,) in enumerate(context.kept_positions()):
        for head, at in enumerate(row):
            held[layer, head, at] = True
    return held


@pytest.mark.parametrize("method", [KVCRUSH, MERGING, KIVI_HOST, STREAMING, ADAKV, MIKV, MINICACHE])
def test_what_is_held_is_what_a_cache_holds_that_nobody_watches(model, found, by_name, method):
    before, *after = map(positions, caches(model, method, found))
    watched = by_name[method].held
    for step, then in enumerate(after):
        bits = watched[:, :, step]
        assert np.array_equal(bits & state.HELD > 0, before | then)
        assert np.array_equal(bits & state.LEAVES > 0, before & ~then)
        before = then


@pytest.mark.parametrize("method", [KVCRUSH, KIVI_HOST, STREAMING, SPECACHE])
def test_a_method_that_is_watched_answers_as_ever(model, found, by_name, method):
    plain = kvjax.generate(model, [PROMPT], method, max_new_tokens=STEPS, capacity=64)
    assert by_name[method].own == plain.tokens[0]
    bytes_ = kvjax.state_bytes(kvjax.prefill(model, [PROMPT], method, capacity=64)[1])
    assert by_name[method].bytes == bytes_


def test_the_answer_is_that_of_full_whichever_methods_are_asked_for(model, found, by_name):
    alone = explored(model, PROMPT, SNAPKV, 2)
    assert found.answer[:2] == alone.answer and by_name["full"].own == found.answer
    assert found.likeliest[:-1] == found.answer[1:] and by_name["full"].likeliest == found.likeliest
    assert not by_name["full"].lost.any() and not by_name["full"].off.any()


def exact_attention(model, ids):
    """f64[L K T S] in NumPy, from one pass over the whole text without a cache: the mean over each head's queries."""
    seen = []

    def attend(i, q, k, v, x):
        seen.append((np.asarray(q, np.float64)[0], np.asarray(k, np.float64)[0]))
        return causal_attention(q, k, v), None

    tokens = jnp.asarray([ids], jnp.int32)
    Decoder(model.config, model.dtype).apply({"params": model.params}, tokens, token_positions(tokens), attend)
    rows = []
    for q, k in seen:
        s = np.einsum("kgth,ksh->kgts", q, k) / np.sqrt(q.shape[-1])
        s = np.where(np.tri(len(ids), dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        rows.append((p / p.sum(-1, keepdims=True)).mean(1))
    return np.stack(rows)


def test_exact_attention_is_that_of_numpy_and_sums_to_one(model, found):
    expected = exact_attention(model, [*PROMPT, *found.answer])[:, :, len(PROMPT) :]
    assert found.attention.shape == expected.shape == (2, 2, STEPS, len(PROMPT) + STEPS)
    np.testing.assert_allclose(found.attention, expected, atol=1e-5)
    np.testing.assert_allclose(found.attention.sum(3), 1, atol=1e-5)


def test_a_sliding_window_gets_no_attention_beyond_it():
    model = toy_model(layers=2, windows=(6, 6))
    record = explored(model, PROMPT, "full", 2)
    assert not record.attention[:, :, 0, : len(PROMPT) - 5].any()
    np.testing.assert_allclose(record.attention.sum(3), 1, atol=1e-5)


@pytest.mark.parametrize("method", [STREAMING, ADAKV])
def test_lost_attention_is_that_of_numpy(model, found, by_name, method):
    exact = exact_attention(model, [*PROMPT, *found.answer])[:, :, len(PROMPT) :]
    held = [positions(context) for context in caches(model, method, found)]
    for step in range(STEPS):
        there = held[step].copy()
        there[:, :, len(PROMPT) + step] = True  # its own token
        gone = np.where(there, 0, exact[:, :, step]).sum(-1)
        np.testing.assert_allclose(by_name[method].lost[:, :, step], gone, atol=1e-5)
        assert gone.max() > 0.05


def test_streaming_llm_loses_its_oldest_recent_token_in_each_step(by_name):
    for step in range(STEPS):
        bits = by_name[STREAMING].held[0, 0, step]
        n = len(PROMPT) + step
        assert np.flatnonzero(bits).tolist() == [0, 1, *range(n - 6, n + 1)]
        assert np.flatnonzero(bits & state.LEAVES).tolist() == [n - 6]


def test_kivi_holds_its_residual_exactly_and_the_rest_in_few_bits(by_name):
    for step in range(STEPS):
        off, n = by_name[KIVI].off[0, 0, step], len(PROMPT) + step + 1
        keys, values = (n - 1) // 8 * 8, max(n - 1 - 8, 0)  # what was due when the newest token came
        at = np.arange(n)
        assert np.array_equal(off[:n] >> 4 > 0, at < keys) and np.array_equal(off[:n] & 15 > 0, at < values)


def test_host_memory_holds_codes_and_not_what_a_residual_has(by_name):
    bits, off = (x[0, 0, -1, : len(PROMPT) + STEPS] for x in (by_name[KIVI_HOST].held, by_name[KIVI_HOST].off))
    assert np.array_equal(bits & state.KEY_HOST > 0, off >> 4 > 0)
    assert np.array_equal(bits & state.VALUE_HOST > 0, off & 15 > 0) and (off == 0).any() and (off > 0).any()


def test_kcache_has_values_on_the_host_but_for_its_first_layer(by_name):
    bits = by_name[KCACHE].held[:, :, -1]
    assert np.all(bits[0] == state.HELD) and np.all(bits[1] == state.HELD | state.VALUE_HOST)
    assert not by_name[KCACHE].off.any()


def test_representatives_are_the_same_in_all_heads_and_exact(by_name):
    marked = by_name[KVCRUSH].held & state.REPRESENTS > 0
    assert np.array_equal(marked[:, 0], marked[:, 1])
    assert (marked[:, :, 0].sum(-1) == 3).all()  # half of the 8 tokens but the window of 2
    assert not marked[..., len(PROMPT) - 2 :].any() and not by_name[KVCRUSH].off.any()
    assert not (by_name[SNAPKV].held & state.REPRESENTS).any()


def test_merged_tokens_are_those_whose_values_changed(by_name):
    merged, off = by_name[MERGING].held & state.MERGED > 0, by_name[MERGING].off
    assert merged.any() and np.array_equal(merged, off > 0) and not (off >> 4).any()


def test_a_low_tier_is_told_apart(by_name):
    bits, off = (x[0, :, 0, : len(PROMPT)] for x in (by_name[MIKV].held, by_name[MIKV].off))
    assert (bits == state.HELD).all() and ((off > 0).sum(-1) == len(PROMPT) // 2).all()


def test_what_cannot_be_told_is_said(by_name, found):
    untold = by_name[MINICACHE].held & state.UNTOLD > 0
    assert untold.any() and not by_name[MINICACHE].off[untold].any()
    foreign = found.methods[-1].held
    assert (foreign[foreign > 0] & state.UNTOLD > 0).all()
    assert by_name[SPECACHE].aside and not by_name[KIVI].aside


def test_an_answer_ends_where_the_model_ends_it(model, found):
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=(found.answer[1],)))
    short = explored(ending, PROMPT, "full", STEPS)
    stop = found.answer.index(found.answer[1]) + 1
    assert short.answer == found.answer[:stop] and short.attention.shape[2] == stop


def test_levels_of_errors_are_those_of_the_page():
    assert state.error_of(0) == 0 and state.error_of(state.LEVELS) == 1
    assert state.error_of(1) < 0.004
