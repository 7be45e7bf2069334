"""Staircase adaptive quantisation: the bits of a token fall step by step with its age."""

from __future__ import annotations

from kvjax.cache.codecs.stairs import StaircaseQuantizer
from kvjax.cache.method import Method
from kvjax.errors import KvjaxError
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    """In blocks of 4 tokens: one of them as they came, one in 8 bits, one in 4 bits, the others in 2; groups of 4."""
    blocks = {8: 1, 4: 1, 2: x.S // 4 - 2}
    numbers = {bits: x.B * x.K * 4 * count * x.H for bits, count in blocks.items()}
    codes = sum(n * bits // 8 for bits, n in numbers.items())
    scales_and_minima = 2 * sum(numbers.values()) // 4 * x.itemsize
    return Bytes(2 * (codes + scales_and_minima + x.rows(4) + x.per_row()) + x.positions(x.S) + x.per_row())


@recipe(
    "The Nature of Mathematical Modeling and Probabilistic Optimization Engineering in Generative AI, Li 2024, "
    "arXiv 2410.18441, SAQ; groups: KIVI, arXiv 2402.02750",
    Trial("saq:group=4,every=4", "saq:group=4,every=24", _bytes),
    formula="a token of the a-th newest full block of `every` tokens has bits[min(a, last)] bits, coded from the codes "
    "that it had before; groups, scales and minima as in KIVI",
    differs="The paper's listing was read for keys; unverified are its number of bits, that values move in the same "
    "blocks, and its prompt: here each token is coded once, on the step of its age. What the last step holds is not "
    "coded again, where the listing does so with every block, to the same bits.",
    example="saq:every=32",
    family="quantization by channel and group",
)
def saq(bits: str = "8-4-2", group: int = 32, every: int = 128) -> Method:
    """Full precision for the newest tokens, and then fewer bits with every block of tokens that follows them.

    bits: of the codes on each step, the newest first; each but the last holds `every` tokens. group: tokens of a
    channel (keys) or channels of a token (values) that share a scale and a minimum (KIVI's 32). every: the tokens that
    stay exact at most, and move together (KIVI's 128). Attention in the prompt is exact; so is all of it while prompt
    and answer together are fewer than `every` tokens.
    """
    try:
        steps = tuple(int(b) for b in bits.split("-"))
    except ValueError:
        raise KvjaxError(f"bits must be numbers with '-' between them, got {bits!r}; for example '8-4-2'") from None
    return Method(
        k=StaircaseQuantizer(steps, group, "channel", every), v=StaircaseQuantizer(steps, group, "token", every)
    )
