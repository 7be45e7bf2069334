"""An answer token by token, as in the decode loop: each token with a draft of the next, where a method uses it."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvjax.cache.protocol import Cache
from kvjax.core.types import Array
from kvjax.engine.decode import num_draft_tokens, step
from kvjax.engine.forward import Target
from kvjax.generation.finite import check_logits
from kvjax.generation.inputs import place
from kvjax.models.model import Model


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerState:
    """The state of an answer to one prompt: a value, and each step returns another one."""

    model: Model
    cache: Cache
    last: Array  # f32[1 V], the logits of the last token
    draft: int | None = None  # the token after the next one; None before the first step, or where none is used

    @property
    def likeliest(self) -> int:
        """The token that would come next."""
        return int(self.last.argmax())

    def feed(self, token: int) -> AnswerState:
        """Returns the state after one more token, fed as if the method had generated it."""
        if not num_draft_tokens(self.cache.plan):
            logits, cache = self._step(self.cache, [token], 1)
            return dataclasses.replace(self, cache=cache, last=logits[:, 0])
        cache, draft = self.cache, self.draft
        if draft is None:
            # A step that commits nothing predicts the first draft.
            logits, cache = self._step(cache, [token], 0)
            draft = int(logits[0, 0].argmax())
        logits, cache = self._step(cache, [token, draft], 1)
        return dataclasses.replace(self, cache=cache, last=logits[:, 0], draft=int(logits[0, 1].argmax()))

    def _step(self, cache: Cache, tokens: list[int], num_committed: int) -> tuple[Array, Cache]:
        ids = place(self.model, np.array([tokens], np.int32), "B T")
        out = step(self.model.auto_params, ids, cache, num_committed, Target(cache.config, self.model.auto_mesh))
        check_logits(self.model, out[0][:, 0], [tokens[:1]], what="a token of answer")
        return out
