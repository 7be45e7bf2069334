"""MiniCache: neighbouring layers share the directions of a prompt's keys and values, and keep their own lengths."""

from __future__ import annotations

from kvjax.cache.codecs.directions import SharedDirections
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Trial, everything


@recipe(
    "MiniCache, Liu et al. 2024, arXiv 2405.14366",
    # The battery's model has a single layer, which is half of no pair; see tests/oracles/test_minicache.py.
    Trial("minicache", "minicache", everything),
    formula="x'_l = |x_l| e and x'_{l-1} = |x_{l-1}| e, e = [sin((1-t) w) u_{l-1} + sin(t w) u_l] / sin(w), "
    "u = x / |x|, w the angle between both u; tokens with the largest w keep x",
    differs="The tokens that stay exact are a fixed share of each head's, by the angle between keys, for keys and "
    "values alike; the paper counts them by a threshold between the smallest and the largest angle (gamma = 0.05, "
    "unverified), which gives no fixed size. Merged directions become unit vectors again, which matters next to a half "
    "turn alone. What is decoded is never merged.",
    example="minicache",
    family="fewer numbers per vector",
)
def minicache(t: float = 0.6, share: float = 0.05, start: float = 0.5) -> Method:
    """Pairs of layers hold the directions of a prompt's keys and values once, and lengths for each layer.

    t: where the shared direction lies between that of the lower layer, 0, and that of the upper one, 1 (the paper:
    0.6). share: of each head's tokens, those whose keys turn most from one layer to the next, rounded up, which both
    layers keep exactly (5 %). start: the share of the layers, rounded down, below the first pair (the paper: half of
    them); they hold everything, and so does a last layer without another. What is decoded stays exact. Compose it with
    a codec, as in 'minicache + int4', to hold directions and what stays exact in fewer bits.
    """
    return Method(side_store=SharedDirections(t, share, start))
