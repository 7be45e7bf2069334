"""The text around a context and its questions: none, or the one that the model's chat template writes."""

from __future__ import annotations

import dataclasses
import functools
from datetime import datetime

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Spec
from kvjax.eval.tasks.encoding import context_ids, prompt_ids
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer

NOW = datetime(2025, 1, 1)  # the date that a template may write, so that cases are the same on every day
CONTEXT, ANSWER, QUESTION = "<<the context>>", "<<the answer>>", "<<the question>>"  # placeholders of messages


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """Encodes contexts and questions, in plain text or as messages of a chat.

    In a chat the first message is the context and the first question; a method that reads the context before any
    question sees the template's first words and the context. Special tokens that the template writes, or that are
    spelled out in a message, are read as such, as `kvjax.chat` does, and none is added.
    """

    tokenizer: Tokenizer
    is_chat: bool = False
    head: str = ""  # before the context
    tail: str = ""  # between a question and its answer
    between: str = "\n"  # between an answer and the next question

    def encode_context(self, text: str) -> np.ndarray:
        """Encodes a context, i32[S], which opens the prompt."""
        if not self.is_chat:
            return context_ids(self.tokenizer, text)
        return np.array(self.tokenizer.encode(self.head + text, special_tokens=False), np.int32)

    def encode_question(self, text: str, opening: str = "", is_first: bool = True) -> np.ndarray:
        """Encodes a question, i32[P], that follows a context's line break, or an answer.

        Args:
          text: the question.
          opening: the first words of the answer, which are given (RULER's answer_prefix).
          is_first: whether the question follows the context; later questions of a conversation follow an answer.
        """
        opening = opening.lstrip() if self.tail[-1:].isspace() else opening
        whole = ("" if is_first else self.between) + text + self.tail + opening
        return prompt_ids(self.tokenizer, whole, parse_special=self.is_chat)


def chat_format(model: Model, spec: Spec) -> ChatFormat:
    """Returns the format of the model's chat template, or plain text if it has none or `spec.chat` is False.

    Raises:
      KvjaxError: the model has no tokenizer, or no template and `spec.chat` is True.
    """
    tokenizer, template = model.text_tokenizer(), model.chat_template
    if spec.chat and template is None:
        raise KvjaxError("this model has no chat template, which --chat asks for; leave --chat out for plain text")
    if template is None or spec.chat is False:
        return ChatFormat(tokenizer)
    return ChatFormat(tokenizer, True, *_split_template(template))


@functools.lru_cache(8)
def _split_template(template: ChatTemplate) -> tuple[str, str, str]:
    """(text before the context, after a question, between an answer and the next question)."""
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
