"""Special tokens stand only where a sequence begins, whichever call a text is given to."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import speculative
from kvjax.calibrate import split_documents
from kvjax.errors import KvjaxError
from kvjax.eval.tasks.encoding import context_ids, encode_prompt, prompt_ids
from kvjax.explore.exploration import explore
from kvjax.explore.explorer_page import page_data
from kvjax.generation.inputs import are_empty, token_ids
from kvjax.models.chat_template import ChatTemplate
from kvjax.testing import toy_model
from tests.helpers.tokenizer_files import byte_level, sentencepiece

PROMPT, MORE = "the capital of France", " is Paris"
BOS = 1


@functools.cache
def model(make=sentencepiece, template="<s> $A </s>"):
    tokenizer = make(template=template)
    return dataclasses.replace(toy_model(vocab_size=tokenizer.vocab_size, layers=1), tokenizer=tokenizer)


@functools.cache
def context():
    return kvjax.read(model(), PROMPT, "full", headroom=40)


def lengths(x):
    return np.asarray(x.cache.length).tolist()


def ids(text):
    return model().tokenizer.encode_prompt(text)


def test_a_text_that_is_fed_has_no_bos():
    assert lengths(context()) == [5]  # <s> and four words; the template's </s> is none of a prompt
    assert lengths(context().feed([MORE])) == [7]
    by_ids = kvjax.read(model(), [ids(PROMPT + MORE)], "full", headroom=40)
    np.testing.assert_allclose(context().feed(MORE).last_logits, by_ids.last_logits, atol=1e-5)


def test_scores_are_of_the_continuation_alone():
    ((logp, _),) = context().score([MORE])
    assert len(logp) == 2
    (same,) = kvjax.score(model(), PROMPT, MORE, "full")
    np.testing.assert_allclose(same, logp, atol=1e-5)
    exact = np.asarray(kvjax.logits(model(), PROMPT + MORE)[0], float)[4:6]
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp, exact[[0, 1], ids(PROMPT + MORE)[5:]], atol=1e-5)


def test_every_call_that_continues_a_cache_reads_the_same_tokens():
    options = {"max_new_tokens": 3, "eos_ids": ()}
    right = kvjax.generate(model(), PROMPT + MORE, "full", **options)
    _, cache = kvjax.prefill(model(), PROMPT, "full", capacity=64)
    assert kvjax.extend(model(), MORE, cache)[0].shape[1] == 2
    assert kvjax.generate(model(), MORE, cache=cache, **options).tokens == right.tokens
    assert [t for (t,) in kvjax.stream(model(), MORE, cache=cache, **options)] == right.tokens[0]
    assert "".join(kvjax.stream_text(model(), MORE, cache=cache, **options)) == right.text[0]
    assert context().ask(MORE, **options).tokens == right.tokens
    assert context().ask([MORE, MORE], **options).tokens == right.tokens * 2
    assert context().fork(2).feed([MORE, MORE]).generate(**options).tokens == right.tokens * 2


def test_a_document_after_a_shared_prefix_continues_it_and_one_after_none_begins():
    assert lengths(context().extend_prefix([MORE, MORE + MORE])) == [7, 9]
    assert lengths(context().extend_prefix([MORE, PROMPT], of=[0, -1])) == [7, 5]


def test_a_text_after_an_empty_sequence_begins_it():
    both = kvjax.read(model(), [PROMPT, PROMPT], "full", headroom=40).crop([0, 5])
    assert are_empty(both.cache) == [True, False]
    assert lengths(both.feed([PROMPT, MORE])) == [5, 7]


def test_an_inserted_text_begins_a_sequence_only_at_its_start():
    assert lengths(context().edit(1, 2, "the capital")) == [6]
    assert lengths(context().edit(0, 2, "the capital")) == [6]
    assert lengths(context().edit(0, 5, PROMPT)) == [5]


def test_chunks_are_joined_under_one_bos():
    chunks = kvjax.reuse.read_exactly(model(), ["the capital of", "of France is"])
    for order in ([0, 1], [1, 0]):
        text = kvjax.reuse.blend(chunks, [order], [MORE], ratio=1.0, layer=0)
        words = [("the capital of", "of France is")[i] for i in order]
        assert text.lengths.tolist() == [9]
        right = kvjax.logits(model(), " ".join(words) + MORE)[0, -1]
        np.testing.assert_allclose(text.last_logits[0], right, atol=1e-4)


def test_a_chunk_that_follows_others_only_is_read_as_a_continuation():
    chunks = kvjax.reuse.read_exactly(model(), ["the capital", " of France"], begins=[True, False])
    assert [*chunks.ids[0], *chunks.ids[1]] == ids(PROMPT)
    text = kvjax.reuse.blend(chunks, [[0, 1]], [MORE], ratio=1.0, layer=0)
    np.testing.assert_allclose(text.last_logits[0], kvjax.logits(model(), PROMPT + MORE)[0, -1], atol=1e-4)
    with pytest.raises(KvjaxError, match="begins has 1 values for 2 documents"):
        kvjax.reuse.read_exactly(model(), ["the", "of"], begins=[True])


def test_chunks_of_a_prompt_take_its_bos_along_to_the_front_alone():
    read = kvjax.reuse.read_exactly(model(), ["the capital of France"])
    chunks = kvjax.reuse.cut(read, [[3, 2]])  # <s> the capital, of France
    text = chunks.reuse([[1, 0]], [MORE], alpha=100.0)
    assert text.lengths.tolist() == [7]
    np.testing.assert_allclose(
        text.last_logits[0], kvjax.logits(model(), "of France the capital" + MORE)[0, -1], atol=1e-4
    )


def test_documents_that_a_text_is_split_into_begin_each():
    documents = split_documents(model(), " ".join([PROMPT] * 4), 12, 4)
    assert [len(x) for x in documents] == [4] * 3 and all(x[0] == BOS and BOS not in x[1:] for x in documents)
    with pytest.raises(KvjaxError, match="context must be an integer from 2"):
        split_documents(model(), PROMPT, 4, 1)


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "$A </s>"])
def test_one_prompt_has_one_reading(make, template):
    m = model(make, template)
    (read,) = token_ids(m, PROMPT, begins=True)
    assert read == context_ids(m.tokenizer, PROMPT).tolist() == encode_prompt(m, PROMPT).ids.tolist()
    assert token_ids(m, [MORE], begins=False) == [prompt_ids(m.tokenizer, MORE).tolist()]
    assert read + token_ids(m, [MORE], begins=False)[0] == token_ids(m, [PROMPT + MORE], begins=True)[0]
    assert lengths(kvjax.read(m, PROMPT, "full")) == [len(read)]


@pytest.mark.parametrize("call", [lambda: context().feed(""), lambda: kvjax.extend(model(), "", context().cache)])
def test_texts_without_tokens_feed_nothing(call):
    with pytest.raises(KvjaxError, match="all 1 texts are empty, and there is nothing to feed"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: context().ask([""]),
        lambda: context().score([""]),
        lambda: kvjax.score(model(), PROMPT, "", "full"),
        lambda: kvjax.generate(model(), "", cache=context().cache),
        lambda: context().extend_prefix([""]),
    ],
)
def test_a_text_without_tokens_continues_nothing(call):
    with pytest.raises(KvjaxError, match="text 0, '', has no tokens"):
        call()


def test_a_caller_says_whether_a_text_begins():
    with pytest.raises(TypeError, match="begins"):
        token_ids(model(), PROMPT)


def writing_model(tokens, **kind):
    """A model that writes these tokens after any other one, and again from the first; they are unlike each other."""
    tokenizer = sentencepiece(**kind)
    base = toy_model(vocab_size=tokenizer.vocab_size, layers=1)
    params = jax.tree.map(np.zeros_like, base.params)
    ids = [tokenizer.token_id(token) for token in tokens]
    params["embedding"][:, 0] = params["final_norm"]["scale"][:] = 1
    for i, token in enumerate(ids):
        params["embedding"][token] = np.eye(base.config.width)[(i + 1) % len(ids)]
        params["head"]["kernel"][i, token] = 1
    return dataclasses.replace(base, params=jax.tree.map(jnp.asarray, params), tokenizer=tokenizer)


@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
def test_an_answer_begins_with_its_space_whichever_call_writes_it(prepend):
    m = writing_model(["\u2581is"], prepend=prepend)
    two, context = {"max_new_tokens": 2}, kvjax.read(m, PROMPT, "full")
    _, cache = kvjax.prefill(m, PROMPT, "full", capacity=64)
    texts = [
        kvjax.generate(m, PROMPT, "full", **two).text[0],
        kvjax.generate(m, MORE, cache=cache, **two).text[0],
        kvjax.generate(m, [[m.tokenizer.token_id("<s>")]], "full", **two).text[0],  # after a special token
        context.ask(MORE, **two).text[0],
        context.generate(**two).text[0],
        speculative.speculate(m, PROMPT, "full", **two).text[0],
        speculative.speculate(m, PROMPT, "full", **two, eos_ids=[]).text[0],
    ]
    assert texts == [" is is"] * len(texts)
    assert list(kvjax.stream_text(m, PROMPT, "full", **two))[:2] == [" is", " is"]


def test_a_stop_string_that_begins_with_a_space_is_found_in_the_first_word():
    m = writing_model(["\u2581of", "\u2581is"])
    (stopped,) = kvjax.generate(m, PROMPT, "full", max_new_tokens=6, stop=" is").text
    assert stopped == " of" == "".join(kvjax.stream_text(m, PROMPT, "full", max_new_tokens=6, stop=" is"))
    out = kvjax.generate(m, PROMPT, "full", max_new_tokens=6, stop=" of")
    assert out.text == [""] and out.tokens == [[m.tokenizer.token_id("\u2581of")]]
    assert "".join(kvjax.stream_text(m, PROMPT, "full", max_new_tokens=6, stop=" of")) == ""


def test_a_streamed_character_of_several_bytes_comes_when_it_is_complete():
    m = writing_model(["\u2581", "<0xE2>", "<0x82>", "<0xAC>", "\u2581is"])
    deltas = list(kvjax.stream_text(m, PROMPT, "full", max_new_tokens=5))
    assert [x for x in deltas if x] == [" ", "\u20ac", " is"]


def test_an_end_of_sequence_id_is_in_no_text():
    m = writing_model(["\u2581of", "\u2581is"])
    options = {"max_new_tokens": 6, "eos_ids": [m.tokenizer.token_id("\u2581is")]}
    assert kvjax.generate(m, PROMPT, "full", **options).text == [" of"]
    assert speculative.speculate(m, PROMPT, "full", **options).text == [" of"]


def test_the_explorer_shows_an_answer_with_its_space():
    m = writing_model(["\u2581is"])
    exploration = explore(m, m.tokenizer.encode_prompt(PROMPT), "full; streaming_llm:recent=3,sinks=1", 2)
    data = page_data(exploration, m.tokenizer, "text")
    assert data["tokens"][-2:] == [" is", " is"] and data["likeliest"] == [" is", " is"]
    assert [method["own"] for method in data["methods"]] == [[" is is", ""]] * 2


SPELLED = f"<s>{PROMPT}"


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "$A </s>", "<s> </s> $A"])
def test_a_text_that_spells_its_beginning_gets_no_second_one(make, template):
    m = model(make, template)
    tokenizer, text = m.tokenizer, template.partition("$A")[0].replace(" ", "") + PROMPT
    plain = tokenizer.encode(text, special_tokens=False)
    assert plain[: len(tokenizer.opening_ids)] == tokenizer.opening_ids
    assert tokenizer.encode_prompt(text) == plain == token_ids(m, text, begins=True)[0]
    encoding = tokenizer.prompt_encoding(text)
    assert "".join(text[a:b] for a, b in dict.fromkeys(encoding.offsets)).replace(" ", "") == text.replace(" ", "")
    assert encode_prompt(m, text).ids.tolist() == plain and encode_prompt(m, text).starts[0] == 0
    # As plain text it is no beginning, and gets one.
    letters = tokenizer.encode_prompt(text, parse_special=False)
    assert letters[: len(tokenizer.opening_ids)] == tokenizer.opening_ids
    assert not set(letters[len(tokenizer.opening_ids) :]) & {tokenizer.token_id(x) for x in ("<s>", "</s>")}
    assert context_ids(tokenizer, text).tolist() == letters


def test_a_text_may_be_its_beginning_alone_or_have_it_twice():
    tokenizer = model().tokenizer
    assert tokenizer.encode_prompt("<s>") == [BOS] == tokenizer.encode_prompt("")
    assert tokenizer.encode_prompt(f"<s>{SPELLED}") == tokenizer.encode(f"<s>{SPELLED}", special_tokens=False)
    assert tokenizer.encode_prompt(f"</s>{PROMPT}")[:2] == [BOS, tokenizer.token_id("</s>")]


def test_every_call_that_begins_a_sequence_reads_a_spelled_beginning_once():
    m = model()
    (right,) = token_ids(m, SPELLED, begins=True)
    assert right.count(BOS) == 1
    options = {"max_new_tokens": 3, "eos_ids": ()}
    tokens = kvjax.generate(m, [right], "full", **options).tokens
    _, filled = kvjax.prefill(m, PROMPT, "full", capacity=64)
    empty = kvjax.cache_ops.crop(filled, 0)
    assert kvjax.generate(m, SPELLED, "full", **options).tokens == tokens
    assert kvjax.generate(m, SPELLED, cache=empty, **options).tokens == tokens
    assert kvjax.extend(m, SPELLED, empty)[0].shape[1] == len(right) == kvjax.logits(m, SPELLED).shape[1]
    assert kvjax.prefill(m, SPELLED, "full", capacity=64)[1].length.tolist() == [len(right)]
    assert [t for (t,) in kvjax.stream(m, SPELLED, "full", **options)] == tokens[0]
    assert speculative.speculate(m, SPELLED, "int8", **options).tokens == tokens
    assert lengths(kvjax.read(m, SPELLED, "full")) == lengths(context().crop(0).feed(SPELLED)) == [len(right)]
    assert context().crop(0).ask(SPELLED, **options).tokens == tokens
    assert lengths(context().extend_prefix([SPELLED], of=[-1])) == [len(right)]
    np.testing.assert_allclose(
        kvjax.score(m, SPELLED, MORE, "full")[0], kvjax.score(m, [right], MORE, "full")[0], atol=1e-5
    )
    assert kvjax.reuse.read_exactly(m, [SPELLED]).ids == [right]
    documents = split_documents(m, SPELLED + PROMPT, 8, 4)
    assert all(x[0] == BOS and BOS not in x[1:] for x in documents)


def test_a_conversation_is_read_alike_as_text_and_as_ids():
    m = dataclasses.replace(
        model(), chat_template=ChatTemplate("{{ bos_token }}{{ messages[0].content }}", (("bos_token", "<s>"),))
    )
    messages = [[{"role": "user", "content": text}] for text in ("the capital", " of", "<s>is")]
    by_text, by_ids = (kvjax.read(m, x(messages), "full") for x in (m.chat_texts, m.chat_ids))
    assert by_text.ids == by_ids.ids and [row[0] for row in by_ids.ids] == [BOS] * 3
    np.testing.assert_array_equal(by_text.last_logits, by_ids.last_logits)
