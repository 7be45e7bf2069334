"""RotateKV: bare keys rotated over several heads and sorted by channel, values rotated, both in two bits."""

from __future__ import annotations

from kvjax.cache.calibration.bases import Bases
from kvjax.cache.codecs.across_heads import CrossHeadRotation
from kvjax.cache.codecs.exact_prefix import ExactPrefix
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.zero_point import ZeroPointQuantizer
from kvjax.cache.method import Method
from kvjax.methods.registry import register_method


@register_method(family="quantization by token", sized_by="bits")
def rotatekv(bits: int = 2, heads: int = 4, clip: float = 0.0, sinks: int = 5, table: str = "") -> Method:
    """Quantizes each token by itself after rotations that spread large numbers over many channels.

    A group is as many channels as a head has (128 in the authors' models). On several devices a read gathers keys from
    all of them. Attention in the prompt is exact. A key or a value of head size H takes H bits / 8 + 4 bytes.

    Formula:
      K before RoPE: y = channels of 4 heads together times H / sqrt(4 d), sorted by sum over tokens, then groups of d;
      V: v H / sqrt(d); s = c (max - min) / (2^bits - 1), z = round(-c min / s), code = clip(round(x / s) + z), x' =
      (code - z) s

    Differs:
      The channels' order is by default that of each prompt, where the authors calibrate it. Their code keeps those
      tokens exact that have the 20 largest numbers of a prompt's hidden states; here the first tokens are exact. Their
      scale divides by bits^2 - 1, which is 8 instead of 7 for 3 bits.

    Args:
      bits: 2, 3 or 4 (the authors'; also 1 and 8).
      heads: neighboring key/value heads that are rotated together (the authors: 4), or their greatest common divisor
        with the layer's.
      clip: fraction of a group's smallest and largest number that codes span; 0 for the authors' defaults, 0.8 at 2
        bits and 1 at others.
      sinks: first tokens that are stored exactly (the authors' code has 5 in a comment).
      table: a file of `kvjax calibrate bases`, or "shipped", by whose mean keys channels are ordered; without one, by
        those of each prompt.

    Reference:
      RotateKV, Su et al. 2025, arXiv 2501.16383; constants of its authors' code
    """
    quantizer = ZeroPointQuantizer(bits, clip or (0.8 if bits == 2 else 1.0))
    keys = CrossHeadRotation(PerTokenCodec(quantizer), heads, Bases.table_file(table) if table else None)
    return Method(k=ExactPrefix(keys, sinks), v=ExactPrefix(PerTokenCodec(quantizer, "hadamard"), sinks))
