"""SpeCache: a low-bit cache on the device, and exact tokens fetched from the host one step ahead."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.core.kernels import mixed_attention, products, use_kernels


@kv.pytree
class LowBitCopy:
    """The low-bit copy of all slots on the device, and the exact tokens that were fetched for the next step."""

    k: Any  # stored by the reader's key codec
    v: Any  # stored by the reader's value codec
    fetched: FetchedTokens | None  # None where no token is fetched ahead


@kv.pytree
class FetchedTokens:
    """The exact keys and values of some slots."""

    k: kv.Array  # [B K n H]
    v: kv.Array  # [B K n H]
    idx: kv.Array  # i32[B K n], their slots, -1 where there is none


@dataclasses.dataclass(frozen=True)
class SpeculativeReader(kv.Reader):
    """Reads a low-bit copy, with the topk heaviest tokens replaced by exact ones (SpeCache, 2503.16163, section 3.3).

    Args:
      topk: exact tokens of a key/value head.
      k: codec of the low-bit keys; only slots that it stores inexactly are candidates.
      v: codec of the low-bit values.
      reduce: "mean" or "max" over the query heads of a key/value head, of their softmax weights (the paper has no
        grouped heads).
      speculative: whether the exact tokens were selected by the query of the predicted next token and fetched in the
        step before. False: they are selected by this step's own query, which waits for them (the paper's Table 4).
    """

    topk: kv.PositiveInt
    k: kv.Codec = kv.Kivi(1, axis="channel")
    v: kv.Codec = kv.Kivi(1, axis="token")
    reduce: Literal["mean", "max"] = "mean"
    speculative: bool = True

    __post_init__ = kv.check_fields

    @property
    def draft_tokens(self) -> int:
        return int(self.speculative)

    sequential_writes = True
    supports_eviction = False  # the low-bit copy quantizes groups of tokens

    def init_state(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> LowBitCopy:
        S = block.pos.shape[2]
        fetched = None
        if self.speculative:
            n = min(self.topk, S)
            k, v = (jnp.zeros((*x.shape[:2], n, x.shape[3]), x.dtype) for x in (block.k, block.v))
            fetched = FetchedTokens(k, v, jnp.full((*k.shape[:2], n), -1, jnp.int32))
        return LowBitCopy(self.k.encode(block.k, block.pos), self.v.encode(block.v, block.pos), fetched)

    def append(self, reader_state: LowBitCopy, new: kv.KVBlock, at: kv.Array, spec: kv.LayerSpec) -> LowBitCopy:
        return dataclasses.replace(
            reader_state, k=self.k.append(reader_state.k, new.k, at), v=self.v.append(reader_state.v, new.v, at)
        )

    def used_part(self, reader_state: LowBitCopy, num_tokens: int) -> Any:
        return (
            self.k.used_part(reader_state.k, num_tokens),
            self.v.used_part(reader_state.v, num_tokens),
            reader_state.fetched,
        )

    def read_bytes(self, storage: kv.KVStorage, state: kv.LayerState) -> kv.StepBytes:
        exact = storage.read_bytes(state, min(self.topk, state.pos.shape[2]))
        replaced = kv.StepBytes.of_all(state.reader_state.fetched).device
        return exact + kv.StepBytes.of_all(state.reader_state) + kv.StepBytes(device_written=replaced)

    def read(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        q: kv.Array,
        q_pos: kv.Array,
        other_partial: kv.Partial | None = None,
        cross_layer: Any = None,
    ) -> kv.ReadResult:
        assert state.n is not None
        reader_state, T = state.reader_state, q.shape[3]
        if T > 2:
            raise kv.KvjaxError(
                f"a step carries one token and at most one draft, got {T} tokens: no tree or beam of drafts"
            )
        if self._has_kernel(storage, state, q):
            part, mass = self._attend_by_kernel(storage, state, q, q_pos, other_partial)
        else:
            s = self.k.scores(q, reader_state.k)
            s = storage.spec.rule.logits(s, state.pos, q_pos, state.bias)
            fetched = reader_state.fetched if self.speculative else self._fetch_now(storage, state, s, other_partial)
            part, mass = self._attend(storage, state, s, q, fetched, q_pos, other_partial)
        if self.speculative:
            reader_state = self._fetch_ahead(storage, state, mass, q_pos)
        return kv.ReadResult(part, reader_state, cross_layer=cross_layer)

    def _has_kernel(self, storage: kv.KVStorage, state: kv.LayerState, q: kv.Array) -> bool:
        """Whether one kernel reads codes, recent and fetched tokens; it knows neither biases nor soft caps."""
        k, v = self.k, self.v
        if not (self.speculative and use_kernels() and isinstance(k, kv.Kivi) and isinstance(v, kv.Kivi)):
            return False
        are_codes = k.bits == v.bits and k.packed == v.packed == "tokens" and (k.axis, v.axis) == ("channel", "token")
        is_plain = state.bias is None and storage.spec.rule.soft_cap is None and storage.indexed_by is None
        is_tile = storage.spec.head_dim == storage.spec.value_dim
        return are_codes and is_plain and is_tile and products.fits(q, k.packed_codes(state.reader_state.k))

    def _attend_by_kernel(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        q: kv.Array,
        q_pos: kv.Array,
        other_partial: kv.Partial | None,
    ) -> tuple[kv.Partial, kv.Array]:
        """Computes what `_attend` does, with codes and recent tokens read where they lie."""
        stored = state.reader_state
        assert isinstance(self.k, kv.Kivi) and isinstance(self.v, kv.Kivi) and state.n is not None
        keys, values = (
            mixed_attention.GroupedTokens(codec.packed_codes(x), x.recent, x.num_quantized)
            for codec, x in ((self.k, stored.k), (self.v, stored.v))
        )
        fetched = mixed_attention.SlotVectors(stored.fetched.k, stored.fetched.v, stored.fetched.idx)
        part, s = mixed_attention.attend(
            q,
            keys,
            values,
            fetched,
            state.pos,
            q_pos,
            state.n,
            bits=self.k.bits,
            window=storage.spec.rule.window,
            interpret=jax.default_backend() != "gpu",
        )
        total = part if other_partial is None else kv.attention.combine(part, other_partial)
        m, l = (x[:, :, :, -1:] for x in (total.m, total.l))
        # Logits of slots without a token are anything, NaN included; those are no candidates.
        return part, self._reduce_group(jnp.exp(s - m) / jnp.maximum(l, 1e-30))

    def _attend(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        s: kv.Array,
        q: kv.Array,
        fetched: FetchedTokens,
        q_pos: kv.Array,
        other_partial: kv.Partial | None,
    ) -> tuple[kv.Partial, kv.Array]:
        """Attends to low-bit and fetched tokens; also returns the last query's weight of each slot, f32[B K S]."""
        at = jnp.maximum(fetched.idx, 0)
        pos = jnp.broadcast_to(state.pos, (*fetched.idx.shape[:2], state.pos.shape[2]))
        pos = jnp.where(fetched.idx >= 0, jnp.take_along_axis(pos, at, 2), -1)
        bias = None if state.bias is None else jnp.take_along_axis(state.bias, at, 2)
        exact = storage.spec.rule.logits(kv.attention.scores(q, fetched.k), pos, q_pos, bias)  # [B K G T n]
        slot = jnp.where(fetched.idx >= 0, fetched.idx, s.shape[-1])
        is_replaced = _set_at(jnp.zeros((*slot.shape[:2], s.shape[-1]), bool), slot, True)
        p, m, l = kv.attention.weights(jnp.where(is_replaced[:, :, None, None], kv.MASKED_LOGIT, s))
        exact_part = kv.attention.attend_scores(exact, fetched.v)
        part = kv.attention.combine(kv.Partial(self.v.mix(p, state.reader_state.v), m, l), exact_part)
        total = part if other_partial is None else kv.attention.combine(part, other_partial)

        def normalize_last(p: kv.Array, m: kv.Array) -> kv.Array:
            """Normalizes the last query's weights, of maximum m, over all tokens that it reads."""
            weight = p * (jnp.exp(m - total.m) / jnp.maximum(total.l, 1e-30))[..., None]
            return self._reduce_group(weight[:, :, :, -1])

        exact_p = jnp.where(exact > kv.MASKED_LOGIT / 2, jnp.exp(exact - exact_part.m[..., None]), 0.0)
        return part, _set_at(normalize_last(p, m), slot, normalize_last(exact_p, exact_part.m))

    def _fetch_now(
        self, storage: kv.KVStorage, state: kv.LayerState, s: kv.Array, other_partial: kv.Partial | None
    ) -> FetchedTokens:
        """Fetches the tokens of this step, by the weights of its first query's logits s."""
        assert state.n is not None
        low, m, l = kv.attention.weights(s)
        mass = low[:, :, :, 0] / jnp.maximum(l[:, :, :, :1], 1e-30)
        if other_partial is not None:
            lse_others = kv.attention.log_sum_exp(other_partial.m, other_partial.l)
            mass = mass * kv.attention.weight_share(kv.attention.log_sum_exp(m, l), lse_others)[:, :, :, :1]
        return self._fetch(storage, state, self._reduce_group(mass), self._num_coded(state.n - 1))

    def _fetch_ahead(self, storage: kv.KVStorage, state: kv.LayerState, mass: kv.Array, q_pos: kv.Array) -> LowBitCopy:
        """Fetches the tokens of the next step, by this step's weight of each slot, f32[B K S]."""
        assert state.n is not None
        # Nothing else in this step needs the result, so the transfer overlaps with the layers above.
        with jax.named_scope("prefetch"):
            new, old = self._fetch(storage, state, mass, self._num_coded(state.n)), state.reader_state.fetched
            # A sequence without a token in this step keeps what was fetched for its next one.
            real = (q_pos[:, -1] >= 0)[:, None, None]
            k, v = (jnp.where(real[..., None], a, b) for a, b in ((new.k, old.k), (new.v, old.v)))
            new = FetchedTokens(k, v, jnp.where(real, new.idx, old.idx))
        return dataclasses.replace(state.reader_state, fetched=new)

    def _num_coded(self, n: kv.Array) -> kv.Array:
        """The number of the first n tokens i32[B] whose keys are codes when the next token is read."""
        codec = self.k
        while isinstance(codec, kv.CodecWrapper):  # which carries gradients
            codec = codec.inner
        assert isinstance(codec, kv.Kivi)
        return codec.num_quantized(n)

    def _reduce_group(self, w: kv.Array) -> kv.Array:
        """Reduces weights f32[B K G S] to f32[B K S]."""
        return w.mean(2) if self.reduce == "mean" else w.max(2)

    def _fetch(
        self, storage: kv.KVStorage, state: kv.LayerState, mass: kv.Array, candidates: kv.Array
    ) -> FetchedTokens:
        """Fetches the topk heaviest of the first `candidates` i32[B] slots."""
        slot = jnp.arange(mass.shape[-1], dtype=jnp.int32)[None, None]
        is_candidate = (slot < candidates[:, None, None]) & (state.pos >= 0)
        best, idx = kv.top_k(jnp.where(is_candidate, mass, -1.0), min(self.topk, mass.shape[-1]))
        idx = jnp.where(best >= 0, idx, -1)
        at = jnp.maximum(idx, 0)
        pos = jnp.take_along_axis(jnp.broadcast_to(state.pos, mass.shape), at, 2)
        return FetchedTokens(*storage.gather(state, at, pos), idx)


def _set_at(x: kv.Array, idx: kv.Array, value: Any) -> kv.Array:
    """Sets x [B K S] at idx i32[B K n] to a value; an index beyond S is dropped."""
    B, K, _ = x.shape
    return x.at[jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], idx].set(value, mode="drop")


@kv.register_method(example="specache:bits=1", family="host memory")
def specache(
    bits: int = 1,
    group: int = 32,
    topk: int = 64,
    residual: int = 64,
    speculative: bool = True,
    one_bit: Literal["improved", "original"] = "improved",
    reduce: Literal["mean", "max"] = "mean",
) -> kv.Method:
    """Stores everything exactly on the host and a low-bit copy on the device, and prefetches the tokens that matter.

    Candidates for fetching are the slots in low bits; recent tokens are exact.

    Formula:
      out = softmax over the exact logits of the topk fetched tokens and the low-bit logits of the others; topk: the
      largest weights of the predicted next token's query, one step earlier

    Differs:
      Only true tokens are kept; the paper's Algorithm 3 would append the predicted one too. The authors published no
      code.

    Args:
      bits: as in `kivi`; SpeCache has 1 or 2 for the low-bit copy.
      group: as in `kivi`; SpeCache has 32 or 64.
      topk: tokens fetched per key/value head and step (the paper: 64).
      residual: as in `kivi`; SpeCache has 64, which 64 fetched tokens extend to KIVI's 128.
      speculative: whether each step also runs a draft of the next token, whose query selects the tokens of the next
        step, so that they are fetched during this one; otherwise each query selects its own and waits.
      one_bit: as in `kivi`.
      reduce: reduction over the query heads of a key/value head, "mean" or "max".

    Reference:
      SpeCache, Jie et al. 2025, arXiv 2503.16163, section 3.3 and Algorithms 1-3
    """

    low_keys = kv.Kivi(bits, group, "channel", residual, one_bit)
    low_values = kv.Kivi(bits, group, "token", residual, one_bit)
    read = SpeculativeReader(topk, low_keys, low_values, reduce, speculative)
    return kv.Method(k=kv.Host(kv.Plain()), v=kv.Host(kv.Plain()), read=read)
