"""MiniCache: neighbouring layers share the directions of a prompt's keys and values, and keep their own lengths."""

from __future__ import annotations

from kvjax.cache.codecs.directions import SharedDirections
from kvjax.cache.method import Method
from kvjax.methods.registry import register_method


@register_method(family="fewer numbers per vector")
def minicache(t: float = 0.6, share: float = 0.05, start: float = 0.5) -> Method:
    """Stores the directions of a prompt's keys and values once for two neighboring layers, with norms for each.

    Decoded tokens stay exact. Compose it with a codec, as in 'minicache + int4', to store directions and exact tokens
    in fewer bits.

    Formula:
      x'_l = |x_l| e and x'_{l-1} = |x_{l-1}| e, e = [sin((1-t) w) u_{l-1} + sin(t w) u_l] / sin(w), u = x / |x|, w the
      angle between both u; tokens with the largest w keep x

    Differs:
      The tokens that stay exact are a fixed fraction of each head's, by the angle between keys, for keys and values
      alike; the paper counts them by a threshold between the smallest and the largest angle (gamma = 0.05, unverified),
      which gives no fixed size. Merged directions are normalized again, which matters only near a half turn. Decoded
      tokens are never merged.

    Args:
      t: interpolation weight of the shared direction, 0 for that of the lower layer and 1 for that of the upper (the
        paper: 0.6).
      share: fraction of each head's tokens, rounded up, that both layers keep exactly: those whose keys turn most
        between the layers (5 %).
      start: fraction of the layers, rounded down, below the first pair (the paper: half of them). They store
        everything, and so does a last layer without a partner.

    Reference:
      MiniCache, Liu et al. 2024, arXiv 2405.14366
    """
    return Method(side_store=SharedDirections(t, share, start))
