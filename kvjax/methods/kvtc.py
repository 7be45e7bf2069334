"""KVTC: keys and values along calibrated principal directions, each in as many bits as its variance earns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Literal

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv
from kvjax.cache.codecs import blockwise
from kvjax.methods.cskv import ExactWindow

WIDTHS = (8, 4, 2, 1)
"""Bits of a code. A word of 32 bits has codes of one width: four, eight, sixteen or thirty-two components."""


@functools.cache
def level_error(bits: int) -> float:
    """The mean squared error of N(0, 1) at its 2^bits Lloyd-Max levels; 1 without a bit."""
    if not bits:
        return 1.0
    x = np.linspace(-8, 8, 40_001)
    error = np.square(x[:, None] - kv.lloyd_max_levels(1, bits)[None]).min(1)
    return float((error * np.exp(-np.square(x) / 2)).sum() / np.exp(-np.square(x) / 2).sum())


def allocate_words(variances: np.ndarray, num_words: int) -> tuple[int, ...]:
    """Chooses the bits of the codes in each word, so that the sum of squared errors is least.

    Args:
      variances: f64[C] of the components, falling.
      num_words: words of a token; those that could hold no more components are left out.

    Returns:
      The bits of the codes in each word. Words hold the components in their order, and what no word holds has no bit.
    """
    C = len(variances)
    lost = np.append(np.cumsum(variances[::-1])[::-1], 0.0)  # the error from each component on, without a bit
    # least[c]: for c components in the words so far, the least error of these, and the words' bits.
    least: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    best = (lost[0], ())
    for _ in range(num_words):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for (c, (error, words)), bits in itertools.product(least.items(), WIDTHS):
            end = min(c + 32 // bits, C)
            candidate = error + level_error(bits) * float(lost[c] - lost[end]), (*words, bits)
            if c < C and (end not in reached or candidate < reached[end]):
                reached[end] = candidate
        best = min([best, *((error + lost[c], words) for c, (error, words) in reached.items())])
        least = reached
    return best[1]


@kv.pytree
class TransformState:
    """The components of all tokens as codes, and the directions that they belong to."""

    words: kv.memory.Buffer  # uint32[B K S words]
    basis: kv.Array  # f32[1 K H C], directions times the deviations along them
    mean: kv.Array  # f32[1 K 1 H]
    dtype: str = dataclasses.field(metadata={"static": True})  # of the keys or values


@dataclasses.dataclass(frozen=True)
class TransformCoded(kv.Codec):
    """Codes each token by its components along the directions of a table of `Bases`.

    A component over its deviation is a number of N(0, 1) where tokens are like the table's text, and takes the nearest
    of that distribution's Lloyd-Max levels. Nothing else is stored of a token: no scale.

    Args:
      bits: bits of a channel in the mean, that is words of 32 bits for `H * bits` bits.
      table: the file.
      of: which of the table's bases; with "bare_keys" the codec stores keys before their rotation.
      spec: the layer, set by `at`.
    """

    bits: kv.PositiveInt = 2
    table: kv.TableFile | None = None
    of: Literal["bare_keys", "values"] = "values"
    spec: kv.LayerSpec | None = None

    __post_init__ = kv.check_fields

    @property
    def pre_rope(self) -> bool:
        return self.of == "bare_keys"

    def in_pages(self, page: int) -> None:
        return None  # the directions of a head do not serve the head whose page it would store

    def at(self, spec: kv.LayerSpec) -> kv.Codec:
        bound = dataclasses.replace(kv.bind_fields(self, spec), spec=spec.without_index)
        bound._read_table()  # raises here, when the method is bound, for a table that does not fit the model
        return bound

    def encode(self, x: kv.Array, pos: kv.Array) -> TransformState:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        basis, mean, _ = self._read_table()
        basis, mean = (kv.over_heads.local_part(jnp.asarray(a), x.shape[1])[None] for a in (basis, mean))
        stored = TransformState(
            kv.memory.pack(self._code(x, basis, mean[:, :, None])), basis, mean[:, :, None], x.dtype.name
        )
        return stored

    def append(self, stored: TransformState, x: kv.Array, at: kv.Array) -> TransformState:
        words = kv.memory.append(stored.words, self._code(x, stored.basis, stored.mean), at)
        return dataclasses.replace(stored, words=words)

    def decode(self, stored: TransformState) -> kv.Array:
        return self._expand(kv.memory.unpack(stored.words), stored)

    def gather(self, stored: TransformState, idx: kv.Array) -> kv.Array:
        return self._expand(kv.memory.gather_tokens(stored.words, idx), stored)

    def mix(self, p: kv.Array, stored: TransformState) -> kv.Array:
        B, K, S, _ = stored.words.data.shape
        C = stored.basis.shape[3]

        def decode_tile(head: kv.Array, num_heads: int, start: kv.Array | int, count: int) -> kv.Array:
            return self._components(kv.memory.slice_tokens(stored.words, head, num_heads, start, count))

        # The components are summed, and their sum expanded once, in place of every value.
        mixed = blockwise.mix(p, C, blockwise.tile_size(B * K, S, C), decode_tile)
        mean = p.sum(-1, keepdims=True) * stored.mean[:, :, None]
        return kv.matmul_in_float32(mixed, stored.basis.swapaxes(2, 3)[:, :, None]) + mean

    def _code(self, x: kv.Array, basis: kv.Array, mean: kv.Array) -> kv.Array:
        """Codes tokens [B K n H]: uint32[B K n words]."""
        x = kv.refuse_gradient(x, f"codes of {type(self).__name__}").astype(jnp.float32)
        # The columns are orthogonal: over their squared lengths they are their own inverse. A direction along which
        # the table's text does not vary has no length, and no component.
        inverse = basis / jnp.maximum(jnp.square(basis).sum(2, keepdims=True), 1e-12)
        components, words, start = kv.matmul_in_float32(x - mean, inverse), [], 0
        for bits, count in self._runs():
            level = kv.lloyd_max_levels(1, bits)
            middles = jnp.asarray((level[1:] + level[:-1]) / 2)
            own = components[..., start : start + count * (32 // bits)]
            codes = jnp.searchsorted(middles, own, method="compare_all" if bits < 8 else "scan").astype(jnp.uint32)
            missing = count * (32 // bits) - codes.shape[-1]  # in the last word
            codes = jnp.pad(codes, [(0, 0), (0, 0), (0, 0), (0, missing)])
            words.append(kv.bit_packing.pack(codes, bits, -1))
            start += count * (32 // bits)
        return jnp.concatenate(words, -1)

    def _components(self, words: kv.Array) -> kv.Array:
        """Words [.. words] -> the components f32[.. C], over their deviations."""
        found, start = [], 0
        for bits, count in self._runs():
            codes = kv.bit_packing.unpack(words[..., start : start + count], bits, -1)
            found.append(jnp.asarray(kv.lloyd_max_levels(1, bits))[codes.astype(jnp.int32)])
            start += count
        return jnp.concatenate(found, -1)[..., : self._num_components()]

    def _expand(self, words: kv.Array, stored: TransformState) -> kv.Array:
        x = kv.matmul_in_float32(self._components(words), stored.basis.swapaxes(2, 3)) + stored.mean
        return x.astype(stored.dtype)

    def _runs(self) -> list[tuple[int, int]]:
        """Neighboring words of one width: (bits of a code, number of words)."""
        return [(bits, len(list(run))) for bits, run in itertools.groupby(self._read_table()[2])]

    def _num_components(self) -> int:
        return min(sum(32 // bits for bits in self._read_table()[2]), self._width())

    def _width(self) -> int:
        assert self.spec is not None
        return self.spec.value_dim if self.of == "values" else self.spec.head_dim

    def _read_table(self) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """The directions of each head times their deviations f32[K H C], the means f32[K H], and the words' bits."""
        assert self.spec is not None and self.table is not None
        K, H = self.spec.num_kv_heads, self._width()
        shapes = {self.of: (K, H, H), f"{self.of}_mean": (K, H), f"{self.of}_deviation": (K, H)}
        basis, mean, deviation = self.table.layer_arrays(self.spec, **shapes).values()
        if H * self.bits < 32:
            raise kv.KvjaxError(
                f"heads of {H} channels in {self.bits} bits do not fill a word of 32 bits; use more bits"
            )
        # One choice for all heads of a layer, which run one program: components of one rank have their mean variance.
        words = _allocate_words(np.square(deviation.astype(np.float64)).mean(0).tobytes(), H * self.bits // 32)
        num_components = min(sum(32 // bits for bits in words), H)
        return (basis * deviation[:, None])[:, :, :num_components], mean, words


@functools.cache
def _allocate_words(variances: bytes, num_words: int) -> tuple[int, ...]:
    return allocate_words(np.frombuffer(variances), num_words)


@kv.register_method(example="kvtc:recent=32", family="quantization by token")
def kvtc(
    k_bits: kv.PositiveInt = 2,
    v_bits: kv.PositiveInt = 2,
    sinks: kv.NonNegativeInt = 4,
    recent: kv.PositiveInt = 128,
    table: str = "shipped",
) -> kv.Method:
    """Codes each token along calibrated principal directions, in bits that follow the variances; many get none.

    Attention in the prompt is exact. A key or a value takes H bits / 8 bytes, and nothing more.

    Formula:
      c = (x - mean) E, E the directions of falling variance s_i^2; c_i takes the nearest of the 2^b_i Lloyd-Max levels
      of N(0, s_i^2), b_i in 0, 1, 2, 4, 8 with the least sum of s_i^2 error(b_i) in H bits bits, by dynamic programming

    Differs:
      There is no public code of the authors. The paper's directions are those of all heads together and its scales
      those of blocks of components; here each head has its own, and levels follow the table. Codes have fixed widths in
      whole words: the paper's entropy coder gains nothing on codes of a normal distribution.

    Args:
      k_bits: bits of a key's channel in the mean; keys are coded before RoPE.
      v_bits: bits of a value's channel in the mean.
      sinks: first tokens that are stored exactly (the paper: 4).
      recent: last tokens that are stored exactly (the paper: 128).
      table: the file of `kvjax calibrate bases`; "shipped" for the tables that ship with kvjax.

    Reference:
      KVTC, Staniszewski and Lancucki 2025, arXiv 2511.01815
    """
    bases = kv.Bases.table_file(table)
    keys, values = TransformCoded(k_bits, bases, "bare_keys"), TransformCoded(v_bits, bases, "values")
    return kv.Method(
        k=kv.ExactPrefix(ExactWindow(keys, recent), sinks), v=kv.ExactPrefix(ExactWindow(values, recent), sinks)
    )
