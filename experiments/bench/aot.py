"""Prefill and decode of every method, compiled for accelerators that this machine lacks: what copies, waits or fails.

python -m experiments.bench.aot --topology v5e:2x4 [--methods "full;kcache:n=64"] [--layers all]

The model has Llama-3.1-8B's shape in bfloat16 and a prompt of 32,768 tokens. No model is run and no weights are made:
weights, prompt and cache are shapes. Heads, MLP and vocabulary are spread over all devices of the topology as
`kvjax.load(mesh=)` spreads them. Each program is compiled in a process of its own, and whatever stops it is the row's
result. Results are lines of a file, one a method: a second run compiles what has no line. Every run ends with the page
of all results, `experiments/results/bench.aot.md`.

Programs of 32 layers take long to compile, and most layers are equal. So the decode loop is compiled with one layer of
each kind that the method makes, and again with one more of each frequent kind; the difference is what such a layer
costs, and the sum over all layers is reported. `--layers all` compiles the whole model instead. Where layers differ in
a seed, a table or a budget alone, those in the middle stand for all. The prefill is one program of these layers. Tables
that kvjax does not ship for this shape are made of random numbers, which decide values and no shapes.

Needs the extra `aot` for TPUs; `cross_compile.py` says what an H200 needs. XLA_FLAGS=--xla_dump_to=FOLDER keeps the
text of every program.
"""

from __future__ import annotations

import collections
import dataclasses
import json
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
from experiments.bench import measuring
from experiments.bench.cross_compile import (
    LIBTPU,
    LoweredFor,
    count_bytes,
    lower_for,
    make_mesh,
    open_topology,
    trace_for,
)
from experiments.bench.process import Killed, iterate_in_process
from experiments.bench.shapes import SHAPES
from experiments.bench.steps import Step
from experiments.bench.traffic import Program
from kvjax import KvjaxError
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_kinds import TABLE_KINDS
from kvjax.cache.protocol import BoundLayer, Cache, num_layer_slots
from kvjax.core import memory
from kvjax.core.mesh import axes_of_layer_array, spec
from kvjax.core.random import key_from_seed
from kvjax.engine.decode import num_draft_tokens
from kvjax.engine.forward import Target, layer_calls
from kvjax.engine.plan import bind, specs
from kvjax.engine.prefill import prefill
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
    batch: int = 1

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
        arrays, tree = abstract_state(call, self.config, self.tokens, self.batch, jnp.dtype(DTYPE), guards=True)
        return jax.tree.unflatten(tree, [self.layer_array(x) for x in arrays])

    def layer_array(self, x: Any) -> jax.ShapeDtypeStruct:
        """Describes an array of a layer, which devices divide as `kvjax.core.mesh.per_device` does."""
        axes = axes_of_layer_array(x.shape, self.batch, self.config.kind(0).attention.kv_heads)
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


@dataclasses.dataclass(frozen=True)
class Sample:
    """Layers that stand for a whole plan."""

    base: tuple[int, ...]  # indices of the layers of the first program, ascending
    more: tuple[tuple[int, tuple[int, ...]], ...]  # (how often it is still missing, layers of the base with one more)
    num_kinds: int  # of layers, in the whole plan
    is_exact: bool  # whether layers that count as equal have equal programs


def choose_layers(plan: Sequence[BoundLayer], states: Sequence[Any]) -> Sample:
    """Chooses one layer of each kind, and one more of each kind of which there are many."""
    layers = [getattr(layer, "after_prompt", layer) for layer in plan]
    arrays = [jax.tree.leaves(state) for state in states]
    sizes = [tuple((x.shape, str(x.dtype)) for x in each) for each in arrays]
    types = [tuple((len(x.shape), str(x.dtype)) for x in each) for each in arrays]
    exact = names = list(zip(layers, sizes, strict=True))
    for coarser in (sizes, types):
        if len(set(names)) > FREQUENT:
            names = [(type(layer).__name__, about) for layer, about in zip(layers, coarser, strict=True)]
    kinds: dict[Any, list[int]] = collections.defaultdict(list)
    for i, name in enumerate(names):
        kinds[name].append(i)
    # Kinds that are equally many are added together, as are the two layers of a pair.
    groups: dict[int, list[list[int]]] = collections.defaultdict(list)
    for kind in kinds.values():
        groups[len(kind)].append(kind)
    base: list[int] = []
    added: list[tuple[int, list[int]]] = []
    for count, group in groups.items():
        if count <= FREQUENT:
            base += [i for kind in group for i in kind]
        else:  # the middle of a kind stands for the others where their sizes differ
            base += [kind[count // 2] for kind in group]
            added.append((count - 1, [kind[count // 2 - 1] for kind in group]))
    more = tuple((missing, tuple(sorted([*base, *indices]))) for missing, indices in added)
    return Sample(tuple(sorted(base)), more, len(set(exact)), names is exact)


def lower_decode(shapes: Shapes, plan: Sequence[BoundLayer], states: Sequence[Any]) -> LoweredFor:
    """Lowers the decode loop of some layers."""
    config = shapes.config.with_layers(shapes.config.pattern[: len(plan)])
    has_drafts = num_draft_tokens(tuple(plan)) > 0
    logits, key, eos = (
        shapes.array((shapes.batch, config.vocab_size), jnp.float32),
        key_from_seed(0),
        jnp.zeros(1, jnp.int32),
    )
    state = jax.eval_shape(
        lambda logits: decode_loop.init_state(
            logits, key, eos, Sampler(), num_tokens=NEW_TOKENS, has_drafts=has_drafts
        ),
        logits,
    )
    state = jax.tree.map(lambda x: shapes.array(x.shape, x.dtype), state)
    length = shapes.array((shapes.batch,), jnp.int32, "B")
    cache = Cache(tuple(states), length, shapes.capacity, tuple(plan), config, DTYPE)
    arguments = {
        "params": shapes.params(len(plan)),
        "state": dataclasses.replace(state, cache=cache),
        "limit": np.int32(0),
        "sampler": Sampler(),
        "target": Target(config, shapes.mesh),
    }
    program = jax.jit(decode_loop.decode_until, static_argnames="target", donate_argnames="state")
    return lower_for(shapes.topology, program, arguments, ("target",), shapes.mesh, is_loop=True)


def compile_decode(shapes: Shapes, plan: Sequence[BoundLayer], states: Sequence[Any]) -> dict[str, Any]:
    """Compiles the decode loop of some layers; returns its counts on one device."""
    lowered, params = lower_decode(shapes, plan, states), shapes.params(len(plan))
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    sizes, text = compiled.memory_analysis(), Program.from_text(compiled.as_text())
    found = dataclasses.asdict(Step.from_program(text)) | text.step_counts(largest_array(states))
    found |= {
        "device_bytes": sizes.argument_size_in_bytes,
        "host_bytes": sizes.host_argument_size_in_bytes,
        "counted_bytes": count_bytes(compiled),
        "weight_bytes": device_bytes(params),
        "read_weight_bytes": device_bytes(params)
        - (0 if shapes.config.tie_embeddings else device_bytes(params["embedding"])),
        "workspace_bytes": sizes.temp_size_in_bytes,
        "compile_seconds": round(seconds, 1),
    }
    return found


def scale(base: Mapping[str, Any], more: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Adds up a whole plan's counts: of the base, and the missing layers times the cost of one more.

    A compiler may copy less in the larger program; the model then counts as that program.
    """
    found = {name: x + sum(n * (one[name] - x) for n, one in more) for name, x in base.items()}
    found = {name: max(x, *(one[name] for one in (base, *(one for _, one in more)))) for name, x in found.items()}
    found["workspace_bytes"] = max(x["workspace_bytes"] for x in (base, *(one for _, one in more)))
    found["compile_seconds"] = base["compile_seconds"] + sum(one["compile_seconds"] for _, one in more)
    return found


def compile_prefill(shapes: Shapes, plan: Sequence[BoundLayer]) -> dict[str, Any]:
    """Compiles the prefill of some layers as one program; returns its counts on one device."""
    config = shapes.config.with_layers(shapes.config.pattern[: len(plan)])
    target = Target(config, shapes.mesh)

    def run(params: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        return prefill(params, tokens, lengths, tuple(plan), target, shapes.capacity)

    arguments = {
        "params": shapes.params(len(plan)),
        "tokens": shapes.array((1, shapes.tokens), jnp.int32, "B"),
        "lengths": shapes.array((1,), jnp.int32, "B"),
    }
    start = time.perf_counter()
    compiled = lower_for(shapes.topology, jax.jit(run), arguments, (), shapes.mesh).compile()
    return {
        "workspace_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "counted_bytes": count_bytes(compiled),
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


def find_config(model: str) -> Config:
    """The configuration of a model that is written down, or of a shape of the benchmarks."""
    return SHAPES[model] if model in SHAPES else find_model(model).config


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
    program: str, method: str, model: str, topology: str, tokens: int, layers: str, tables: str | None
) -> Iterator[dict[str, Any]]:
    """Compiles a program of a method; yields the part of its record.

    Args:
      program: one of PROGRAMS.
      method: its string.
      model: a name of `kvjax.planning`, or of SHAPES.
      topology: see `cross_compile.open_topology`.
      tokens: of the prompt.
      layers: "few" or "all".
      tables: the folder of `write_tables`, where kvjax ships none for this model.
    """
    try:
        config, num_devices = find_config(model), len(open_topology(topology))
        shapes = Shapes(topology, config, tokens, make_mesh(topology, (1, num_devices), MESH))
        if tables is not None:
            table_file.SHIPPED_TABLES = Path(tables)
        with trace_for(topology):
            plan = bind(method, config)
            states = [shapes.state(layer) for layer in plan]
            planned = kvjax.planned_bytes(method, config, tokens, capacity=shapes.capacity, dtype=DTYPE)
            step = kvjax.step_bytes(method, config, tokens, capacity=shapes.capacity, dtype=DTYPE)
            sample = choose_layers(plan, states)
        about = {
            "devices": num_devices,
            "planned_bytes": planned.total,
            "planned_step_bytes": dataclasses.asdict(step),
            "kinds": sample.num_kinds,
            "is_exact": sample.is_exact,
        }
        yield about

        def decode(indices: Sequence[int]) -> dict[str, Any]:
            return compile_decode(shapes, [plan[i] for i in indices], [states[i] for i in indices])

        if program == "prefill":
            yield {"prefill": {"layers": {"prompt": compile_prefill(shapes, [plan[i] for i in sample.base])}}}
        elif layers == "all":
            yield {"decode": decode(range(config.layers))}
        else:
            base = decode(sample.base)
            yield {"decode": scale(base, [(n, decode(indices)) for n, indices in sample.more])}
    except KvjaxError as e:
        yield {"reason": str(e)}
    except Exception as e:  # whatever the compiler raises is a result
        first = (str(e).splitlines() or [""])[0]
        yield {"reason": f"{type(e).__name__}: {first:.300}"}


def compile_programs(*arguments: Any, seconds: float) -> dict[str, Any]:
    """Compiles each program of a method in a process of its own, and collects what is known of them."""
    record: dict[str, Any] = {"reasons": {}}
    for program in PROGRAMS:
        try:
            for part in iterate_in_process(compile_method, program, *arguments, seconds=seconds):
                record |= part
        except Killed as e:
            record["reason"] = str(e)
        if "reason" in record:
            record["reasons"][program] = record.pop("reason")
    return record


COLUMNS = (
    *("method", "step MB", "planned", "tok/s", "copied MB", "full-size", "host", "fetches", "waits", "fetched MB"),
    *("outside", "launches", "counted MB", "cache MB", "planned", "workspace MB", "prefill MB", "note"),
)
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
  scratch memory of the decode loop, "prefill MB" that of the prefill, which is one program; up to kvjax at 1716f4af it
  was a program for each layer, and the largest of them counts.
- The programs have one or two layers of each kind, and the cost of one more is multiplied. "of N kinds": layers that
  differ in a seed, a table or a budget, for which those in the middle stand. Rows "(all layers)" have the whole model.
- "as full" marks a method whose counts are those of `full`: the prompt is too short for it, or `device_layers` covers
  the model.
- Rows of an earlier kvjax than that of `full` name its commit.
- Tables that kvjax does not ship for this shape are random numbers: they decide values and no shapes.
"""


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the records of a file by method and layers, without a line that an interrupted run left unfinished."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {f"{x['method']}, {x['layers']}": x for x in records}


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
        mb(max(prefill) / 1e6) if prefill else None,
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
        full = find_full(records)
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
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="after which a method is given up")
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
    methods = args.methods or [r.example for r in load_all().values()]
    missing = [method for method in dict.fromkeys(methods) if f"{method}, {args.layers}" not in known]
    with tempfile.TemporaryDirectory() as folder:
        tables = folder if any(lacks_table(method, config) for method in missing) else None
        if tables:
            measuring.log_progress("tables of random numbers, which kvjax does not ship for this shape")
            write_tables(Path(folder), config)
        for method in missing:
            measuring.log_progress(method)
            start = time.perf_counter()
            arguments = method, args.model, args.topology, args.tokens, args.layers, tables
            names = ("method", "model", "topology", "tokens", "layers")
            record = dict(zip(names, arguments, strict=False)) | {"versions": versions, "commit": commit}
            record |= compile_programs(*arguments, seconds=args.seconds)
            record["seconds"] = round(time.perf_counter() - start, 1)
            known[f"{method}, {args.layers}"] = record
            out.write_text("".join(json.dumps(x) + "\n" for x in known.values()))
            measuring.log_progress(f"{record['reasons'] or 'compiles'}, {record['seconds']} s")
    pages = [list(read_results(path).values()) for path in sorted(args.folder.glob("bench.aot.*.jsonl"))]
    (args.folder / "bench.aot.md").write_text(page(pages))
    here = list(known.values())
    lines = [[*cells[:-1], cells[-1][:60]] for cells in (row(x, find_full(here)) for x in here)]
    measuring.report("aot", before, [measuring.table(args.topology, COLUMNS, lines)], [], here)


def find_full(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of the method full, with which the others are compared."""
    return next((x for x in records if x["method"] == "full" and x["layers"] == "few" and "decode" in x), None)


def lacks_table(method: str, config: Config) -> bool:
    """Whether a method reads a table that kvjax does not ship for a model."""
    try:
        bind(method, config)
    except KvjaxError as e:
        return "ships no table" in str(e)
    return False


if __name__ == "__main__":
    main()
