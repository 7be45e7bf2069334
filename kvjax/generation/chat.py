"""Chat: a model's answer in a conversation that its chat template writes."""

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
    """The model's next message in one conversation, or in each of a batch, under a method; options as in `generate`.

    messages: [{"role": "user", "content": "Hello"}], or a list of such lists. An answer ends with one of the
    checkpoint's end-of-sequence ids, among which is its end of turn. Whole conversations are read: to go on from a
    cache, use `kvjax.generate`. Raises KvjaxError as `Model.chat_ids` does.
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
