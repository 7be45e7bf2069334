"""What ends an answer early: ids, and strings in the text of its tokens."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.utils import arguments

Stop = str | Sequence[str]
"""One string, or several of which the first that appears counts."""

LOOK = 8  # tokens between two looks at the text of a batch
UNFINISHED = "\ufffd"  # how a tokenizer shows a character of which not all bytes are there yet


def strings(model: Model, stop: Stop) -> tuple[str, ...]:
    """The strings of `stop`; raises KvjaxError for an empty one, another type, and a model that knows no text."""
    given = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    for text in given:
        if not isinstance(text, str) or not text:
            raise KvjaxError(
                f"stop takes texts of at least one character, got {text!r}; () is none, and to end at ids, use eos_ids"
            )
    if given:
        model.text_tokenizer()
    return given


def end_ids(model: Model, eos_ids: Sequence[int] | int | None) -> Array:
    """i32[E]: the ids that end a row, the model's own for None; raises KvjaxError for what is no token of it."""
    given = np.atleast_1d(model.config.eos_ids if eos_ids is None else eos_ids).tolist()
    for token in given:
        arguments.integer("an id in eos_ids", token, 0, model.config.vocab_size - 1, "; () ends at none")
    return jnp.asarray(given, jnp.int32)


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
