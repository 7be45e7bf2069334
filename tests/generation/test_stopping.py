"""Stop strings and streamed text, on a toy model that writes text."""

from __future__ import annotations

import dataclasses
import functools

import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.generation import stopping
from kvjax.generation.result import concat_results
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testing import toy_model

PROMPTS = ["The pier lights were out.", "for i in range(10):"]
COUNT = 24


@functools.cache
def make_model() -> kvjax.Model:
    return dataclasses.replace(toy_model(vocab_size=512, layers=1, eos_ids=()), tokenizer=Tokenizer(vocab.tokenizer()))


@pytest.fixture(scope="module")
def unstopped_output():
    """The output for both prompts without a stop string."""
    return kvjax.generate(make_model(), PROMPTS, "full", max_new_tokens=COUNT)


def test_a_text_ends_before_the_first_string_and_its_tokens_with_the_one_that_completes_it(unstopped_output):
    text, other = unstopped_output.text
    late, early = text[30:33], text[20:24]
    out = kvjax.generate(make_model(), PROMPTS, "full", max_new_tokens=COUNT, stop=[late, early])
    assert out.text[0] == text[: text.index(early)] and out.finish_reasons[0] == "stop"
    decode = make_model().tokenizer.decode
    assert early in decode(out.tokens[0]) and early not in decode(out.tokens[0][:-1])
    if early not in other and late not in other:
        assert out.text[1] == other and out.finish_reasons[1] == "length"


def test_no_step_is_run_after_all_rows_have_ended(unstopped_output):
    first = unstopped_output.text[0][:1]
    out = kvjax.generate(make_model(), PROMPTS[:1], "full", max_new_tokens=COUNT, stop=first)
    assert out.text == [""] and out.decode_steps < stopping.STOP_CHECK_INTERVAL


def test_speed_counts_the_tokens_of_the_answers_alone(unstopped_output):
    """A batch of answers of 10 and 33 tokens takes 32 steps, in which 9 + 32 tokens of them are decoded."""
    fields = {"tokens": [[0] * 10, [0] * 33], "text": ["", ""], "decode_steps": 32, "num_sequences": 2}
    out = dataclasses.replace(unstopped_output, **fields, decode_seconds=1.0)
    assert out.tokens_per_second == out.to_json()["tokens_per_second"] == 41 and "41.0 tokens/s" in repr(out)
    parts = [dataclasses.replace(out, tokens=[row], num_sequences=1, decode_steps=len(row) - 1) for row in out.tokens]
    both = concat_results(parts)
    assert both.tokens_per_second == 41 / 2 and both.decode_seconds == 2
    assert dataclasses.replace(out, tokens=[[0], [0]], decode_steps=0, decode_seconds=0.0).tokens_per_second == 0


@pytest.mark.parametrize("loop", ["layers", "while", "scan"])
def test_speed_is_of_the_tokens_that_a_call_returns(unstopped_output, loop):
    ends = unstopped_output.tokens[0][4]
    out = kvjax.generate(make_model(), PROMPTS, "full", max_new_tokens=COUNT, eos_ids=ends, loop=loop)
    assert len(out.tokens[0]) <= 5
    assert out.tokens_per_second == pytest.approx((sum(map(len, out.tokens)) - 2) / out.decode_seconds)


def test_speed_of_a_speculation_counts_no_rejected_tokens(unstopped_output):
    out = kvjax.speculative.speculate(make_model(), PROMPTS, "int4", max_new_tokens=COUNT, num_draft_tokens=2)
    assert out.tokens_per_second == pytest.approx((sum(map(len, out.tokens)) - 2) / out.decode_seconds)


def test_a_context_knows_stop_strings_too(unstopped_output):
    stop = unstopped_output.text[0][10:13]
    context = kvjax.read(make_model(), PROMPTS[:1], "full", headroom=COUNT)
    out = context.generate(max_new_tokens=COUNT, stop=stop)
    assert out.text == [unstopped_output.text[0].split(stop)[0]]


@pytest.mark.parametrize("stop", [(), "e", ("no such text", "th")])
def test_streamed_pieces_are_the_text_of_generate(stop):
    for prompt in PROMPTS:
        pieces = list(kvjax.stream_text(make_model(), prompt, "full", max_new_tokens=COUNT, stop=stop))
        assert (
            "".join(pieces) == kvjax.generate(make_model(), [prompt], "full", max_new_tokens=COUNT, stop=stop).text[0]
        )


def test_streamed_columns_end_at_the_string(unstopped_output):
    stop = unstopped_output.text[0][10:13]
    columns = list(kvjax.stream(make_model(), PROMPTS[:1], "full", max_new_tokens=COUNT, stop=stop))
    out = kvjax.generate(make_model(), PROMPTS[:1], "full", max_new_tokens=COUNT, stop=stop)
    assert [c[0] for c in columns if c[0] is not None] == out.tokens[0]


@pytest.mark.parametrize(
    ("text", "stop", "final"),
    [
        ("abc", (), "abc"),
        ("abc", ("cd",), "ab"),  # a string may have begun
        ("abcd", ("cd",), "ab"),
        ("ab\n", ("\n\nQ", "b\nx"), "a"),  # the longest possible beginning of a string is not final
        ("é\ufffd", (), "é"),  # an incomplete character
    ],
)
def test_the_final_prefix_of_a_streamed_text(text, stop, final):
    assert stopping.final_prefix(text, stop) == final


@pytest.mark.parametrize("stop", ["", ["a", ""], [3]])
def test_what_is_no_string_is_refused(stop):
    with pytest.raises(KvjaxError, match="stop takes texts of at least one character"):
        kvjax.generate(make_model(), PROMPTS, "full", stop=stop)


def test_stop_needs_a_tokenizer_and_a_loop_that_can_stop():
    with pytest.raises(KvjaxError, match="no tokenizer"):
        kvjax.generate(dataclasses.replace(make_model(), tokenizer=None), [[1, 2]], "full", stop="a")
    with pytest.raises(KvjaxError, match="leave stop out"):
        kvjax.generate(make_model(), PROMPTS, "full", stop="a", loop="scan")
