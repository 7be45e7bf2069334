"""Which drafted tokens a model accepts, and what stands in place of the first that it does not.

Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1; Chen et al. 2023, arXiv 2302.01318): the
tokens that come out are distributed as if the verifier had drawn each of them. Greedy decoding is the same rule for
distributions that have all their mass on one token: then a token is accepted if it is the verifier's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.core.types import Array, pytree
from kvjax.engine.sampling import Sampler, apply_filters
from kvjax.errors import KvjaxError


@pytree
class Shift:
    """How far the draft's opinion moves the verifier's logits before drafts are judged (RAPID, arXiv 2502.20330).

    The numbers are arrays, so that a sweep over them does not recompile; strength 0 moves nothing. The formulas are
    those of the authors' code, on logits after temperature and filters; there the token behind a whole accepted draft
    is drawn from the model's own logits, and strength is 1 where nothing else is said.
    """

    strength: Array
    alpha: Array


def shift(strength: float, alpha: float) -> Shift:
    """A checked Shift."""
    if not 0 <= strength < float("inf"):
        raise KvjaxError(f"transfer must be 0 (lossless) or a positive number, got {strength}")
    if not 0 <= alpha <= 1:
        raise KvjaxError(f"alpha must be in [0, 1], got {alpha}; RAPID uses 0.1")
    return Shift(jnp.float32(strength), jnp.float32(alpha))


def moved(how: Shift, z: Array, p: Array, q: Array) -> Array:
    """The verifier's logits f32[... V] nearer to a draft that is sure of itself: z - m (p - q), where q >= alpha max q.

    p, q f32[... V]: the softmax of the verifier's and of the draft's logits.
    """
    likely = q >= how.alpha * q.max(-1, keepdims=True)
    return z - how.strength * jnp.where(likely, p - q, 0.0)


def acceptance_probabilities(p: Array, q: Array, drafted: Array) -> Array:
    """The probability min(1, p/q) with which each token drafted i32[B A] is accepted, f32[B A]; p, q f32[B A V]."""
    p, q = (jnp.take_along_axis(x, drafted[..., None], -1)[..., 0] for x in (p, q))
    return jnp.minimum(p / jnp.maximum(q, jnp.finfo(q.dtype).tiny), 1.0)


def remainder(p: Array, near: Array, q: Array) -> Array:
    """What a token is drawn from where one was rejected: f32[B V], of p, `near` (p as it judged) and q f32[B V].

    As in RAPID's code; where nothing was transferred, `near` is p, and this is the rule of speculative sampling.
    """
    rest = jnp.maximum(jnp.maximum(p - q, p - near), 0.0)
    total = rest.sum(-1, keepdims=True)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), p)  # of equals nothing is left but rounding


def judge(
    s: Sampler, how: Shift, verified: Array, offered: Array, drafted: Array, uniform: Array
) -> tuple[Array, Array]:
    """(how many of each row's tokens drafted i32[B A] are accepted i32[B], what the next one is drawn from f32[B V]).

    verified f32[B A+1 V]: the verifier's logits where each of them is due, and behind the last. offered f32[B A V]: the
    draft's logits, of which they were drawn. uniform f32[B A]: numbers in [0, 1).
    """
    z, y = warped(s, verified), warped(s, offered)
    p, q = probabilities(s, z), probabilities(s, y)
    ahead = drafted.shape[1]
    here = z[:, :ahead]
    near = probabilities(s, moved(how, here, jax.nn.softmax(here, -1), jax.nn.softmax(y, -1)))
    agreed = jnp.cumprod(uniform < acceptance_probabilities(near, q, drafted), 1, dtype=jnp.int32)
    accepted = agreed.sum(1, dtype=jnp.int32)

    def there(x: Array) -> Array:
        return jnp.take_along_axis(x, jnp.minimum(accepted, x.shape[1] - 1)[:, None, None], 1)[:, 0]

    all_accepted = (accepted == ahead)[:, None]
    return accepted, jnp.where(all_accepted, p[:, -1], remainder(there(p), there(near), there(q)))


def warped(s: Sampler, logits: Array) -> Array:
    """Logits f32[B T V] after the temperature and the filters."""
    if s.temperature is None:
        return logits
    return apply_filters(s, logits.reshape(-1, logits.shape[-1]) / s.temperature).reshape(logits.shape)


def probabilities(s: Sampler, logits: Array) -> Array:
    """What tokens are drawn from, of warped logits f32[... V]; greedy: all mass on the first of the likeliest."""
    if s.temperature is None:
        return jax.nn.one_hot(logits.argmax(-1), logits.shape[-1], dtype=logits.dtype)
    return jax.nn.softmax(logits, -1)
