"""Prefill and decode of every method, compiled for accelerators that this machine lacks: what copies, waits or fails.

python -m experiments.bench.aot --topology v5e:2x4 [--methods "full;kcache:n=64"] [--layers all] [--keep FOLDER]

The model has Llama-3.1-8B's shape in bfloat16 and a prompt of 32,768 tokens. No model is run and no weights are made:
weights, prompt and cache are shapes. Heads, MLP and vocabulary are spread over all devices of the topology as
`kvjax.load(mesh=)` spreads them. Each method is compiled in a process of its own, and whatever stops it is the row's
result. Results are lines of a file, one a method: a second run goes on where the first one ended. Every run ends with
the page of all results, `experiments/results/bench.aot.md`.

Programs of 32 layers take long to compile, and most layers are equal. So the decode loop is compiled with one layer of
each kind that the method makes, and again with one more of each frequent kind; the difference is what such a layer
costs, and the sum over all layers is reported. `--layers all` compiles the whole model instead. Where layers differ in
a seed, a table or a budget alone, those in the middle stand for all. In a prefill, each kind of layer is a program of
its own in kvjax, too. Tables that kvjax does not ship for this shape are made of random numbers, which decide values
and no shapes.

Needs the extra `aot` for TPUs; `cross_compile.py` says what an H200 needs.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import hashlib
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from experiments.bench import measuring, steps
from experiments.bench.cross_compile import LIBTPU, count_bytes, lower_for, make_mesh, open_topology, trace_for
from experiments.bench.process import Killed, iterate_in_process
from experiments.bench.shapes import SHAPES
from experiments.bench.traffic import Program
from kvjax import KvjaxError
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_kinds import TABLE_KINDS
from kvjax.cache.protocol import BoundLayer, Cache, num_layer_slots
from kvjax.core import memory
from kvjax.core.mesh import axes_of_layer_array, spec
from kvjax.core.random import key_from_seed
from kvjax.engine import prefill as engine_prefill
from kvjax.engine.decode import num_draft_tokens
from kvjax.engine.forward import Target, apply_layer, embed, layer_calls, outer_params
from kvjax.engine.modes import ChunkedPrefill, FullPrefill, PromptReplay
from kvjax.engine.plan import bind, specs
from kvjax.engine.sampling import Sampler
from kvjax.eval.run.machine import machine, version
from kvjax.generation import decode_loop
from kvjax.generation.memory_plan import abstract_state
from kvjax.models import Config
from kvjax.models.sharding import abstract_params, param_shardings
from kvjax.planning.hardware import find_hardware
from kvjax.planning.models import find_model
from kvjax.registry.loading import load_all
from kvjax.registry.strings import split_list

RESULTS = Path(__file__).parents[1] / "results"
TOKENS, NEW_TOKENS, DTYPE = 32_768, 64, "bfloat16"
MESH = "data", "model"  # axes, as in `kvjax.core.mesh`
MAX_SECONDS = 600.0  # for one method
PACKAGES = "jax", "jaxlib", "libtpu", "jax-cuda13-plugin"
PROGRAMS = "decode", "prefill"
FREQUENT = 3  # a kind of more layers than this is compiled once more, and its cost multiplied


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The target of every program: the model, the prompt, and the devices."""

    topology: str
    config: Config
    tokens: int
    mesh: Any
    keep: Path | None = None  # folder for the text of compiled programs

    def keep_text(self, name: str, text: str) -> None:
        """Writes the text of a compiled program, where it is asked for."""
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            (self.keep / f"{name}.hlo.gz").write_bytes(gzip.compress(text.encode()))

    def array(self, shape: Sequence[int], dtype: Any, axes: str = "", kind: str = "device") -> jax.ShapeDtypeStruct:
        """Describes an array that lies on the mesh by its axis letters."""
        return self.on_mesh(shape, dtype, spec(axes, self.mesh), kind)

    def on_mesh(self, shape: Sequence[int], dtype: Any, partition: PartitionSpec, kind: str = "device") -> Any:
        """Describes an array that lies on the mesh by a partition spec."""
        sharding = NamedSharding(self.mesh, partition, memory_kind=kind)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

    def params(self, num_layers: int) -> Any:
        """Describes the weights of the first layers."""
        config = self.config.with_layers(self.config.pattern[:num_layers])
        shardings = param_shardings(config, self.mesh)
        shapes = nn.unbox(abstract_params(config, DTYPE))
        return jax.tree.map(lambda x, at: self.on_mesh(x.shape, x.dtype, at.spec), shapes, shardings)

    def state(self, layer: BoundLayer) -> Any:
        """Describes a layer's part of the cache after the prompt."""
        slots = num_layer_slots(layer, (self.tokens,), self.capacity)
        (call,) = layer_calls((layer,), self.config, (slots,))
        arrays, tree = abstract_state(call, self.config, self.tokens, 1, jnp.dtype(DTYPE), guards=True)
        return jax.tree.unflatten(tree, [self.layer_array(x) for x in arrays])

    def layer_array(self, x: Any) -> jax.ShapeDtypeStruct:
        """Describes an array of a layer, which devices divide as `kvjax.core.mesh.per_device` does."""
        axes = axes_of_layer_array(x.shape, 1, self.config.kind(0).attention.kv_heads)
        return self.array(x.shape, x.dtype, axes, memory.memory_kind(x))

    @property
    def capacity(self) -> int:
        return self.tokens + NEW_TOKENS


def device_bytes(tree: Any) -> int:
    """Bytes on one device of described arrays in its memory."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind == "device"
    )


def largest_array(states: Sequence[Any]) -> int:
    """Bytes on one device of the largest array of a cache in its memory."""
    return max((device_bytes(x) for x in jax.tree.leaves(states)), default=0)


# ---- which layers are compiled -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sample:
    """Layers that stand for a whole plan."""

    base: tuple[int, ...]  # indices of the layers of the first program, ascending
    more: tuple[tuple[int, tuple[int, ...]], ...]  # (how often it is still missing, layers of the base with one more)
    num_kinds: int  # of layers, in the whole plan
    is_exact: bool  # whether layers that count as equal have equal programs


def choose_layers(plan: Sequence[BoundLayer], states: Sequence[Any]) -> Sample:
    """Chooses one layer of each kind, and one more of each kind of which there are many."""

    def sizes(state: Any) -> tuple[Any, ...]:
        return tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(state))

    def types(state: Any) -> tuple[Any, ...]:
        return tuple((len(x.shape), str(x.dtype)) for x in jax.tree.leaves(state))

    layers = [getattr(layer, "after_prompt", layer) for layer in plan]
    exact = [(layer, sizes(state)) for layer, state in zip(layers, states, strict=True)]
    names, num_kinds = exact, len(set(exact))
    for coarser in (sizes, types):
        if len(set(names)) > FREQUENT:
            names = [(type(layer).__name__, coarser(state)) for layer, state in zip(layers, states, strict=True)]
    members: dict[Any, list[int]] = collections.defaultdict(list)
    for i, name in enumerate(names):
        members[name].append(i)
    # Kinds that are equally many and take turns, such as the two layers of a pair, are compiled together.
    groups: dict[Any, list[list[int]]] = collections.defaultdict(list)
    for kind in members.values():
        takes_turns = len(kind) > FREQUENT and any(abs(kind[0] - x) != 1 for x in kind[1:2])
        groups[len(kind) if takes_turns else ("alone", kind[0])].append(kind)
    base: list[int] = []
    frequent: list[list[list[int]]] = []
    for group in groups.values():
        if len(group[0]) <= FREQUENT:
            base += [i for kind in group for i in kind]
            continue
        # The middle of a kind stands for the others where their sizes differ.
        middle = len(group[0]) // 2
        base += [kind[middle] for kind in group]
        frequent.append(group)
    more = []
    for group in frequent:
        middle = len(group[0]) // 2
        added = [kind[middle - 1] for kind in group]
        more.append((len(group[0]) - 1, tuple(sorted([*base, *added]))))
    return Sample(tuple(sorted(base)), tuple(more), num_kinds, names is exact)


# ---- decode --------------------------------------------------------------------------------------------------------


def compile_decode(
    shapes: Shapes, plan: Sequence[BoundLayer], states: Sequence[Any], known: Mapping[str, dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Compiles the decode loop of some layers, unless its counts are known.

    Returns:
      The digest of the program, and its counts on one device.
    """
    config = shapes.config.with_layers(shapes.config.pattern[: len(plan)])
    has_drafts = num_draft_tokens(tuple(plan)) > 0
    logits, key, eos = shapes.array((1, config.vocab_size), jnp.float32), key_from_seed(0), jnp.zeros(1, jnp.int32)
    state = jax.eval_shape(
        lambda logits: decode_loop.init_state(
            logits, key, eos, Sampler(), num_tokens=NEW_TOKENS, has_drafts=has_drafts
        ),
        logits,
    )
    state = jax.tree.map(lambda x: shapes.array(x.shape, x.dtype), state)
    length = shapes.array((1,), jnp.int32, "B")
    cache = Cache(tuple(states), length, shapes.capacity, tuple(plan), config, DTYPE)
    params = shapes.params(len(plan))
    arguments = {
        "params": params,
        "state": dataclasses.replace(state, cache=cache),
        "limit": np.int32(0),
        "sampler": Sampler(),
        "target": Target(config, shapes.mesh),
    }
    program = jax.jit(decode_loop.decode_until, static_argnames="target", donate_argnames="state")
    lowered = lower_for(shapes.topology, program, arguments, ("target",), shapes.mesh, is_loop=True)
    digest = hashlib.sha256(lowered.text().encode()).hexdigest()[:32]
    if digest in known:  # another method's, or the same method's before a change elsewhere
        return digest, known[digest]
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    shapes.keep_text(f"decode-{len(plan)}", text)
    found = dataclasses.asdict(steps.Step.from_program(text))
    found |= Program.from_text(text).step_counts(largest_array(states))
    found |= {
        "device_bytes": sizes.argument_size_in_bytes,
        "host_bytes": sizes.host_argument_size_in_bytes,
        "counted_bytes": count_bytes(compiled),
        "weight_bytes": device_bytes(params),
        "read_weight_bytes": device_bytes(params) - (0 if config.tie_embeddings else device_bytes(params["embedding"])),
        "workspace_bytes": sizes.temp_size_in_bytes,
        "compile_seconds": round(seconds, 1),
    }
    return digest, found


def scale(base: Mapping[str, Any], more: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Adds up a whole plan's counts: of the base, and the missing layers times the cost of one more.

    A compiler may copy less in the larger program; the model then counts as that program.
    """
    found = {name: x + sum(n * (one[name] - x) for n, one in more) for name, x in base.items()}
    found = {name: max(x, *(one[name] for one in (base, *(one for _, one in more)))) for name, x in found.items()}
    found["workspace_bytes"] = max(x["workspace_bytes"] for x in (base, *(one for _, one in more)))
    found["compile_seconds"] = base["compile_seconds"] + sum(one["compile_seconds"] for _, one in more)
    return found


# ---- prefill -------------------------------------------------------------------------------------------------------


def prefill_programs(
    shapes: Shapes, plan: Sequence[BoundLayer], states: Sequence[Any], index: int
) -> Iterator[tuple[str, Any, dict[str, Any], tuple[str, ...]]]:
    """Yields the programs that kvjax runs for one layer of a prompt: name, jitted function, arguments, static names."""
    c, T, layer = shapes.config, shapes.tokens, plan[index]
    config, target = c.with_layers(c.pattern[index : index + 1]), Target(c, shapes.mesh)
    num_slots = num_layer_slots(layer, (T,), shapes.capacity)
    (call,) = layer_calls((layer,), config, (num_slots,))
    needs = [x.needs for x in plan]
    own_chunk = min((n.prompt_chunk for n in needs if n.prompt_chunk), default=None)
    chunk = own_chunk or T
    one_pass = own_chunk is None and not any(n.global_budget or n.replay or n.paired_layer for n in needs)
    lengths = shapes.array((1,), jnp.int32, "B")
    params = shapes.params(1)
    tokens = shapes.array((1, chunk), jnp.int32, "B T")
    hidden, angles, _ = jax.eval_shape(
        lambda params, tokens: embed(params, tokens, None, None, target=Target(c)), outer_params(params), tokens
    )
    hidden, angles = jax.tree.map(lambda x: shapes.array(x.shape, x.dtype), (hidden, angles))
    static = ("call", "target")

    def run_layer(mode: Any, state: Any) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
        arguments = {"params": params["layer_0"], "hidden": hidden, "angles": angles, "mode": mode, "state": state}
        program = jax.jit(apply_layer, static_argnames=static, donate_argnames="state")
        return program, arguments | {"cross_layer": None, "call": call, "target": target}, static

    if one_pass:
        observed = [n.observed_queries for n in needs]
        num_observed = None if None in observed else max(1, *(n for n in observed if n is not None))
        yield "layer", *run_layer(FullPrefill(lengths, shapes.capacity, num_observed), None)
        return
    start = shapes.array((), jnp.int32)
    if layer.needs.prompt_chunk:
        yield "chunk", *run_layer(ChunkedPrefill(start, lengths), states[index])
        return
    empty = jax.eval_shape(
        lambda: engine_prefill.empty_prompt(batch=1, width=T, dtype=jnp.dtype(DTYPE), call=call, target=Target(c))
    )
    prompt = jax.tree.map(shapes.layer_array, empty)
    yield "chunk", *run_layer(ChunkedPrefill(start, lengths), prompt)
    if layer.needs.replay:
        prompt = prompt._replace(replay_scores=shapes.array(prompt.k.shape[:3], jnp.float32, "B K"))
        settings = layer.needs.replay
        width = settings.lead_tokens + min(settings.chunk_tokens, T)
        hidden = shapes.array((1, width, c.width), hidden.dtype, "B")
        angles = jax.tree.map(lambda x: shapes.array((x.shape[0], width, *x.shape[2:]), x.dtype), angles)
        yield "replay", *run_layer(PromptReplay(start, shapes.array((1, width), jnp.int32, "B"), lengths), prompt)
    if layer.needs.output_projection:
        kernel = params["layer_0"]["attention"]["o"]["kernel"]
        partition = PartitionSpec(None, *kernel.sharding.spec)
        prompt = prompt._replace(output_projection=shapes.on_mesh((1, *kernel.shape), kernel.dtype, partition))
    if layer.needs.paired_layer:
        prompt = prompt._replace(paired=(prompt.k, prompt.v))
    arguments = {"prompt": prompt, "lengths": lengths, "capacity": shapes.capacity, "mesh": target.mesh}
    kept = measure = None
    static = ("call", "capacity", "mesh")
    if layer.needs.global_budget:
        empty_call = dataclasses.replace(call, num_slots=0)
        measure_call = arguments | {"call": empty_call}
        yield "measure", engine_prefill.measure_prompt, measure_call, static
        traced = jax.make_jaxpr(
            lambda prompt, lengths: engine_prefill.measure_prompt(
                prompt, lengths, call=empty_call, capacity=shapes.capacity, mesh=None
            ),
            return_shape=True,
        )(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (prompt, lengths)))[1]
        measure = jax.tree.map(shapes.layer_array, traced)
        division = jax.eval_shape(
            lambda measures, lengths: engine_prefill.allocate_tokens(measures, lengths, layers=tuple(plan)),
            (traced,) * len(plan),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        )
        kept = shapes.array(division.shape[1:], division.dtype, "B")
    yield "compress", engine_prefill.compress, arguments | {"num_kept": kept, "measure": measure, "call": call}, static


def compile_prefill(shapes: Shapes, plan: Sequence[BoundLayer], states: Sequence[Any], index: int) -> dict[str, Any]:
    """Compiles the programs of one layer of a prompt; returns their counts on one device, by name."""
    found = {}
    for name, program, arguments, static in prefill_programs(shapes, plan, states, index):
        start = time.perf_counter()
        compiled = lower_for(shapes.topology, program, arguments, static, shapes.mesh).compile()
        sizes = compiled.memory_analysis()
        shapes.keep_text(f"prefill-{index}-{name}", compiled.as_text())
        found[name] = {
            "workspace_bytes": sizes.temp_size_in_bytes,
            "counted_bytes": count_bytes(compiled),
            "compile_seconds": round(time.perf_counter() - start, 1),
        }
    return found


def find_config(model: str) -> Config:
    """The configuration of a model that is written down, or of a shape of the benchmarks."""
    return SHAPES[model] if model in SHAPES else find_model(model).config


# ---- one method ----------------------------------------------------------------------------------------------------


def topology_problems(topology: str) -> Iterator[str]:
    """Yields why a topology cannot be compiled for, if it cannot."""
    try:
        open_topology(topology)
    except KvjaxError as e:
        yield str(e)


def write_tables(folder: Path, config: Config) -> None:
    """Writes tables of random numbers for a model's shape, one of each kind that kvjax knows, as if they shipped."""
    rng, (first, *_) = np.random.default_rng(0), specs(config)
    a = config.kind(0).attention
    K, D = a.kv_heads, config.width
    # The examples of these two kinds are for small models; here they have the sizes that `kvjax calibrate` makes.
    sizes = {
        "attention_gate": {
            "query": (1, D, 32),
            "key": (1, D, 32),
            "value": (1, D, K),
            "output": (1, K, K),
            "bias": (K,),
        },
        "lococo": {"weight": (32, 2 * a.head_dim, 21), "bias": (32,), "normalizer": (1,)},
    }
    for name, kind in TABLE_KINDS.items():
        (folder / name).mkdir(parents=True)
        if name in sizes:
            arrays = {array: rng.normal(size=size).astype(np.float32) for array, size in sizes[name].items()}
        else:
            arrays = kind.example(first, rng)
        # All layers have one set of numbers: making it takes seconds.
        file, source = folder / name / "made.safetensors", "random numbers, for compiled programs"
        table_file.write(file, name, first, [arrays] * config.layers, source)


def compile_method(
    method: str,
    model: str,
    topology: str,
    tokens: int,
    layers: str,
    programs: Sequence[str],
    known: Mapping[str, dict[str, Any]],
    tables: str | None,
    keep: str | None,
) -> Iterator[dict[str, Any]]:
    """Compiles one method; yields the parts of its record, each as soon as it is known.

    Args:
      method: its string.
      model: a name of MODELS.
      topology: see `cross_compile.open_topology`.
      tokens: of the prompt.
      layers: "few" or "all".
      programs: those of PROGRAMS that are compiled.
      known: counts of loops that need not be compiled, by the digest of the program.
      tables: the folder of `write_tables`, where kvjax ships none for this model.
      keep: a folder for the text of compiled programs.
    """
    try:
        config, num_devices = find_config(model), len(open_topology(topology))
        mesh = make_mesh(topology, (1, num_devices), MESH)
        folder = None if keep is None else Path(keep, re.sub(r"\W+", "_", method))
        shapes = Shapes(topology, config, tokens, mesh, folder)
        if tables is not None:
            table_file.SHIPPED_TABLES = Path(tables)
        with trace_for(topology):
            plan = bind(method, config)
            made: dict[BoundLayer, Any] = {}
            for layer in plan:
                if layer not in made:
                    made[layer] = shapes.state(layer)
            states = [made[layer] for layer in plan]
            planned = kvjax.planned_bytes(method, config, tokens, capacity=shapes.capacity, dtype=DTYPE)
            step = kvjax.step_bytes(method, config, tokens, capacity=shapes.capacity, dtype=DTYPE)
            sample = choose_layers(plan, states)
        yield {
            "devices": num_devices,
            "planned_bytes": planned.total,
            "planned_step_bytes": dataclasses.asdict(step),
            "kinds": sample.num_kinds,
            "is_exact": sample.is_exact,
        }

        loops: dict[str, dict[str, Any]] = {}

        def decode(indices: Sequence[int]) -> dict[str, Any]:
            digest, counts = compile_decode(shapes, [plan[i] for i in indices], [states[i] for i in indices], known)
            loops[digest] = counts
            return counts

        if "decode" in programs:
            if layers == "all":
                total = decode(range(config.layers))
            else:
                base = decode(sample.base)
                total = scale(base, [(n, decode(indices)) for n, indices in sample.more])
            yield {"decode": total, "loops": loops}
        if "prefill" in programs:
            # A layer that `full` has too is compiled with that method.
            seen, prefills = set() if method == "full" else set(bind("full", config)), {}
            for i in sample.base:
                if plan[i] not in seen:
                    seen.add(plan[i])
                    prefills[f"layer {i}"] = compile_prefill(shapes, plan, states, i)
            yield {"prefill": prefills}
    except KvjaxError as e:
        yield {"reason": str(e)}
    except Exception as e:  # whatever the compiler raises is a result
        first = (str(e).splitlines() or [""])[0]
        yield {"reason": f"{type(e).__name__}: {first:.300}"}


# ---- the page ------------------------------------------------------------------------------------------------------

COLUMNS = (
    "method",
    "step MB",
    "planned",
    "tok/s",
    "copied MB",
    "full-size",
    "host",
    "fetches",
    "waits",
    "fetched MB",
    "outside",
)
COLUMNS += ("launches", "counted MB", "cache MB", "planned", "workspace MB", "prefill MB", "note")
COUNTS = "launches", "fusions", "copies", "step_bytes", "counted_bytes"
INTRODUCTION = """# Every method, compiled for accelerators

`python -m experiments.bench.aot --topology NAME` wrote this page, `make aot` repeats it: prefill and decode of every
method at Llama-3.1-8B's shape, bfloat16, one sequence of 32,768 tokens, compiled on a machine without an accelerator.
**No program has run**: these are counts, and "tok/s" is what the memory's bandwidth and the link to the host allow.

- All columns are of one decode step of all 32 layers on one of the devices, weights included. "step MB" is read and
  written in the device's memory. An array that passes through a TPU's scratchpad counts once, a slice or an update with
  its own size; "counted MB" is the compiler's figure, which takes whole operands, and those in the scratchpad too.
  "planned", behind it, is the weights and what `kvjax.step_bytes` says of the cache. "tok/s" is one over the larger
  of step MB / bandwidth and fetched MB / link, with the rates of `kvjax.planning.hardware`.
- "copied MB" is what copies write to the device's memory, "full-size" how many of them are as large as the largest
  array of a layer's cache. On a TPU most are buffers that were fetched into the scratchpad, got one row there, and are
  written back whole.
- "host" counts launches that read or write host memory, "fetches" transfers from there, "waits" fetches that nothing
  else overlaps, "outside" copies of whole host buffers before or after the loop.
- "cache MB" is the cache among the program's arguments, on device and host of all devices together, "planned" what
  `kvjax.planned_bytes` says. The difference is padding, and arrays that every device holds whole. "workspace MB" is the
  scratch memory of the decode loop, "prefill MB" the largest of a prefill program.
- The programs have one or two layers of each kind, and the cost of one more is multiplied. "of N kinds": layers that
  differ in a seed, a table or a budget, for which those in the middle stand. Rows "(all layers)" have the whole model.
- "as full" marks a method whose counts are those of `full`: the prompt is too short for it, or `device_layers` covers
  the model. In the column of the prefill it says that the layers are those of `full`.
- Rows of an earlier kvjax than that of `full` name its commit.
- Tables that kvjax does not ship for this shape are random numbers: they decide values and no shapes.
"""


def read_results(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a file, without lines that an interrupted run left unfinished."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def row(found: Mapping[str, Any], full: Mapping[str, Any] | None) -> list[Any]:
    """Formats a record; `full` is that of the method full, with which the counts are compared."""
    name = found["method"] + (" (all layers)" if found["layers"] == "all" else "")
    notes = [f"of {found['kinds']} kinds"] if not found.get("is_exact", True) and found["layers"] != "all" else []
    if len(set(found["reasons"].values())) == 1 and len(found["reasons"]) > 1:
        notes += set(found["reasons"].values())
    else:
        notes += [f"{program}: {reason}" for program, reason in found["reasons"].items()]
    if "decode" not in found:
        return [name, *[None] * (len(COLUMNS) - 2), "; ".join(notes)]
    d = found["decode"]
    if full and found["commit"] != full["commit"]:
        notes.append(f"kvjax at {found['commit']}")
    if full and found is not full and all(d[key] == full["decode"][key] for key in COUNTS):
        notes.append("as full")
    cache = (d["device_bytes"] - d["weight_bytes"] + d["host_bytes"]) * found["devices"]
    planned = found["planned_step_bytes"]
    # A step reads each weight but those of the embedding, of which it reads a row.
    planned_step = d["read_weight_bytes"] + (planned["device"] + planned["device_written"]) / found["devices"]
    prefill = [x["workspace_bytes"] for layer in found.get("prefill", {}).values() for x in layer.values()]
    mb = "{:,.1f}".format
    return [
        name,
        mb(d["step_bytes"] / 1e6),
        mb(planned_step / 1e6),
        f"{tokens_per_second(found):,.0f}",
        mb(d["copied_bytes"] / 1e6),
        d["full_copies"],
        d["host"],
        d["fetches"],
        d["waits"],
        mb(d["fetched_bytes"] / 1e6),
        d["outside"],
        d["launches"],
        mb(d["counted_bytes"] / 1e6),
        mb(cache / 1e6),
        mb(sum(found["planned_bytes"].values()) / 1e6),
        mb(d["workspace_bytes"] / 1e6),
        mb(max(prefill) / 1e6) if prefill else "as full" if "prefill" in found else None,
        "; ".join(notes),
    ]


def tokens_per_second(found: Mapping[str, Any]) -> float:
    """Steps per second that a device's memory and its link to the host allow."""
    hardware = find_hardware(found["topology"].partition(":")[0])
    reading = found["decode"]["step_bytes"] / hardware.memory_bandwidth
    return 1 / max(reading, found["decode"]["fetched_bytes"] / hardware.host_link)


def page(results: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The page of all results, the records of each topology."""
    text = [INTRODUCTION]
    for records in filter(None, results):
        full = next((x for x in records if x["method"] == "full" and x["layers"] == "few" and "decode" in x), None)
        versions = "; ".join(sorted({", ".join(f"{k} {v}" for k, v in x["versions"].items()) for x in records}))
        decoded, prefilled = (sum(program in x for x in records) for program in PROGRAMS)
        counts = f"Of {len(records)} rows, {decoded} have a decode loop that compiles and {prefilled} a prefill"
        commit = f"; kvjax at {full['commit']}" if full else ""
        text.append(f"## {records[0]['topology']}\n\n{versions}{commit}. {counts}.\n")
        text.append(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 2)}---|")
        order = sorted(records, key=lambda x: (x["method"] != "full", x["method"], x["layers"]))
        for found in order:
            cells = ["" if x is None else str(x).replace("|", "\\|") for x in row(found, full)]
            text.append(f"| `{cells[0]}` | {' | '.join(cells[1:])} |")
        text.append("")
    return "\n".join(text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--topology", required=True, help="v5e:2x4, v6e:2x4, h200 or h200:8")
    parser.add_argument("--methods", type=split_list, help='separated by ";"; by default an example of every method')
    parser.add_argument("--model", default="llama-3.1-8b", help="a name of kvjax.planning, or small or 125m")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt")
    parser.add_argument("--layers", choices=("few", "all"), default="few")
    parser.add_argument("--folder", type=measuring.output_folder, default=RESULTS, help="of the results")
    parser.add_argument(
        "--keep", type=measuring.output_folder, help="folder that gets the text of every compiled program"
    )
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="decode, prefill or both, with a comma")
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="after which a method is given up")
    parser.add_argument("--again", action="store_true", help="lower all methods anew, and compile what has changed")
    args = parser.parse_args(argv)
    before, config = machine(), find_config(args.model)
    # Where nothing can be compiled, this raises, and no row does. A TPU's compiler stays out of this process.
    for problem in iterate_in_process(topology_problems, args.topology, seconds=MAX_SECONDS):
        raise KvjaxError(problem)
    versions = {name: version(name) for name in PACKAGES if version(name)}
    for info in LIBTPU.parents[1].glob("libtpu-*.dist-info"):  # apart from the packages of the environment
        versions.setdefault("libtpu", info.name.removeprefix("libtpu-").removesuffix(".dist-info"))
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "no commit"
    out = args.folder / f"bench.aot.{args.topology.replace(':', '-')}.jsonl"
    known = read_results(out)
    if out.exists():  # without what an interrupted run left unfinished
        out.write_text("".join(json.dumps(record) + "\n" for record in known))
    done: dict[Any, set[str]] = {}
    if not args.again:
        done = {(x["method"], x["layers"]): {p for p in PROGRAMS if p in x or p in x["reasons"]} for x in merged(known)}
    # What was compiled by other versions may come out otherwise.
    loops = {
        digest: x for record in known if record["versions"] == versions for digest, x in record.get("loops", {}).items()
    }
    methods = args.methods or [r.example for r in load_all().values()]
    missing = {
        method: [x for x in args.programs.split(",") if x not in done.get((method, args.layers), ())]
        for method in dict.fromkeys(methods)
    }
    missing = {method: programs for method, programs in missing.items() if programs}
    with tempfile.TemporaryDirectory() as folder:
        tables = folder if any(lacks_table(method, config) for method in missing) else None
        if tables:
            measuring.log_progress("tables of random numbers, which kvjax does not ship for this shape")
            write_tables(Path(folder), config)
        for method, programs in missing.items():
            measuring.log_progress(method)
            start = time.perf_counter()
            record: dict[str, Any] = {"method": method, "topology": args.topology, "model": args.model}
            record |= {
                "tokens": args.tokens,
                "layers": args.layers,
                "versions": versions,
                "commit": commit,
                "reasons": {},
            }
            keep = None if args.keep is None else str(args.keep)
            while left := [x for x in programs if x not in record and x not in record["reasons"]]:
                arguments = method, args.model, args.topology, args.tokens, args.layers, left, loops, tables, keep
                try:
                    for part in iterate_in_process(compile_method, *arguments, seconds=args.seconds):
                        record |= part
                except Killed as e:
                    record["reason"] = str(e)
                # What stopped one program need not stop the next, which gets a process of its own.
                stopped = next((x for x in left if x not in record), None)
                if stopped:
                    record["reasons"][stopped] = record.pop("reason")
            loops |= record.get("loops", {})
            record["seconds"] = round(time.perf_counter() - start, 1)
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            measuring.log_progress(f"{record['reasons'] or 'compiles'}, {record['seconds']} s")
    found = sorted(args.folder.glob("bench.aot.*.jsonl"))
    results = [merged(read_results(path)) for path in found]
    (args.folder / "bench.aot.md").write_text(page(results))
    here = merged(read_results(out))
    full = next((x for x in here if x["method"] == "full" and x["layers"] == "few" and "decode" in x), None)
    lines = [[*row(x, full)[:-1], row(x, full)[-1][:60]] for x in here]
    measuring.report("aot", before, [measuring.table(args.topology, COLUMNS, lines)], [], here)


def merged(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each method, with few layers or with all, of which the latest result of each program counts."""
    found: dict[Any, dict[str, Any]] = {}
    for record in records:
        before = found.get((record["method"], record["layers"]), {"reasons": {}})
        reasons = {k: v for k, v in before["reasons"].items() if k not in record} | record["reasons"]
        found[record["method"], record["layers"]] = before | record | {"reasons": reasons}
    return list(found.values())


def lacks_table(method: str, config: Config) -> bool:
    """Whether a method reads a table that kvjax does not ship for a model."""
    try:
        bind(method, config)
    except KvjaxError as e:
        return "ships no table" in str(e)
    return False


if __name__ == "__main__":
    main()
