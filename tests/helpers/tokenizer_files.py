"""Small tokenizers of the kinds that checkpoints have, with their special tokens and their way to mark spaces."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvjax.models.tokenizer import Tokenizer

WORDS = ("the", "capital", "of", "France", "Paris", "is")


def sentencepiece(*, prepend: str = "normalizer", template: str = "<s> $A") -> Tokenizer:
    """Words and letters with "\u2581" for a space, and bytes for all else, as in Llama 2 and Mistral.

    Args:
      prepend: what puts the mark before a text: the "normalizer" (Llama 2), or the pre-tokenizer "metaspace" (as
        transformers writes the same tokenizers today).
      template: of the post-processor.
    """
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *(chr(c) for c in range(33, 127))]
    merges = []
    for word in WORDS:  # a word is merged letter by letter, and then with the mark
        starts = [word[:n] for n in range(1, len(word) + 1)]
        merges += [(a, b[len(a) :]) for a, b in zip(starts, starts[1:], strict=False)] + [("\u2581", word)]
    merges = list(dict.fromkeys(merges))
    pieces += [a + b for a, b in merges]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend == "normalizer":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_template(inner, template)


def byte_level(*, template: str = "<s> $A", add_prefix_space: bool = False) -> Tokenizer:
    """Bytes and a few merges of letters, as in Llama 3: a sequence of ByteLevel and a template, which trims offsets."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("i", "s"), ("\u0120", "is"), ("\u010a", "\u010a")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    inner.decoder = decoders.ByteLevel()
    return _with_template(inner, template, processors.ByteLevel(trim_offsets=True))


def _with_template(inner: tokenizers.Tokenizer, template: str, *before: processors.PostProcessor) -> Tokenizer:
    inner.add_special_tokens(["<s>", "</s>"])
    ids = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
    inner.post_processor = processors.Sequence(
        [*before, processors.TemplateProcessing(single=template, special_tokens=ids)]
    )
    return Tokenizer(inner)
