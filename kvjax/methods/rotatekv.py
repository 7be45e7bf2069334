"""RotateKV: bare keys rotated over several heads and sorted by channel, values rotated, both in two bits."""

from __future__ import annotations

from kvjax.cache.calibration.bases import Bases
from kvjax.cache.codecs.across_heads import CrossHeadRotation
from kvjax.cache.codecs.exact_prefix import FirstExact
from kvjax.cache.codecs.per_token import Rows
from kvjax.cache.codecs.zero_point import ZeroPointQuantizer
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    """Two bits a number, a scale and a zero point a row, 2 sinks as they are, and the order of the channels."""
    codes = 2 * x.B * x.K * x.S * (x.H * 2 // 8 + 2 + 2)
    order = 4 * x.B * x.K * x.H
    return Bytes(codes + 2 * x.rows(2) + order + x.positions(x.S) + x.per_row())


@recipe(
    "RotateKV, Su et al. 2025, arXiv 2501.16383; constants of its authors' code",
    Trial("rotatekv:sinks=2", "rotatekv:sinks=100", _bytes),
    formula="K before RoPE: y = channels of 4 heads together times H / sqrt(4 d), sorted by sum over tokens, then "
    "groups of d; V: v H / sqrt(d); s = c (max - min) / (2^bits - 1), z = round(-c min / s), "
    "code = clip(round(x / s) + z), x' = (code - z) s",
    differs="The channels' order is by default that of each prompt, where the authors calibrate it. Their code keeps "
    "tokens exact that hold the 20 largest numbers of a prompt's hidden states; here these are the first ones. Their "
    "scale divides by bits^2 - 1, which is 8 in place of 7 for 3 bits.",
    sized_by="bits",
    family="quantization by token",
)
def rotatekv(bits: int = 2, heads: int = 4, clip: float = 0.0, sinks: int = 5, table: str = "") -> Method:
    """All tokens in few bits, each by itself as it comes; rotations spread what is large over many channels.

    bits: 2, 3 or 4 (the authors'; also 1 and 8). heads: so many neighbouring key/value heads are rotated together (4),
    or as many as divide these and the layer's. clip: of a group's least and greatest number the share that codes span;
    0 stands for the authors' 0.8 at 2 bits, and 1 at others. sinks: so many first tokens are held exactly (their code
    has 5 in a comment). table: a file of `kvjax calibrate bases`, or "shipped", by whose mean keys channels are
    ordered; without one, by those of each prompt. A group is as many channels as a head has (128 in the authors'
    models). On several devices keys are gathered from all of them to be read. Takes H bits / 8 + 4 bytes for each of a
    key and a value, per token and head of size H. Attention in the prompt is exact.
    """
    quantiser = ZeroPointQuantizer(bits, clip or (0.8 if bits == 2 else 1.0))
    keys = CrossHeadRotation(Rows(quantiser), heads, Bases.given(table) if table else None)
    return Method(k=FirstExact(keys, sinks), v=FirstExact(Rows(quantiser, "hadamard"), sinks))
