"""The kinds of layers that a model is made of: all that distinguishes one decoder layer from another, as data."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvjax.core.attention import PLAIN, Rule
from kvjax.core.rope import Rope


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

    A layer has one key/value head. Its keys are the rotated channels followed by the latent vector, its values that
    latent vector alone; the up-projections of keys and values are applied to queries and outputs.

    Attributes:
      rank: width of the latent vector.
      unrotated: channels of a query head that carry no position.
      value: width of a value head after the up-projection.
    """

    rank: int
    unrotated: int
    value: int


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """The attention of a layer. Axis letters are those of `kvjax.core.types`.

    Attributes:
      heads: N, query heads.
      kv_heads: K, key/value heads.
      head_dim: H, width of queries and keys, as methods see them.
      rope: rotary embedding of the first `rope.dim` channels; None for none.
      rule: window and soft cap.
      value_dim: width of values; None: `head_dim`.
      scale: factor of the dot products; None: head_dim ** -0.5. The decoder folds it into the queries.
      qk_norm: RMSNorm of queries and keys: "" for none, of each "head", or of "all" heads together (OLMo 2).
      qkv_bias, out_bias: whether these projections have a bias.
      sinks: whether each query head has a learned logit that takes weight and gives no value (gpt-oss).
      latent: multi-head latent attention, or None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    rule: Rule = PLAIN
    value_dim: int | None = None
    scale: float | None = None
    qk_norm: Literal["", "head", "all"] = ""
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    latent: Latent | None = None


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of one MLP.

    Attributes:
      count: experts of a layer.
      top_k: experts that a token is sent to.
      normalize: whether the weights of a token's experts sum to one; else they are those of a softmax over all.
      factor: multiplies the weights.
      shared_width: width of the MLP that every token passes beside its experts; 0 for none.
      router_bias: whether the router has a bias.
    """

    count: int
    top_k: int
    normalize: bool = True
    factor: float = 1.0
    shared_width: int = 0
    router_bias: bool = False


@dataclasses.dataclass(frozen=True)
class MlpKind:
    """The gated feed-forward part of a layer.

    Attributes:
      width: F, of one expert where there are several.
      activation: of the gate; "clamped_swiglu" is that of gpt-oss.
      bias: whether its projections have a bias.
      experts: mixture of experts, or None.
    """

    width: int
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    bias: bool = False
    experts: Experts | None = None


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A decoder layer.

    Attributes:
      attention: its attention.
      mlp: its feed-forward part.
      norms: where RMSNorm stands: "before" each part (Llama), "after" it (OLMo 2), or "both" (Gemma 2 and 3).
      unit_offset: whether norms multiply by 1 + scale in place of scale (Gemma).
      residual: factor of what each part adds to the residual stream (Granite).
    """

    attention: AttentionKind
    mlp: MlpKind
    norms: Literal["before", "after", "both"] = "before"
    unit_offset: bool = False
    residual: float = 1.0
