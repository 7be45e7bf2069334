"""Tokenizers that load and fail later, or fail by a panic: each gives an error of one line."""

from __future__ import annotations

import json

import pytest

from kvjax.errors import KvjaxError
from kvjax.models.tokenizer import Tokenizer

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


def test_the_plain_one_works(tmp_path):
    assert Tokenizer.from_directory(write_tokenizer(tmp_path)).encode("z") == [0]


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
