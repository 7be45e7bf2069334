"""The result of generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvjax.cache.accounting import CacheBytes
from kvjax.core.mesh import to_numpy
from kvjax.generation.decode_loop import TokenLogProbs
from kvjax.utils.display import shorten, table


class TokenLogProb(NamedTuple):
    """A token, and the natural log of its probability."""

    id: int
    logprob: float


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """The result of `generate`; seconds are wall-clock, and compilation is counted separately."""

    tokens: list[list[int]]
    text: list[str] | Any  # None for a model without a tokenizer; `Any` spares every caller a check for None
    finish_reasons: list[str]  # "stop": an end-of-sequence id or a stop string; "length": max_new_tokens
    bytes: CacheBytes  # of the KV cache after the last token
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    decode_steps: int  # after the first token, which the prefill yields
    num_sequences: int  # that each step decodes
    # Natural logs of probabilities in the model's own distribution, before penalties, temperature and filters.
    logprobs: list[list[float]] | Any = dataclasses.field(default=None, kw_only=True)  # of each of `tokens`
    top_logprobs: list[list[list[TokenLogProb]]] | Any = dataclasses.field(default=None, kw_only=True)
    # for each of `tokens`, the likeliest of its step, likeliest first

    def __repr__(self) -> str:
        first = shorten(self.text[0]) if self.text else f"{len(self.tokens[0])} ids"
        more = f" and {len(self.tokens) - 1} more" if len(self.tokens) > 1 else ""
        return f"Result({first} [{self.finish_reasons[0]}]{more}; {self._costs()})"

    def _repr_html_(self) -> str:
        texts = self.text or [str(row) for row in self.tokens]
        lengths = map(len, self.tokens)
        rows = zip(range(len(texts)), texts, lengths, self.finish_reasons, strict=True)
        return table(self._costs(), ("sequence", "text" if self.text else "ids", "tokens", "ended by"), rows)

    def _costs(self) -> str:
        return f"{self.bytes}, {self.tokens_per_second:,.1f} tokens/s"

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, the bytes with their fractions of the full cache, and the speed."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"bytes": self.bytes.to_json(), "tokens_per_second": self.tokens_per_second}

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers per second of the decode loop; 0 when no step was run.

        The first token of each sequence does not count, as the prefill yields it, nor does what a finished sequence
        would have gone on with while others in its batch were decoded.
        """
        num_decoded = sum(max(len(row) - 1, 0) for row in self.tokens)
        return num_decoded / self.decode_seconds if self.decode_steps else 0.0


def logprob_fields(logprobs: TokenLogProbs | None, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The fields of a `Result` with the log-probabilities of its tokens; none where they were not asked for."""
    if logprobs is None:
        return {}
    drawn, top_ids, top = (
        [row[: len(ids)] for row, ids in zip(to_numpy(x).tolist(), tokens, strict=True)]
        for x in (logprobs.drawn, logprobs.top_ids, logprobs.top)
    )
    if not logprobs.top.shape[2]:
        return {"logprobs": drawn}
    pairs = [
        [[TokenLogProb(*pair) for pair in zip(*step, strict=True)] for step in zip(*row, strict=True)]
        for row in zip(top_ids, top, strict=True)
    ]
    return {"logprobs": drawn, "top_logprobs": pairs}


def concat_results(results: Sequence[Result]) -> Result:
    """Concatenates the results of batches that were decoded one after the other; bytes are those of one batch."""
    optional = [name for name in ("text", "logprobs", "top_logprobs") if getattr(results[0], name) is not None]
    joined = ["tokens", "finish_reasons", *optional]
    fields: dict[str, Any] = {name: [x for r in results for x in getattr(r, name)] for name in joined}
    for name in ("prefill_seconds", "decode_seconds", "compile_seconds", "decode_steps"):
        fields[name] = sum(getattr(r, name) for r in results)
    return dataclasses.replace(results[0], **fields)
