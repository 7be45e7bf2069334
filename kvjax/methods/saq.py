"""Staircase adaptive quantisation: the bits of a token fall step by step with its age."""

from __future__ import annotations

from kvjax.cache.codecs.stairs import StaircaseQuantizer
from kvjax.cache.method import Method
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@register_method(example="saq:every=32", family="quantization by channel and group")
def saq(bits: str = "8-4-2", group: int = 32, every: int = 128) -> Method:
    """Keeps the newest tokens exact, and stores older ones in fewer bits with every block of tokens that follows them.

    Attention in the prompt is exact; so is all of it while prompt and answer together are fewer than `every` tokens.

    Formula:
      a token of the a-th newest full block of `every` tokens has bits[min(a, last)] bits, coded from the codes that it
      had before; groups, scales and minima as in KIVI

    Differs:
      The paper's listing was read for keys; unverified are its number of bits, that values move in the same blocks, and
      its prompt: here each token is coded once, on the step of its age. The last step's tokens are not coded again,
      where the listing does so with every block, to the same bits.

    Args:
      bits: bits of the codes on each step, newest first; each but the last holds `every` tokens.
      group: tokens of a channel (keys) or channels of a token (values) that share a scale and a minimum (KIVI: 32).
      every: tokens that stay exact at most, and move together (KIVI: 128).

    Reference:
      The Nature of Mathematical Modeling and Probabilistic Optimization Engineering in Generative AI, Li 2024, arXiv
      2410.18441, SAQ; groups: KIVI, arXiv 2402.02750
    """
    try:
        steps = tuple(int(b) for b in bits.split("-"))
    except ValueError:
        raise KvjaxError(f"bits must be numbers with '-' between them, got {bits!r}; for example '8-4-2'") from None
    return Method(
        k=StaircaseQuantizer(steps, group, "channel", every), v=StaircaseQuantizer(steps, group, "token", every)
    )
