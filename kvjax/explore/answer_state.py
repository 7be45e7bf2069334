"""An answer token by token, as the decode loop takes it: beside each token its own guess, where a method wants one."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvjax.cache.protocol import Cache
from kvjax.core.types import Array
from kvjax.engine.decode import num_draft_tokens, step
from kvjax.engine.forward import Target
from kvjax.generation.context import Context
from kvjax.generation.inputs import place
from kvjax.models.model import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """Where an answer is: a value, of which each step makes another one. It has one row."""

    model: Model
    cache: Cache
    last: Array  # f32[1 V], the logits of the last token
    guess: int | None = None  # what may come after the next token; None before the first step, or where none is wanted

    @classmethod
    def behind(cls, context: Context) -> Steps:
        """Before the first token of an answer."""
        return cls(context.model, context.cache, context.last)

    @property
    def likeliest(self) -> int:
        """The token that would come next."""
        return int(self.last.argmax())

    def then(self, token: int) -> Steps:
        """After one more token, which stands for what the method would decode: it is not told beforehand."""
        if not num_draft_tokens(self.cache.plan):
            out, cache = self._advanced(self.cache, [token], 1)
            return dataclasses.replace(self, cache=cache, last=out[:, 0])
        cache, guess = self.cache, self.guess
        if guess is None:
            out, cache = self._advanced(cache, [token], 0)
            guess = int(out[0, 0].argmax())
        out, cache = self._advanced(cache, [token, guess], 1)
        return dataclasses.replace(self, cache=cache, last=out[:, 0], guess=int(out[0, 1].argmax()))

    def _advanced(self, cache: Cache, tokens: list[int], commit: int) -> tuple[Array, Cache]:
        given = place(self.model, np.array([tokens], np.int32), "B T")
        return step(self.model.params, given, cache, commit, Target(self.model.config, self.model.mesh))
