"""KVgrad: keeps the tokens through which the model's last hidden states would change most."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.eviction.competition import level_components
from kvjax.methods.kvzip import ReplayAttention, output_norms


@dataclasses.dataclass(frozen=True)
class GradientAttention(ReplayAttention):
    """Scores a token by what it adds to a layer's output in a repetition, times how much the last layer depends on it.

    The fields are those of `ReplayAttention`.
    """

    needs_output: ClassVar[bool] = True
    needs_hidden: ClassVar[bool] = False

    @property
    def replay(self) -> Any:
        """KVzip's second pass, with gradients."""
        return dataclasses.replace(super().replay, needs_gradients=True)

    def weigh_attention(self, chunk: kv.KVBlock, observation: kv.Observation) -> tuple[kv.Array, kv.Array]:
        assert observation.gradient_norms is not None
        return output_norms(chunk, observation), jnp.where(observation.pos >= 0, observation.gradient_norms, 0.0)


@kv.register_method(example="kvgrad:budget=512", family="eviction after the prompt")
def kvgrad(
    budget: kv.TokenBudget = 1024,
    chunk: int = 512,
    lead: int = 8,
    sinks: int = 4,
    level: Literal["model", "layer", "head"] = "model",
    page: int = 16,
) -> kv.Method:
    """Keeps the tokens on which the model's last hidden states depend most while it repeats the prompt.

    It costs a prefill, and for each chunk a pass forward, one more in parts, and one back. While prompts are read, all
    layers' exact keys and values are on the device, and of one chunk the hidden vectors before every layer. The prompt
    is attended exactly. With level=model bytes are planned as an upper bound.

    Formula:
      score_s = max over queries t that repeat s's chunk, and over query heads, of softmax(q_t k_s) |v_s W_o| |d Phi / d
      a_t|; a_t is the layer's attention output, Phi = sum over t of |h_t|^2, h the last layer's output before the final
      norm; the L K T c pairs of the highest scores stay, of all heads of all layers

    Differs:
      As `kvzip`: the first tokens always stay, in every head, and the template's end of turn is not appended to the
      instruction. Prompts cannot wait in host memory (prompt_memory="host"), nor can the model be another package's: a
      gradient needs all layers.

    Args:
      budget: as in `make_selection`, on average over the heads that share it.
      chunk: tokens of the prompt that are repeated at a time (kvpress: 512).
      lead, sinks, level, page: as in `kvzip`.

    Reference:
      KVgrad, openreview.net/forum?id=cg1wTCJjjk; constants of its press in kvpress (KVgradPress)
    """
    return kv.Method(
        select=kv.make_selection(GradientAttention(chunk, lead, sinks), budget, sinks),
        **level_components(level, page),
    )
