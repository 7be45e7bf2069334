"""The tokenizer inside a GGUF file, as the files that a Hugging Face checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from checkpoints_convert.gguf.pretokenizers import pre_tokenizer
from checkpoints_convert.gguf.vocabulary import (
    AGAIN,
    BYTE,
    CONTROL,
    IDS,
    UNKNOWN,
    USER_DEFINED,
    Metadata,
    Vocabulary,
    array,
    read_vocabulary,
    value,
)
from kvjax.errors import KvjaxError

SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}
"""What llama.cpp takes for the ids that a SentencePiece vocabulary does not give."""

NO_TOKENIZER = ("", "no_vocab", "none")
SPACE = "\u2581"
INSTEAD = "convert the safetensors checkpoint instead, which has its own tokenizer.json"


def files(metadata: Metadata) -> dict[str, bytes]:
    """The tokenizer's files by name; none if the metadata have no tokenizer.

    Raises KvjaxError if the tokenizer is of another kind than byte-level BPE and SentencePiece BPE, has a
    pre-tokeniser that is not known, or if its arrays and ids contradict each other.
    """
    kind = value(metadata, "tokenizer.ggml.model", str, "")
    if kind in NO_TOKENIZER:
        return {}
    if kind not in KINDS:
        raise KvjaxError(f"tokenizer.ggml.model {kind!r} is not supported; supported: {', '.join(KINDS)}; {INSTEAD}")
    vocabulary = read_vocabulary(metadata, SENTENCEPIECE_IDS if kind == "llama" else {})
    tokenizer, adds_bos = KINDS[kind](metadata, vocabulary)
    _add_tokens(tokenizer, vocabulary, metadata)
    added = {"bos": _adds(metadata, vocabulary, "bos", adds_bos), "eos": _adds(metadata, vocabulary, "eos", False)}
    if any(added.values()):
        tokenizer.post_processor = _template(vocabulary, added)
    return _written(tokenizer, _config(metadata, vocabulary, added))


def byte_level(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether bos stands before a text unless the file says otherwise."""
    pre = pre_tokenizer(value(metadata, "tokenizer.ggml.pre", str, "default"))
    ids = vocabulary.ids
    merges = [tuple(merge.split(" ")) for merge in array(metadata, "tokenizer.ggml.merges", str)]
    for merge in merges:
        if len(merge) != 2 or any(token not in ids for token in (*merge, "".join(merge))):
            raise KvjaxError(f"tokenizer.ggml.merges has {' '.join(merge)!r:.80}, which joins no two tokens; {AGAIN}")
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(pre.steps))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def sentencepiece(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE, and whether bos stands before a text unless the file says otherwise."""
    scores = array(metadata, "tokenizer.ggml.scores", (float, int), len(vocabulary.tokens))
    merges = merges_by_score(vocabulary, scores)
    unknown = vocabulary.name("unk")
    tokenizer = Tokenizer(BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    decoding: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if value(metadata, "tokenizer.ggml.add_space_prefix", bool, True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        decoding.append(decoders.Strip(" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer, True


KINDS = {"gpt2": byte_level, "llama": sentencepiece}


def merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, those of the best joined piece first, then those of the longest left.

    Unknown, control and byte tokens are not made of pieces: text never becomes one by merging.
    """
    whole = (UNKNOWN, CONTROL, BYTE)
    pieces = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.types[i] not in whole}
    splits = ((i, t[:cut], t[cut:]) for t, i in pieces.items() for cut in range(1, len(t)))
    ranked = [(scores[i], len(a), len(b), a, b) for i, a, b in splits if a in pieces and b in pieces]
    return [pair[3:] for pair in sorted(ranked, key=itemgetter(0, 1, 2), reverse=True)]


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, metadata: Metadata) -> None:
    """Marks what is found in a text as it is: special tokens, which decoding can leave out, and those of the user."""
    name = value(metadata, "general.name", str, "").lower()
    strips = "phi-3" in name or "phi3" in name  # the format has no place for this; llama.cpp goes by the name too
    roles = {vocabulary.roles.get(role) for role in ("bos", "eos", "unk")}
    found = []
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        special = kind in (UNKNOWN, CONTROL) or i in roles
        if special or kind == USER_DEFINED:
            rstrip = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
            found.append(AddedToken(token, rstrip=rstrip, normalized=False, special=special))
    tokenizer.add_tokens(found)


def _adds(metadata: Metadata, vocabulary: Vocabulary, role: str, default: bool) -> bool:
    """Whether the token of that role is added to a text; raises KvjaxError if it shall be and there is none."""
    key = f"tokenizer.ggml.add_{role}_token"
    wanted = value(metadata, key, bool, default and role in vocabulary.roles)
    if wanted and role not in vocabulary.roles:
        raise KvjaxError(f"{key} is true, but {IDS[role]} is missing; {AGAIN}")
    return wanted


def _template(vocabulary: Vocabulary, added: Mapping[str, bool]) -> TemplateProcessing:
    """Puts bos before and eos behind each text."""
    bos, eos = (["bos"] if added["bos"] else []), (["eos"] if added["eos"] else [])
    tokens = [{"id": role, "ids": [vocabulary.roles[role]], "tokens": [vocabulary.name(role)]} for role in (*bos, *eos)]
    one, two = [*bos, "$A", *eos], [f"{piece}:1" for piece in (*bos, "$B", *eos)]
    return TemplateProcessing(single=one, pair=one + two, special_tokens=tokens)


def _config(metadata: Metadata, vocabulary: Vocabulary, added: Mapping[str, bool]) -> dict[str, Any]:
    """What tokenizer_config.json says."""
    length = f"{value(metadata, 'general.architecture', str, '')}.context_length"
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": value(metadata, length, int),
        **{f"{role}_token": vocabulary.name(role) for role in IDS},
        **{f"add_{role}_token": adds for role, adds in added.items()},
        "clean_up_tokenization_spaces": False,
        "chat_template": value(metadata, "tokenizer.chat_template", str),
    }
    return {key: said[key] for key in said if said[key] is not None}


def _written(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, bytes]:
    texts = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "chat_template.jinja": config.get("chat_template"),
    }
    return {name: text.encode() for name, text in texts.items() if text is not None}
