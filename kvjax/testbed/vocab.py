"""The vocabulary: 256 bytes, four markers and 252 symbols that occur in no text."""

from __future__ import annotations

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, PAIR, ASK, LET = range(256, 260)
MARKERS = ("<end>", "<pair>", "<ask>", "<let>")
SYMBOLS = np.arange(260, 512, dtype=np.int32)
SIZE = 512


def tokenizer() -> Tokenizer:
    """Makes a byte-level tokenizer whose ids below 256 are the byte values; markers and symbols are whole tokens."""
    # The ByteLevel alphabet writes unprintable bytes as characters from 256 on (Radford et al., 2019, GPT-2's encoder).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    names = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    out = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    out.decoder = decoders.ByteLevel()
    names = [*MARKERS, *(f"<s{i}>" for i in range(len(SYMBOLS)))]
    out.add_tokens([AddedToken(name, normalized=False) for name in names])
    return out


def tokenizer_files() -> dict[str, bytes]:
    """Returns the tokenizer files of a model with this vocabulary: contents by name."""
    return {"tokenizer.json": tokenizer().to_str(pretty=True).encode()}
