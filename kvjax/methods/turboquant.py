"""TurboQuant: vectors by length and direction at the best levels of a normal distribution, or values in equal steps."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp

from kvjax import method_api as kv

MAX_FLOAT16 = float(jnp.finfo(jnp.float16).max)


@kv.exportable
class DirectionCodes(NamedTuple):
    """Vectors as the codes of their directions, and their lengths."""

    codes: kv.Array  # uint32[... words]
    length: kv.Array  # f16[... 1]


@dataclasses.dataclass(frozen=True)
class LloydMax(kv.Quantizer):
    """Codes a vector's direction at 2^bits Lloyd-Max levels of N(0, 1/H) (TurboQuant, 2504.19874; vLLM's code).

    The entries of a rotated unit vector are nearly distributed so. The length takes 2 bytes in addition to the codes.

    Args:
      bits: bits of a code.
      correct: whether restored directions are scaled to length 1, so that a vector keeps its length (vLLM's presets
        `_nc`).
    """

    bits: kv.RowBits = 4
    correct: bool = True

    __post_init__ = kv.check_fields

    def check(self, H: int) -> None:
        kv.bit_packing.check_fills(H, self.bits)

    def encode(self, x: kv.Array) -> DirectionCodes:
        level = kv.lloyd_max_levels(x.shape[-1], self.bits)
        boundaries = jnp.asarray((level[:-1] + level[1:]) / 2)
        length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
        x = x / jnp.where(length > 0, length, 1.0)
        codes = jnp.searchsorted(boundaries, x, side="right", method="compare_all").astype(jnp.uint32)
        return DirectionCodes(
            kv.bit_packing.pack(codes, self.bits, -1), jnp.minimum(length, MAX_FLOAT16).astype(jnp.float16)
        )

    def decode(self, coded: DirectionCodes) -> kv.Array:
        codes = kv.bit_packing.unpack(coded.codes, self.bits, -1)
        x = jnp.asarray(kv.lloyd_max_levels(codes.shape[-1], self.bits))[codes.astype(jnp.int32)]
        if self.correct:
            x = x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-16)
        return x * coded.length.astype(jnp.float32)


@kv.exportable
class UniformCodes(NamedTuple):
    """Vectors as codes of equal steps."""

    codes: kv.Array  # uint32[... words]
    ends: kv.Array  # f16[... 2], the size of a step, and the least number


@dataclasses.dataclass(frozen=True)
class UniformQuantizer(kv.Quantizer):
    """Equal steps from a vector's least to its greatest number, with float16 scales (vLLM's values of TurboQuant).

    scale = max((max - min) / (2^bits - 1), 1e-8), code = floor((x - min) / scale + 1/2), x' = code * scale + min.
    """

    bits: kv.RowBits = 4

    __post_init__ = kv.check_fields

    def check(self, H: int) -> None:
        kv.bit_packing.check_fills(H, self.bits)

    def encode(self, x: kv.Array) -> UniformCodes:
        top = float(2**self.bits - 1)
        least = x.min(-1, keepdims=True)
        scale = kv.step_size(x.max(-1, keepdims=True) - least, top, 1e-8)
        codes = jnp.clip(jnp.floor((x - least) / scale + 0.5), 0.0, top).astype(jnp.uint32)
        ends = jnp.clip(jnp.concatenate([scale, least], -1), -MAX_FLOAT16, MAX_FLOAT16)
        return UniformCodes(kv.bit_packing.pack(codes, self.bits, -1), ends.astype(jnp.float16))

    def decode(self, coded: UniformCodes) -> kv.Array:
        ends = coded.ends.astype(jnp.float32)
        return (
            kv.bit_packing.codes_to_float(kv.bit_packing.unpack(coded.codes, self.bits, -1)) * ends[..., :1]
            + ends[..., 1:]
        )


@dataclasses.dataclass(frozen=True)
class ExactEndLayers(kv.CodecWrapper):
    """Quantizes all layers except the first and the last ones of the model (vLLM's rule for TurboQuant).

    This is the codec of a whole model: `at` returns the codec of one layer, which stores the tokens.

    Args:
      inner: the codec of the layers between.
      layers: exact layers at each end, at most half of all; a model of twice as many layers, or fewer, is all exact.
    """

    layers: kv.NonNegativeInt = 2

    __post_init__ = kv.check_fields

    def at(self, spec: kv.LayerSpec) -> kv.Codec:
        assert spec.index is not None
        num_exact = min(self.layers, spec.num_layers // 2)
        is_between = num_exact <= spec.index < spec.num_layers - num_exact
        return kv.bind_component(self.inner, spec) if is_between else kv.Plain()


@kv.register_method(example="turboquant:ends=0", family="quantization by token")
def turboquant(
    k_bits: kv.RowBits = 4,
    v_bits: kv.RowBits = 4,
    correct: bool = True,
    ends: kv.NonNegativeInt = 2,
    v_levels: Literal["uniform", "normal"] = "uniform",
) -> kv.Method:
    """Quantizes rotated keys to the best levels for their distribution, and values uniformly or as keys.

    Attention in the prompt is exact. A key of head size H takes H k_bits / 8 + 2 bytes and a value H v_bits / 8 + 4, or
    2 with v_levels=normal.

    Formula:
      K: y = k H / (sqrt(d) |k|), c = the nearest Lloyd-Max level of N(0, 1/d), k' = |k| c / |c|; V: code = floor((v -
      min) / s + 1/2), s = (max - min) / (2^bits - 1), or as K

    Differs:
      Values are neither rotated nor at the levels of keys, as in vLLM; the paper treats both alike, as v_levels=normal
      does, in 20.7% of the exact cache's bytes instead of 21.5% at 3 bits (SmolLM2-135M; 8 contexts tell neither code
      nor later questions apart). Whole bits alone: the paper's 2.5 and 3.5 give some channels of a head one bit more,
      and vLLM has no such type. Also as in vLLM, Hadamard's matrix without random signs replaces a random rotation, and
      the paper's extra bit per number for the sign of the projected residual (QJL) is left out. FP8 keys beyond 448
      take that value.

    Args:
      k_bits: bits of a key: 3 or 4 (vLLM's), 1 or 2, or 8 for FP8 e4m3 without rotation or scale.
      v_bits: bits of a value: 1, 2, 3, 4 or 8. vLLM's presets (k_bits, v_bits) are 4 and 4 (`turboquant_4bit_nc`), 3
        and 4 (`k3v4_nc`), 3 and 3 (`3bit_nc`), 8 and 4 (`k8v4`); it reports 3 %, 11 %, 21 % and 1 % more perplexity for
        these.
      correct: whether a key keeps its norm (the presets `_nc`).
      ends: layers at each end of the model that are exact, at most half of all (vLLM: 2; 0 for none).
      v_levels: "uniform", equal steps (vLLM), or "normal", values rotated and quantized as keys are (the paper).

    Reference:
      TurboQuant, Zandieh et al. 2025, arXiv 2504.19874; as in vLLM, kv_cache_dtype turboquant_4bit_nc and its like
    """
    keys = (
        kv.PerTokenCodec(kv.Fp8(scaled=False))
        if k_bits == 8
        else kv.PerTokenCodec(LloydMax(k_bits, correct), "hadamard")
    )
    values = (
        kv.PerTokenCodec(UniformQuantizer(v_bits))
        if v_levels == "uniform"
        else kv.PerTokenCodec(LloydMax(v_bits, correct), "hadamard")
    )
    return kv.Method(k=ExactEndLayers(keys, ends), v=ExactEndLayers(values, ends))
