"""Byte-level tokenizers in GGUF metadata, against tokenizers trained here with the published pre-tokenizers."""

from __future__ import annotations

import functools
import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from checkpoints_convert.gguf import tokenizer_files
from checkpoints_convert.gguf.pretokenizers import PRE_TOKENIZERS
from tests.checkpoints_convert.gguf.gguf_metadata import load_tokenizer, tiny_keys, tokenizer_keys

SPECIAL = ["<|begin|>", "<|end|>"]
CORPUS = [
    "The keys don't fit: it'LL take 12345 bytes, we've 678 left. HTTPServer iPhone McDonald's",
    "def f(x):\n    return x ** 2  # 1,000,000 times\r\n\r\n\tif x == 10:\n        pass\n",
    "naïve café cafe\u0301 Straße Ångström, Привет мир, हिन्दी क्षत्रिय",
    "你好，世界！日本語のテキスト、한국어 텍스트입니다 2024年",
    "/path/to/file.txt\n//// $100 +5 <=> ^~| `x` ===--->>> !!!\n\n",
] * 3
TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "   a  b\n\n  c \t\n ",
    "1 12 123 1234 ½ ² ٣٤٥ Ⅷ",
    "I'm 'S 'ſ DON'T it'sx",
    "e\u0301 n\u0303 a\u0301\u0301 \u0301 \u1e9b\u0323",
    "😀👍🏽🇺🇸 \u200b\u00a0\u3000\x00\x7f",
    "世界123abc한국 テスト。 Ǆǅ ªº 𐐀",
    "<|begin|>a <|end|>\n<|end|><|end |>",
    "Ġ Ċ \u2581 <0x0A> " + " " * 50 + "\n" * 20,
]


def split_by(*patterns: str):
    """A pre-tokenizer as most tokenizer.json spell it: a list of splits, then bytes."""
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
CJK = "[一-龥぀-ゟ゠-ヿ]+"
PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(False),
    "phi-2": pre_tokenizers.ByteLevel(False),
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "llama-bpe": split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "qwen2": split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "qwen35": split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": split_by(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": split_by(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "kimi-k2": split_by(
        r"[\p{Han}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "deepseek-v3": split_by(
        r"\p{N}{1,3}",
        CJK,
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
COMPOSING = ("command-r", "qwen2", "qwen35")


@functools.cache
def train_tokenizer(name: str) -> Tokenizer:
    """Trains a small byte-level tokenizer with the published pre-tokenizer of that name."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = PUBLISHED[name]
    tokenizer.decoder = decoders.ByteLevel()
    if name in COMPOSING:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level_keys(name: str = "gpt-2", **changes) -> dict:
    """Metadata of the trained tokenizer."""
    model = json.loads(train_tokenizer(name).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3 if token in SPECIAL else 1 for token in tokens]
    merges = [" ".join(merge) for merge in model["merges"]]
    known = dict(model="gpt2", pre=name, tokens=tokens, token_type=types, merges=merges, add_bos_token=False)
    return tokenizer_keys(**known | {"bos_token_id": 0, "eos_token_id": 1} | changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_level_ids_are_those_of_the_trained_tokenizer(name, tmp_path):
    ours, peer = load_tokenizer(byte_level_keys(name), tmp_path), train_tokenizer(name)
    for text in TEXTS:
        assert ours.encode(text) == peer.encode(text).ids, text
        if name not in COMPOSING:
            assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_every_name_loads_and_text_survives(tmp_path):
    for name in PRE_TOKENIZERS:
        ours = load_tokenizer(byte_level_keys("gpt-2", pre=name), tmp_path)
        assert ours.decode(ours.encode(TEXTS[0]), skip_special_tokens=False) == TEXTS[0], name


def test_without_a_name_the_pre_tokenizer_is_the_default():
    metadata = byte_level_keys()
    del metadata["tokenizer.ggml.pre"]
    assert tokenizer_files.make_files(metadata) == tokenizer_files.make_files(byte_level_keys(pre="default"))


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("default", ["a", ",", " b", "!?", " ", "123", "45"]),
        ("gpt-2", ["a", ",", " b", "!?", " 12345"]),
        ("glm4", ["a", ",", " b", "!?", " ", "123", "45"]),
        ("seed-coder", ["a", ",", " b", "!?", " ", "1", "2", "3", "4", "5"]),
        ("deepseek-coder", ["a", ",", " b", "!?", " ", "1", "2", "3", "4", "5"]),
    ],
)
def test_pieces(name, pieces):
    """The pieces are llama.cpp's, where no tokenizer.json is at hand."""
    steps = pre_tokenizers.Sequence(list(PRE_TOKENIZERS[name].steps))
    assert [piece.replace("Ġ", " ") for piece, _ in steps.pre_tokenize_str("a, b!? 12345")] == pieces


@pytest.mark.parametrize(("name", "ids"), [("gpt-2", [5, 4]), ("llama-bpe", [6]), ("tekken", [6]), ("qwen2", [5, 4])])
def test_a_word_that_is_a_token(name, ids, tmp_path):
    assert load_tokenizer(tiny_keys(pre=name), tmp_path).encode("abc") == ids
