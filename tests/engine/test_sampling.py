"""Samplers against their definitions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.attention import MASKED_LOGIT
from kvjax.engine.sampling import SamplingParams, apply_filters, sample, sequence_keys
from kvjax.errors import KvjaxError
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testing import toy_model
from tests.models.test_chat import CHATML

PROBABILITIES = np.array([[0.5, 0.05, 0.25, 0.15, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]])
LOGITS = jnp.asarray(np.log(PROBABILITIES), jnp.float32)


def kept_tokens(**fields) -> list[list[int]]:
    """The token ids that the filters leave in each sequence."""
    logits = apply_filters(SamplingParams(temperature=1.0, **fields).sampler(), LOGITS)
    return [np.flatnonzero(row > MASKED_LOGIT / 2).tolist() for row in np.asarray(logits)]


def test_greedy_takes_the_first_of_the_likeliest():
    assert sample(SamplingParams().sampler(), LOGITS, sequence_keys(jax.random.key(0), 2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({"top_k": 1}, [0], [0]),
        ({"top_k": 3}, [0, 2, 3], [0, 1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ({"top_p": 0.4}, [0], [0, 1]),
        ({"top_p": 0.6}, [0, 2], [0, 1, 2]),
        ({"top_p": 0.76}, [0, 2, 3], [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0], [0]),
        ({"min_p": 0.4}, [0, 2], [0, 1, 2, 3, 4]),
        ({"min_p": 0.0}, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.6}, [0, 2], [0, 1]),
    ],
)
def test_filters_keep_what_they_define(fields, first, second):
    assert kept_tokens(**fields) == [first, second]


VOCABULARY = 152_000  # Qwen's


def count_kept(logits: np.ndarray, **fields) -> int:
    """How many tokens the filters leave of one sequence's logits."""
    filtered = filter_logits(
        SamplingParams(temperature=1.0, **fields).sampler(), jnp.asarray(logits, jnp.float32)[None]
    )
    return int((np.asarray(filtered) > MASKED_LOGIT / 2).sum())


filter_logits = jax.jit(apply_filters)


def test_a_top_p_of_one_keeps_the_whole_vocabulary():
    """The rounded sum of 152,000 probabilities reaches 1 before the last tokens."""
    logits = np.random.default_rng(0).normal(size=VOCABULARY) * 3
    assert count_kept(logits, top_p=1.0) == VOCABULARY
    assert count_kept(logits, top_p=1.0, min_p=0.0, top_k=VOCABULARY) == VOCABULARY
    assert count_kept(logits, top_p=1.0, top_k=100) == 100
    assert count_kept(np.array([0.0, -200.0, -1000.0]), top_p=1.0) == 3  # their probabilities are 0 in float32


@pytest.mark.parametrize(("fraction", "count"), [(0.1, 15_200), (0.5, 76_000), (0.9, 136_800), (0.999, 151_848)])
def test_top_p_counts_equal_tokens_of_a_large_vocabulary_exactly(fraction, count):
    assert count_kept(np.zeros(VOCABULARY), top_p=fraction) == count


def exact_top_p(tenths: tuple[int, ...], bound: int) -> int:
    """The fewest likeliest tokens that reach a probability, in whole tenths."""
    reached, count = 0, 0
    for x in sorted(tenths, reverse=True):
        if reached >= bound:
            break
        reached, count = reached + x, count + 1
    return count


TENTHS = [(3, 1, 1, 5), (4, 3, 2, 1), (2, 2, 2, 2, 2), (6, 1, 1, 1, 1), (1,) * 10, (7, 3), (5, 2, 2, 1)]


@pytest.mark.parametrize("offset", [0.0, 3.7, -41.3])
def test_top_p_and_min_p_are_exact_where_a_token_is_on_the_boundary(offset):
    assert exact_top_p((3, 1, 1, 5), 8) == 2
    for tenths in TENTHS:
        logits = np.log(np.array(tenths, np.float32) / 10) + np.float32(offset)
        for bound in range(1, 11):
            kept = exact_top_p(tenths, bound) if bound < 10 else len(tenths)
            assert count_kept(logits, top_p=bound / 10) == kept, (tenths, bound)
            kept = sum(10 * x >= bound * max(tenths) for x in tenths)
            assert count_kept(logits, min_p=bound / 10) == kept, (tenths, bound)


def test_a_tiny_bound_keeps_the_likeliest_token_and_a_min_p_of_one_its_equals():
    logits = np.array([0.0, 1.0, 1.0, 0.5])
    assert count_kept(logits, top_p=1e-30) == count_kept(logits, top_k=1) == 1
    assert count_kept(logits, min_p=1.0) == count_kept(logits, top_k=2) == 2
    assert count_kept(logits, min_p=1e-30) == count_kept(logits, top_k=2**31 - 1) == 4


def probabilities_by_definition(logits: np.ndarray, temperature: float, top_k=None, top_p=None, min_p=None):
    """The probabilities f64[V] of one sequence's tokens, by the definitions of the filters, in float64."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    order = np.argsort(-logits, kind="stable")
    kept = order[: len(order) if top_k is None else top_k]
    if top_p is not None and top_p < 1:
        p = np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
        kept = kept[np.cumsum(p) - p < top_p * (1 - 1e-6)]
    if min_p is not None:
        kept = kept[np.exp(scaled[kept]) >= min_p * (1 - 1e-6)]
    p = np.zeros(len(logits))
    p[kept] = np.exp(scaled[kept])
    return p / p.sum()


EXTREMES = {
    "negative": [-50.0, -60.0, -60.0, -1e4],
    "positive": [60.0, 50.0, 59.0, -3.0],
    "of both signs": [-0.5, 0.25, -40.0, 0.125],
    "small": [-1e-20, -2e-20, 0.0, -1e-30],
    "ties": [-7.0, -5.0, -5.0, -5.0],
    "without a chance": [-50.0, -np.inf, -51.0, -np.inf],
}
FILTERS = ({}, {"top_k": 1}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1})


@pytest.mark.parametrize("temperature", [1e-30, 1e-29, 1e-20, 0.01, 1.0, 1e30])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_no_temperature_draws_what_a_filter_drops(temperature, fields):
    """As `generate` samples, and as `speculate` verifies, which turns the same logits into probabilities."""
    logits = np.array(list(EXTREMES.values()), np.float32)
    sampler = SamplingParams(temperature=temperature, **fields).sampler()
    expected = np.stack([probabilities_by_definition(row, temperature, **fields) for row in logits])
    np.testing.assert_allclose(jax.nn.softmax(filter_logits(sampler, jnp.asarray(logits)), -1), expected, atol=1e-6)
    draw = jax.jit(jax.vmap(lambda keys: sample(sampler, jnp.asarray(logits), keys)))
    tokens = draw(jax.random.split(jax.random.key(0), (64, len(logits))))
    assert (expected[np.arange(len(logits)), np.asarray(tokens)] > 0).all()


NUM_DRAWS = 20_000
FIVE_SIGMA = 5 * np.sqrt(0.25 / NUM_DRAWS)


def draw_frequencies(temperature: float, seed: int) -> np.ndarray:
    """The frequencies of the tokens in many draws from the first sequence's logits."""
    sampler = SamplingParams(temperature=temperature).sampler()

    def draw(key):
        return sample(sampler, LOGITS[:1], key[None])[0]

    tokens = jax.vmap(draw)(jax.random.split(jax.random.key(seed), NUM_DRAWS))
    return np.bincount(np.asarray(tokens), minlength=5) / NUM_DRAWS


def test_draws_follow_the_probabilities():
    np.testing.assert_allclose(draw_frequencies(1.0, seed=0), PROBABILITIES[0], atol=FIVE_SIGMA)


def test_temperature_divides_the_logits():
    roots = np.sqrt(PROBABILITIES[0])
    np.testing.assert_allclose(draw_frequencies(2.0, seed=1), roots / roots.sum(), atol=FIVE_SIGMA)


def test_a_rows_draw_does_not_depend_on_its_neighbours():
    s = SamplingParams(temperature=1.0, top_p=0.9).sampler()
    keys = sequence_keys(jax.random.key(3), 2)
    assert sample(s, LOGITS, keys)[0] == sample(s, LOGITS[:1], sequence_keys(jax.random.key(3), 1))[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -1.0}, "temperature must be a number from 1e-30 to 1e\\+30, got -1.0; 0 is greedy"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an integer from 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be a number from"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p must be a number from 0 to 1"),
        ({"temperature": 1e-40}, "temperature must be a number"),  # logits over it would be infinite
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k must be an integer"),
        ({"temperature": 1.0, "top_k": 2**31}, "top_k must be an integer"),
        ({"temperature": 1.0, "top_p": 1e-40}, "top_p must be a number"),  # float32 has no such number
        ({"top_k": 5}, "need temperature > 0"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 1e-30 to 1e.30, got 0; 1 is none"),
        ({"repetition_penalty": "1"}, "repetition_penalty must be a number"),
        ({"presence_penalty": 2.5}, "presence_penalty must be a number from -2 to 2, got 2.5; 0 is none"),
        ({"presence_penalty": None}, "presence_penalty must be a number from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be a number from -2 to 2"),
        ({"frequency_penalty": True}, "frequency_penalty must be a number from -2 to 2"),
    ],
)
def test_values_out_of_range_are_refused(fields, says):
    with pytest.raises(KvjaxError, match=says):
        SamplingParams(**fields)


def test_params_are_plain_and_hash():
    """A value is static in a compiled program, from whatever kind of numbers it was made."""
    numbers = (
        jnp.float32(0.5),
        np.int64(3),
        np.float32(0.75),
        jnp.float32(0.25),
        np.uint8(7),
        jnp.float32(1.5),
        np.int64(1),
    )
    params, plain = kvjax.SamplingParams(*numbers), kvjax.SamplingParams(0.5, 3, 0.75, 0.25, 7, 1.5, 1)
    assert params == plain and hash(params) == hash(dataclasses.astuple(params))
    assert [type(x) for x in dataclasses.astuple(params)] == [float, int, float, float, int, float, float, float]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1


@pytest.fixture(scope="module")
def model():
    return dataclasses.replace(
        toy_model(layers=1, vocab_size=vocab.SIZE),
        tokenizer=Tokenizer(vocab.tokenizer()),
        chat_template=ChatTemplate(CHATML),
    )


def sampling_calls(model):
    """The calls that draw tokens, as functions of the sampling keywords."""
    context = kvjax.read(model, ["a b", "c"], "full", headroom=16)
    more = {"max_new_tokens": 4, "eos_ids": ()}
    draft = {"draft": "full", "num_draft_tokens": 1}
    return {
        "generate": lambda **kw: kvjax.generate(model, ["a b", "c"], "full", **more, **kw).tokens,
        "stream": lambda **kw: list(kvjax.stream(model, ["a b", "c"], "full", **more, **kw)),
        "stream_text": lambda **kw: "".join(kvjax.stream_text(model, "a b", "full", **more, **kw)),
        "generate of a context": lambda **kw: context.generate(**more, **kw).tokens,
        "stream of a context": lambda **kw: list(context.stream(**more, **kw)),
        "chat": lambda **kw: kvjax.chat(model, [{"role": "user", "content": "a"}], **more, **kw).tokens,
        "start": lambda **kw: context.start(**more, **kw).finish(4).tokens,
        "ask": lambda **kw: context.ask(["b", "a"], **more, **kw).tokens,
        "speculate": lambda **kw: kvjax.speculative.speculate(model, ["a b", "c"], **draft, **more, **kw).tokens,
    }


def test_all_calls_take_params_or_their_fields_and_not_both(model):
    fields = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    params = kvjax.SamplingParams(**fields)
    for name, call in sampling_calls(model).items():
        tokens = call(sampling=params)
        assert tokens == call(**fields) != call(), name
        says = "sampling and temperature, seed are both given.*replace\\(sampling, temperature=0.0, seed=1\\)"
        with pytest.raises(KvjaxError, match=says):
            call(sampling=params, temperature=0.0, seed=1)
        with pytest.raises(KvjaxError, match="sampling is a value such as kvjax.SamplingParams"):
            call(sampling={"temperature": 1.0})
