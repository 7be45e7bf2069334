"""The keywords that all calls which generate have in common, so that editors complete them; see `kvjax.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from kvjax.cache.contract import Cache
from kvjax.run.sampling import SamplingParams
from kvjax.run.stops import Stop


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn: `sampling`, or any of the others."""

    sampling: SamplingParams | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None


class DecodingOptions(SamplingOptions, total=False):
    """And when an answer ends, and how the steps are run."""

    eos_ids: Sequence[int] | int | None
    stop: Stop
    loop: str | None


class ChatOptions(DecodingOptions, total=False):
    """Of `kvjax.chat`."""

    capacity: int | None


class GenerateOptions(ChatOptions, total=False):
    """Of `kvjax.generate` and what streams the same."""

    cache: Cache | None


class AnswerOptions(DecodingOptions, total=False):
    """Of `Context.start`, and of what it is started by."""

    first_row: int
    use_up: bool
