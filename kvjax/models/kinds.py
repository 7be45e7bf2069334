"""The kinds of layers that a model is made of: all that distinguishes one decoder layer from another, as data.

A kind is a value: equal kinds are equal, whichever layers they describe, so that layers of one kind share their
compiled programs. What a field may be is checked where a kind is made, and a `KvjaxError` names the field.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, cast

from kvjax.core.attention import PLAIN, Rule
from kvjax.core.gated_delta import GatedDelta
from kvjax.core.rope import Rope
from kvjax.core.types import hash_once
from kvjax.errors import KvjaxError
from kvjax.utils.parameter_types import NonNegativeInt, PositiveFloat, Size, check_fields

QKNorm = Literal["", "head", "all"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
Scoring = Literal["softmax", "sigmoid"]
NormPlace = Literal["before", "after", "both"]


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

    A layer has one key/value head. Its keys are the rotated channels followed by the latent vector, its values that
    latent vector alone; the up-projections of keys and values are applied to queries and outputs.

    Attributes:
      rank: width of the latent vector.
      unrotated: channels of a query head that carry no position.
      value: width of a value head after the up-projection.
      query_rank: width of the latent vector of queries; None where they are projected at once (DeepSeek-V2-Lite).
    """

    rank: Size
    unrotated: Size
    value: Size
    query_rank: Size | None = None

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class QueryTemperature:
    """A factor of queries that grows with their position, 1 + beta * ln(1 + floor(position / positions)).

    It sharpens the attention of late tokens, whose softmax has more terms: Llama 4's temperature tuning, in all layers
    of Ministral 3.

    Attributes:
      beta: its growth.
      positions: of each step; the factor is one before the first.
    """

    beta: PositiveFloat
    positions: Size

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """The attention of a layer. Axis letters are those of `kvjax.core.types`.

    Attributes:
      heads: N, query heads.
      kv_heads: K, key/value heads.
      head_dim: H, width of queries and keys, as methods see them.
      rope: rotary embedding of the first `rope.dim` channels; None for none.
      rule: window and soft cap.
      value_dim: width of values; by default `head_dim`.
      scale: factor of the dot products; None: head_dim ** -0.5. The decoder folds it into the queries.
      qk_norm: RMSNorm of queries and keys: "" for none, of each "head", or of "all" heads together (OLMo 2).
      value_norm: whether the values of each head are divided by their root mean square, without a scale (Gemma 4).
      keys_as_values: whether values are what keys are before norm and rotation, as one projection makes both (Gemma 4).
      qkv_bias, out_bias: whether these projections have a bias.
      sinks: whether each query head has a learned logit that takes weight and gives no value (gpt-oss).
      latent: multi-head latent attention, or None.
      reads_layer: index of an earlier layer of the model whose keys and values the layer attends to, as it has none of
        its own: shared key/value caches, as in YOCO, cross-layer attention and Gemma 3n. None for a layer that has.
      query_temperature: factor of queries by position, or None.
      output_gate: whether each channel of the output is multiplied by a sigmoid of the layer's input (Qwen3-Next).
      recurrence: a recurrence that stands in the place of attention, or None.
    """

    heads: Size
    kv_heads: Size
    head_dim: Size
    rope: Rope | None
    rule: Rule = PLAIN
    value_dim: Size = cast(int, None)
    scale: PositiveFloat | None = None
    qk_norm: QKNorm = ""
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    latent: Latent | None = None
    reads_layer: NonNegativeInt | None = None
    query_temperature: QueryTemperature | None = None
    output_gate: bool = False
    recurrence: GatedDelta | None = None
    value_norm: bool = False
    keys_as_values: bool = False

    def __post_init__(self):
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        check_fields(self)
        if self.reads_layer is not None and self.latent is not None:
            raise KvjaxError(
                "a layer with latent attention has a latent vector of its own, and reads_layer names another layer's; "
                "leave one of them out"
            )
        if self.heads % self.kv_heads:
            raise KvjaxError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.recurrence is not None:
            known = "heads", "kv_heads", "head_dim", "value_dim", "rope", "recurrence"
            others = {x.name: x.default for x in dataclasses.fields(self) if x.name not in known}
            wrong = [name for name, default in others.items() if getattr(self, name) != default]
            if wrong or self.rope is not None:
                name = wrong[0] if wrong else "rope"
                raise KvjaxError(
                    f"a layer with a recurrence has no attention, and {name} is a part of one; leave out {name}"
                )
        if self.keys_as_values and (self.value_dim != self.head_dim or self.latent is not None):
            what = "a latent vector" if self.latent is not None else f"value_dim {self.value_dim}"
            raise KvjaxError(
                f"keys_as_values gives values the projection of keys, {self.head_dim} wide, and the layer has {what}; "
                "leave one of them out"
            )
        rope, latent = self.rope, self.latent
        if rope is not None and (rope.dim > self.head_dim or rope.dim < 2 or rope.dim % 2):
            raise KvjaxError(
                f"the rotary embedding turns {rope.dim} channels: their number must be even, at least 2, and at most "
                f"all {self.head_dim} of a head; give rope=None for a layer without positions"
            )
        if latent is None:
            return
        rotated = 0 if rope is None else rope.dim
        expected = {"kv_heads": 1, "head_dim": rotated + latent.rank, "value_dim": latent.rank, "qk_norm": ""}
        wrong = [
            f"{field} = {getattr(self, field)!r} for {value!r}"
            for field, value in expected.items()
            if getattr(self, field) != value
        ]
        if wrong:
            raise KvjaxError(
                f"latent attention of rank {latent.rank} with {rotated} rotated channels has one key/value head, whose "
                f"keys are both and whose values are the latent vector; the kind has {', '.join(wrong)}"
            )

    @property
    def groups(self) -> int:
        """G, query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def stored_numbers(self) -> int:
        """The numbers of a token that an exact cache holds; values of latent attention are channels of its keys."""
        if self.reads_layer is not None or self.recurrence is not None:
            return 0
        return self.kv_heads * (self.head_dim + (0 if self.latent else self.value_dim))

    @property
    def query_factor(self) -> float:
        """The factor of queries, as methods scale dot products by head_dim ** -0.5 in every model."""
        factor = 1.0 if self.scale is None else self.scale * self.head_dim**0.5
        return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-9) else factor


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of one MLP.

    Attributes:
      count: experts of a layer.
      top_k: experts that a token is sent to.
      normalize: whether the weights of a token's experts sum to one; else they are those of a softmax over all.
      factor: multiplies the weights.
      shared_width: width of the MLP that every token passes in addition to its experts; 0 for none.
      shared_bias: whether the projections of that MLP have a bias.
      shared_gate: whether a sigmoid of the token multiplies the output of that MLP (Qwen3-Next).
      own_norms: whether experts, router and shared MLP are three branches with norms of their own (Gemma 4). Experts
        and router read the hidden vectors before the norm of the feed-forward part, each through another norm; both
        outputs have a norm before they are added; and a learned factor of each expert multiplies its weight.
      router_bias: whether the router has a bias.
      groups: equal groups of neighboring experts (DeepSeek-V2); 1 for none.
      top_groups: groups that a token's experts are chosen from, those with the best single experts, or with "sigmoid"
        those with the best sums of two.
      scoring: what becomes of the router's logits. With "softmax" they choose the experts. With "sigmoid" (DeepSeek-V3)
        each is a weight by itself, which `normalize` divides by the sum of the chosen ones, and a learned bias of each
        expert is added to it for the choice.
    """

    count: Size
    top_k: Size
    normalize: bool = True
    factor: PositiveFloat = 1.0
    shared_width: NonNegativeInt = 0
    shared_bias: bool = False
    router_bias: bool = False
    groups: Size = 1
    top_groups: Size = 1
    scoring: Scoring = "softmax"
    shared_gate: bool = False
    own_norms: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.own_norms and not self.shared_width:
            raise KvjaxError("own_norms has a norm of the shared MLP's output, and shared_width is 0; give its width")
        if self.shared_gate and not self.shared_width:
            raise KvjaxError(
                "shared_gate multiplies the output of the shared MLP, and shared_width is 0; give its width"
            )
        if self.count % self.groups or self.top_groups > self.groups:
            raise KvjaxError(
                f"{self.count} experts cannot be chosen from {self.top_groups} of {self.groups} equal groups; groups "
                "must divide count, and top_groups be at most groups"
            )
        if self.scoring == "sigmoid" and self.groups > 1 and self.count < 2 * self.groups:
            raise KvjaxError(
                f"{self.groups} groups of {self.count} experts are ranked by their two best, and need two each; lower "
                "groups"
            )
        candidates = self.count // self.groups * self.top_groups
        if self.top_k > candidates:
            raise KvjaxError(f"top_k is {self.top_k}, and a token chooses from {candidates} experts; lower top_k")


@dataclasses.dataclass(frozen=True)
class MlpKind:
    """The gated feed-forward part of a layer.

    Attributes:
      width: F, of one expert where there are several.
      activation: of the gate; "clamped_swiglu" is that of gpt-oss.
      bias: whether its projections have a bias; with experts, those of each expert.
      experts: mixture of experts, or None.
      limit, slope: of "clamped_swiglu", the bound of its two projections and the slope of its sigmoid.
    """

    width: Size
    activation: Activation = "silu"
    bias: bool = False
    experts: Experts | None = None
    limit: PositiveFloat = 7.0
    slope: PositiveFloat = 1.702

    __post_init__ = check_fields


@hash_once
@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A decoder layer.

    Attributes:
      attention: its attention.
      mlp: its feed-forward part.
      norms: where RMSNorm stands: "before" each part (Llama), "after" it (OLMo 2), or "both" (Gemma 2 and 3).
      unit_offset: whether norms multiply by 1 + scale in place of scale (Gemma). Those of a recurrence's output and of
        `Experts.own_norms` multiply by the scale, whatever stands here.
      residual: factor of what each part adds to the residual stream (Granite).
      output_scale: whether a learned number multiplies the layer's output (Gemma 4).
    """

    attention: AttentionKind
    mlp: MlpKind
    norms: NormPlace = "before"
    unit_offset: bool = False
    residual: PositiveFloat = 1.0
    output_scale: bool = False

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class PerLayerEmbedding:
    """A second embedding of the tokens, which has a vector for each layer (Gemma 3n, Gemma 4).

    A layer multiplies its vector of the token by a gate of the hidden vector, and adds a projection of the product to
    the hidden vector. The layer's vector is the sum of the token's row in a table and of a normed projection of its
    embedding, over the square root of two.

    Attributes:
      width: J, of each layer's vector.
      layers: L, vectors of a token. A model with fewer layers, as `Config.with_layers` makes one, leaves some unread.
    """

    width: Size
    layers: Size

    __post_init__ = check_fields
