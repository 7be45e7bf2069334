"""Penalties against their definitions: Keskar et al. 2019 (arXiv 1909.05858, section 4.1) and OpenAI's other two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.engine.sampling import Penalties, SamplingParams, TokenCounts, apply_penalties
from kvjax.errors import KvjaxError
from kvjax.generation import decode_loop
from kvjax.testing import toy_model
from tests.generation.test_logprobs import assert_log_probs

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
PENALTIES = {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.4}
DRAFTS = "specache:bits=1,group=8,residual=8,topk=99"


@pytest.fixture(scope="module")
def model():
    return toy_model(layers=1)


def penalize(logits, prompt, answer, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0):
    """The oracle: one sequence's logits [V] after its penalties."""
    logits = np.array(logits, np.float64)
    for token in {*prompt, *answer}:
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    for token in answer:
        logits[token] -= frequency_penalty
    for token in {*answer}:
        logits[token] -= presence_penalty
    return logits


def oracle_tokens(model, prompt, count, **penalties):
    """Greedy tokens through the uncached forward pass, with the oracle's penalties."""
    answer = []
    for _ in range(count):
        logits = np.asarray(kvjax.logits(model, [[*prompt, *answer]])[0, -1])
        answer.append(int(penalize(logits, prompt, answer, **penalties).argmax()))
    return answer


@pytest.mark.parametrize("fields", [{name: value} for name, value in PENALTIES.items()] + [PENALTIES], ids=str)
def test_logits_are_penalized_as_defined(fields):
    rng = np.random.default_rng(0)
    logits, prompts, answers = rng.normal(size=(2, 12)) * 3, [[1, 2, 2], [5]], [[2, 2, 7], [5, 5, 11]]
    counts = np.stack([np.bincount(row, minlength=12) for row in answers])
    in_prompt = np.stack([np.isin(np.arange(12), row) for row in prompts])
    sampler = SamplingParams(**fields).sampler()
    assert isinstance(sampler.penalties, Penalties)
    token_counts = TokenCounts(jnp.asarray(in_prompt), jnp.asarray(counts, jnp.int32))
    out = apply_penalties(sampler.penalties, jnp.asarray(logits, jnp.float32), token_counts)
    expected = [penalize(*row, **fields) for row in zip(logits, prompts, answers, strict=True)]
    np.testing.assert_allclose(np.asarray(out), np.stack(expected), rtol=1e-5)


@pytest.fixture(scope="module")
def penalized(model):
    return [oracle_tokens(model, prompt, 6, **PENALTIES) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("method", "loop"), [("full", "layers"), ("full", "while"), ("full", "scan"), (DRAFTS, "layers"), (DRAFTS, "while")]
)
def test_greedy_tokens_are_the_oracles_in_all_loops_and_with_drafts(model, penalized, method, loop):
    """The log-probabilities that ride along are those of the logits before the penalties."""
    options = {"max_new_tokens": 6, "eos_ids": (), "loop": loop, "logprobs": 3}
    out = kvjax.generate(model, PROMPTS, method, **options, **PENALTIES)
    assert out.tokens == penalized
    assert_log_probs(model, out, PROMPTS, 3)


@pytest.mark.parametrize("name", PENALTIES)
def test_each_penalty_alone_gives_the_oracles_tokens(model, name):
    fields, plain = {name: 1.9}, {"max_new_tokens": 5, "eos_ids": ()}
    out = kvjax.generate(model, PROMPTS, "full", **plain, **fields)
    assert out.tokens == [oracle_tokens(model, prompt, 5, **fields) for prompt in PROMPTS]
    assert out.tokens != kvjax.generate(model, PROMPTS, "full", **plain).tokens


def test_drawn_tokens_are_those_of_the_penalized_logits(model, penalized):
    cold = {"temperature": 1e-4, **PENALTIES}  # so that the likeliest token is drawn
    options = {"max_new_tokens": 6, "eos_ids": ()}
    assert kvjax.generate(model, PROMPTS, "full", **options, **cold).tokens == penalized
    assert kvjax.generate(model, PROMPTS, "full", sampling=SamplingParams(**cold), **options).tokens == penalized


def test_values_do_not_recompile_and_neutral_ones_count_nothing(model):
    options = {"max_new_tokens": 3, "eos_ids": (), "loop": "layers"}
    kvjax.generate(model, PROMPTS, "full", **options, **PENALTIES)
    size = decode_loop.draw_next._cache_size()
    kvjax.generate(
        model, PROMPTS, "full", **options, repetition_penalty=1.1, presence_penalty=-2, frequency_penalty=2.0
    )
    assert decode_loop.draw_next._cache_size() == size
    neutral = kvjax.SamplingParams(repetition_penalty=1, presence_penalty=0, frequency_penalty=0)
    assert neutral == kvjax.SamplingParams() and not neutral.has_penalties
    assert jax.tree.structure(neutral.sampler()) == jax.tree.structure(SamplingParams().sampler())
    state = kvjax.read(model, PROMPTS, "full").start(sampling=neutral, max_new_tokens=2).state
    assert state.counts is None and state.logprobs is None
    state = kvjax.read(model, PROMPTS, "full").start(presence_penalty=1, max_new_tokens=2).state
    assert state.counts is not None and state.counts.in_prompt is None


def test_contexts_know_the_tokens_that_they_have_read(model):
    ask = {"max_new_tokens": 3, "eos_ids": (), **PENALTIES}
    context = kvjax.read(model, [[1, 2, 3], [4]], "full", headroom=32)

    def expected(*prompts):
        return kvjax.generate(model, list(prompts), "full", **ask).tokens

    whole, both = expected([1, 2, 3, 5, 6], [4, 7]), expected([1, 2, 3, 5, 6], [1, 2, 3, 7])
    assert context.ask([[5, 6], [7]], **ask).tokens == whole
    fed = context.feed([[5, 6], [7]])
    assert fed.generate(**ask).tokens == whole
    assert list(fed.stream(**ask)) == [list(step) for step in zip(*whole, strict=True)]
    assert fed.take([1, 0]).generate(**ask).tokens == whole[::-1]
    assert fed.crop([4, 1]).ask([[6], [7]], **ask).tokens == whole
    assert fed.take([0]).join(fed.take([1])).generate(**ask).tokens == whole
    one = kvjax.read(model, [[1, 2, 3]], "full", headroom=32)
    assert one.ask([[5, 6], [7]], **ask).tokens == both
    assert one.extend_prefix([[5, 6], [7]], "full").generate(**ask).tokens == both
    exact = kvjax.reuse.read_exactly(model, [[1, 2, 3, 5, 6]]).compress("full", capacity=32)
    assert exact.generate(**ask).tokens == whole[:1]


def test_where_the_prompt_is_unknown_a_repetition_penalty_is_refused_and_the_others_are_not(model, tmp_path):
    context = kvjax.read(model, [[1, 2, 3]], "full", headroom=32)
    resumed = kvjax.resume(model, context.save(tmp_path / "context"))
    _, cache = kvjax.prefill(model, [[1, 2, 3]], "full")
    calls = [
        lambda **kw: kvjax.generate(model, [[5]], cache=cache, max_new_tokens=4, **kw),
        lambda **kw: resumed.ask([[5]], max_new_tokens=4, **kw),
        lambda **kw: resumed.join(context).ask([[5], [5]], max_new_tokens=4, **kw),
        lambda **kw: context.edit(0, 1, [[4]]).ask([[5]], max_new_tokens=4, **kw),
    ]
    for call in calls:
        with pytest.raises(KvjaxError, match="repetition_penalty counts the tokens of the whole prompt"):
            call(repetition_penalty=1.2)
        assert call(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.0).tokens


def test_calls_that_cannot_count_refuse(model):
    plan = functional.bind("full", model.config)
    last, cache = functional.prefill(model.params, [[1, 2]], [2], plan, model.config, 16)
    with pytest.raises(KvjaxError, match="penalties count the tokens before, which a cache does not know"):
        functional.decode(model.params, cache, last.argmax(-1), 4, SamplingParams(presence_penalty=1))
    for name in PENALTIES:
        with pytest.raises(KvjaxError, match="speculate knows no penalties"):
            kvjax.speculative.speculate(model, [[1, 2]], "full", max_new_tokens=2, **{name: 1.5})
