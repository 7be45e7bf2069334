"""The scripts on eviction in miniature: their questions, comparisons and output, not the quality of a method."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from experiments.papers import (
    eviction,
    eviction_tables,
    streaming,
)
from experiments.papers.kvcrush import table2 as kvcrush_table2
from experiments.papers.specache import table2 as specache_table2
from kvjax import KvjaxError
from kvjax.models.tokenizer import Tokenizer
from kvjax.registry.strings import split_methods
from kvjax.testbed import tasks, vocab
from kvjax.testbed.vocab import ASK, PAIR
from kvjax.testing import toy_model


@pytest.fixture(scope="module")
def toy() -> kvjax.Model:
    """A random model with the shipped model's vocabulary."""
    model = toy_model(vocab_size=vocab.SIZE, layers=2)
    return kvjax.Model(model.config, model.params, Tokenizer(vocab.tokenizer()), name="toy")


def make_instances(count: int = 2, length: int = 90) -> list[tasks.Instance]:
    return [eviction.phrases(np.random.default_rng(i), length, pairs=4, span=3, questions=3) for i in range(count)]


def test_phrases_are_found_by_reading_the_context():
    instance = eviction.phrases(np.random.default_rng(0), 90, pairs=8, span=3, questions=8)
    context = instance.context.tolist()
    assert len(context) == 90 and context.count(PAIR) == 8
    for q in instance.questions:
        mark, key = q.prompt
        at = [i for i in range(90) if context[i : i + 2] == [PAIR, key]]
        assert mark == ASK and len(at) == 1 and at[0] == round(q.depth * 90)
        assert context[at[0] + 2 : at[0] + 5] == q.answer.tolist()
    assert len({q.prompt[1] for q in instance.questions}) == 8
    with pytest.raises(KvjaxError, match="8 facts take 40 tokens, the context has 39"):
        eviction.phrases(np.random.default_rng(0), 39, pairs=8, span=3)


@pytest.mark.parametrize(
    "method", ["pyramidkv:budget=24", "h2o:heavy=8,recent=8", "infllm:block=4,sinks=4,local=16,topk=2,chunk=8"]
)
def test_compressing_exact_prompts_gives_what_prefill_gives(toy, method):
    prompts = [i.context[:n] for i, n in zip(make_instances(), (90, 71), strict=True)]
    compressed = eviction.Prompts(toy, prompts, 10).compress(method)
    expected, prefilled = kvjax.prefill(toy, prompts, method, capacity=compressed.cache.capacity)
    np.testing.assert_allclose(compressed.last, expected, atol=1e-4)
    state = compressed.cache
    for a, b in zip(kvjax.kept_positions(state), kvjax.kept_positions(prefilled), strict=True):
        for x, y in zip((h for row in a for h in row), (h for row in b for h in row), strict=True):
            np.testing.assert_array_equal(x, y)
    assert jax.tree.structure(state) == jax.tree.structure(prefilled)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(prefilled), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
    following = [[5, 6, 7], [8, 9, 10]]
    a, b = (kvjax.extend(toy, following, cache)[0] for cache in (state, prefilled))
    np.testing.assert_allclose(a, b, atol=1e-4)


def exact_log_probs(model, context, *more) -> np.ndarray:
    """Log-probabilities of each next token from one exact pass over the whole text."""
    ids = np.concatenate([context, *more])[None]
    return np.asarray(jax.nn.log_softmax(kvjax.logits(model, ids)[0], -1))


def test_questions_are_asked_as_the_file_says(toy):
    instances = make_instances()
    outcomes, _ = eviction.QuestionPrompts(toy, instances).outcomes(kvjax.methods.full())
    assert {when: o.nats.shape for when, o in outcomes.items()} == {"unseen": (2, 3), "first": (2, 1), "later": (2, 2)}
    for row, instance in enumerate(instances):
        first = instance.questions[0]
        for i, q in enumerate(instance.questions):
            cases = [("unseen", i, [])]
            cases.append(("first", 0, []) if i == 0 else ("later", i - 1, [first.prompt, first.answer]))
            for when, column, before in cases:
                tokens = [instance.context, *before, q.prompt, q.answer]
                logp = exact_log_probs(toy, *tokens)[-len(q.answer) - 1 : -1]
                nats = -logp[np.arange(len(q.answer)), q.answer].mean()
                np.testing.assert_allclose(outcomes[when].nats[row, column], nats, atol=1e-4)
                assert outcomes[when].right[row, column] == float((logp.argmax(-1) == q.answer).all())


def test_text_is_continued_token_by_token(toy):
    windows = np.random.default_rng(0).integers(0, 256, (2, 75), np.int32)
    outcomes, _ = eviction.TextPrompts(toy, windows, 70).outcomes(kvjax.methods.full())
    expected = [-exact_log_probs(toy, w)[np.arange(69, 74), w[70:]] for w in windows]
    np.testing.assert_allclose(outcomes["text"].nats, expected, atol=1e-4)


def outcome(right) -> eviction.Outcome:
    return eviction.Outcome(np.array(right, np.float32), np.zeros((len(right), len(right[0])), np.float32))


def test_scores_and_gains_are_per_context_and_paired():
    measurements = eviction.Measurements()
    measurements.outcomes = {
        ("a", "t", "first"): outcome([[1, 1], [0, 1], [1, 1], [0, 0]]),
        ("b", "t", "first"): outcome([[1, 0], [0, 0], [1, 1], [0, 0]]),
        ("a", "u", "first"): outcome([[1], [0]]),
        ("b", "u", "first"): outcome([[0], [0]]),
    }
    means = np.array([1, 0.5, 1, 0])
    assert measurements.score("a", "first", task="t") == pytest.approx((means.mean(), means.std(ddof=1) / 2))
    gains = np.array([0.5, 0.5, 0, 0])
    assert measurements.gain("a", "b", "first", task="t") == pytest.approx((0.25, gains.std(ddof=1) / 2))
    both = np.hypot(gains.std(ddof=1) / 2, np.array([1, 0]).std(ddof=1) / np.sqrt(2)) / 2
    assert measurements.gain("a", "b", "first") == pytest.approx(((0.25 + 0.5) / 2, both))
    assert np.isnan(measurements.score("a", "later")[0])
    line = eviction_tables.Line("a", "a", "b")
    assert eviction_tables.format_score(measurements, line, "first", "t") == "62.5 ±23.9 (+25.0 ±14.4)"
    assert eviction_tables.format_score(measurements, line, "later") is None


def test_pages_are_the_papers():
    method = kvjax.parse(kvcrush_table2.paged_h2o(32))
    select = method.select
    assert (select.budget.tokens, select.sinks, select.recent, select.granularity.size) == (672, 32, 128, 32)


def test_spending_of_the_baselines_is_the_benchmarks():
    """longctx_bench at a quarter of 7,500 tokens."""
    methods = specache_table2.methods(7500, 4, 64, 128)
    parts = {name: split_methods(method)[0].values for name, method in methods.items() if split_methods(method)}
    infllm, stream, h2o = parts["InfLLM"], parts["StreamLLM, prompt in full"], parts["H2O"]
    assert (infllm["sinks"], infllm["topk"]) == (39, 4)
    assert infllm["sinks"] + 128 * infllm["topk"] + infllm["local"] == 1875
    assert stream["sinks"] + stream["recent"] == h2o["heavy"] + h2o["recent"] == 1875
    streamed = methods["StreamLLM"].decode
    assert (streamed.sinks, streamed.recent) == (stream["sinks"], stream["recent"])


def test_a_streamed_prompt_forgets_as_it_goes(toy):
    method = specache_table2.stream_prompts(kvjax.methods.streaming_llm(12, 4))
    tokens = make_instances()[0].context[:80]
    last, state = kvjax.prefill(toy, [tokens], method, capacity=96)
    whole = kvjax.methods.streaming_llm(12, 4)
    _, start = kvjax.prefill(toy, [tokens[:1]], whole, capacity=96)
    steps, expected = kvjax.extend(toy, [tokens[1:]], start, whole)
    np.testing.assert_allclose(last, steps[:, -1], atol=1e-4)
    np.testing.assert_array_equal(kvjax.kept_positions(state)[0][0][0], kvjax.kept_positions(expected)[0][0][0])
    assert np.abs(last - kvjax.prefill(toy, [tokens], whole, capacity=96)[0]).max() > 1e-3


@pytest.mark.parametrize("chunk", [1, 16])
def test_streamed_losses_are_those_of_single_steps(toy, chunk):
    tokens, method = make_instances()[0].context[:40], kvjax.methods.streaming_llm(recent=12, sinks=4)
    nats, sizes = streaming.stream_text(toy, method, tokens, 16, chunk)
    last, state = kvjax.prefill(toy, [tokens[:16]], method, capacity=64)
    expected = []
    for t in range(16, 40):
        expected.append(-float(jax.nn.log_softmax(last[0])[tokens[t]]))
        logits, state = kvjax.extend(toy, [tokens[t : t + 1]], state, method)
        last = logits[:, 0]
    np.testing.assert_allclose(nats, expected, atol=1e-4)
    assert sizes == {sum(kvjax.state_bytes(state).total.values())}


def test_windows_computed_anew_see_what_they_say(toy):
    tokens = make_instances()[0].context[:45]
    nats = streaming.recompute_windows(toy, tokens, 16, 2)
    assert nats.shape == (29,)
    for t in (16, 31, 32, 44):
        start = t // 16 * 16 - 16
        assert nats[t - 16] == pytest.approx(-exact_log_probs(toy, tokens[start : t + 1])[-2, tokens[t]], abs=1e-4)
