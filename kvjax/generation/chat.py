"""Chat: the model's next message in a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.cache.protocol import KVMethod
from kvjax.engine.sampling import SamplingParams, resolve_sampling
from kvjax.generation.generate import generate
from kvjax.generation.result import Result
from kvjax.generation.stopping import Stop
from kvjax.models.chat_template import Messages
from kvjax.models.model import Model


def chat(
    model: Model,
    messages: Messages,
    method: str | KVMethod = "full",
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    eos_ids: Sequence[int] | int | None = None,
    stop: Stop = (),
    capacity: int | None = None,
    loop: str | None = None,
) -> Result:
    """Generates the next message of one conversation, or of each in a batch, under a method.

    The whole conversation is read; to continue from a cache, use `kvjax.generate`. An answer ends with one of the
    checkpoint's end-of-sequence ids, which include its end of turn.

    Args:
      model: from `kvjax.load`.
      messages: [{"role": "user", "content": "Hello"}], or a list of such lists.
      method: a method or its string.
      max_new_tokens: the most tokens per answer; this and all that follow as in `kvjax.generate`.

    Raises:
      KvjaxError: as `Model.chat_ids` and `kvjax.generate` do.
    """
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    return generate(
        model,
        model.chat_ids(messages),
        method,
        max_new_tokens=max_new_tokens,
        sampling=params,
        eos_ids=eos_ids,
        stop=stop,
        capacity=capacity,
        loop=loop,
    )
