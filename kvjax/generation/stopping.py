"""End-of-sequence ids and stop strings: what ends an answer early."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

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
CHARACTER_BYTES = 4  # at most, in UTF-8


def parse_eos_ids(model: Model, eos_ids: Sequence[int] | int | None) -> Array:
    """Returns the ids that end a sequence, i32[E], the model's own for None; raises KvjaxError for an unknown id."""
    ids = np.atleast_1d(model.config.eos_ids if eos_ids is None else eos_ids).tolist()
    for token in ids:
        arguments.integer("an id in eos_ids", token, 0, model.config.vocab_size - 1, "; () ends at none")
    return jnp.asarray(ids, jnp.int32)


@dataclasses.dataclass(frozen=True)
class AnswerText:
    """How the tokens of an answer, which follow a prompt, become its text.

    Stop strings are looked for in the text that is shown. Those that spell a special token, such as a model's end of
    turn, are also looked for in the text with all special tokens: those that are not shown, and the id that ended the
    answer.
    """

    tokenizer: Tokenizer
    eos_ids: Sequence[int]
    stop: Sequence[str] = ()
    skip_special_tokens: bool = True

    def decode_shown(self, tokens: Sequence[int]) -> str:
        """Decodes tokens, without the id that ended them; stop strings are not looked for."""
        has_eos = len(tokens) > 0 and tokens[-1] in self.eos_ids
        return self._decode(tokens[:-1] if has_eos else tokens, self.skip_special_tokens)

    def is_stopped(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens contain a stop string."""
        if contains_stop(self.decode_shown(tokens), self.stop):
            return True
        return bool(self._special_stop) and contains_stop(self._decode_with_special(tokens), self._special_stop)

    def shorten(self, tokens: Sequence[int]) -> list[int]:
        """Returns the fewest first tokens that contain a stop string, all of them where there is none."""
        # Containing a stop string is monotone in the number of tokens, so that a binary search decodes few prefixes.
        # It ends at `len(tokens)` where no prefix contains one.
        num_tokens = bisect.bisect_left(range(len(tokens)), True, key=lambda n: self.is_stopped(tokens[:n]))
        return list(tokens[:num_tokens])

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text up to the first stop string, all of it where there is none."""
        return self._truncate(tokens, truncate_at_stop)

    def final_text(self, tokens: Sequence[int]) -> str:
        """Returns the part of the text that stays whatever tokens follow."""
        return self._truncate(tokens, final_prefix)

    def _truncate(self, tokens: Sequence[int], cut: Callable[[str, Sequence[str]], str]) -> str:
        """Applies `cut` to the shown text and to the one with all special tokens: what both leave of the shown one."""
        text = cut(self.decode_shown(tokens), self.stop)
        if not self._special_stop:
            return text
        with_special = self._decode_with_special(tokens)
        before = cut(with_special, self._special_stop)
        if self.skip_special_tokens and before != with_special:
            # Special tokens before the cut are in `before` and are not shown. The tokens that lie before it as a whole
            # are decoded without them; what is left are characters of the next token.
            num_whole = next(
                n for n in range(len(tokens), -1, -1) if before.startswith(self._decode_with_special(tokens[:n]))
            )
            rest = before[len(self._decode_with_special(tokens[:num_whole])) :]
            before = self._decode(tokens[:num_whole]) + rest
        return text if before == with_special else os.path.commonprefix([text, before])

    def _decode_with_special(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens, skip_special_tokens=False)

    def _decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes tokens, those of a last character that lacks some of its bytes by themselves.

        SentencePiece's decoders read a run of bytes as a whole, so that such a character would hide those before it.
        """
        decode = self.tokenizer.decode_continuation
        text = decode(tokens, skip_special_tokens)
        for n in range(1, min(CHARACTER_BYTES, len(tokens) + 1) if text.endswith(UNFINISHED) else 1):
            before = decode(tokens[:-n], skip_special_tokens)
            if not before.endswith(UNFINISHED):
                return before + decode(tokens[-n:], skip_special_tokens)
        return text

    @functools.cached_property
    def _special_stop(self) -> list[str]:
        """The stop strings that spell a special token; others do not match within one, such as ">" in "<|im_end|>"."""
        added = self.tokenizer.inner.get_added_tokens_decoder().values() if self.stop else ()
        return [s for s in self.stop if any(token.special and token.content in s for token in added)]


def contains_stop(text: str, stop: Sequence[str]) -> bool:
    """Whether one of the stop strings appears in a text."""
    return any(s in text for s in stop)


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Returns a text up to the first stop string, all of it where none appears."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


def final_prefix(text: str, stop: Sequence[str]) -> str:
    """Returns the part of a streamed text that is final: no incomplete UTF-8 character, no partial stop string."""
    text = truncate_at_stop(text, stop).rstrip(UNFINISHED)
    partial = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return text[: len(text) - partial]
