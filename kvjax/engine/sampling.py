"""From logits to the next token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.core.attention import MASKED_LOGIT
from kvjax.core.random import check_seed
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError
from kvjax.utils import arguments

LEAST = 1e-30  # of a temperature and of top_p: logits over a smaller one would overflow, a smaller share be none


@pytree
class Sampler:
    """`SamplingParams` in a compiled program: the numbers are arrays, so that a sweep over them does not recompile.

    temperature None: greedy.
    """

    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: one value for all calls that generate, as `kvjax.generate(..., sampling=params)`.

    It is hashable, holds plain numbers and is checked when it is made. The filters apply in the order of the fields,
    after the temperature; each keeps the likeliest token, and equal logits are kept or dropped lower index first.

    Attributes:
      temperature: what logits are divided by; 0, the default, takes the likeliest token and no filter.
      top_k: only the k likeliest tokens.
      top_p: only the likeliest tokens that together reach this probability (Holtzman et al., 2020, arXiv 1904.09751).
      min_p: only tokens of at least this fraction of the likeliest one's probability (Nguyen et al., 2024, arXiv
        2407.01082).
      seed: of the random numbers; a sequence draws by the seed and its index in the batch, never by its neighbours.

    Raises:
      KvjaxError: a number outside its range, or a filter without a temperature.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._set(temperature=self._checked_temperature(), seed=check_seed(self.seed))
        # As plain numbers, which hash: those of JAX and NumPy are taken too.
        if self.top_k is not None:
            self._set(top_k=arguments.integer("top_k", self.top_k))
        if self.top_p is not None:
            self._set(top_p=arguments.number("top_p", self.top_p, LEAST, 1))
        if self.min_p is not None:
            self._set(min_p=arguments.number("min_p", self.min_p, 0, 1))
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (None, None, None):
            raise KvjaxError("top_k, top_p and min_p need temperature > 0; temperature 0 is greedy")

    def _checked_temperature(self) -> float:
        if not isinstance(self.temperature, bool) and self.temperature == 0:
            return 0.0
        return arguments.number("temperature", self.temperature, LEAST, 1 / LEAST, "; 0 is greedy")

    def _set(self, **fields: float) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def sampler(self) -> Sampler:
        """The same for a compiled program."""
        if self.temperature == 0:
            return Sampler()

        def array(x: float | None, dtype: Any) -> Array | None:
            return None if x is None else jnp.asarray(x, dtype)

        filters = array(self.top_k, jnp.int32), array(self.top_p, jnp.float32), array(self.min_p, jnp.float32)
        return Sampler(jnp.float32(self.temperature), *filters)


def resolve_sampling(sampling: SamplingParams | None = None, **given: Any) -> SamplingParams:
    """How a call draws: by `sampling`, or by the keywords that it gives, those that are not None.

    Raises KvjaxError where it gives both.
    """
    said = {name: value for name, value in given.items() if value is not None}
    if sampling is None:
        return SamplingParams(**said)
    if not isinstance(sampling, SamplingParams):
        raise KvjaxError(f"sampling is a value such as kvjax.SamplingParams(temperature=0.7), got {sampling!r:.80}")
    if said:
        changed = ", ".join(f"{name}={value!r:.40}" for name, value in said.items())
        raise KvjaxError(
            f"sampling and {', '.join(said)} are both given, and say the same thing twice: leave one out, or write "
            f"dataclasses.replace(sampling, {changed})"
        )
    return sampling


def sample(s: Sampler, logits: Array, key: Array) -> Array:
    """logits f32[B V] -> tokens i32[B]; a row's token depends only on its own logits and its own key [B]."""
    if s.temperature is None:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(key, apply_filters(s, logits / s.temperature)).astype(jnp.int32)


def apply_filters(s: Sampler, logits: Array) -> Array:
    """logits f32[B V], after the temperature, with the tokens that the filters drop at NEG."""
    if (s.top_k, s.top_p, s.min_p) == (None, None, None):
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    x = jnp.take_along_axis(logits, order, -1)  # likeliest first
    keep = jnp.ones(x.shape, bool)
    if s.top_k is not None:
        keep &= (jnp.arange(x.shape[-1]) < s.top_k)[None]
    if s.top_p is not None:
        p = jax.nn.softmax(jnp.where(keep, x, MASKED_LOGIT), -1)
        keep &= jnp.cumsum(p, -1) - p < s.top_p  # the mass before this token has not reached p yet
    if s.min_p is not None:
        keep &= x >= x[:, :1] + jnp.log(s.min_p)
    keep = jnp.put_along_axis(jnp.zeros_like(keep), order, keep, -1, inplace=False)
    return jnp.where(keep, logits, MASKED_LOGIT)


def sequence_keys(key: Array, batch: int, first: Array | int = 0) -> Array:
    """One key per row, numbered from `first` on, so that a row draws the same tokens alone and in company."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(batch))
