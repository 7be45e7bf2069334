"""Texts as contexts and questions in token ids, and the longest text that fits a length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvjax.eval.tasks.case import TooShort
from kvjax.generation.inputs import round_up
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer


def context_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes a text of a task that opens a prompt, i32[S]; special tokens that it spells are plain text."""
    return np.array(tokenizer.encode_prompt(text, parse_special=False), np.int32)


def prompt_ids(tokenizer: Tokenizer, text: str, parse_special: bool = False) -> np.ndarray:
    """Encodes a text of a task that follows others, i32[P]; `parse_special` as in `Tokenizer.encode_prompt`."""
    return np.array(tokenizer.encode_continuation(text, parse_special=parse_special), np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt's ids i32[n], and the character at which each token starts, i32[n] (-1: a special token)."""

    ids: np.ndarray
    starts: np.ndarray

    def truncate_middle(self, length: int) -> EncodedPrompt:
        """Keeps at most `length` tokens, half at each end."""
        if len(self.ids) <= length:
            return self
        keep = np.r_[: length // 2, len(self.ids) - length // 2 : len(self.ids)]
        return EncodedPrompt(self.ids[keep], self.starts[keep])

    def split(self, character: int) -> tuple[np.ndarray, np.ndarray]:
        """Splits into (context, question) at the first token that starts at `character` or later; none is empty."""
        early = np.flatnonzero(self.starts < character)
        place = int(early[-1]) + 1 if len(early) else 0
        place = max(1, min(place, len(self.ids) - 1))
        return self.ids[:place], self.ids[place:]


def encode_prompt(model: Model, text: str) -> EncodedPrompt:
    """Encodes a text that the model continues: with special tokens before it and none after it."""
    encoding = model.text_tokenizer().prompt_encoding(text)
    tokens = zip(encoding.special_tokens_mask, encoding.offsets, strict=True)
    starts = [-1 if special else start for special, (start, _) in tokens]
    return EncodedPrompt(np.array(encoding.ids, np.int32), np.array(starts, np.int32))


def find_largest(
    task: str, cost: Callable[[int], int], length: int, low: int, high: int = 2**40, prompt_tokens: int = 0
) -> int:
    """Returns the largest number of units that fits into a length, or one that leaves at most 0.5% of it free.

    Args:
      task: its name, for the error.
      cost: tokens of a number of units, nearly in proportion; where it does not grow, the result fits all the same.
      length: tokens of the units and of `prompt_tokens` more.
      low: the fewest units.
      high: the most units.
      prompt_tokens: tokens of what follows the units, where `cost` does not count it.

    Raises:
      TooShort: not even `low` fits; the message has a length that is enough: some more than this instance takes, since
        others have longer words.
    """
    limit, low_cost = length - prompt_tokens, cost(low)
    if low_cost > limit:
        enough = round_up((low_cost + prompt_tokens) * 6 // 5, 32)
        raise TooShort(f"task {task!r} does not fit in {length} tokens; use a length of at least {enough}")
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
