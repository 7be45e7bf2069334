"""Tokens that stand beside tokenizer.json, in every file and spelling: ids and texts are those of transformers 5."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken

from kvjax.errors import KvjaxError
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.special_tokens import ADDED, CONFIG, MAP
from kvjax.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import byte_level

TEXT = "a <s> b<|im_end|> c <x> d"
NAMED = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}"


def token(content: str, **flags: bool) -> dict:
    """An entry as transformers writes it."""
    known = dict(lstrip=False, rstrip=False, normalized=False, single_word=False, special=True)
    return {"content": content} | known | flags


def typed(content: str) -> dict:
    return {"__type": "AddedToken"} | token(content)


def write_tokenizer(directory: Path, files: dict[str, dict], added: tuple[AddedToken, ...] = ()) -> Path:
    """Writes 256 bytes as a tokenizer, further tokens from 256 on, and the other files."""
    inner = tokenizers.Tokenizer.from_str(byte_level().to_str().replace("<s>", "<!>"))
    raw = json.loads(inner.to_str())
    raw["added_tokens"] = []
    inner = tokenizers.Tokenizer.from_str(json.dumps(raw))
    inner.add_tokens(list(added))
    inner.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(NAMED)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def table(*tokens: dict, first: int = 256) -> dict:
    return {"added_tokens_decoder": {str(first + i): entry for i, entry in enumerate(tokens)}}


BOTH = (token("<s>"), token("<|im_end|>"))
CASES = {
    # name: (files, ids from 256 on in TEXT, number of ids, decoded, what the template's names are)
    "a map with texts and objects": (
        {MAP: {"bos_token": "<s>", "eos_token": token("<|im_end|>")}},
        ([256, 257], 14, "a  b c <x> d", "<s>|<|im_end|>|"),
    ),
    "the map takes precedence": (
        {CONFIG: {"bos_token": "<x>"}, MAP: {"bos_token": "<s>"}},
        ([256], 23, "a  b<|im_end|> c <x> d", "<s>||"),
    ),
    "the map says that there is none": (
        {CONFIG: {"bos_token": "<s>"}, MAP: {"bos_token": None}},
        ([], 25, TEXT, "||"),
    ),
    "a table stands above the map": (
        {CONFIG: table(token("<s>")), MAP: {"bos_token": "<s>"}, ADDED: {"<|im_end|>": 257}},
        ([256], 23, "a  b<|im_end|> c <x> d", "||"),
    ),
    "a table": ({CONFIG: {"bos_token": "<s>"} | table(*BOTH)}, ([256, 257], 14, "a  b c <x> d", "<s>||")),
    "a table whose order is another": (
        {CONFIG: {"added_tokens_decoder": {"257": token("<s>"), "256": token("<|im_end|>")}}},
        ([257, 256], 14, "a  b c <x> d", "||"),
    ),
    "flags of a table": (
        {CONFIG: table(token("<s>", special=False, normalized=True), token("<|im_end|>", lstrip=True, rstrip=True))},
        ([256, 257], 13, "a <s> bc <x> d", "||"),
    ),
    "a table with texts and flags left out": (
        {CONFIG: table({"content": "<s>"}, {"content": "<|im_end|>", "special": True})},
        ([256, 257], 14, "a <s> b c <x> d", "||"),
    ),
    "added_tokens.json": (
        {CONFIG: {"eos_token": "<|im_end|>"}, ADDED: {"<|im_end|>": 256, "<s>": 257}},
        ([257, 256], 14, "a <s> b c <x> d", "|<|im_end|>|"),
    ),
    "added_tokens.json and a map": (
        {MAP: {"bos_token": "<s>", "eos_token": typed("<|im_end|>")}, ADDED: {"<s>": 256, "<|im_end|>": 257}},
        ([256, 257], 14, "a  b c <x> d", "<s>|<|im_end|>|"),
    ),
    "names without ids, in the order of transformers": (
        {CONFIG: {"image_token": "<x>", "eos_token": "<|im_end|>", "bos_token": typed("<s>")}},
        ([256, 257, 258], 12, "a  b c  d", "<s>|<|im_end|>|<x>"),
    ),
    "a list of further tokens": (
        {CONFIG: {"extra_special_tokens": ["<s>", typed("<|im_end|>")]}},
        ([256, 257], 14, "a  b c <x> d", "||"),
    ),
    "a list of further tokens in the map": (
        {MAP: {"additional_special_tokens": ["<s>", "<|im_end|>"]}},
        ([256, 257], 14, "a  b c <x> d", "||"),
    ),
    "lists in two files": (
        {CONFIG: {"additional_special_tokens": ["<x>"]}, MAP: {"extra_special_tokens": ["<s>"]}},
        ([257, 256], 21, "a  b<|im_end|> c  d", "||"),
    ),
    "a list stands above the map's": (
        {CONFIG: {"additional_special_tokens": ["<x>"]}, MAP: {"additional_special_tokens": ["<s>"]}},
        ([256], 23, "a <s> b<|im_end|> c  d", "||"),
    ),
    "named further tokens": (
        {CONFIG: {"extra_special_tokens": {"image_token": "<x>"}}},
        ([256], 23, "a <s> b<|im_end|> c  d", "||<x>"),
    ),
    "a token of the vocabulary": ({CONFIG: {"bos_token": "b"}}, ([], 25, "a <s> <|im_end|> c <x> d", "b||")),
    "switches are no tokens": ({CONFIG: {"add_bos_token": True, "bos_token": None}}, ([], 25, TEXT, "||")),
    "nothing": ({}, ([], 25, TEXT, "||")),
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES)
def test_tokens_beside_the_file_are_read_as_by_transformers(files, expected, tmp_path):
    directory = write_tokenizer(tmp_path, files)
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode(TEXT, False)
    template = ChatTemplate.from_directory(directory)
    assert template is not None
    (named,) = template.render([[{"role": "user", "content": "x"}]])
    assert ([i for i in ids if i >= 256], len(ids), tokenizer.decode(ids), named) == expected
    contents = {f.name: f.read_bytes() for f in directory.iterdir()}
    assert Tokenizer.from_files(contents, directory).encode(TEXT, False) == ids


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("config", [table(token("<s>")), {"eos_token": "<s>"}, {"extra_special_tokens": ["<s>"]}])
def test_a_token_is_special_by_any_file(special, config, tmp_path):
    directory = write_tokenizer(tmp_path, {CONFIG: config}, (AddedToken("<s>", special=special),))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.decode(tokenizer.encode("a<s>b", False)) == "ab"


def test_a_token_of_tokenizer_json_keeps_its_flags_where_no_table_gives_others(tmp_path):
    strips = AddedToken("<s>", lstrip=True, special=True, normalized=False)
    for config, num_ids in (({"bos_token": "<s>"}, 2), (table(token("<s>")), 3)):
        directory = write_tokenizer(tmp_path, {CONFIG: config}, (strips,))
        assert len(Tokenizer.from_directory(directory).encode("a <s>", False)) == num_ids
    directory = write_tokenizer(tmp_path, {CONFIG: {}, ADDED: {"<s>": 256}}, (strips,))
    assert Tokenizer.from_directory(directory).encode("a <s>", False) == [64, 256]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {CONFIG: table(token("<s>"), first=300)},
            r"tokenizer_config.json gives the token '<s>' the id 300, which would be 256 .* give the tokens before it",
        ),
        ({CONFIG: table(token("<s>")) | {}, ADDED: {}}, None),
        ({ADDED: {"<s>": 258, "<x>": 256}}, r"added_tokens.json gives the token '<s>' the id 258, which would be 257"),
        ({CONFIG: table(token("b"))}, r"token 'b' the id 256, which would be 65 .*copy both files again.* remove its"),
        ({CONFIG: {"added_tokens_decoder": {"x": token("<s>")}}}, r"the id 'x', which is no number; copy it again"),
        ({CONFIG: {"added_tokens_decoder": {"256": {"special": True}}}}, r"the token 256 of .* has no text; copy it"),
        ({CONFIG: {"added_tokens_decoder": ["<s>"]}}, r"which is no number; copy it again"),
        ({ADDED: {"<s>": "no"}}, r"added_tokens.json gives a token the id 'no', which is no number"),
        ({MAP: []}, r"special_tokens_map.json does not hold a JSON object; copy it again"),
    ],
)
def test_ids_that_cannot_be_had_and_damaged_files_are_named(files, says, tmp_path):
    directory = write_tokenizer(tmp_path, files)
    if says is None:
        assert Tokenizer.from_directory(directory).encode("<s>") == [256]
        return
    with pytest.raises(KvjaxError, match=says):
        Tokenizer.from_directory(directory)


def test_a_table_that_contradicts_tokenizer_json_is_refused(tmp_path):
    for config in ({ADDED: {"<x>": 256}}, {CONFIG: table(token("<x>"))}):
        directory = write_tokenizer(tmp_path, config, (AddedToken("<s>", special=True),))
        with pytest.raises(KvjaxError, match="gives the token '<x>' the id 256, which would be 257"):
            Tokenizer.from_directory(directory)


def test_the_own_end_is_known_by_its_id(tmp_path):
    assert Tokenizer.from_directory(write_tokenizer(tmp_path, {CONFIG: {"eos_token": "<|im_end|>"}})).eos_id == 256
    assert Tokenizer.from_directory(write_tokenizer(tmp_path, {CONFIG: {"eos_token": None}})).eos_id is None
