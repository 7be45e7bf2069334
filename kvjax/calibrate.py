"""Tables calibrated on a text: a model reads it once, and each layer counts the statistics of a kind of table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from rich.progress import track

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_kinds import TABLE_KINDS, TableKind
from kvjax.cache.components import LayerBudgets, PromptSelection
from kvjax.cache.eviction.competition import level_components
from kvjax.cache.method import Method
from kvjax.cache.protocol import KVMethod, LayerSpec, Needs, Traits
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array, KVBlock
from kvjax.engine.forward import layer_calls
from kvjax.engine.plan import bind, specs
from kvjax.engine.prefill import measure_layers, stack_measures
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.generation.finite import check_logits
from kvjax.generation.inputs import Prompts, pad, place, token_ids
from kvjax.generation.model_calls import capacity_for, model_for, run_prompts
from kvjax.models.model import Model
from kvjax.registry.loading import load_all
from kvjax.registry.strings import method_of
from kvjax.reuse.full_kv import observe_prompts
from kvjax.utils import arguments
from kvjax.utils.files import expand_user
from kvjax.utils.mesh_context import leaves_callers_mesh


@dataclasses.dataclass(frozen=True)
class Counting:
    """A method whose layer state is a kind of table's statistics of the prompts; it never decodes."""

    kind: TableKind
    traits = Traits()

    def bind(self, spec: LayerSpec) -> CountingLayer:
        """Binds the method to one layer, with its index only if the kind needs it."""
        return CountingLayer(self.kind, spec if self.kind.needs_layer_index else spec.without_index)


@dataclasses.dataclass(frozen=True)
class CountingLayer:
    """A `Counting` bound to one layer."""

    kind: TableKind
    spec: LayerSpec

    @property
    def needs(self) -> Needs:
        """The observations that the kind reads."""
        return Needs(
            observed_queries=self.kind.num_queries,
            output_projection=self.kind.needs_output,
            hidden_states=self.kind.needs_hidden,
        )

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Returns 0: no token is stored."""
        return 0

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Any:
        """Returns the statistics of the prompts, one set for each."""
        return self.kind.count(block.clean(), observation, self.spec)


def parse_kind(text: str) -> TableKind:
    """Parses a kind of table: its name, as in "bases", with its parameters if it has any: "joint_bases:heads=2".

    Raises:
      KvjaxError: there is no such kind or parameter; the message lists them.
    """
    load_all()  # the files of methods register the kinds that these need
    name, _, parameters = text.partition(":")
    if name not in TABLE_KINDS:
        raise KvjaxError(f"unknown kind of table {name!r:.80}; there are {', '.join(sorted(TABLE_KINDS))}")
    kind = TABLE_KINDS[name]
    known = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    # A method has commas itself, so it takes the rest of the text.
    head, method, rest = parameters.partition("method=")
    pairs = [pair.partition("=") for pair in (head if "method" in known else parameters).split(",") if pair]
    if "method" in known and method:
        pairs.append(("method", "=", rest))
    for key, _, value in pairs:
        is_text = key in known and isinstance(getattr(kind, key), str)
        if key not in known or not value or not (is_text or (value.isdecimal() and len(value) <= 10)):
            forms = {k: "NAME" if isinstance(getattr(kind, k), str) else "NUMBER" for k in sorted(known)}
            has = " and ".join(f"{k}={form}" for k, form in forms.items()) or "no parameters"
            raise KvjaxError(f"{text!r:.80} is no kind of table: {name} has {has}")
    values = {key: type(getattr(kind, key))(value) for key, _, value in pairs}
    return cast(TableKind, dataclasses.replace(cast(Any, kind), **values)) if pairs else kind


@leaves_callers_mesh
def count_arrays(model: Model, kind: str, documents: Prompts | None, rows: int = 1) -> list[dict[str, np.ndarray]]:
    """Counts a table's arrays.

    Args:
      model: reads the documents.
      kind: as in `parse_kind`.
      documents: texts or lists of ids; a kind that brings its own documents needs none, and ignores these.
      rows: documents at a time.

    Returns:
      For each layer its arrays by name.
    """
    arguments.integer("rows", rows)
    remedy = "calibrate a model whose layers all have their own, or take a method without a table"
    model.config.require_own_caches("kvjax calibrate", remedy)
    counting = Counting(parse_kind(kind))
    own = counting.kind.documents(model.config.vocab_size, model.config.max_positions)
    documents = documents if own is None else own
    if documents is None:
        raise KvjaxError(f"a table of {kind} is counted on a text; give one, as with --text")
    ids = token_ids(model, documents, begins=True)
    model = model_for(model, ids, 0)
    total: Any = None
    for start in track(range(0, len(ids), rows), "calibrate", transient=True):
        batch = ids[start : start + rows]
        layers = _count_batch(model, counting, batch)
        for i in range(len(batch)):
            # float64: sums over a whole text would lose digits in float32.
            statistics = jax.tree.map(lambda x, i=i: to_numpy(x[i]).astype(np.float64), layers)
            if any(np.isnan(x).any() for x in jax.tree.leaves(statistics)):
                raise _not_finite(f"what is counted in document {start + i}", model)
            total = statistics if total is None else jax.tree.map(counting.kind.join, total, statistics)
    layer_specs = specs(model.config)
    layers = [dict(counting.kind.arrays(statistics, spec)) for statistics, spec in zip(total, layer_specs, strict=True)]
    for i, arrays in enumerate(layers):
        for name, x in arrays.items():
            if not np.isfinite(x).all():
                raise _not_finite(f"`{name}` of layer {i}", model)
    return layers


def _not_finite(what: str, model: Model) -> KvjaxError:
    return KvjaxError(
        f"{what} is not finite: {model.dtype} cannot hold what the model computes of these documents; load it with "
        "dtype='float32', or give other documents"
    )


def _count_batch(model: Model, counting: Counting, ids: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """The statistics of documents per layer, with one set for each document."""
    kind = counting.kind
    if not kind.measuring_method:
        plan = bind(cast(KVMethod, counting), model.config)
        return run_prompts(model, plan, ids, capacity_for(ids, None, 0))[1].layers
    # The method's scores are ranked over the whole model here, whatever budgets it gives to layers and heads itself.
    # A table has all layers of a model, those with a window too.
    components = level_components("model", page=16)
    ranking = dataclasses.replace(cast(Method, method_of(kind.measuring_method)), windowed="method", **components)
    try:
        plan = bind(ranking, model.config)
    except IncompatibleMethod as e:
        raise IncompatibleMethod(
            f"the tokens of all layers cannot be ranked by {kind.measuring_method!r}: give a method that evicts after "
            "the prompt by scores that layers have on one scale, such as turned_queries, kvzip or snapkv"
        ) from e
    tokens, lengths = pad(ids)
    lengths = place(model, lengths, "B")
    last, prompts = observe_prompts(model, plan, place(model, tokens, "B T"), lengths)
    check_logits(model, last, ids, what="document")
    calls = layer_calls(plan, model.config)
    measures = measure_layers(prompts, lengths, calls, tokens.shape[1], model.auto_mesh)
    first = ranking.bind(specs(model.config)[0])
    assert first.selection is not None
    statistics = _count_layers(
        tuple(measures), lengths, kind=kind, selection=first.selection, layer_budgets=first.method.layer_budgets
    )
    return tuple(jax.tree.map(lambda x, i=i: x[i], statistics) for i in range(len(plan)))


@functools.partial(jax.jit, static_argnames=("kind", "selection", "layer_budgets"))
def _count_layers(
    measures: tuple[Any, ...], lengths: Array, kind: TableKind, selection: PromptSelection, layer_budgets: LayerBudgets
) -> Any:
    return kind.count_layers(selection, layer_budgets, stack_measures(measures), lengths)


@leaves_callers_mesh
def calibrate(
    model: Model, kind: str, out: str | Path, documents: Prompts | None, rows: int = 1, source: str = ""
) -> Path:
    """Counts a table and writes it; returns the path.

    Args:
      model: the model that the table is for.
      kind: as in `parse_kind`.
      out: the file, in a folder that exists.
      documents: texts or lists of ids, as in `count_arrays`.
      rows: documents at a time.
      source: the origin of the table, as its file records it.

    Raises:
      KvjaxError: the folder is missing, the kind is unknown, or it is counted on documents and there are none.
    """
    out = expand_user(out)
    if not out.parent.is_dir():
        raise KvjaxError(f"there is no folder {out.parent} to write {out.name} into; make it first")
    layers, name = count_arrays(model, kind, documents, rows), kind.partition(":")[0]
    return table_file.write(out, name, specs(model.config)[0], layers, source or f"kvjax calibrate {kind} {model.name}")


def split_documents(model: Model, text: str, tokens: int, context: int) -> Sequence[Sequence[int]]:
    """Splits a text into documents of `context` tokens, `tokens` in all.

    Each document begins with the special tokens that stand before a text, as bos, and counts them.

    Raises:
      KvjaxError: the text is too short, or the model has fewer positions than a document.
    """
    tokenizer = model.text_tokenizer()
    opening = tokenizer.opening_ids
    arguments.integer(
        "context", context, len(opening) + 1, model.config.max_positions, "; the model has no more positions"
    )
    arguments.integer("tokens", tokens, context, remedy="; give at least one context")
    own = context - len(opening)  # tokens of the text in a document
    ids, num_documents = tokenizer.encode_prompt(text)[len(opening) :], tokens // context
    if len(ids) + num_documents * len(opening) < tokens:
        raise KvjaxError(f"the text has {len(ids)} tokens, and {tokens} were asked for; give a longer one")
    return [opening + ids[i * own : (i + 1) * own] for i in range(num_documents)]
