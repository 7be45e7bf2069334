"""Texts that begin a sequence and texts that continue one, on tokenizers of the kinds that checkpoints have."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from kvjax.models.tokenizer import Tokenizer
from tests.helpers.tokenizer_files import byte_level, sentencepiece

KINDS = {
    "llama 2": sentencepiece(),
    "metaspace": sentencepiece(prepend="metaspace"),
    "llama 3": byte_level(),
    "byte level with a space": byte_level(add_prefix_space=True),
}
ALL = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
PROMPT = "the capital of France"


def spell(tokenizer, ids):
    return [tokenizer.inner.id_to_token(i) for i in ids]


@ALL
@pytest.mark.parametrize("text", [" is Paris", "is Paris", "\n\nis", "  is", "\u20ac 7", ": a", "|", " "])
def test_a_prompt_and_its_continuation_decode_to_both_texts(tokenizer, text):
    prompt, ids = tokenizer.encode_prompt(PROMPT), tokenizer.encode_continuation(text)
    assert tokenizer.decode(prompt + ids) == tokenizer.decode(prompt) + text
    assert tokenizer.token_id("<s>") not in ids


def test_a_continuation_has_the_tokens_that_the_whole_text_has():
    for name in ("llama 2", "metaspace", "llama 3"):
        tokenizer = KINDS[name]
        whole = tokenizer.encode_prompt(PROMPT + " is Paris")
        assert tokenizer.encode_prompt(PROMPT) + tokenizer.encode_continuation(" is Paris") == whole
    assert spell(KINDS["llama 2"], KINDS["llama 2"].encode_continuation(" is Paris")) == ["\u2581is", "\u2581Paris"]
    assert spell(KINDS["llama 2"], KINDS["llama 2"].encode_continuation("is")) == ["is"]


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
@pytest.mark.parametrize(
    ("template", "opening"), [("<s> $A </s>", ["<s>"]), ("$A </s>", []), ("<s> $A", ["<s>"]), ("$A </s> <s>", [])]
)
def test_special_tokens_open_a_text_and_none_closes_it(make, template, opening):
    tokenizer = make(template=template)
    assert spell(tokenizer, tokenizer.opening_ids) == opening == spell(tokenizer, tokenizer.encode_prompt(""))
    plain = tokenizer.encode(PROMPT, special_tokens=False)
    assert tokenizer.encode_prompt(PROMPT) == tokenizer.opening_ids + plain
    assert tokenizer.encode_continuation("") == []
    # A text that spells the end keeps it, since the template did not put it there.
    assert spell(tokenizer, tokenizer.encode_prompt("a</s>"))[-1] == "</s>"
    assert "</s>" not in spell(tokenizer, tokenizer.encode_prompt("a</s>", parse_special=False))
    assert "</s>" not in spell(tokenizer, tokenizer.encode_continuation("a</s>", parse_special=False))


def test_a_beginning_that_is_an_ordinary_word_is_spelled_only_where_special_tokens_are_read():
    inner = tokenizers.Tokenizer(models.WordLevel({"[B]": 0, "a": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 0)])
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode_prompt("[B] a") == [0, 1] and tokenizer.encode_prompt("a") == [0, 1]
    assert tokenizer.encode_prompt("[B] a", parse_special=False) == [0, 0, 1]


@ALL
@pytest.mark.parametrize("text", [" is is", "is", "\u20ac is", "  a", "\n7", ""])
def test_an_answer_keeps_its_first_space(tokenizer, text):
    ids = tokenizer.encode_continuation(text)
    assert tokenizer.decode_continuation(ids) == text
    # The tokens that a decoder leaves out change nothing, wherever they stand.
    begin, end = tokenizer.token_id("<s>"), tokenizer.token_id("</s>")
    assert tokenizer.decode_continuation([begin, *ids, end]) == text
    assert tokenizer.decode_continuation([begin, *ids], skip_special_tokens=False) == "<s>" + text


@ALL
def test_a_character_of_several_tokens_is_unfinished_until_its_last(tokenizer):
    ids = tokenizer.encode_continuation(" \u20ac")
    texts = [tokenizer.decode_continuation(ids[:n]) for n in range(len(ids) + 1)]
    assert texts[:2] == ["", " "] and texts[-1] == " \u20ac"
    assert all(text.startswith(" \ufffd") and not text.rstrip("\ufffd").strip() for text in texts[2:-1])


def test_a_vocabulary_without_words_and_one_without_a_decoder():
    letters = tokenizers.Tokenizer(models.WordLevel({"!": 0, "?": 1}, unk_token="?"))
    assert Tokenizer(letters).decode_continuation([0, 1]) == "! ?"
    assert Tokenizer(letters).encode_continuation("!") == [0] and Tokenizer(letters).opening_ids == []
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    assert Tokenizer(words).decode_continuation([1, 0]) == " b a"  # words are joined by spaces
