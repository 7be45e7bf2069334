"""TurboQuant: keys by length and direction in the best levels of a normal distribution, values in even steps."""

from __future__ import annotations

from kvjax.cache.codecs.ends import ExactEndLayers
from kvjax.cache.codecs.even import UniformQuantizer
from kvjax.cache.codecs.lloyd import LloydMax
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.quantizers import Fp8
from kvjax.cache.method import Method
from kvjax.methods.registry import register_method


@register_method(example="turboquant:ends=0", family="quantization by token")
def turboquant(k_bits: int = 4, v_bits: int = 4, correct: bool = True, ends: int = 2) -> Method:
    """Quantizes rotated keys to the best levels for their distribution, and values uniformly, to 3 or 4 bits.

    Attention in the prompt is exact. A key of head size H takes H k_bits / 8 + 2 bytes and a value H v_bits / 8 + 4.

    Formula:
      K: y = k H / (sqrt(d) |k|), c = the nearest Lloyd-Max level of N(0, 1/d), k' = |k| c / |c|; V: code = floor((v -
      min) / s + 1/2), s = (max - min) / (2^bits - 1)

    Differs:
      As in vLLM, and not in the paper, Hadamard's matrix without random signs replaces a random rotation, and the
      paper's extra bit per number for the sign of the projected residual (QJL) is left out. FP8 keys beyond 448 take
      that value.

    Args:
      k_bits: bits of a key: 3 or 4, or 8 for FP8 e4m3 without rotation or scale.
      v_bits: bits of a value: 3 or 4. vLLM's presets (k_bits, v_bits) are 4 and 4 (`turboquant_4bit_nc`), 3 and 4
        (`k3v4_nc`), 3 and 3 (`3bit_nc`), 8 and 4 (`k8v4`); it reports 3 %, 11 %, 21 % and 1 % more perplexity for
        these.
      correct: whether a key keeps its norm (the presets `_nc`).
      ends: layers at each end of the model that are exact, at most half of all (vLLM: 2; 0 for none).

    Reference:
      TurboQuant, Zandieh et al. 2025, arXiv 2504.19874; as in vLLM, kv_cache_dtype turboquant_4bit_nc and its like
    """
    keys = PerTokenCodec(Fp8(scaled=False)) if k_bits == 8 else PerTokenCodec(LloydMax(k_bits, correct), "hadamard")
    return Method(k=ExactEndLayers(keys, ends), v=ExactEndLayers(PerTokenCodec(UniformQuantizer(v_bits)), ends))
