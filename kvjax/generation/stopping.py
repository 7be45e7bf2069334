"""End-of-sequence ids and stop strings: what ends an answer early."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from kvjax.core.types import Array
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.utils import arguments

Stop = str | Sequence[str]
"""One string, or several; the first to appear counts."""

STOP_CHECK_INTERVAL = 8  # decode steps between two checks of a batch's text
UNFINISHED = "\ufffd"  # a tokenizer's sign for a character that still lacks some of its bytes


def parse_eos_ids(model: Model, eos_ids: Sequence[int] | int | None) -> Array:
    """Returns the ids that end a sequence, i32[E], the model's own for None; raises KvjaxError for an unknown id."""
    ids = np.atleast_1d(model.config.eos_ids if eos_ids is None else eos_ids).tolist()
    for token in ids:
        arguments.integer("an id in eos_ids", token, 0, model.config.vocab_size - 1, "; () ends at none")
    return jnp.asarray(ids, jnp.int32)


def decode_answer(tokenizer: Tokenizer, tokens: Sequence[int], eos_ids: Sequence[int] | np.ndarray) -> str:
    """Decodes the tokens of an answer, as they follow the prompt, without the id that ended it."""
    has_eos = len(tokens) > 0 and tokens[-1] in eos_ids
    return tokenizer.decode_continuation(tokens[:-1] if has_eos else tokens)


def contains_stop(text: str, stop: Sequence[str]) -> bool:
    """Whether one of the stop strings appears in a text."""
    return any(s in text for s in stop)


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Returns a text up to the first stop string, all of it where none appears."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


def shortest_stopped(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> list[int]:
    """Returns the fewest first tokens whose text contains a stop string, all of them where none appears."""
    # Containing a stop string is monotone in the number of tokens, so that a binary search decodes few prefixes.
    # It ends at `len(tokens)` where no prefix contains one.
    num_tokens = bisect.bisect_left(
        range(len(tokens)), True, key=lambda n: contains_stop(tokenizer.decode_continuation(tokens[:n]), stop)
    )
    return list(tokens[:num_tokens])


def final_prefix(text: str, stop: Sequence[str]) -> str:
    """Returns the part of a streamed text that is final: no incomplete UTF-8 character, no partial stop string."""
    text = truncate_at_stop(text, stop).rstrip(UNFINISHED)
    partial = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return text[: len(text) - partial]
