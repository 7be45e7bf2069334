"""What stands around a context and its questions: nothing, or what the model's chat template writes."""

from __future__ import annotations

import dataclasses
import functools
from datetime import datetime

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Spec
from kvjax.eval.tasks.texts import context_ids, encoded, prompt_ids
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer

NOW = datetime(2025, 1, 1)  # the date that a template may write, so that cases are the same on every day
CONTEXT, ANSWER, QUESTION = "<<the context>>", "<<the answer>>", "<<the question>>"  # to see where messages go


@dataclasses.dataclass(frozen=True)
class Frame:
    """Turns contexts and questions into ids.

    In a chat the first message is the context and the first question; a method that reads the context before any
    question sees the template's first words and the context. Special tokens that the template writes, or that are
    spelled out in a message, are read as such, as `kvjax.chat` does, and none is added.
    """

    tokenizer: Tokenizer
    chat: bool = False
    head: str = ""  # before the context
    tail: str = ""  # between a question and its answer
    between: str = "\n"  # between an answer and the next question

    def context(self, text: str) -> np.ndarray:
        """A context, i32[S], which opens the prompt."""
        if not self.chat:
            return context_ids(self.tokenizer, text)
        return np.array(encoded(self.tokenizer, self.head + text, opening=False, special=True).ids, np.int32)

    def question(self, text: str, opening: str = "", turn: int = 0) -> np.ndarray:
        """A question, i32[P], that goes on from a context's line break, or in later turns from an answer.

        opening: the first words of the answer, which are given (RULER's answer_prefix).
        """
        opening = opening.lstrip() if self.tail[-1:].isspace() else opening
        whole = (self.between if turn else "") + text + self.tail + opening
        return prompt_ids(self.tokenizer, whole, special=self.chat)


def framed(model: Model, spec: Spec) -> Frame:
    """The model's chat template, where it has one and `spec.chat` is not False; or plain text.

    Raises KvjaxError for a model without tokenizer, or without a template where `spec.chat` is True.
    """
    tokenizer, template = model.text_tokenizer(), model.chat_template
    if spec.chat and template is None:
        raise KvjaxError("this model has no chat template, which --chat asks for; leave --chat out for plain text")
    if template is None or spec.chat is False:
        return Frame(tokenizer)
    return Frame(tokenizer, True, *_written(template))


@functools.lru_cache(8)
def _written(template: ChatTemplate) -> tuple[str, str, str]:
    """What the template writes (before the context, after a question, between an answer and the next question)."""
    first, answer = {"role": "user", "content": CONTEXT}, {"role": "assistant", "content": ANSWER}
    once, twice = template.render([[first], [first, answer, {"role": "user", "content": QUESTION}]], NOW)
    head, _, tail = once.partition(CONTEXT)
    between, _, last = twice.partition(ANSWER)[2].partition(QUESTION)
    if once.count(CONTEXT) != 1 or twice.count(ANSWER) != 1 or twice.count(QUESTION) != 1 or last != tail:
        raise KvjaxError(
            "the model's chat template does not write each message once and as it is, so no context can be cut out; "
            "evaluate in plain text with --no-chat"
        )
    return head, tail, between
