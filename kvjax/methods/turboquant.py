"""TurboQuant: keys by length and direction in the best levels of a normal distribution, values in even steps."""

from __future__ import annotations

from kvjax.cache.codecs.ends import ExactEndLayers
from kvjax.cache.codecs.even import UniformQuantizer
from kvjax.cache.codecs.lloyd import LloydMax
from kvjax.cache.codecs.per_token import Rows
from kvjax.cache.codecs.quantizers import Fp8
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


def _trial(text: str, k_bits: int, v_bits: int, name: str = "") -> Trial:
    def count(x: Sizes) -> Bytes:
        length, ends = 2, 2 + 2
        row = x.H * k_bits // 8 + length + x.H * v_bits // 8 + ends
        return Bytes(x.B * x.K * x.S * row + x.positions(x.S) + x.per_row())

    return Trial(text, "", count, name=name)


@recipe(
    "TurboQuant, Zandieh et al. 2025, arXiv 2504.19874; as in vLLM, kv_cache_dtype turboquant_4bit_nc and its like",
    _trial("turboquant", 4, 4),
    _trial("turboquant:k_bits=3,v_bits=3", 3, 3, "3 bits"),
    formula="K: y = k H / (sqrt(d) |k|), c = the nearest Lloyd-Max level of N(0, 1/d), k' = |k| c / |c|; "
    "V: code = floor((v - min) / s + 1/2), s = (max - min) / (2^bits - 1)",
    differs="As in vLLM, and not in the paper: Hadamard's matrix without random signs takes the place of a random "
    "rotation, and the paper's extra bit per number for the sign of the projected residual (QJL) is left out. FP8 keys "
    "beyond 448 take that value.",
    example="turboquant:ends=0",
    family="quantization by token",
)
def turboquant(k_bits: int = 4, v_bits: int = 4, correct: bool = True, ends: int = 2) -> Method:
    """Keys rotated, in 3 or 4 bits at the best levels for what a rotation makes of them; values in 3 or 4 bits.

    k_bits, v_bits: 4 and 4 (vLLM's `turboquant_4bit_nc`), 3 and 4 (`k3v4_nc`), 3 and 3 (`3bit_nc`), or 8 and 4
    (`k8v4`: keys in FP8 e4m3 without rotation or scale); vLLM reports 3 %, 11 %, 21 % and 1 % more perplexity for these
    four. correct: a key keeps its length (the presets `_nc`). ends: so many layers at each end of the model are exact,
    at most half of all (vLLM: 2); with 0 none are. Attention in the prompt is exact. Takes H k_bits / 8 + 2 bytes for a
    key and H v_bits / 8 + 4 for a value, per token and head of size H.
    """
    keys = Rows(Fp8(scaled=False)) if k_bits == 8 else Rows(LloydMax(k_bits, correct), "hadamard")
    return Method(k=ExactEndLayers(keys, ends), v=ExactEndLayers(Rows(UniformQuantizer(v_bits)), ends))
