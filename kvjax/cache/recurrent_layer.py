"""`RecurrentLayer`: a layer of a model that has no keys and values, and a state of constant size in their place.

Linear attention (Qwen3-Next, Qwen3.5) is such a layer. A method acts in the layers that have keys and values and leaves
this one alone, whatever it is: the state holds sums over tokens, of which none can be evicted, quantized by itself or
taken back.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Bool, Float32

from kvjax.cache.protocol import Needs
from kvjax.cache.uses import CONTEXT_REMEDY
from kvjax.core.attention_mass import Observation
from kvjax.core.gated_delta import GatedDelta, RecurrentInputs, apply_gated_delta_rule, convolve, last_inputs
from kvjax.core.memory import array_bytes
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.errors import IncompatibleMethod


@pytree
class RecurrentState:
    """The state of a recurrent layer."""

    inputs: Array  # [B K W-1 C], the tokens that the convolution reads back, in the model's dtype
    # In float32 whatever the model's dtype: each token adds to it, and each sum would round again.
    matrix: Float32[Array, "B K G H Hv"]


class WithRecurrence(Protocol):
    """What `kvjax.models.kinds.AttentionKind` says of a layer with a recurrence."""

    @property
    def groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def recurrence(self) -> GatedDelta | None: ...


@dataclasses.dataclass(frozen=True)
class RecurrentLayer:
    """A bound layer whose state does not grow with the text.

    Attributes:
      num_groups: G, value heads of a key head.
      head_dim: H, width of a key.
      value_dim: Hv, width of a value.
      kernel_tokens: W, tokens that the convolution reads, the new one among them.
    """

    num_groups: int
    head_dim: int
    value_dim: int
    kernel_tokens: int

    needs = Needs()

    @classmethod
    def of(cls, attention: WithRecurrence) -> RecurrentLayer:
        """Makes the layer of a kind that has a recurrence."""
        assert attention.recurrence is not None
        return cls(attention.groups, attention.head_dim, attention.value_dim, attention.recurrence.kernel_tokens)

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """One, whatever the length: the state."""
        return 1

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> RecurrentState:
        """Makes the state of sequences without tokens; of the block only batch, heads and dtype are read."""
        B, K = block.k.shape[:2]
        return self.empty(B, K, block.k.dtype)

    def empty(self, B: int, K: int, dtype: Any) -> RecurrentState:
        """Makes the state of B sequences without tokens, of a model with this dtype."""
        channels = 2 * self.head_dim + self.num_groups * self.value_dim
        return RecurrentState(
            jnp.zeros((B, K, self.kernel_tokens - 1, channels), dtype),
            jnp.zeros((B, K, self.num_groups, self.head_dim, self.value_dim), jnp.float32),
        )

    def count_bytes(self, K: int, itemsize: int) -> int:
        """Returns the bytes of a sequence with K key heads, in a model whose numbers have `itemsize` bytes."""
        numbers = self.num_groups * self.value_dim
        return K * (itemsize * (self.kernel_tokens - 1) * (2 * self.head_dim + numbers) + 4 * self.head_dim * numbers)

    def extend(
        self,
        state: RecurrentState,
        q: Array,
        new: KVBlock,
        commit: int,
        cross_layer: Any,
        outside: Partial | None = None,
    ) -> Any:
        """Is never called: the engine calls `run` with what the decoder makes in place of queries, keys and values."""
        raise AssertionError("a recurrent layer has no keys and values to be extended by")

    def run(
        self, state: RecurrentState, inputs: RecurrentInputs, is_real: Bool[Array, "B T"], commit: int
    ) -> tuple[Float32[Array, "B K G T Hv"], RecurrentState]:
        """Runs new tokens, and keeps the first `commit` of them.

        Args:
          state: before the tokens.
          inputs: of the tokens.
          is_real: which tokens are no padding, which follows the others.
          commit: tokens beyond it are drafts and leave no trace.

        Returns:
          The output for each token, which means nothing for padding, and the new state.
        """
        T = is_real.shape[1]
        is_kept = is_real & (jnp.arange(T) < commit)[None]
        out, matrix = self._run_matrix(state, inputs, is_real)
        if commit < T:
            _, matrix = self._run_matrix(state, inputs, is_kept)
        count = is_kept.sum(1, dtype=jnp.int32)
        return out, RecurrentState(last_inputs(inputs.mixed, state.inputs, count), matrix)

    def _run_matrix(
        self, state: RecurrentState, inputs: RecurrentInputs, is_written: Bool[Array, "B T"]
    ) -> tuple[Array, Array]:
        H, G = self.head_dim, self.num_groups
        x = convolve(inputs.mixed, state.inputs, inputs.kernel)
        v = x[..., 2 * H :].reshape(*x.shape[:3], G, self.value_dim)
        log_decay, write_strength = (
            jnp.where(is_written[:, None, None], y, 0.0) for y in (inputs.log_decay, inputs.write_strength)
        )
        return apply_gated_delta_rule(
            x[..., :H], x[..., H : 2 * H], jnp.moveaxis(v, 3, 2), log_decay, write_strength, state.matrix
        )

    def positions(self, state: RecurrentState) -> Array:
        """i32[B 1 0]: the state holds no token by itself."""
        return jnp.full((state.matrix.shape[0], 1, 0), -1, jnp.int32)

    def empty_bytes(self, state: RecurrentState, dtype: str, prompt: int | None = None) -> dict[str, int]:
        """`SizedLayer.empty_bytes`: none, at any length."""
        return array_bytes(())

    def step_bytes(self, state: RecurrentState) -> StepBytes:
        """`MeteredLayer.step_bytes`: the state is read whole and written whole."""
        return StepBytes.of_all(state) + StepBytes(device_written=array_bytes(state)["device"])

    def max_rollback(self, state: RecurrentState) -> Array:
        """`RewindableLayer.max_rollback`: raises IncompatibleMethod, under every method."""
        raise self._no_rollback()

    def crop(self, state: RecurrentState, count: Array) -> RecurrentState:
        """`RewindableLayer.crop`: raises as `max_rollback` does."""
        raise self._no_rollback()

    def decoded_block(self, state: RecurrentState) -> KVBlock:
        """`EditableLayer.decoded_block`: raises as `max_rollback` does."""
        raise self._no_rollback()

    def append_block(self, state: RecurrentState, block: KVBlock) -> RecurrentState:
        """`EditableLayer.append_block`: raises as `max_rollback` does."""
        raise self._no_rollback()

    def _no_rollback(self) -> IncompatibleMethod:
        return IncompatibleMethod(
            "layers of this model hold a recurrent state, a sum over all tokens so far, and no method can give back "
            f"tokens of it; {CONTEXT_REMEDY}"
        )
