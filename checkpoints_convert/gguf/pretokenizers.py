"""Pre-tokenizers, which split text before byte-level BPE, by their names in `tokenizer.ggml.pre`."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = "|".join((CONTRACTION, WORD, r"\p{N}{1,3}", PUNCTUATION, BREAKS))
QWEN2 = "|".join((CONTRACTION, WORD, r"\p{N}", PUNCTUATION, BREAKS))
QWEN35 = "|".join(
    (CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", BREAKS)
)
TEKKEN = "|".join((*CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", BREAKS))
GPT4O = "|".join((*(f"{cased}{CONTRACTION}?" for cased in CASED), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", BREAKS))
NOT_HAN = tuple(part.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for part in CASED)
KIMI = "|".join((r"[\p{Han}]+", *(f"{cased}{CONTRACTION}?" for cased in NOT_HAN), r"\p{N}{1,3}", PUNCTUATION, BREAKS))
SEED = "|".join((CONTRACTION, WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", BREAKS))
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BREAKS}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
"""The patterns of llama.cpp for a file that does not name its pre-tokenizer."""


def split(*patterns: str) -> tuple[PreTokenizer, ...]:
    """Splits at the matches of each pattern in turn, then spells the words in bytes."""
    splits = [Split(Regex(p), "isolated") for p in patterns]
    return (*splits, ByteLevel(add_prefix_space=False, use_regex=False))


class PreTokenization(NamedTuple):
    """The pre-tokenizer of a name, and the settings that llama.cpp derives from the name too."""

    steps: tuple[PreTokenizer, ...]
    nfc: bool = False  # whether text is normalized to NFC first
    whole_words: bool = False  # whether a word that is a token skips the merges
    add_bos: bool = False  # the default, for a file that does not say


WORDS = (ByteLevel(add_prefix_space=False, use_regex=True),)
SINGLE_DIGITS = (Digits(individual_digits=True), *WORDS)

PRE_TOKENIZERS = {
    "default": PreTokenization(split(*DEFAULT)),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "olmo"), PreTokenization(WORDS)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), PreTokenization(SINGLE_DIGITS)),
    "command-r": PreTokenization(SINGLE_DIGITS, nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"),
        PreTokenization(split(LLAMA3), whole_words=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenization(split(LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), PreTokenization(split(QWEN2), nfc=True)),
    "stablelm2": PreTokenization(split(QWEN2)),
    "qwen35": PreTokenization(split(QWEN35), nfc=True),
    "tekken": PreTokenization(split(TEKKEN), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenization(split(GPT4O))),
    "kimi-k2": PreTokenization(split(KIMI)),
    "seed-coder": PreTokenization(split(SEED)),
    "deepseek-v3": PreTokenization(split(*DEEPSEEK3)),
    "deepseek-coder": PreTokenization(split(*DEEPSEEK_CODER)),
}
"""Names and patterns of llama.cpp (src/llama-vocab.cpp), spelled as in the models' own tokenizer.json.

llama.cpp does not normalize text; `nfc` is true for the models whose tokenizer.json does.
"""
