"""The record of each token, against cases counted by hand, NumPy, and caches that nobody watches."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.attention import causal_attention
from kvjax.engine.positions import token_positions
from kvjax.explore import token_codes
from kvjax.explore.exploration import explore
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


def level_error(level: int) -> float:
    """The error of a level, as a fraction of the vector's length."""
    return 2.0 ** (token_codes.LEAST_LOG2 + token_codes.STEP_LOG2 * level) if level else 0.0


@pytest.fixture(scope="module")
def model():
    return toy_model(layers=2)


@pytest.fixture(scope="module")
def exploration(model):
    own = LastTokens(9)
    messages = []
    record = explore(model, PROMPT, [*METHODS, own], STEPS, messages.append)
    assert messages == ["full", *METHODS, kvjax.name_of(own)]
    return record


@pytest.fixture(scope="module")
def by_name(exploration):
    return {m.name: m for m in exploration.methods}


def caches(model, method, exploration):
    """The caches of a method that nobody watches, after the prompt and after each token of the answer."""
    context = kvjax.read(model, [PROMPT], method, headroom=STEPS)
    yield context
    for token in exploration.answer:
        context = context.feed([[token]], decoded=True)
        yield context


def held_positions(context):
    """bool[L K P]: the positions that a cache holds."""
    is_held = np.zeros((2, 2, len(PROMPT) + STEPS), bool)
    for layer, (row,) in enumerate(context.kept_positions()):
        for head, at in enumerate(row):
            is_held[layer, head, at] = True
    return is_held


@pytest.mark.parametrize("method", [KVCRUSH, MERGING, KIVI_HOST, STREAMING, ADAKV, MIKV, MINICACHE])
def test_what_is_held_is_what_a_cache_holds_that_nobody_watches(model, exploration, by_name, method):
    before, *after = map(held_positions, caches(model, method, exploration))
    watched = by_name[method].status_codes
    for step, then in enumerate(after):
        bits = watched[:, :, step]
        assert np.array_equal(bits & token_codes.HELD > 0, before | then)
        assert np.array_equal(bits & token_codes.LEAVES > 0, before & ~then)
        before = then


@pytest.mark.parametrize("method", [KVCRUSH, KIVI_HOST, STREAMING, SPECACHE])
def test_a_method_that_is_watched_answers_as_ever(model, exploration, by_name, method):
    plain = kvjax.generate(model, [PROMPT], method, max_new_tokens=STEPS, capacity=64)
    assert by_name[method].own_answer == plain.tokens[0]
    bytes_ = kvjax.state_bytes(kvjax.prefill(model, [PROMPT], method, capacity=64)[1])
    assert by_name[method].bytes == bytes_


def test_the_answer_is_that_of_full_whichever_methods_are_asked_for(model, exploration, by_name):
    alone = explore(model, PROMPT, SNAPKV, 2)
    assert exploration.answer[:2] == alone.answer and by_name["full"].own_answer == exploration.answer
    assert exploration.likeliest[:-1] == exploration.answer[1:] and by_name["full"].likeliest == exploration.likeliest
    assert not by_name["full"].lost_attention.any() and not by_name["full"].error_codes.any()


def exact_attention(model, ids):
    """f64[L K T S] in NumPy, from one pass over the whole text without a cache: the mean over each head's queries."""
    queries_and_keys = []

    def attend(i, q, k, v, x):
        queries_and_keys.append((np.asarray(q, np.float64)[0], np.asarray(k, np.float64)[0]))
        return causal_attention(q, k, v), None

    tokens = jnp.asarray([ids], jnp.int32)
    Decoder(model.config, model.dtype).apply({"params": model.params}, tokens, token_positions(tokens), attend)
    rows = []
    for q, k in queries_and_keys:
        s = np.einsum("kgth,ksh->kgts", q, k) / np.sqrt(q.shape[-1])
        s = np.where(np.tri(len(ids), dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        rows.append((p / p.sum(-1, keepdims=True)).mean(1))
    return np.stack(rows)


def test_exact_attention_is_that_of_numpy_and_sums_to_one(model, exploration):
    expected = exact_attention(model, [*PROMPT, *exploration.answer])[:, :, len(PROMPT) :]
    assert exploration.attention.shape == expected.shape == (2, 2, STEPS, len(PROMPT) + STEPS)
    np.testing.assert_allclose(exploration.attention, expected, atol=1e-5)
    np.testing.assert_allclose(exploration.attention.sum(3), 1, atol=1e-5)


def test_a_sliding_window_gets_no_attention_beyond_it():
    model = toy_model(layers=2, windows=(6, 6))
    record = explore(model, PROMPT, "full", 2)
    assert not record.attention[:, :, 0, : len(PROMPT) - 5].any()
    np.testing.assert_allclose(record.attention.sum(3), 1, atol=1e-5)


@pytest.mark.parametrize("method", [STREAMING, ADAKV])
def test_lost_attention_is_that_of_numpy(model, exploration, by_name, method):
    exact = exact_attention(model, [*PROMPT, *exploration.answer])[:, :, len(PROMPT) :]
    held_by_step = [held_positions(context) for context in caches(model, method, exploration)]
    for step in range(STEPS):
        is_held = held_by_step[step].copy()
        is_held[:, :, len(PROMPT) + step] = True  # its own token
        gone = np.where(is_held, 0, exact[:, :, step]).sum(-1)
        np.testing.assert_allclose(by_name[method].lost_attention[:, :, step], gone, atol=1e-5)
        assert gone.max() > 0.05


def test_streaming_llm_loses_its_oldest_recent_token_in_each_step(by_name):
    for step in range(STEPS):
        bits = by_name[STREAMING].status_codes[0, 0, step]
        n = len(PROMPT) + step
        assert np.flatnonzero(bits).tolist() == [0, 1, *range(n - 6, n + 1)]
        assert np.flatnonzero(bits & token_codes.LEAVES).tolist() == [n - 6]


def test_kivi_holds_its_residual_exactly_and_the_rest_in_few_bits(by_name):
    for step in range(STEPS):
        errors, n = by_name[KIVI].error_codes[0, 0, step], len(PROMPT) + step + 1
        keys, values = (n - 1) // 8 * 8, max(n - 1 - 8, 0)  # the groups that were full when the newest token came
        at = np.arange(n)
        assert np.array_equal(errors[:n] >> 4 > 0, at < keys) and np.array_equal(errors[:n] & 15 > 0, at < values)


def test_host_memory_holds_codes_and_not_what_a_residual_has(by_name):
    bits, errors = (
        x[0, 0, -1, : len(PROMPT) + STEPS] for x in (by_name[KIVI_HOST].status_codes, by_name[KIVI_HOST].error_codes)
    )
    assert np.array_equal(bits & token_codes.KEY_HOST > 0, errors >> 4 > 0)
    assert (
        np.array_equal(bits & token_codes.VALUE_HOST > 0, errors & 15 > 0)
        and (errors == 0).any()
        and (errors > 0).any()
    )


def test_kcache_has_values_on_the_host_but_for_its_first_layer(by_name):
    bits = by_name[KCACHE].status_codes[:, :, -1]
    assert np.all(bits[0] == token_codes.HELD) and np.all(bits[1] == token_codes.HELD | token_codes.VALUE_HOST)
    assert not by_name[KCACHE].error_codes.any()


def test_representatives_are_the_same_in_all_heads_and_exact(by_name):
    marked = by_name[KVCRUSH].status_codes & token_codes.REPRESENTS > 0
    assert np.array_equal(marked[:, 0], marked[:, 1])
    assert (marked[:, :, 0].sum(-1) == 3).all()  # half of the 8 tokens but the window of 2
    assert not marked[..., len(PROMPT) - 2 :].any() and not by_name[KVCRUSH].error_codes.any()
    assert not (by_name[SNAPKV].status_codes & token_codes.REPRESENTS).any()


def test_merged_tokens_are_those_whose_values_changed(by_name):
    is_merged, errors = by_name[MERGING].status_codes & token_codes.MERGED > 0, by_name[MERGING].error_codes
    assert is_merged.any() and np.array_equal(is_merged, errors > 0) and not (errors >> 4).any()


def test_a_low_tier_is_told_apart(by_name):
    bits, errors = (x[0, :, 0, : len(PROMPT)] for x in (by_name[MIKV].status_codes, by_name[MIKV].error_codes))
    assert (bits == token_codes.HELD).all() and ((errors > 0).sum(-1) == len(PROMPT) // 2).all()


def test_what_cannot_be_told_is_said(by_name, exploration):
    untold = by_name[MINICACHE].status_codes & token_codes.UNTOLD > 0
    assert untold.any() and not by_name[MINICACHE].error_codes[untold].any()
    foreign = exploration.methods[-1].status_codes
    assert (foreign[foreign > 0] & token_codes.UNTOLD > 0).all()
    assert by_name[SPECACHE].has_reader_state and not by_name[KIVI].has_reader_state


def test_an_answer_ends_where_the_model_ends_it(model, exploration):
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=(exploration.answer[1],)))
    short = explore(ending, PROMPT, "full", STEPS)
    stop = exploration.answer.index(exploration.answer[1]) + 1
    assert short.answer == exploration.answer[:stop] and short.attention.shape[2] == stop


def test_levels_of_errors_are_those_of_the_page():
    assert level_error(0) == 0 and level_error(token_codes.LEVELS) == 1
    assert level_error(1) < 0.004
