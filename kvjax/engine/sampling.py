"""From logits to the next token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Key

from kvjax.core.attention import MASKED_LOGIT
from kvjax.core.random import check_seed
from kvjax.core.top_k import BOUNDARY_ROUNDING, covering_mask
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

MIN_POSITIVE, MAX_POSITIVE = 1e-30, 1e30  # of temperatures, penalties and top_p: float32 holds both and their inverses


@pytree
class Penalties:
    """The penalties of `SamplingParams`; without a repetition penalty, prompts do not count."""

    repetition: Float32[Array, ""] | None
    presence: Float32[Array, ""]
    frequency: Float32[Array, ""]


@pytree
class TokenCounts:
    """The tokens of each sequence that penalties count."""

    in_prompt: Bool[Array, "B V"] | None  # None without a repetition penalty
    num_generated: Int32[Array, "B V"]


@pytree
class Sampler:
    """`SamplingParams` inside a compiled program; a temperature of None is greedy.

    The numbers are arrays, so that a sweep over them does not recompile.
    """

    temperature: Float32[Array, ""] | None = None
    top_k: Int32[Array, ""] | None = None
    top_p: Float32[Array, ""] | None = None
    min_p: Float32[Array, ""] | None = None
    penalties: Penalties | None = None  # None where no penalty is asked for: nothing is then counted


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Settings of the sampler, one value for all calls that generate, as in `kvjax.generate(..., sampling=params)`.

    They are hashable, hold plain numbers and are checked when they are made. The penalties apply first, in greedy
    decoding too, as in vLLM. The filters apply in the order of the fields, after the temperature; each keeps the
    likeliest token, and equal logits are kept or dropped lower index first.

    Attributes:
      temperature: divides the logits; 0, the default, takes the likeliest token and no filter.
      top_k: keeps only the k likeliest tokens.
      top_p: keeps only the fewest likeliest tokens that together reach this probability (Holtzman et al., 2020, arXiv
        1904.09751); 1 keeps all.
      min_p: keeps only tokens of at least this fraction of the likeliest one's probability (Nguyen et al., 2024,
        arXiv 2407.01082).
      seed: of the random numbers; a sequence draws by the seed and its index in the batch, never by its neighbors.
      repetition_penalty: above 1, tokens of the prompt and of the answer so far become less likely: positive logits are
        divided by it and negative ones multiplied (Keskar et al., 2019, arXiv 1909.05858); 1 changes nothing.
      presence_penalty: subtracted from the logits of the answer's tokens so far, from -2 to 2.
      frequency_penalty: the same, times the number of times that the token stands in the answer so far.

    Raises:
      KvjaxError: a number outside its range, or a filter without a temperature.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        # Numbers of JAX and NumPy are accepted and become plain ones, which hash.
        temperature = self.temperature
        if isinstance(temperature, bool) or temperature != 0:
            temperature = arguments.number("temperature", temperature, MIN_POSITIVE, MAX_POSITIVE, "; 0 is greedy")
        fields: dict[str, Any] = {"temperature": float(temperature), "seed": check_seed(self.seed)}
        if self.top_k is not None:
            fields["top_k"] = arguments.integer("top_k", self.top_k)
        for name, least, most, remedy in (
            ("top_p", MIN_POSITIVE, 1, ""),
            ("min_p", 0, 1, ""),
            ("repetition_penalty", MIN_POSITIVE, MAX_POSITIVE, "; 1 is none"),
            ("presence_penalty", -2, 2, "; 0 is none"),
            ("frequency_penalty", -2, 2, "; 0 is none"),
        ):
            value = getattr(self, name)
            if value is not None or getattr(SamplingParams, name) is not None:  # None is no filter
                fields[name] = arguments.number(name, value, least, most, remedy)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (None, None, None):
            raise KvjaxError("top_k, top_p and min_p need temperature > 0; temperature 0 is greedy")

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty changes any logit."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def sampler(self) -> Sampler:
        """Returns the same settings as arrays, for a compiled program."""
        penalties = None
        if self.has_penalties:
            repetition = None if self.repetition_penalty == 1 else jnp.float32(self.repetition_penalty)
            penalties = Penalties(repetition, jnp.float32(self.presence_penalty), jnp.float32(self.frequency_penalty))
        if self.temperature == 0:
            return Sampler(penalties=penalties)
        types = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32, "min_p": jnp.float32}
        numbers = {name: getattr(self, name) for name in types}
        arrays = {name: jnp.asarray(x, types[name]) for name, x in numbers.items() if x is not None}
        return Sampler(**arrays, penalties=penalties)


SamplingParams.__init__ = checks_keywords(SamplingParams.__init__)


def resolve_sampling(sampling: SamplingParams | None = None, **fields: Any) -> SamplingParams:
    """Returns `sampling`, or one made of the fields that are not None; raises KvjaxError where a call gives both."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if sampling is None:
        return SamplingParams(**fields)
    if not isinstance(sampling, SamplingParams):
        raise KvjaxError(f"sampling is a value such as kvjax.SamplingParams(temperature=0.7), got {sampling!r:.80}")
    if fields:
        changed = ", ".join(f"{name}={value!r:.40}" for name, value in fields.items())
        raise KvjaxError(
            f"sampling and {', '.join(fields)} are both given, and say the same thing twice: leave one out, or write "
            f"dataclasses.replace(sampling, {changed})"
        )
    return sampling


def sample(
    sampler: Sampler, logits: Float32[Array, "B V"], keys: Key[Array, " B"], counts: TokenCounts | None = None
) -> Int32[Array, " B"]:
    """Draws a token for each sequence; it depends only on the sequence's own logits and own key.

    A sampler with penalties needs the counts of the tokens so far.
    """
    if sampler.penalties is not None:
        assert counts is not None
        logits = apply_penalties(sampler.penalties, logits, counts)
    if sampler.temperature is None:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, apply_filters(sampler, logits)).astype(jnp.int32)


def apply_penalties(penalties: Penalties, logits: Float32[Array, "B V"], counts: TokenCounts) -> Float32[Array, "B V"]:
    """Applies the penalties in the order of vLLM: repetition first, then what is subtracted."""
    is_generated = counts.num_generated > 0
    if penalties.repetition is not None:
        is_repeated = is_generated if counts.in_prompt is None else is_generated | counts.in_prompt
        penalized = jnp.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
        logits = jnp.where(is_repeated, penalized, logits)
    logits = logits - penalties.frequency * counts.num_generated.astype(jnp.float32)
    return logits - penalties.presence * is_generated.astype(jnp.float32)


def count_tokens(counts: TokenCounts, tokens: Int32[Array, " B"]) -> TokenCounts:
    """Counts one generated token of each sequence."""
    # A comparison with all of the vocabulary divides over a mesh as the logits do; a scatter would not.
    is_token = tokens[:, None] == jnp.arange(counts.num_generated.shape[1], dtype=jnp.int32)[None]
    return dataclasses.replace(counts, num_generated=counts.num_generated + is_token.astype(jnp.int32))


def apply_filters(sampler: Sampler, logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Applies the temperature and then the filters, which set the tokens that they drop to MASKED_LOGIT.

    The largest logit of each sequence becomes 0 before the temperature divides it. At any temperature it then stays
    above MASKED_LOGIT, and what a filter drops is never drawn.
    """
    assert sampler.temperature is not None
    best = logits.max(-1, keepdims=True)
    scaled = (logits - best) / sampler.temperature
    if (sampler.top_k, sampler.top_p, sampler.min_p) == (None, None, None):
        return scaled
    # The sort is stable, so that the lower index of equal logits comes first.
    order = jnp.argsort(-logits, axis=-1, stable=True)
    keep = jnp.ones(logits.shape, bool)  # likeliest first
    if sampler.top_k is not None:
        keep &= (jnp.arange(logits.shape[-1]) < sampler.top_k)[None]
    if sampler.top_p is not None:
        p = jax.nn.softmax(jnp.where(keep, jnp.take_along_axis(scaled, order, -1), MASKED_LOGIT), -1)
        keep &= covering_mask(p, sampler.top_p)
    if sampler.min_p is not None:
        # In units of the logits before the subtraction, whose own rounding is relative to their size.
        slack = BOUNDARY_ROUNDING * jnp.maximum(jnp.abs(best), sampler.temperature)
        least = sampler.temperature * jnp.log(sampler.min_p) - slack
        keep &= jnp.take_along_axis(logits, order, -1) - best >= least
    keep = jnp.put_along_axis(jnp.zeros_like(keep), order, keep, -1, inplace=False)
    return jnp.where(keep, scaled, MASKED_LOGIT)


def sequence_keys(
    key: Key[Array, ""], batch: int, first: Int[Array, ""] | np.integer | int = 0
) -> Key[Array, "{batch}"]:
    """Makes one key per sequence, by its number from `first` on: a sequence draws the same in any batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(batch))
