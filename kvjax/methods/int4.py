"""Keys and values in 4 bits, each token's row of a head by itself."""

from __future__ import annotations

from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.quantizers import MinMax
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _bytes(x: Sizes) -> Bytes:
    codes_and_scale = x.H // 2 + 4
    return Bytes(2 * x.B * x.K * x.S * codes_and_scale + x.positions(x.S) + x.per_row())


def _on_host(x: Sizes) -> Bytes:
    here = x.positions(x.S) + x.per_row()
    return Bytes(here, _bytes(x).device - here)


@recipe(
    "vLLM, kv_cache_dtype int4_per_token_head; rotation: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, section 3",
    Trial("int4", "", _bytes),
    Trial("int4:rotate=false", "", _bytes, name="not rotated"),
    Trial("int4 + offload", "", _on_host, name="on the host"),
    formula="x = row H / sqrt(d); s = (max x - min x) / 15, z = round(-min x / s), code = round(x / s + z), "
    "x' = (code - z) s",
    differs="A row of one sign has zero taken into its range, as in QuaRot; vLLM's formula would clip it.",
    example="int4",
    family="quantization by token",
)
def int4(rotate: bool = True, clip: float = 1.0) -> Method:
    """Every token's key and value of a head in 4 bits with a scale of its own, and coded only once, when it comes.

    rotate: rows are multiplied by a Hadamard matrix first, which spreads outliers (vLLM, QuaRot). clip: of a row's
    least and greatest number the share that its codes span; what lies outside takes the nearest code (QuaRot's clip
    ratio: 1 by default, which clips nothing). Attention in the prompt is exact. Takes H / 2 + 4 bytes per token, head,
    and each of key and value, for a head size of H.
    """
    rows = PerTokenCodec(MinMax(4, clip), "hadamard" if rotate else "")
    return Method(k=rows, v=rows)
