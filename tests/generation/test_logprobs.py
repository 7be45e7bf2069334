"""Log-probabilities of generated tokens against the uncached forward pass."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.generation.result import TokenLogProb
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testing import toy_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]


@pytest.fixture(scope="module")
def model():
    return dataclasses.replace(toy_model(layers=1, vocab_size=vocab.SIZE), tokenizer=Tokenizer(vocab.tokenizer()))


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def oracle(model, prompt, answer):
    """The log-probabilities [T V] in whose place each token of the answer was drawn."""
    return log_softmax(kvjax.logits(model, [[*prompt, *answer]])[0, len(prompt) - 1 : -1])


def assert_log_probs(model, out, prompts, num_top=None):
    assert [len(row) for row in out.logprobs] == [len(row) for row in out.tokens]
    for i, (prompt, tokens) in enumerate(zip(prompts, out.tokens, strict=True)):
        logp = oracle(model, prompt, tokens)
        np.testing.assert_allclose(out.logprobs[i], logp[np.arange(len(tokens)), tokens], atol=1e-4)
        if num_top is None:
            continue
        for step, row in zip(out.top_logprobs[i], logp, strict=True):
            likeliest = np.argsort(-row, kind="stable")[:num_top]
            np.testing.assert_allclose([x.logprob for x in step], row[likeliest], atol=1e-4)
            assert [x.id for x in step] == likeliest.tolist()


def test_they_are_the_models_own_whatever_is_drawn(model):
    """Temperature, filters and penalties change what is drawn, and not the log-probabilities."""
    options = {"temperature": 2.0, "top_k": 50, "seed": 1, "max_new_tokens": 5, "eos_ids": ()}
    out = kvjax.generate(model, PROMPTS, "full", logprobs=3, **options)
    assert_log_probs(model, out, PROMPTS, 3)
    plain = kvjax.generate(model, PROMPTS, "full", **options)
    assert plain.tokens == out.tokens and plain.logprobs is None and plain.top_logprobs is None


def test_true_gives_those_of_the_tokens_alone_and_zero_the_same(model):
    for logprobs in (True, 0, np.int64(0)):
        out = kvjax.generate(model, PROMPTS, "full", max_new_tokens=3, logprobs=logprobs)
        assert_log_probs(model, out, PROMPTS)
        assert out.top_logprobs is None
    for logprobs in (None, False):
        assert kvjax.generate(model, [[1]], "full", max_new_tokens=2, logprobs=logprobs).logprobs is None


def test_all_calls_with_a_result_have_them(model):
    options = {"max_new_tokens": 4, "eos_ids": (), "logprobs": 2}
    context = kvjax.read(model, PROMPTS[:1], "full", headroom=16)
    assert_log_probs(model, context.generate(**options), PROMPTS[:1], 2)
    asked = context.ask([[5], [6, 7]], **options)  # one after the other
    assert_log_probs(model, asked, [[*PROMPTS[0], 5], [*PROMPTS[0], 6, 7]], 2)
    session = context.start(**options)
    session.advance(2)
    assert_log_probs(model, session.result(), PROMPTS[:1], 2)
    _, cache = kvjax.prefill(model, PROMPTS[:1], "full")
    assert_log_probs(model, kvjax.generate(model, [[5]], cache=cache, **options), [[*PROMPTS[0], 5]], 2)
    draft = {"num_draft_tokens": 2, "temperature": 1.5, "draft": "int4"}
    assert_log_probs(model, kvjax.speculative.speculate(model, PROMPTS, **draft, **options), PROMPTS, 2)


def test_an_answer_that_ends_early_has_one_for_each_of_its_tokens(model):
    full = kvjax.generate(model, PROMPTS, "full", max_new_tokens=12, eos_ids=())
    ended = kvjax.generate(model, PROMPTS, "full", max_new_tokens=12, eos_ids=full.tokens[0][3], logprobs=1)
    assert len(ended.tokens[0]) <= 4 and ended.finish_reasons[0] == "stop"
    assert_log_probs(model, ended, PROMPTS, 1)
    stopped = kvjax.generate(model, PROMPTS, "full", max_new_tokens=12, eos_ids=(), stop=full.text[0][2:4], logprobs=1)
    assert len(stopped.tokens[0]) < 12
    assert_log_probs(model, stopped, PROMPTS, 1)


def test_json_holds_them(model):
    out = kvjax.generate(model, [[1, 2]], "full", max_new_tokens=2, logprobs=1)
    assert isinstance(out.top_logprobs[0][0][0], TokenLogProb)
    document = json.loads(json.dumps(out.to_json()))
    assert document["logprobs"] == out.logprobs
    assert document["top_logprobs"] == [[[list(pair) for pair in step] for step in row] for row in out.top_logprobs]


@pytest.mark.parametrize("logprobs", [-1, vocab.SIZE + 1, 1.5, "yes"])
def test_values_out_of_range_are_refused(model, logprobs):
    with pytest.raises(KvjaxError, match=f"logprobs must be an integer from 0 to {vocab.SIZE}, got .*; true is 0 of"):
        kvjax.generate(model, [[1]], "full", logprobs=logprobs)


def test_streams_refuse_what_they_cannot_show(model):
    for logprobs in (True, 0, 3):
        for call in (kvjax.stream, kvjax.stream_text):
            with pytest.raises(KvjaxError, match="a stream has no place for log-probabilities"):
                call(model, "a", "full", logprobs=logprobs)
        with pytest.raises(KvjaxError, match="a stream has no place for log-probabilities"):
            kvjax.read(model, "a", "full").stream(logprobs=logprobs)
