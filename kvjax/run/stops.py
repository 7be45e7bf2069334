"""Text that ends before its tokens do: at strings that the caller names."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from kvjax.core.types import KvjaxError
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer

Stop = str | Sequence[str]
"""One string, or several of which the first that appears counts."""

LOOK = 8  # tokens between two looks at the text of a batch
UNFINISHED = "\ufffd"  # how a tokenizer shows a character of which not all bytes are there yet


def strings(model: Model, stop: Stop) -> tuple[str, ...]:
    """The strings of `stop`; raises KvjaxError for an empty one, another type, and a model that knows no text."""
    given = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in given:
        if not isinstance(text, str) or not text:
            raise KvjaxError(f"stop takes texts of at least one character, got {text!r}; to end at ids, use eos_ids")
    if given:
        model.text_tokenizer()
    return given


def has_one(text: str, stop: Sequence[str]) -> bool:
    """Whether one of the strings appears in a text."""
    return any(s in text for s in stop)


def before(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of the strings, all of it where none appears."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


def shortest(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> list[int]:
    """The fewest first tokens whose text has one of the strings, all where none appears."""

    def enough(count: int) -> bool:
        return has_one(tokenizer.decode(tokens[:count]), stop)

    return list(tokens[: bisect.bisect_left(range(len(tokens)), True, key=enough)])


def settled(text: str, stop: Sequence[str]) -> str:
    """What of a text that still grows no later token changes, and no string that has only begun can take back."""
    text = before(text, stop).rstrip(UNFINISHED)
    begun = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return text[: len(text) - begun]
