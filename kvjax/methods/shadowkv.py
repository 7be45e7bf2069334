"""ShadowKV: a prompt's keys in low rank, its values on the host, fetched by the landmarks of their chunks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.codecs.low_rank import PromptLowRank


@kv.pytree
class ShadowState:
    """The chunks of a prompt, in slots of the side store."""

    tokens: kv.LayerState  # keys in low rank, values on the host; position -1 for what stays exact
    landmarks: kv.memory.Buffer  # [B K C H], the mean key of each chunk


@dataclasses.dataclass(frozen=True)
class ShadowStore(kv.SideStore):
    """Stores a prompt in chunks and lets each query read the best few (Sun et al. 2024).

    A query reads the chunks whose landmarks have the highest softmax weight of its key/value head's query heads. The
    main slots keep exactly: the outlier chunks of each head, whose tokens are least like their mean, the last chunks,
    the remainder of the prompt, and all decoded tokens. The fields are the arguments of `shadowkv`.
    """

    budget: int = 2048
    chunk: kv.PositiveInt = 8
    rank: kv.PositiveInt = 160
    outliers: kv.NonNegativeInt = 48
    local: kv.NonNegativeInt = 4

    uses_host_memory = True

    def __post_init__(self):
        kv.check_fields(self)
        if self.budget < self.chunk:
            raise kv.KvjaxError(
                f"ShadowKV needs a budget of at least a chunk, got budget={self.budget} and chunk={self.chunk}; its "
                "authors use budget=2048 and chunk=8"
            )

    def slots(self, spec: kv.LayerSpec, kept: int, width: int) -> kv.Slots:
        # Outlier chunks, local chunks, and a remainder shorter than a chunk stay.
        main = min(kept, (self.outliers + self.local + 1) * self.chunk - 1)
        return kv.Slots(kept, main, self.chunk * max(kept // self.chunk - self.local, 1))

    def split(
        self, storage: kv.KVStorage, block: kv.KVBlock, observation: kv.Observation | None, slots: kv.Slots
    ) -> tuple[kv.KVBlock, ShadowState]:
        block = block.clean()
        num_chunks = slots.side // self.chunk
        slot = jnp.arange(slots.side, dtype=jnp.int32)[None, None]
        front = kv.gather_tokens(block, jnp.where(slot < block.pos.shape[2], slot, -1))
        landmarks, least_cosine = self._landmarks(front.k)

        # Whole chunks before the local ones leave the main slots, except the ones least like their mean.
        length = (block.pos[:, :1] >= 0).sum(-1, dtype=jnp.int32)
        is_whole = jnp.arange(num_chunks, dtype=jnp.int32)[None, None] < (length // self.chunk - self.local)[..., None]
        is_outlier = kv.top_k_mask(-least_cosine, is_whole, jnp.full_like(length, self.outliers))
        leaves = jnp.repeat(is_whole & ~is_outlier, self.chunk, -1)

        rest = jnp.zeros((*leaves.shape[:2], block.pos.shape[2]), bool)
        stays = ~jnp.concatenate([leaves, rest], 2)[:, :, : block.pos.shape[2]]
        main = kv.gather_tokens(block, kv.mask_to_slots((block.pos >= 0) & stays, slots.main))

        # The basis is fitted to the keys of the whole prompt, so all are encoded, and the chunks' coordinates stay.
        inner, pos = self._chunk_storage(storage.spec), jnp.where(leaves, front.pos, -1)
        k = inner.k.encode(inner.keys_to_store(block), block.pos)
        coordinates = jax.tree.map(lambda x: x[:, :, : pos.shape[2]], k.coordinates)
        k = dataclasses.replace(k, coordinates=coordinates)
        tokens = kv.LayerState(k, inner.v.encode(front.v, pos), pos, bias=front.bias)
        return main, ShadowState(tokens, kv.memory.pack(landmarks.astype(block.k.dtype)))

    def _landmarks(self, keys: kv.Array) -> tuple[kv.Array, kv.Array]:
        """Averages the keys [B K C*chunk H] of each chunk: f32[B K C H], and the least cosine to that f32[B K C]."""
        B, K, S, H = keys.shape
        keys = lax.stop_gradient(keys)  # landmarks and outliers only choose which tokens are read, and from where
        keys = keys.astype(jnp.float32).reshape(B, K, -1, self.chunk, H)
        mean = keys.mean(3, keepdims=True)
        lengths = jnp.sqrt(jnp.square(keys).sum(-1) * jnp.square(mean).sum(-1))
        cosine = (keys * mean).sum(-1) / jnp.maximum(lengths, 1e-8)
        return mean[:, :, :, 0], cosine.min(-1)

    def _chunk_storage(self, spec: kv.LayerSpec) -> kv.KVStorage:
        """The storage of the chunks, whatever codecs the main slots have."""
        return kv.KVStorage(spec, PromptLowRank(0, rank=self.rank, pre_rope=True).at(spec), kv.Host())

    def read_bytes(self, storage: kv.KVStorage, state: kv.LayerState) -> kv.StepBytes:
        store: ShadowState = state.side_store
        tokens = min(self.budget // self.chunk, store.landmarks.data.shape[2]) * self.chunk
        chosen = self._chunk_storage(storage.spec).read_bytes(store.tokens, tokens)
        return chosen + kv.StepBytes.of_all((store.landmarks, store.tokens.pos, store.tokens.bias))

    def read(self, storage: kv.KVStorage, state: kv.LayerState, q: kv.Array, q_pos: kv.Array) -> kv.Partial:
        store: ShadowState = state.side_store
        landmarks, inner = kv.memory.unpack(store.landmarks), self._chunk_storage(storage.spec)
        # A chunk is visible when its newest token is.
        newest = store.tokens.pos[:, :, self.chunk - 1 :: self.chunk]

        def attend(q: kv.Array, q_pos: kv.Array) -> kv.Partial:
            rule = storage.spec.rule
            is_visible = kv.attention.visible(newest, q_pos, rule)
            logits = rule.logits(kv.attention.scores(q, landmarks), newest, q_pos)
            weight = kv.attention.softmax(logits).max(2, keepdims=True)
            num_chunks = min(self.budget // self.chunk, weight.shape[4])
            best, chunk = kv.top_k(jnp.where(is_visible, weight, -1.0), num_chunks)
            offset = jnp.arange(self.chunk, dtype=jnp.int32).reshape(1, 1, 1, 1, 1, -1)
            slots = jnp.where(best[..., None] >= 0, chunk[..., None] * self.chunk + offset, -1)
            return kv.attend_slots(inner, store.tokens, q, q_pos, slots.reshape(*slots.shape[:4], -1))

        return kv.map_query_blocks(attend, q, q_pos, 16)

    def positions(self, store: ShadowState) -> kv.Array:
        return store.tokens.pos

    def visible_block(self, storage: kv.KVStorage, store: ShadowState) -> kv.KVBlock:
        inner, tokens = self._chunk_storage(storage.spec), store.tokens
        return inner.decode(tokens.k, tokens.v, tokens.pos)


@kv.register_method(example="shadowkv:budget=512,rank=16", family="host memory")
def shadowkv(budget: int = 2048, chunk: int = 8, rank: int = 160, outliers: int = 48, local: int = 4) -> kv.Method:
    """Stores a prompt's keys in low rank and its values on the host, and reads the chunks that landmarks select.

    Decoded tokens and the prompt's own attention are exact. The defaults are the authors'.

    Formula:
      K = U_r S_r V_r^T of a prompt's keys before RoPE, all heads together; score(chunk) = max over a head's queries of
      softmax(q mean(chunk) / sqrt(d)); k' = RoPE((U_r S_r V_r^T)[chunk])

    Differs:
      The right singular vectors come from the keys' outer products, which gives the same factors; each query selects
      its chunks, where the code adds up those of one call; a prompt shorter than the budget is no error.

    Args:
      budget: tokens that a query reads in chunks.
      chunk: tokens of a chunk.
      rank: numbers stored per token for all heads together, at most all of their channels.
      outliers: chunks of each head that are exact because one of their tokens is unlike their mean.
      local: last chunks of the prompt that are exact.

    Reference:
      ShadowKV, Sun et al. 2024, arXiv 2410.21465, section 4; constants of its authors' code
    """
    return kv.Method(side_store=ShadowStore(budget, chunk, rank, outliers, local))
