"""The configuration of a decoder: all that distinguishes one model family from another, as data.

A model is made of kinds of layers (`kvjax.models.kinds`) and a pattern, which names the kind of each layer. Nothing
else says what a layer is: `config.kind(i)` is asked for the layer at hand, since layers may differ in every size.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.core.attention import Rule
from kvjax.core.rope import Rope, RopeScaling
from kvjax.core.types import hash_once
from kvjax.errors import KvjaxError
from kvjax.models.kinds import AttentionKind, LayerKind, MlpKind, PerLayerEmbedding, QueryTemperature
from kvjax.utils import arguments
from kvjax.utils.files import parse_json_object
from kvjax.utils.parameter_types import NonNegativeInt, PositiveFloat, Size, check_fields, check_value

MOST_LAYERS = 2**16  # a pattern has an entry for each, and a damaged number of them would fill the memory


@hash_once
@dataclasses.dataclass(frozen=True, repr=False)
class Config:
    """A decoder-only transformer with RMSNorm and gated feed-forward parts.

    Attributes:
      vocab_size: V.
      width: D.
      kinds: the different layers, each once.
      pattern: by layer, the index of its kind.
      max_positions: positions that the model was trained for.
      norm_eps: epsilon of every RMSNorm.
      tie_embeddings: whether the embedding also turns hidden vectors into logits.
      eos_ids: tokens that end an answer.
      bos_id: token before every text, if any.
      embed_scale: factor of the embedded tokens, rounded to the model's dtype (Gemma).
      logit_scale: factor of the logits (Granite).
      final_cap: c in c * tanh(logit / c), which bounds the logits (Gemma 2); None for none.
      per_layer_embedding: a second embedding of the tokens, of which each layer reads its own part, or None.
    """

    vocab_size: Size
    width: Size
    kinds: tuple[LayerKind, ...]
    pattern: tuple[NonNegativeInt, ...]
    max_positions: Size = 4096
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = False
    eos_ids: tuple[NonNegativeInt, ...] = ()
    bos_id: NonNegativeInt | None = None
    embed_scale: PositiveFloat = 1.0
    logit_scale: PositiveFloat = 1.0
    final_cap: PositiveFloat | None = None
    per_layer_embedding: PerLayerEmbedding | None = None

    def __post_init__(self):
        if not isinstance(self.kinds, tuple):
            raise KvjaxError(
                f"kinds must be a tuple of LayerKind, got {self.kinds!r:.80}; Config.llama(vocab_size, width, layers, "
                "heads, ..) makes a model whose layers are all alike"
            )
        check_fields(self)
        if not self.pattern or max(self.pattern) >= len(self.kinds):
            raise KvjaxError(
                f"config field pattern must name one of the {len(self.kinds)} kinds for each layer, by its index from "
                f"0 on, got {self.pattern!r:.80}"
            )
        unused = sorted(set(range(len(self.kinds))) - set(self.pattern))
        if unused or len(set(self.kinds)) < len(self.kinds):
            what = f"kind {unused[0]} is in no layer" if unused else "two of the kinds are equal"
            raise KvjaxError(f"config field kinds must have each kind of layer once, and {what}; leave it out")
        if len({kind.unit_offset for kind in self.kinds}) > 1:
            # The final norm, which belongs to no layer, is like theirs.
            raise KvjaxError("unit_offset must be equal in all kinds of a model's layers")
        for i in range(self.layers):
            self._check_source(i)
        if self.per_layer_embedding is not None and self.per_layer_embedding.layers < self.layers:
            raise KvjaxError(
                f"config field per_layer_embedding has vectors for {self.per_layer_embedding.layers} layers, and the "
                f"pattern names {self.layers}; give one for each layer"
            )
        if all(kind.attention.recurrence is not None for kind in self.kinds):
            raise KvjaxError(
                "all layers have a recurrence and none has keys and values, so that there is nothing for a method of a "
                "KV cache; kvjax runs models with at least one layer of attention"
            )
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            arguments.integer("config field eos_ids or bos_id", token, 0, self.vocab_size - 1)

    def _check_source(self, layer: int) -> None:
        """Raises KvjaxError unless the layer that this one reads, if any, has keys and values that it can read."""
        mine, source = self.kind(layer).attention, self.kind(layer).attention.reads_layer
        if source is None:
            return
        name = f"layer {layer} reads the keys and values of layer {source} (reads_layer)"
        if source >= layer:
            raise KvjaxError(f"{name}, which does not come before it; name an earlier layer, counted from 0")
        its = self.kind(source).attention
        if its.recurrence is not None:
            raise KvjaxError(f"{name}, which has a recurrence in their place; name a layer with attention")
        if its.reads_layer is not None:
            raise KvjaxError(f"{name}, which has none; name the layer that it reads, {its.reads_layer}")
        if its.latent is not None:
            raise KvjaxError(f"{name}, whose attention is latent: no rule says how another layer's heads would read it")
        fields = "kv_heads", "head_dim", "value_dim", "rope", "rule"
        different = [
            f"{field} is {getattr(mine, field)!r} and there {getattr(its, field)!r}"
            for field in fields
            if getattr(mine, field) != getattr(its, field)
        ]
        if different:
            raise KvjaxError(
                f"{name}, and has to agree with it in {', '.join(fields)}: {'; '.join(different)}; give both layers "
                "equal values"
            )
        if self.pattern[source] > self.pattern[layer]:
            raise KvjaxError(f"{name}, and its kind stands before that layer's in config field kinds; swap the two")

    def require_own_caches(self, caller: str, remedy: str = "read the tokens with kvjax.prefill") -> None:
        """Raises KvjaxError, for a caller that handles every layer's keys and values, where a layer has none."""
        for i in range(self.layers):
            source = self.kind(i).attention.reads_layer
            has_recurrence = self.kind(i).attention.recurrence is not None
            if source is not None or has_recurrence:
                why = "holds a recurrent state" if has_recurrence else f"reads those of layer {source}"
                raise KvjaxError(
                    f"{caller} takes keys and values of every layer, and layer {i} of this model has none: it {why}; "
                    f"{remedy}"
                )

    @property
    def has_own_caches(self) -> bool:
        """Whether every layer has keys and values of its own, so that `require_own_caches` passes."""
        attention = (self.kind(i).attention for i in range(self.layers))
        return all(a.reads_layer is None and a.recurrence is None for a in attention)

    def __repr__(self) -> str:
        fields = self.llama_arguments()
        name = "Config" if fields is None else "Config.llama"
        if fields is None:
            fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return f"{name}({', '.join(f'{field}={x!r}' for field, x in fields.items())})"

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(self.pattern)

    def kind(self, layer: int) -> LayerKind:
        """Returns the kind of the layer of this index."""
        return self.kinds[self.pattern[layer]]

    @functools.cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings of the layers, each once."""
        ropes = (self.kinds[i].attention.rope for i in self.pattern)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @functools.cached_property
    def query_temperatures(self) -> tuple[QueryTemperature, ...]:
        """The different temperatures of the layers' queries, each once."""
        temperatures = (self.kinds[i].attention.query_temperature for i in self.pattern)
        return tuple(dict.fromkeys(x for x in temperatures if x is not None))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention; the others have a recurrence."""
        return tuple(i for i in range(self.layers) if self.kind(i).attention.recurrence is None)

    def describe_heads(self) -> str:
        """Returns the different heads of attention in words, "32 heads on 8 of 128", in the order of the layers."""
        attention = (self.kind(i).attention for i in self.attention_layers)
        return " and ".join(dict.fromkeys(f"{a.heads} heads on {a.kv_heads} of {a.head_dim}" for a in attention))

    def with_max_positions(self, positions: int) -> Config:
        """Returns the config for texts of at most these positions, by which LongRoPE chooses its factors.

        Raises:
          KvjaxError: for more positions than the model has.
        """
        arguments.integer("max_positions", positions, 1, self.max_positions)

        def choose(kind: LayerKind) -> LayerKind:
            rope = kind.attention.rope
            if rope is None or rope.scaling is None or rope.scaling.kind != "longrope":
                return kind
            is_long = positions > rope.scaling.original_max_positions
            scaling = dataclasses.replace(rope.scaling, is_long=is_long, is_fixed=True)
            attention = dataclasses.replace(kind.attention, rope=dataclasses.replace(rope, scaling=scaling))
            return dataclasses.replace(kind, attention=attention)

        return dataclasses.replace(self, max_positions=positions, kinds=tuple(map(choose, self.kinds)))

    def for_length(self, num_tokens: int) -> Config:
        """Returns the config for texts of up to this many tokens, by which LongRoPE chooses its factors.

        Within the original context it is `with_max_positions` of that, beyond it that of all positions. It is this very
        config where nothing is left to choose: without LongRoPE, and after either call.
        """
        scalings = [rope.scaling for rope in self.ropes if rope.scaling is not None]
        undecided = [s for s in scalings if s.kind == "longrope" and s.is_long and not s.is_fixed]
        limits = sorted(min(s.original_max_positions, self.max_positions) for s in undecided)
        if not limits:
            return self
        return self.with_max_positions(next((n for n in limits if num_tokens <= n), self.max_positions))

    @property
    def variants(self) -> tuple[Config, ...]:
        """This config, and all that `for_length` makes of it: those that a cache of the model may have."""
        limits = (rope.scaling.original_max_positions for rope in self.ropes if rope.scaling is not None)
        return tuple(dict.fromkeys([self, *map(self.for_length, limits), self.for_length(self.max_positions)]))

    def with_layers(self, pattern: Sequence[int]) -> Config:
        """Returns the config of layers of these kinds, given by index; kinds that none of them has are left out.

        A layer that reads another layer reads the first of the new layers whose kind is that of its source.

        Raises:
          KvjaxError: for a layer that reads another layer, where no layer of the source's kind comes before it.
        """
        pattern, used = tuple(pattern), tuple(dict.fromkeys(pattern))
        kinds = []
        for i in used:
            kind, source = self.kinds[i], self.kinds[i].attention.reads_layer
            if source is not None and pattern[: source + 1] != self.pattern[: source + 1]:
                same = [at for at in range(pattern.index(i)) if pattern[at] == self.pattern[source]]
                if not same:
                    raise KvjaxError(
                        f"layers of kind {i} read one of kind {self.pattern[source]}, and none comes before them in "
                        f"{pattern!r:.80}; take it along"
                    )
                kind = dataclasses.replace(kind, attention=dataclasses.replace(kind.attention, reads_layer=same[0]))
            kinds.append(kind)
        return dataclasses.replace(self, kinds=tuple(kinds), pattern=tuple(used.index(i) for i in pattern))

    @classmethod
    def llama(
        cls,
        vocab_size: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        mlp_width: int,
        max_positions: int = 4096,
        norm_eps: float = 1e-5,
        rope_theta: float = 10_000.0,
        rope_fraction: float = 1.0,
        rope_scaling: RopeScaling | None = None,
        windows: tuple[int | None, ...] | None = None,
        tie_embeddings: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
    ) -> Config:
        """Makes the config of a model whose layers differ in their windows alone: pre-norm, RoPE, a gated SiLU MLP.

        Llama, Mistral, Qwen2, Qwen3 and Phi-3 are such models.

        Args:
          vocab_size: V.
          width: D.
          layers: L.
          heads: N.
          kv_heads: K.
          head_dim: H.
          mlp_width: F.
          max_positions: as in `Config`, and norm_eps, tie_embeddings, eos_ids and bos_id.
          norm_eps: as in `Config`.
          rope_theta: base of the frequencies of RoPE.
          rope_fraction: fraction of a head's channels that are rotated.
          rope_scaling: of the frequencies, or None.
          windows: by layer, latest positions that a query sees, None for all; None where no layer has a window.
          tie_embeddings: as in `Config`.
          qkv_bias: whether the projections to queries, keys and values have a bias.
          out_bias: whether the projection of attention's output has one.
          mlp_bias: whether those of the MLP have one.
          qk_norm: whether queries and keys of each head are normalized.
          eos_ids: as in `Config`.
          bos_id: as in `Config`.

        Raises:
          KvjaxError: for a value that cannot be, by name.
        """
        arguments.integer("layers", layers, 1, MOST_LAYERS)
        arguments.integer("head_dim", head_dim)
        arguments.number("rope_fraction", rope_fraction, 0, 1)
        check_value("Config.llama", "qk_norm", bool, qk_norm)
        rotary_dim = int(head_dim * rope_fraction)
        if rotary_dim % 2 or not rotary_dim:
            raise KvjaxError(
                f"rope_fraction is {rope_fraction}, which rotates {rotary_dim} of {head_dim} channels; their number "
                "must be even and positive"
            )
        if windows is not None and len(windows) != layers:
            raise KvjaxError(f"windows has {len(windows)} entries for {layers} layers; give one per layer")
        by_layer = tuple(windows or (None,) * layers)
        different = tuple(dict.fromkeys(by_layer))
        kinds = []
        for window in different:
            attention = AttentionKind(
                heads,
                kv_heads,
                head_dim,
                Rope(rotary_dim, rope_theta, rope_scaling),
                Rule(window),
                qk_norm="head" if qk_norm else "",
                qkv_bias=qkv_bias,
                out_bias=out_bias,
            )
            kinds.append(LayerKind(attention, MlpKind(mlp_width, bias=mlp_bias)))
        return cls(
            vocab_size,
            width,
            tuple(kinds),
            tuple(different.index(window) for window in by_layer),
            max_positions=max_positions,
            norm_eps=norm_eps,
            tie_embeddings=tie_embeddings,
            eos_ids=eos_ids,
            bos_id=bos_id,
        )

    def to_json(self) -> str:
        """Writes the config for `from_json`.

        A config that `Config.llama` can make is written as the arguments of that call. All versions of kvjax read it,
        and digests of a config in saved contexts and records stay as they are.
        """
        raw = self.llama_arguments()
        if raw is None:
            raw = dataclasses.asdict(self)
            # So that configs of before these fields keep their text and digests.
            if self.per_layer_embedding is None:
                del raw["per_layer_embedding"]
            for kind in raw["kinds"]:
                if not kind["output_scale"]:
                    del kind["output_scale"]
            for experts in (kind["mlp"]["experts"] for kind in raw["kinds"]):
                if experts and experts["scoring"] == "softmax":
                    del experts["scoring"]
                for field in ("shared_gate", "own_norms") if experts else ():
                    if not experts[field]:
                        del experts[field]
            for attention in (kind["attention"] for kind in raw["kinds"]):
                newer_fields = ("reads_layer", "query_temperature", "recurrence", "output_gate", "value_norm")
                for field in (*newer_fields, "keys_as_values"):
                    if attention[field] is None or attention[field] is False:
                        del attention[field]
                scaling = (attention["rope"] or {}).get("scaling")
                if scaling and not scaling["is_fixed"]:
                    del scaling["is_fixed"]
                if scaling and scaling["kind"] != "proportional":
                    del scaling["rotated_fraction"]
        elif raw["rope_scaling"] is not None:
            raw["rope_scaling"] = raw["rope_scaling"].to_json()
        return json.dumps(raw, indent=2) + "\n"

    def llama_arguments(self) -> dict[str, Any] | None:
        """Returns the arguments of `Config.llama` that make this config, in their order; None if none do."""
        kind = self.kind(0)
        a, rope = kind.attention, kind.attention.rope
        if rope is None:
            return None
        windows = tuple(self.kind(i).attention.rule.window for i in range(self.layers))
        flat = {
            "vocab_size": self.vocab_size,
            "width": self.width,
            "layers": self.layers,
            "heads": a.heads,
            "kv_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "mlp_width": kind.mlp.width,
            "max_positions": self.max_positions,
            "norm_eps": self.norm_eps,
            "rope_theta": rope.theta,
            "rope_fraction": rope.dim / a.head_dim,
            "rope_scaling": rope.scaling,
            "windows": windows if any(windows) else None,
            "tie_embeddings": self.tie_embeddings,
            "qkv_bias": a.qkv_bias,
            "out_bias": a.out_bias,
            "mlp_bias": kind.mlp.bias,
            "qk_norm": a.qk_norm == "head",
            "eos_ids": self.eos_ids,
            "bos_id": self.bos_id,
        }
        return flat if Config.llama(**flat) == self else None

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Reads what `to_json` wrote; raises KvjaxError for anything else."""
        raw = parse_json_object(text, "the model configuration", "convert the checkpoint again")
        try:
            return _build(cls if "kinds" in raw else cls.llama, raw)
        except (TypeError, AttributeError) as e:
            raise KvjaxError(f"not a kvjax model configuration ({e}); convert the checkpoint again") from e


def _build(make: Callable[..., Any], raw: Mapping[str, Any]) -> Any:
    """Calls a class or function with arguments from JSON, where tuples are lists and dataclasses are objects."""
    annotated = typing.get_type_hints(make)

    def read(annotation: Any, value: Any) -> Any:
        options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        for option in options:
            if isinstance(value, Mapping) and dataclasses.is_dataclass(option):
                return _build(typing.cast(type, option), value)
            if isinstance(value, list) and typing.get_origin(option) is tuple:
                return tuple(read(typing.get_args(option)[0], x) for x in value)
        return value

    return make(**{name: read(annotated.get(name), value) for name, value in raw.items()})
