"""Tokens as the pieces of text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.generation.stopping import UNFINISHED
from kvjax.models.tokenizer import Tokenizer

CONTEXT_TOKENS = 8  # decoded before each token: a tokenizer may write the first token of a text in another way


def token_texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds, special tokens spelled out; #id without a tokenizer.

    A character that several tokens make belongs to the last of them; the others have no text.
    """
    if tokenizer is None:
        return [f"#{i} " for i in ids]
    texts, unfinished = [], 0  # unfinished: the first of the tokens whose character is not complete yet
    for end in range(1, len(ids) + 1):
        start = max(0, unfinished - CONTEXT_TOKENS)
        before, text = (tokenizer.decode(ids[start:i], skip_special_tokens=False) for i in (unfinished, end))
        is_complete = not text.endswith(UNFINISHED) or end == len(ids) or end - unfinished >= CONTEXT_TOKENS
        texts.append(text[len(before) :] if is_complete else "")
        unfinished = end if is_complete else unfinished
    return texts
