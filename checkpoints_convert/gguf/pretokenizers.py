"""How text is cut before byte-level BPE, by the name that a GGUF file gives it in `tokenizer.ggml.pre`."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from kvjax.errors import KvjaxError

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = "|".join((CONTRACTION, WORD, r"\p{N}{1,3}", MARKS, BREAKS))
QWEN2 = "|".join((CONTRACTION, WORD, r"\p{N}", MARKS, BREAKS))
QWEN35 = "|".join(
    (CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", BREAKS)
)
TEKKEN = "|".join((*CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", BREAKS))
GPT4O = "|".join((*(f"{cased}{CONTRACTION}?" for cased in CASED), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", BREAKS))
SEED = "|".join((CONTRACTION, WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", BREAKS))
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BREAKS}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
"""What llama.cpp reads a file with that does not name its pre-tokeniser."""


def split(*patterns: str) -> tuple[PreTokenizer, ...]:
    """Cuts out the matches of each pattern in turn, and spells the pieces in bytes."""
    cuts = [Split(Regex(p), "isolated") for p in patterns]
    return (*cuts, ByteLevel(add_prefix_space=False, use_regex=False))


class Pre(NamedTuple):
    """What the name of a pre-tokeniser stands for."""

    steps: tuple[PreTokenizer, ...]
    nfc: bool = False  # whether text is composed first
    whole_words: bool = False  # whether a piece that is a token is not taken apart by merges
    add_bos: bool = False  # unless the file says otherwise


WORDS = (ByteLevel(add_prefix_space=False, use_regex=True),)
SINGLE_DIGITS = (Digits(individual_digits=True), *WORDS)

KNOWN = {
    "default": Pre(split(*DEFAULT)),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum"), Pre(WORDS)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), Pre(SINGLE_DIGITS)),
    "command-r": Pre(SINGLE_DIGITS, nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"),
        Pre(split(LLAMA3), whole_words=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Pre(split(LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Pre(split(QWEN2), nfc=True)),
    "stablelm2": Pre(split(QWEN2)),
    "qwen35": Pre(split(QWEN35), nfc=True),
    "tekken": Pre(split(TEKKEN), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Pre(split(GPT4O))),
    "seed-coder": Pre(split(SEED)),
    "deepseek-v3": Pre(split(*DEEPSEEK3)),
    "deepseek-coder": Pre(split(*DEEPSEEK_CODER)),
}
"""The names and the cuts are llama.cpp's (src/llama-vocab.cpp), in the spelling of the models' own tokenizer.json.

llama.cpp does not compose text; `nfc` is for the models whose tokenizer.json does.
"""


def pre_tokenizer(name: str) -> Pre:
    """The pre-tokeniser of that name; raises KvjaxError if there is none."""
    if name not in KNOWN:
        raise KvjaxError(
            f"tokenizer.ggml.pre {name!r} is not a known pre-tokeniser; known: {', '.join(KNOWN)}; "
            "convert the safetensors checkpoint instead, which has its own tokenizer.json"
        )
    return KNOWN[name]
