"""Special tokens in answers: in stop strings, in streams, and in texts that show them."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.eval.run.harness import answer_text
from kvjax.eval.tasks.case import Ask
from kvjax.generation.stopping import AnswerText
from kvjax.models import checkpoint
from kvjax.models.chat_template import ChatTemplate
from tests.helpers.scripted_model import scripted_model, special_tokenizer
from tests.helpers.tokenizer_files import sentencepiece

SCRIPT = "ab <|call|>c\u20ac<|im_end|>defg"
SHOWN = "ab c\u20acdefg"
COUNT = 14  # tokens of the script: the last sign of SCRIPT repeats after them


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    return dataclasses.replace(scripted_model(SCRIPT), chat_template=template)


def generate(model, **options):
    return kvjax.generate(model, "x!", "full", **options)


def ask(model, **options):
    return kvjax.read(model, "x", "full", headroom=COUNT + 8).ask("!", **options)


def from_context(model, **options):
    return kvjax.read(model, "x!", "full", headroom=COUNT + 8).generate(**options)


def from_cache(model, **options):
    _, cache = kvjax.prefill(model, "x", "full", capacity=COUNT + 8)
    return kvjax.generate(model, "!", cache=cache, **options)


def chat(model, **options):
    return kvjax.chat(model, [{"role": "user", "content": "x!"}], **options)


def in_a_batch(model, **options):
    out = kvjax.generate(model, ["x!", "yz!"], "full", **options)
    assert out.text[0] == out.text[1] and out.tokens[0] == out.tokens[1]
    return out


def in_slices(model, **options):
    session = kvjax.read(model, "x!", "full", headroom=COUNT + 8).start(**options)
    session.advance(COUNT)
    return session.result()


def in_one_program(model, **options):
    return generate(model, loop="while", **options)


CALLS = (generate, ask, from_context, from_cache, chat, in_a_batch, in_slices, in_one_program)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("stop", "text", "last"),
    [
        ("<|im_end|>", "ab c\u20ac", "<|im_end|>"),
        (["<|im_end|>"], "ab c\u20ac", "<|im_end|>"),
        (("zz", "<|im_end|>", "e"), "ab c\u20ac", "<|im_end|>"),
        ("\u20ac<|im_end|>", "ab c", "<|im_end|>"),  # begins in a text
        ("<|call|>c", "ab ", "c"),  # ends in one
        ("b <|call|>c", "a", "c"),
        ("<|im_end|>d", "ab c\u20ac", "d"),
        (("|im_end|>d", "|", "e"), "ab c\u20acd", "e"),  # not within a special token that is not shown
        ("c\u20acd", "ab ", "d"),  # in the text that is shown alone
        (["<|im_end|>de", "\u20acd"], "ab c", "d"),  # the first to be complete
        (["ef", "<|im_end|>def"], "ab c\u20ac", "f"),  # complete at once: the first to begin
    ],
)
def test_a_stop_string_may_have_special_tokens(model, call, stop, text, last):
    out = call(model, stop=stop, max_new_tokens=COUNT)
    assert out.text[0] == text and out.finish_reasons[0] == "stop"
    assert model.tokenizer.inner.id_to_token(out.tokens[0][-1]) == last


def test_streams_emit_no_part_of_a_stop_string(model):
    ids = generate(model, max_new_tokens=COUNT).tokens[0]
    for stop in ("<|im_end|>", "b <|call|>c", "<|call|>c", "<|im_end|>de", "\u20ac<|im_end|>d", ("no", "e<|call|>")):
        options = {"stop": stop, "max_new_tokens": COUNT}
        for skip in (True, False):
            expected = generate(model, **options, skip_special_tokens=skip)
            pieces = list(kvjax.stream_text(model, "x!", "full", **options, skip_special_tokens=skip))
            assert "".join(pieces) == expected.text[0]
            assert all(expected.text[0].startswith("".join(pieces[:n])) for n in range(len(pieces)))
        columns = [column[0] for column in kvjax.stream(model, ["x!"], "full", **options)]
        assert [token for token in columns if token is not None] == expected.tokens[0]
        assert expected.tokens[0] == ids[: len(expected.tokens[0])]


@pytest.mark.parametrize("call", CALLS)
def test_special_tokens_are_shown_where_they_are_asked_for(model, call):
    options = {"max_new_tokens": COUNT - 1}
    assert call(model, **options).text[0] == SHOWN
    assert call(model, skip_special_tokens=True, **options).text[0] == SHOWN
    assert call(model, skip_special_tokens=False, **options).text[0] == SCRIPT
    out = call(model, skip_special_tokens=False, stop="<|im_end|>", **options)
    assert out.text[0] == SCRIPT[: SCRIPT.index("<|im_end|>")] and out.finish_reasons[0] == "stop"


def test_streams_and_speculation_show_special_tokens_too(model):
    options = {"max_new_tokens": COUNT - 1, "skip_special_tokens": False}
    assert "".join(kvjax.stream_text(model, "x!", "full", **options)) == SCRIPT
    messages = [{"role": "user", "content": "x!"}]
    assert "".join(kvjax.stream_chat(model, messages, "full", **options)) == SCRIPT
    assert kvjax.speculative.speculate(model, "x!", "int8", **options).text == [SCRIPT]
    assert kvjax.speculative.speculate(model, "x!", "int8", max_new_tokens=COUNT - 1).text == [SHOWN]


@pytest.mark.parametrize("stop", ["<|im_end|>", (), "\u20ac<|im_end|>"])
@pytest.mark.parametrize("skip", [True, False])
def test_the_id_that_ended_an_answer_is_in_its_tokens_alone(stop, skip):
    """As in vLLM; a stop string may end with it."""
    model = scripted_model(SCRIPT, eos=("<|im_end|>",))
    out = generate(model, stop=stop, max_new_tokens=COUNT, skip_special_tokens=skip)
    before = "ab c\u20ac" if skip else "ab <|call|>c\u20ac"
    assert out.text == [before if len(stop) != 11 else before[:-1]] and out.finish_reasons == ["stop"]
    assert out.tokens[0][-1] == model.tokenizer.token_id("<|im_end|>")
    streamed = kvjax.stream_text(model, "x!", "full", stop=stop, max_new_tokens=COUNT, skip_special_tokens=skip)
    assert "".join(streamed) == out.text[0]


def test_the_switch_is_true_or_false(model):
    with pytest.raises(KvjaxError, match="skip_special_tokens is True or False, got 'no'"):
        generate(model, skip_special_tokens="no")


PIECES = ("a", "b", "<|im_end|>", "<|call|>")
STOPS = (("a<|im_end|>",), ("<|call|>b", "ba"), ("ab",), ("<|im_end|><|call|>",), ("end|>a", "bb"), ("<|call|>", "a"))


def expected_text(pieces, stop):
    """(Text, number of tokens) by characters: each knows its token, and whether it is shown."""
    characters = [(c, i, piece in "ab") for i, piece in enumerate(pieces) for c in piece]
    matches = []  # (token that completes a stop string, shown characters before it)
    for s in stop:
        for searched in (characters if "<|" in s else [], [x for x in characters if x[2]]):
            at = "".join(c for c, _, _ in searched).find(s)
            if at >= 0:
                matches.append((searched[at + len(s) - 1][1], sum(x[2] for x in searched[:at])))
    last = min((end for end, _ in matches), default=len(pieces))
    start = min((start for end, start in matches if end == last), default=None)
    return "".join(c for c, i, is_shown in characters if is_shown and i <= last)[:start], min(last + 1, len(pieces))


@pytest.mark.parametrize("stop", STOPS)
def test_all_short_answers_end_where_their_characters_say(stop):
    tokenizer = special_tokenizer()
    ids = {piece: tokenizer.encode_continuation(piece) for piece in PIECES}
    answer = AnswerText(tokenizer, (), stop)
    for pieces in itertools.product(PIECES, repeat=4):
        tokens = [i for piece in pieces for i in ids[piece]]
        text, num_tokens = expected_text(pieces, stop)
        assert len(answer.shorten(tokens)) == num_tokens
        assert answer.text(answer.shorten(tokens)) == text
        # Whatever is final stays, and the end is among what was final or held back.
        finals = [answer.final_text(tokens[:n]) for n in range(num_tokens)]
        assert all(text.startswith(final) for final in finals)


@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
def test_stop_strings_of_a_tokenizer_that_marks_spaces(prepend):
    tokenizer = sentencepiece(prepend=prepend)
    tokens = tokenizer.encode_continuation(" the capital") + [tokenizer.token_id("</s>")]
    tokens += tokenizer.encode_continuation(" is Paris")
    for stop, text in (("</s>", " the capital"), ("l</s> is", " the capita"), ("</s> is P", " the capital")):
        answer = AnswerText(tokenizer, (), [stop])
        assert answer.text(answer.shorten(tokens)) == text
    assert AnswerText(tokenizer, (), (), False).text(tokens) == " the capital</s> is Paris"


@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
@pytest.mark.parametrize("stop", ["\u00e9", "a\u00e9", "\u20ac", "\u00e9\u20ac", "\u65e5</s>", " b\u65e5"])
def test_a_stop_string_is_found_before_the_bytes_of_the_next_character(prepend, stop):
    tokenizer = sentencepiece(prepend=prepend)
    tokens = tokenizer.encode_continuation("a\u00e9\u20ac\U0001f642 b\u65e5</s>\u00e9\u20ac")
    for skip in (True, False):
        answer = AnswerText(tokenizer, (), [stop], skip)
        first = next(n for n in range(len(tokens) + 1) if answer.is_stopped(tokens[:n]))
        assert stop in tokenizer.decode_continuation(tokens[:first], skip_special_tokens=False)
        for n in range(first, len(tokens) + 1):
            assert answer.is_stopped(tokens[:n]) and answer.shorten(tokens[:n]) == tokens[:first]
        assert stop not in answer.text(tokens[:first])
    # A text that ends within a character keeps those before it, and what a stream has shown is its beginning.
    answer = AnswerText(tokenizer, ())
    for n in range(len(tokens) + 1):
        assert answer.text(tokens[:n]).startswith(answer.final_text(tokens[:n]))
        assert answer.text(tokens[:n]).rstrip("\ufffd") in answer.text(tokens)


def test_stop_strings_of_tasks_may_be_special_tokens(model):
    tokens = generate(model, max_new_tokens=COUNT).tokens[0]
    ask = Ask(np.array([0]), "contains", ("x",), COUNT, ("<|call|>",))
    assert answer_text(model, np.array(tokens), ask) == "ab "


def test_the_command_line_takes_them(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)
    files = {"tokenizer.json": model.tokenizer.inner.to_str().encode()}
    checkpoint.save(tmp_path / "model", model.config, model.params, extra_files=files)
    args = ["generate", "--model", str(tmp_path / "model"), "--prompt", "x!", "--max-new-tokens", str(COUNT - 1)]
    for more, text, reason in (
        (["--stop", "<|im_end|>"], "ab c\u20ac", "stop"),
        (["--stop", "zz", "--stop", "<|call|>c"], "ab ", "stop"),
        (["--no-skip-special-tokens"], SCRIPT, "length"),
        (["--skip-special-tokens"], SHOWN, "length"),
    ):
        assert cli.main([*args, *more]) == 0
        assert capsys.readouterr().out == f"{text}\n[{reason}]\n"
        assert cli.main([*args, *more, "--json"]) == 0
        out = json.loads(capsys.readouterr().out)
        assert (out["text"], out["finish_reasons"]) == ([text], [reason])
