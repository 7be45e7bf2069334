"""Tables calibrated on a text: a model reads it once, and each layer counts what a kind of table is made of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from rich.progress import track

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_kinds import TABLE_KINDS, TableKind
from kvjax.cache.eviction.competition import level_components
from kvjax.cache.method import Method
from kvjax.cache.protocol import KVMethod, LayerSpec, Needs, Traits
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.engine.forward import Target
from kvjax.engine.plan import bind, specs
from kvjax.engine.prefill import measure_layers
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.generation.inputs import Prompts, pad, place, token_ids
from kvjax.generation.model_calls import prefill
from kvjax.generation.reuse.full_kv import observe_prompts
from kvjax.methods.registry import load_all
from kvjax.methods.strings import method_of
from kvjax.models.model import Model
from kvjax.utils import arguments


@dataclasses.dataclass(frozen=True)
class Counting:
    """A method whose state of a layer is what a kind of table counts of the prompts; it is never decoded with."""

    kind: TableKind
    traits = Traits()

    def bind(self, spec: LayerSpec) -> CountingLayer:
        return CountingLayer(self.kind, spec if self.kind.needs_layer_index else spec.without_index)


@dataclasses.dataclass(frozen=True)
class CountingLayer:
    """It bound to one layer."""

    kind: TableKind
    spec: LayerSpec

    @property
    def needs(self) -> Needs:
        """What the kind looks at."""
        return Needs(
            observed_queries=self.kind.num_queries,
            output_projection=self.kind.needs_output,
            hidden_states=self.kind.needs_hidden,
        )

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """None: no token is held."""
        return 0

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Any:
        """The statistics of the prompts, one set for each row."""
        return self.kind.count(block.clean(), observation, self.spec)


def kind_of(text: str) -> TableKind:
    """A kind of table from its name, as in "bases", with its parameters where it has some: "joint_bases:heads=2".

    Raises KvjaxError for what there is not, with what there is.
    """
    load_all()  # the files of methods register the kinds that these need
    name, _, given = text.partition(":")
    if name not in TABLE_KINDS:
        raise KvjaxError(f"unknown kind of table {name!r:.80}; there are {', '.join(sorted(TABLE_KINDS))}")
    kind = TABLE_KINDS[name]
    known = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    # A method has commas of its own, so it takes all that follows.
    head, method, rest = given.partition("method=")
    pairs = [pair.partition("=") for pair in (head if "method" in known else given).split(",") if pair]
    if "method" in known and method:
        pairs.append(("method", "=", rest))
    for key, _, value in pairs:
        is_text = key in known and isinstance(getattr(kind, key), str)
        if key not in known or not value or not (is_text or (value.isdecimal() and len(value) <= 10)):
            is_what = {k: "NAME" if isinstance(getattr(kind, k), str) else "NUMBER" for k in sorted(known)}
            has = " and ".join(f"{k}={what}" for k, what in is_what.items()) or "no parameters"
            raise KvjaxError(f"{text!r:.80} is no kind of table: {name} has {has}")
    values = {key: type(getattr(kind, key))(value) for key, _, value in pairs}
    return cast(TableKind, dataclasses.replace(cast(Any, kind), **values)) if pairs else kind


def arrays(model: Model, kind: str, documents: Prompts | None, rows: int = 1) -> list[dict[str, np.ndarray]]:
    """The arrays of each layer, by name, from documents (texts or lists of ids), read so many at a time.

    A kind that brings documents of its own needs none, and does not look at these.
    """
    arguments.integer("rows", rows)
    counting = Counting(kind_of(kind))
    own = counting.kind.documents(model.config.vocab_size, model.config.max_positions)
    documents = documents if own is None else own
    if documents is None:
        raise KvjaxError(f"a table of {kind} is counted on a text; give one, as with --text")
    ids = token_ids(model, documents)
    total: Any = None
    for start in track(range(0, len(ids), rows), "calibrate", transient=True):
        batch = ids[start : start + rows]
        layers = _counted(model, counting, batch)
        for row in range(len(batch)):
            counted = jax.tree.map(lambda x, row=row: np.asarray(x[row], np.float64), layers)
            total = counted if total is None else jax.tree.map(counting.kind.join, total, counted)
    made = [counting.kind.arrays(counted, spec) for counted, spec in zip(total, specs(model.config), strict=True)]
    return [dict(layer) for layer in made]


def _counted(model: Model, counting: Counting, ids: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """The statistics of documents, per layer, with one set for each of them."""
    kind = counting.kind
    if not kind.measuring_method:
        return prefill(model, ids, cast(KVMethod, counting), capacity=max(map(len, ids)))[1].layers
    # Whatever division the method has of its own, its scores are ranked over the model here.
    ranking = dataclasses.replace(cast(Method, method_of(kind.measuring_method)), **level_components("model", page=16))
    try:
        plan = bind(ranking, model.config)
    except IncompatibleMethod as e:
        raise IncompatibleMethod(
            f"the tokens of all layers cannot be ranked by {kind.measuring_method!r}: give a method that evicts after "
            "the prompt by scores that layers have on one scale, such as turned_queries, kvzip or snapkv"
        ) from e
    tokens, lengths = pad(ids)
    lengths = place(model, lengths, "B")
    _, prompts = observe_prompts(model, plan, place(model, tokens, "B T"), lengths)
    measures = measure_layers(prompts, lengths, plan, Target(model.config, model.mesh))
    every = _count_layers(measures, lengths, kind=kind, layer=plan[0])
    return tuple(jax.tree.map(lambda x, i=i: x[i], every) for i in range(len(plan)))


@functools.partial(jax.jit, static_argnames=("kind", "layer"))
def _count_layers(measures: Any, lengths: Array, kind: TableKind, layer: MethodLayer) -> Any:
    return kind.count_layers(layer, measures, lengths)


def calibrate(
    model: Model, kind: str, out: str | Path, documents: Prompts | None, rows: int = 1, source: str = ""
) -> Path:
    """Writes a table of this kind for the model, counted on the documents; source: what the file says of its origin."""
    if not Path(out).parent.is_dir():
        raise KvjaxError(f"there is no folder {Path(out).parent} to write {Path(out).name} into; make it first")
    layers, name = arrays(model, kind, documents, rows), kind.partition(":")[0]
    return table_file.write(out, name, specs(model.config)[0], layers, source or f"kvjax calibrate {kind} {model.name}")


def pieces(model: Model, text: str, tokens: int, context: int) -> Sequence[Sequence[int]]:
    """The first `tokens` tokens of a text, in documents of `context` tokens; raises KvjaxError for too short a text."""
    arguments.integer("context", context)
    if tokens < context:
        raise KvjaxError(f"tokens must be at least one context of {context} tokens, got {tokens}; raise tokens")
    if context > model.config.max_positions:
        raise KvjaxError(f"the model has {model.config.max_positions} positions, got a context of {context}; lower it")
    ids = model.text_tokenizer().encode(text)
    if len(ids) < tokens:
        raise KvjaxError(f"the text has {len(ids)} tokens, and {tokens} were asked for; give a longer one")
    return [ids[start : start + context] for start in range(0, tokens - context + 1, context)]
