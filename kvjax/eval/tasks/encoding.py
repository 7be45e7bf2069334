"""Texts as contexts and questions in token ids, and the longest text that fits a length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from tokenizers import Encoding

from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer


def encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool, parse_special: bool = False) -> Encoding:
    """Encodes a text.

    Args:
      tokenizer: the model's.
      text: the text.
      add_special_tokens: whether the tokens that open and close a text are added.
      parse_special: whether a special token that is spelled in the text, such as "<s>", becomes that token; otherwise
        it is plain text.
    """
    inner = tokenizer.inner
    # The option belongs to the tokenizer that the whole process shares, so it is put back.
    before = inner.encode_special_tokens
    inner.encode_special_tokens = not parse_special
    try:
        return inner.encode(text, add_special_tokens=add_special_tokens)
    finally:
        inner.encode_special_tokens = before


def context_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes a text that opens a prompt, i32[S], with special tokens before it and none after it."""
    encoding = encode_text(tokenizer, text, add_special_tokens=True)
    end = _num_tokens_before_end(encoding)
    return np.array(encoding.ids[:end] if end else encoding.ids, np.int32)


def _num_tokens_before_end(encoding: Encoding) -> int:
    """Number of tokens before the special ones that end a text."""
    special = encoding.special_tokens_mask
    return next((i for i in range(len(special), 0, -1) if not special[i - 1]), 0)


def prompt_ids(tokenizer: Tokenizer, text: str, parse_special: bool = False) -> np.ndarray:
    """Encodes a text that follows a line break, i32[P], without added special tokens.

    Args:
      tokenizer: the model's.
      text: the text after the line break.
      parse_special: as in `encode_text`.
    """
    # Many tokenizers put a space before the first word of a text, so the text is encoded after a line break, which is
    # then cut off. If one token holds the break and more, the text is encoded alone; this may differ from encoding
    # both parts together by that token.
    encoding = encode_text(tokenizer, "\n" + text, add_special_tokens=False, parse_special=parse_special)
    first = next((i for i, (start, end) in enumerate(encoding.offsets) if start >= 1 and end > start), 0)
    if first and encoding.offsets[first][0] == 1:
        return np.array(encoding.ids[first:], np.int32)
    return np.array(encode_text(tokenizer, text, False, parse_special).ids, np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt's ids i32[n], and the character at which each token starts, i32[n] (-1: a special token)."""

    ids: np.ndarray
    starts: np.ndarray

    def num_tokens_from(self, character: int) -> int:
        """Number of last tokens that start at `character` or later."""
        early = np.flatnonzero(self.starts < character)
        return len(self.ids) - (int(early[-1]) + 1 if len(early) else 0)

    def truncate_middle(self, length: int, head: int, tail: int) -> EncodedPrompt:
        """Keeps at most `length` tokens of the characters head..tail, half at each end (LongBench's pred.py).

        The text before and after these characters, a chat template, stays and does not count; special tokens count.
        """
        last = self.num_tokens_from(tail)
        inside = len(self.ids) - last - int(((self.starts < head) & (self.starts >= 0)).sum())
        if inside <= length:
            return self
        back = last + length // 2
        front = len(self.ids) - back - (inside - 2 * (length // 2))
        keep = np.r_[:front, len(self.ids) - back : len(self.ids)]
        return EncodedPrompt(self.ids[keep], self.starts[keep])

    def split(self, character: int) -> tuple[np.ndarray, np.ndarray]:
        """Splits into (context, question) at the first token that starts at `character` or later; none is empty."""
        n = min(max(1, self.num_tokens_from(character)), len(self.ids) - 1)
        return self.ids[: len(self.ids) - n], self.ids[len(self.ids) - n :]


def encode_prompt(model: Model, text: str) -> EncodedPrompt:
    """Encodes a text that the model continues: with special tokens before it and none after it."""
    encoding = model.text_tokenizer().inner.encode(text)
    end = _num_tokens_before_end(encoding)
    tokens = zip(encoding.special_tokens_mask[:end], encoding.offsets[:end], strict=True)
    starts = [-1 if special else start for special, (start, _) in tokens]
    return EncodedPrompt(np.array(encoding.ids[:end], np.int32), np.array(starts, np.int32))


def find_largest(cost: Callable[[int], int], limit: int, low: int, high: int = 2**40) -> int | None:
    """Returns the largest n from low to high with cost(n) <= limit, or one whose cost is within 0.5% of the limit.

    Args:
      cost: grows with n, nearly in proportion. Where it does not grow strictly, the result keeps the limit all the
        same.
      limit: the most that the result may cost.
      low: the least n.
      high: the largest n.

    Returns:
      n, or None if cost(low) is above the limit.
    """
    low_cost = cost(low)
    if low_cost > limit:
        return None
    # A call of `cost` builds and encodes a whole prompt. It grows nearly in proportion, so that interpolation needs
    # far fewer calls than bisection.
    top = min(2 * low + 1, high)
    while (top_cost := cost(top)) <= limit:
        if top == high:
            return high
        aim = top + int(1.1 * (limit - top_cost) * (top - low) / max(1, top_cost - low_cost))
        low, low_cost, top = top, top_cost, min(max(aim, top + top // 8 + 1), 8 * top, high)
    for step in range(200):
        if top - low <= 1 or limit - low_cost <= limit // 200:
            break
        # Every fifth step bisects: interpolation alone can creep where the cost is far from a straight line.
        guess = (low + top) // 2 if step % 5 == 4 else low + (limit - low_cost) * (top - low) // (top_cost - low_cost)
        middle = min(max(guess, low + 1), top - 1)
        if (middle_cost := cost(middle)) <= limit:
            low, low_cost = middle, middle_cost
        else:
            top, top_cost = middle, middle_cost
    return low
