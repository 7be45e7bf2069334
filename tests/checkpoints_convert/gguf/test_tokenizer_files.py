"""The tokenizer in GGUF metadata: SentencePiece against its own ids, the tokens around a text, the refusals."""

from __future__ import annotations

import json

import pytest

from checkpoints_convert.gguf import tokenizer_files
from checkpoints_convert.gguf.vocabulary import read_end_ids
from kvjax.errors import KvjaxError
from kvjax.models.chat_template import ChatTemplate
from tests.checkpoints_convert.gguf.gguf_metadata import load_tokenizer, tiny_keys, tokenizer_keys
from tests.fixtures import ROOT

SENTENCEPIECE = json.loads((ROOT / "sentencepiece.json").read_text(encoding="utf-8"))


def sentencepiece_keys(**changes) -> dict:
    return SENTENCEPIECE["prefix"]["metadata"] | tokenizer_keys(**changes)


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_ids_are_those_of_sentencepiece(name, tmp_path):
    entry = SENTENCEPIECE[name]
    ours = load_tokenizer(entry["metadata"] | tokenizer_keys(add_bos_token=False), tmp_path)
    for text, ids in entry["cases"]:
        assert ours.encode(text) == ids, text
        if name == "prefix" and "\u2581" not in text:
            assert ours.decode(ids) == text


def test_fixture_covers_unknown_characters_bytes_and_symbols():
    bytes_, unknown = SENTENCEPIECE["prefix"], SENTENCEPIECE["plain"]
    types = [entry["metadata"]["tokenizer.ggml.token_type"] for entry in (bytes_, unknown)]
    met = [{kinds[i] for _, ids in e["cases"] for i in ids} for e, kinds in zip((bytes_, unknown), types, strict=True)]
    assert met == [{1, 6}, {1, 2, 4}]


def test_sentencepiece_puts_a_space_before_each_stretch_of_text(tmp_path):
    ours = load_tokenizer(sentencepiece_keys(), tmp_path)
    tokens = sentencepiece_keys()["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in ours.encode("a<s>e")] == ["<s>", "\u2581a", "<s>", "\u2581e"]
    assert ours.encode("") == [1]


def test_special_tokens_are_left_out_and_those_of_the_user_are_not(tmp_path):
    tokens = ["<s>", "<x>", "a", "b", "c", "ab", "abc"]
    ours = load_tokenizer(tiny_keys(tokens=tokens, token_type=[3, 4, *[1] * 5]), tmp_path)
    ids = ours.encode("a<s>b<x>")
    assert ids == [2, 0, 3, 1]
    assert ours.decode(ids) == "ab<x>"


def test_bos_and_eos_are_special_whatever_their_type(tmp_path):
    ours = load_tokenizer(tiny_keys(token_type=[1] * 7, bos_token_id=0, eos_token_id=1), tmp_path)
    assert ours.decode(ours.encode("a<s>b</s>")) == "ab"


def test_the_tokens_of_phi_3_take_the_space_behind_them(tmp_path):
    plain = sentencepiece_keys(add_bos_token=False)
    phi = plain | {"general.name": "Phi-3 mini"}
    assert load_tokenizer(phi, tmp_path).encode("</s>\n a") == load_tokenizer(plain, tmp_path).encode("</s>a")
    assert load_tokenizer(phi, tmp_path).encode("<s>\n a") == load_tokenizer(plain, tmp_path).encode("<s>\n a")


@pytest.mark.parametrize(
    ("metadata", "added"),
    [
        (tiny_keys(bos_token_id=0, eos_token_id=1), (False, False)),
        (tiny_keys(bos_token_id=0, eos_token_id=1, pre="llama-bpe"), (True, False)),
        (tiny_keys(pre="llama-bpe"), (False, False)),
        (tiny_keys(bos_token_id=0, eos_token_id=1, pre="llama-bpe", add_bos_token=False), (False, False)),
        (tiny_keys(bos_token_id=0, eos_token_id=1, add_eos_token=True), (False, True)),
        (tiny_keys(bos_token_id=0, eos_token_id=1, add_bos_token=True, add_eos_token=True), (True, True)),
        (sentencepiece_keys(), (True, False)),
        (sentencepiece_keys(add_bos_token=False, add_eos_token=True), (False, True)),
    ],
)
def test_what_stands_around_a_text(metadata, added, tmp_path):
    ours = load_tokenizer(metadata, tmp_path)
    bos, eos = (0, 1) if metadata["tokenizer.ggml.model"] == "gpt2" else (1, 2)
    first, second = (ours.encode(text, special_tokens=False) for text in ("ab", "a"))
    before, after = [bos] * added[0], [eos] * added[1]
    assert ours.encode("ab") == [*before, *first, *after]
    assert ours.inner.encode("ab", "a").ids == [*before, *first, *after, *before, *second, *after]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"]) == added


def test_tokens_of_any_spelling_stand_around_a_text(tmp_path):
    metadata = tiny_keys(tokens=["$A:1 [x]:0", "</s>", "a", "b", "c", "ab", "abc"], bos_token_id=0, add_bos_token=True)
    assert load_tokenizer(metadata, tmp_path).encode("a") == [0, 2]


def test_config_and_chat_template():
    about = {"general.architecture": "llama", "llama.context_length": 64, "tokenizer.chat_template": "{{ 'é' }}"}
    files = tokenizer_files.make_files(
        tiny_keys(bos_token_id=0, eos_token_id=1, padding_token_id=1, unknown_token_id=0) | about
    )
    assert json.loads(files["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 64,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<s>",
        "pad_token": "</s>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ 'é' }}",
    }
    assert files["chat_template.jinja"] == "{{ 'é' }}".encode()
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_chat_templates_with_names(tmp_path):
    key = "tokenizer.chat_template"
    names = {f"{key}.tool_use": "{{ tools }}", f"{key}.rag": "é", "tokenizer.chat_templates": ["tool_use", "rag"]}
    for default in ({key: "d"}, {f"{key}.default": "d"}, {}):
        files = tokenizer_files.make_files(tiny_keys(bos_token_id=0) | default | names)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / "additional_chat_templates").mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        template = ChatTemplate.from_directory(folder)
        assert template.source == ("d" if default else None) and template.tokens == (("bos_token", "<s>"),)
        assert dict(template.named) == {"tool_use": "{{ tools }}", "rag": "é"}


def test_what_the_metadata_do_not_say_is_not_in_the_config():
    files = tokenizer_files.make_files(tiny_keys())
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    config = json.loads(files["tokenizer_config.json"])
    assert not {"model_max_length", "bos_token", "eos_token", "chat_template"} & set(config)


def test_an_ordinary_token_that_fills_up_batches_stays_ordinary(tmp_path):
    metadata = tiny_keys(bos_token_id=0, eos_token_id=1, padding_token_id=2)
    ours = load_tokenizer(metadata, tmp_path)
    assert ours.decode(ours.encode("ab")) == "ab" and ours.encode("ab") == [5]


def test_sentencepiece_has_default_ids():
    metadata = {k: v for k, v in sentencepiece_keys().items() if not k.endswith("_id")}
    config = json.loads(tokenizer_files.make_files(metadata)["tokenizer_config.json"])
    assert [config[f"{role}_token"] for role in ("unk", "bos", "eos")] == ["<unk>", "<s>", "</s>"]


def test_types_may_be_missing():
    metadata = tiny_keys(bos_token_id=0)
    del metadata["tokenizer.ggml.token_type"]
    added = json.loads(tokenizer_files.make_files(metadata)["tokenizer.json"])["added_tokens"]
    assert [token["content"] for token in added] == ["<s>", "</s>"]  # </s> ends a text by its spelling


def change_tokens(*tokens: str, **keys) -> dict:
    """Metadata of seven letters and words, the last of which are replaced by these tokens."""
    tokens = (*("p", "q", "a", "b", "c", "ab", "d", "e")[: 8 - len(tokens)], *tokens)
    return tiny_keys(tokens=list(tokens), token_type=[1] * 8, merges=["a b"], **keys)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (change_tokens("<|im_end|>", eos_token_id=2), [2, 7]),
        (change_tokens("<|eot_id|>", "<|eom_id|>", eos_token_id=2), [2, 6, 7]),
        (change_tokens("<|end|>", "<|endoftext|>", eos_token_id=7, eot_token_id=6), [7, 6]),
        (change_tokens("<end_of_turn>", eos_token_id=2, eot_token_id=7), [2, 7]),
        (change_tokens("<|fim_pad|>", "<|file_sep|>", eos_token_id=2), [2, 6, 7]),
        (change_tokens("<|fim_pad|>", "<|file_sep|>", eos_token_id=2, fim_pad_token_id=3), [2, 3, 7]),
        (change_tokens("<|return|>", "<|call|>", eos_token_id=2), [2, 6, 7]),
        (change_tokens("</s>", "<|tool_response>", eos_token_id=2), [2, 7]),
        (change_tokens("<eos>", "<end_of_turn>", "</s>", eos_token_id=5), [5, 6]),
        (change_tokens("<\uff5cend\u2581of\u2581sentence\uff5c>"), [7]),
        (change_tokens("<|im_start|>", eos_token_id=2), [2]),
        (change_tokens("<|im_end|> ", eos_token_id=2), [2]),
        (sentencepiece_keys(), [2]),
        (tokenizer_keys(eos_token_id=5, eot_token_id=3), [5, 3]),
        ({}, []),
    ],
)
def test_ends_of_keys_and_of_tokens_by_their_text(metadata, expected):
    assert read_end_ids(metadata) == expected


def test_the_end_of_a_part_ends_no_message_where_others_do():
    tokens = ["<|return|>", "<|call|>", "<|end|>", "a", "b", "ab", "c", "d"]
    assert read_end_ids(tiny_keys(tokens=tokens, eos_token_id=0)) == [0, 1]
    assert read_end_ids(tiny_keys(tokens=["<|flush|>", "<|calls|>", *tokens[2:]])) == [0, 1]
    assert read_end_ids(tiny_keys(tokens=["x", "<|call|>", *tokens[2:]])) == [1, 2]


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_a_token_that_ends_a_turn_is_special_whatever_its_type(kind, tmp_path):
    metadata = tiny_keys(tokens=["<s>", "<|im_end|>", "a", "b", "c", "ab", "abc"], token_type=[3, kind, *[1] * 5])
    ours = load_tokenizer(metadata, tmp_path)
    assert ours.encode("ab<|im_end|>") == [5, 1]
    assert ours.decode([5, 1]) == "ab"


def test_a_token_without_text_has_a_name_of_its_own(tmp_path):
    ours = load_tokenizer(tiny_keys(tokens=["<s>", "", "a", "b", "c", "ab", "abc"]), tmp_path)
    assert ours.token_id("[EMPTY_1]") == 1


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_no_tokenizer(model):
    assert tokenizer_files.make_files({} if model is None else tokenizer_keys(model=model)) == {}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (tiny_keys(model="bert"), r"model 'bert' is not supported; supported: gpt2, llama; convert the safetensors"),
        (tiny_keys(model=["gpt2"]), r"tokenizer.ggml.model is \['gpt2'\], which is no str"),
        (
            tiny_keys(pre="gpt-9"),
            r"'gpt-9' is not a known pre-tokenizer; known: default, gpt-2, .* convert the safetensors",
        ),
        (tiny_keys(pre=3), "tokenizer.ggml.pre is 3, which is no str"),
        ({"tokenizer.chat_template.rag": 3}, "tokenizer.chat_template.rag is 3, which is no str; .* copy it again"),
        ({"tokenizer.chat_template.": "a"}, "tokenizer.chat_template.'' is no name of a template"),
        ({"tokenizer.chat_template.../../a": "a"}, "tokenizer.chat_template.'../../a' is no name of a template"),
        ({"tokenizer.chat_template.a\0": "a"}, r"tokenizer.chat_template.'a\\x00' is no name of a template"),
        (tiny_keys(tokens=None), "tokenizer.ggml.tokens is missing; .* copy it again"),
        (tiny_keys(tokens=[]), "tokenizer.ggml.tokens is not a list"),
        (tiny_keys(tokens="ab"), "tokenizer.ggml.tokens is not a list"),
        (tiny_keys(tokens=["a", 1]), "tokenizer.ggml.tokens is not a list"),
        (
            tiny_keys(tokens=["a", "b", "a", "c", "ab", "x", "y"]),
            "tokenizer.ggml.tokens has 'a' twice; .* copy it again",
        ),
        (tiny_keys(token_type=[1]), "tokenizer.ggml.token_type has 1 values for 7 tokens; .* copy it again"),
        (tiny_keys(token_type=["1"] * 7), "tokenizer.ggml.token_type is not a list"),
        (tiny_keys(merges=None), "tokenizer.ggml.merges is missing"),
        (tiny_keys(merges=["b c"]), "tokenizer.ggml.merges has 'b c', which joins no two tokens"),
        (tiny_keys(merges=["x y"]), "tokenizer.ggml.merges has 'x y', which joins no two tokens"),
        (tiny_keys(merges=["ab"]), "tokenizer.ggml.merges has 'ab', which joins no two tokens"),
        (tiny_keys(merges=["a b c"]), "tokenizer.ggml.merges has 'a b c', which joins no two tokens"),
        (tiny_keys(bos_token_id=7), "tokenizer.ggml.bos_token_id is 7, but there are 7 tokens"),
        (tiny_keys(eos_token_id=-1), "tokenizer.ggml.eos_token_id is -1, but there are 7 tokens"),
        (tiny_keys(eos_token_id="1"), "tokenizer.ggml.eos_token_id is '1', which is no int"),
        (tiny_keys(add_bos_token=True), "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"),
        (tiny_keys(add_eos_token=1), "tokenizer.ggml.add_eos_token is 1, which is no bool"),
        (sentencepiece_keys(scores=None), "tokenizer.ggml.scores is missing; .* convert the safetensors"),
        (sentencepiece_keys(scores=[0.0]), "tokenizer.ggml.scores has 1 values for 520 tokens"),
        (sentencepiece_keys(add_space_prefix="no"), "tokenizer.ggml.add_space_prefix is 'no', which is no bool"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(metadata, message):
    with pytest.raises(KvjaxError, match=message):
        tokenizer_files.make_files(metadata)


def test_several_spaces_are_one_piece_whichever_way_a_file_spells_them(tmp_path):
    # As in Gemma's files: pieces of the user's own, written with plain spaces and with the converter's lowest score.
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a", "  ", "   "]
    metadata = tokenizer_keys(
        model="llama",
        tokens=tokens,
        token_type=[2, 3, 3, 1, 1, 1, 4, 4],
        scores=[0.0, 0.0, 0.0, -2.0, -3.0, -1.0, -1000.0, -1000.0],
        add_bos_token=False,
        add_space_prefix=False,
    )
    ours = load_tokenizer(metadata, tmp_path)
    for text, ids in (
        ("  a", [6, 4]),
        (" a", [5]),
        ("    ", [7, 3]),
        ("a\u2581\u2581\u2581", [4, 7]),
        ("   a a", [7, 4, 5]),
    ):
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text.replace("\u2581", " ")
