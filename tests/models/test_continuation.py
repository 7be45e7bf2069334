"""Texts that begin a sequence and texts that continue one, on tokenizers of the kinds that checkpoints have."""

from __future__ import annotations

import pytest

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
    prompt, ids = tokenizer.encode(PROMPT), tokenizer.encode_continuation(text)
    assert tokenizer.decode(prompt + ids) == tokenizer.decode(prompt) + text
    assert tokenizer.token_id("<s>") not in ids


def test_a_continuation_has_the_tokens_that_the_whole_text_has():
    for name in ("llama 2", "metaspace", "llama 3"):
        tokenizer = KINDS[name]
        whole = tokenizer.encode(PROMPT + " is Paris")
        assert tokenizer.encode(PROMPT) + tokenizer.encode_continuation(" is Paris") == whole
    assert spell(KINDS["llama 2"], KINDS["llama 2"].encode_continuation(" is Paris")) == ["\u2581is", "\u2581Paris"]
    assert spell(KINDS["llama 2"], KINDS["llama 2"].encode_continuation("is")) == ["is"]


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
@pytest.mark.parametrize(
    ("template", "opening"), [("<s> $A </s>", ["<s>"]), ("$A </s>", []), ("<s> $A", ["<s>"]), ("$A </s> <s>", [])]
)
def test_special_tokens_open_a_text_and_none_closes_it(make, template, opening):
    tokenizer = make(template=template)
    assert spell(tokenizer, tokenizer.opening_ids) == opening == spell(tokenizer, tokenizer.encode(""))
    plain = tokenizer.encode(PROMPT, special_tokens=False)
    assert tokenizer.encode(PROMPT) == tokenizer.opening_ids + plain
    assert tokenizer.encode_continuation("") == []
    # A text that spells the end keeps it, since the template did not put it there.
    assert spell(tokenizer, tokenizer.encode("a</s>"))[-1] == "</s>"
    assert "</s>" not in spell(tokenizer, tokenizer.encode("a</s>", parse_special=False))
    assert "</s>" not in spell(tokenizer, tokenizer.encode_continuation("a</s>", parse_special=False))
