"""The tokenizer of a GGUF file as the tokenizer files of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import math
from operator import itemgetter

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from checkpoints_convert.gguf.pretokenizers import PRE_TOKENIZERS
from checkpoints_convert.gguf.vocabulary import (
    BYTE,
    CONTROL,
    MERGES,
    NORMAL,
    SCORES,
    TEMPLATE,
    UNKNOWN,
    USER_DEFINED,
    Metadata,
    Vocabulary,
    check_metadata,
    read_end_ids,
    read_named_templates,
    read_vocabulary,
)
from kvjax.errors import KvjaxError
from kvjax.models import chat_template

NO_TOKENIZER = ("", "no_vocab", "none")
SPACE = "\u2581"  # SentencePiece's mark of a space


def make_files(metadata: Metadata) -> dict[str, bytes]:
    """Makes the tokenizer's files, contents by name; none if the metadata have no tokenizer.

    Raises:
      KvjaxError: for another kind than byte-level BPE and SentencePiece BPE, an unknown pre-tokenizer, and arrays and
        ids that contradict each other.
    """
    check_metadata(metadata)
    kind, pre = metadata.get("tokenizer.ggml.model", ""), metadata.get("tokenizer.ggml.pre", "default")
    if kind in NO_TOKENIZER:
        return {}
    problem = None
    if kind not in KINDS:
        problem = f"tokenizer.ggml.model {kind!r} is not supported; supported: {', '.join(KINDS)}"
    elif kind == "gpt2" and pre not in PRE_TOKENIZERS:
        problem = f"tokenizer.ggml.pre {pre!r} is not a known pre-tokenizer; known: {', '.join(PRE_TOKENIZERS)}"
    if problem is not None:
        raise KvjaxError(f"{problem}; convert the safetensors checkpoint instead, which has its own tokenizer.json")
    vocabulary = read_vocabulary(metadata)
    if kind == "llama":
        vocabulary = spell_spaces(vocabulary)
    tokenizer, adds_bos = KINDS[kind](metadata, vocabulary)
    _add_tokens(tokenizer, vocabulary, metadata)
    # Whether the tokens are added to a text.
    adds = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", adds_bos and "bos" in vocabulary.roles),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    if any(adds.values()):
        bos, eos = (["bos"] if adds["bos"] else []), (["eos"] if adds["eos"] else [])
        one, two = [*bos, "$A", *eos], [f"{item}:1" for item in (*bos, "$B", *eos)]
        tokens = [
            {"id": role, "ids": [vocabulary.roles[role]], "tokens": [vocabulary.token(role)]} for role in (*bos, *eos)
        ]
        tokenizer.post_processor = TemplateProcessing(single=one, pair=one + two, special_tokens=tokens)
    length = f"{metadata.get('general.architecture', '')}.context_length"
    # A named token is read as special, which an ordinary one that only fills up batches is not.
    roles = dict(vocabulary.roles)
    is_ordinary = "pad" in roles and vocabulary.types[roles["pad"]] == NORMAL
    if is_ordinary and roles["pad"] not in (i for role, i in roles.items() if role != "pad"):
        del roles["pad"]
    entries = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.get(length),
        **{f"{role}_token": vocabulary.tokens[i] for role, i in roles.items()},
        **{f"add_{role}_token": is_added for role, is_added in adds.items()},
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get(TEMPLATE),
    }
    config = {key: x for key, x in entries.items() if x is not None}
    texts = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        chat_template.FILE: config.get("chat_template"),
        **{f"{chat_template.FOLDER}/{name}.jinja": text for name, text in read_named_templates(metadata).items()},
    }
    return {name: text.encode() for name, text in texts.items() if text is not None}


def make_byte_level(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Makes a byte-level BPE tokenizer; also returns whether bos is added for a file that does not say."""
    pre = PRE_TOKENIZERS[metadata.get("tokenizer.ggml.pre", "default")]
    merges = [tuple(merge.split(" ")) for merge in metadata[MERGES]]
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(pre.steps))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def make_sentencepiece(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Makes a SentencePiece BPE tokenizer; also returns whether bos is added for a file that does not say."""
    # Pieces of the user's own come before all others; their scores in the file are the converter's, not the model's.
    types = vocabulary.types
    scores = [math.inf if kind == USER_DEFINED else x for x, kind in zip(metadata[SCORES], types, strict=True)]
    # All pairs of pieces that join to a piece, the best score of the joined piece first, then the longest left half.
    # Unknown, control and byte tokens take no part: text never becomes one of them by merging.
    whole = (UNKNOWN, CONTROL, BYTE)
    pieces = {t: i for i, t in enumerate(vocabulary.tokens) if types[i] not in whole}
    splits = ((i, t[:cut], t[cut:]) for t, i in pieces.items() for cut in range(1, len(t)))
    ranked = [(scores[i], len(a), len(b), a, b) for i, a, b in splits if a in pieces and b in pieces]
    merges = [pair[3:] for pair in sorted(ranked, key=itemgetter(0, 1, 2), reverse=True)]
    unknown = vocabulary.token("unk")
    tokenizer = Tokenizer(BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    decoding: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        decoding.append(decoders.Strip(" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer, True


def spell_spaces(vocabulary: Vocabulary) -> Vocabulary:
    """Spells pieces of several spaces with SentencePiece's mark, as Gemma's own tokenizer does.

    llama.cpp's converter writes such pieces of the user's with plain spaces, which no normalized text has.
    """
    types, tokens = vocabulary.types, vocabulary.tokens
    known = set(tokens)
    spelled = [token.replace(" ", SPACE) if token and not token.strip(" ") else token for token in tokens]
    return vocabulary._replace(
        tokens=[
            new if kind == USER_DEFINED and new not in known else old
            for old, new, kind in zip(tokens, spelled, types, strict=True)
        ]
    )


KINDS = {"gpt2": make_byte_level, "llama": make_sentencepiece}


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, metadata: Metadata) -> None:
    """Adds the tokens that a text may spell out: special tokens, which decoding can skip, and user-defined ones."""
    name = metadata.get("general.name", "").lower()
    strips = "phi-3" in name or "phi3" in name  # as llama.cpp does; the format cannot say it
    # llama.cpp overrides the type of a token that ends an answer.
    special = {vocabulary.roles.get(role) for role in ("bos", "eos", "unk")} | set(read_end_ids(metadata))
    added = []
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        is_special = kind in (UNKNOWN, CONTROL) or i in special
        if is_special or kind == USER_DEFINED:
            rstrip = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(AddedToken(token, rstrip=rstrip, normalized=False, special=is_special))
    tokenizer.add_tokens(added)
