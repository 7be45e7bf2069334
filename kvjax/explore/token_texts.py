"""Tokens as the pieces of text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.generation.stopping import UNFINISHED
from kvjax.models.tokenizer import Tokenizer

BEFORE = 8  # tokens before a piece that it is decoded with: a tokenizer may write the first one in another way


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, special ones spelled out; #id without a tokenizer.

    Of a character that several tokens make, the last one has it, and the others have no text.
    """
    if tokenizer is None:
        return [f"#{i} " for i in ids]
    found, begun = [], 0  # begun: the first of the tokens whose character is not complete yet
    for end in range(1, len(ids) + 1):
        start = max(0, begun - BEFORE)
        before, text = (tokenizer.decode(ids[start:i], skip_special_tokens=False) for i in (begun, end))
        complete = not text.endswith(UNFINISHED) or end == len(ids) or end - begun >= BEFORE
        found.append(text[len(before) :] if complete else "")
        begun = end if complete else begun
    return found
