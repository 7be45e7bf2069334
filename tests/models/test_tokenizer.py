"""The tokenizer wrapper, on tokenizers built here."""

from __future__ import annotations

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from kvjax.errors import KvjaxError
from kvjax.models.tokenizer import Tokenizer


def byte_level(bos: bool = False) -> tokenizers.Tokenizer:
    """256 byte tokens and <s>, which the post-processor puts in front if `bos`."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>"])
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return inner


@pytest.fixture
def directory(tmp_path):
    def write(inner):
        inner.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return write


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x\n", "naïve Ω 🙂", " leading", ""])
def test_text_survives(directory, text):
    tokenizer = Tokenizer.from_directory(directory(byte_level()))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 257


def test_bos_comes_from_the_post_processor(directory):
    tokenizer = Tokenizer.from_directory(directory(byte_level(bos=True)))
    ids = tokenizer.encode("ab")
    assert ids[0] == tokenizer.token_id("<s>") == 256 and len(ids) == 3
    assert tokenizer.encode("ab", special_tokens=False) == ids[1:]
    assert tokenizer.decode(np.array(ids)) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>ab"


def test_truncation_and_padding_of_the_file_are_ignored(directory):
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    assert len(Tokenizer.from_directory(directory(inner)).encode("abcd")) == 4


def test_unknown_token(directory):
    with pytest.raises(KvjaxError, match="'<eos>' is not in the vocabulary of 257"):
        Tokenizer.from_directory(directory(byte_level())).token_id("<eos>")


def test_a_text_that_was_no_utf8(directory):
    with pytest.raises(KvjaxError, match=r"has '\\udcff' as character 1; read it again"):
        Tokenizer.from_directory(directory(byte_level())).encode("a\udcff")


def test_no_or_damaged_tokenizer(tmp_path):
    with pytest.raises(KvjaxError, match="has no tokenizer.json; copy"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        KvjaxError, match=r"of its SentencePiece tokenizer tokenizer.model make tokenizer.json(.|\n)*save_pre"
    ):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(KvjaxError, match="is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)


PARTS = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
WORDS = {"model": {"type": "WordLevel", "vocab": {"z": 0, "?": 1}, "unk_token": "?"}}
PLAIN = dict.fromkeys(PARTS) | {"version": "1.0", "added_tokens": []} | WORDS


def template(token: str) -> dict:
    """A post-processor that prepends a token which its table lacks."""
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    first = [{"SpecialToken": {"id": token, "type_id": 0}}, text[0]]
    return {"type": "TemplateProcessing", "single": first, "pair": text, "special_tokens": {}}


def split(regex: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def write_tokenizer(directory, **changes):
    """Writes the plain tokenizer.json with other parts, and returns its directory."""
    (directory / "tokenizer.json").write_text(json.dumps(PLAIN | changes))
    return directory


def test_a_panic_at_loading_names_the_file_and_what_the_library_said(tmp_path):
    broken = write_tokenizer(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": ""})
    with pytest.raises(KvjaxError, match=r"tokenizer.json is not a tokenizer .*Cannot parse precompiled.*; copy it"):
        Tokenizer.from_directory(broken)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"z": 0}, "unk_token": "[UNK]"}}, r"Missing \[UNK\]"),
        ({"post_processor": template("<s>")}, "no entry found"),
        ({"pre_tokenizer": split("(a+)+$")}, "retry-limit-in-match over"),
    ],
)
def test_a_failure_at_encoding_names_the_file_and_what_the_library_said(tmp_path, changes, says):
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, **changes))
    with pytest.raises(KvjaxError, match=rf"/tokenizer.json fails to encode a text of 41 .*{says}.*token ids"):
        tokenizer.encode("a" * 40 + "!")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_passes(error):
    class Stops:
        encode_special_tokens, no_truncation, no_padding = False, staticmethod(lambda: None), staticmethod(lambda: None)

        def encode(self, text, **options):
            raise error

    with pytest.raises(error):
        Tokenizer(Stops()).encode("z")


class Interrupted:
    """A tokenizer that calls `meanwhile` in the middle of every encoding."""

    def __init__(self, inner, meanwhile):
        vars(self).update(inner=inner, meanwhile=meanwhile)

    def __getattr__(self, name):
        return getattr(vars(self)["inner"], name)

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)

    def __deepcopy__(self, memo):
        return Interrupted(copy.deepcopy(self.inner, memo), self.meanwhile)

    def encode(self, text, **options):
        self.meanwhile()
        return self.inner.encode(text, **options)


@pytest.mark.parametrize("name", ["encode_prompt", "encode_continuation", "prompt_encoding"])
def test_plain_texts_of_one_thread_leave_special_tokens_of_others_alone(name):
    others, text = [], "a<s>b"
    tokenizer = Tokenizer(byte_level())
    special, own = tokenizer.encode(text), threading.get_ident()
    assert special == [64, 256, 65]
    with ThreadPoolExecutor(1) as pool:

        def meanwhile():
            if threading.get_ident() == own:
                others.append(pool.submit(tokenizer.encode_prompt, text).result())

        tokenizer.inner = Interrupted(tokenizer.inner, meanwhile)
        plain = getattr(tokenizer, name)(text, parse_special=False)
    assert len(getattr(plain, "ids", plain)) == 5 and others and others == [special] * len(others)


def test_many_threads_read_texts_in_both_ways():
    tokenizer = Tokenizer(byte_level())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda plain: tokenizer.encode_prompt("a<s>b", parse_special=not plain), [0, 1] * 200))
    assert found == [[64, 256, 65], [64, 27, 82, 29, 65]] * 200


@pytest.mark.parametrize("value", [None, 5, b"x", ["x"]])
def test_what_is_no_text_is_refused(value):
    tokenizer = Tokenizer(byte_level())
    for encode in (tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_continuation):
        with pytest.raises(KvjaxError, match="a text is a str, got"):
            encode(value)
    with pytest.raises(KvjaxError, match="is not in the vocabulary"):
        tokenizer.token_id(value)


@pytest.mark.parametrize("ids", ["12", [-1], [2**40], [1.0], 5, [[1, 2]], [None]])
def test_what_are_no_ids_are_refused(ids):
    tokenizer = Tokenizer(byte_level())
    for decode in (tokenizer.decode, tokenizer.decode_continuation):
        with pytest.raises(KvjaxError, match="fails to decode ids .*; copy it again, or give a flat list of ids"):
            decode(ids)


def test_ids_may_be_of_numpy_and_jax():
    tokenizer = Tokenizer(byte_level())
    for ids in ([0, 1], np.array([0, 1]), jnp.array([0, 1]), [np.int32(0), jnp.int32(1)], iter([0, 1])):
        assert tokenizer.decode(ids) == tokenizer.decode([0, 1])
