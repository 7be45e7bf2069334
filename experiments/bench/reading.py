"""What reading a prompt takes: `kvjax plan` beside compiled programs, for accelerators that this machine lacks.

python -m experiments.bench.reading [--models "llama-3.1-8b;1b"] [--methods "full;kivi:bits=2"] [--tokens 65536]
    [--batch 1] [--chunk 4096] [--prompt-memory host] [--topology h200]

No model is run. The programs that read a prompt are compiled for one layer of each kind of the model: the layer over
all tokens or over a chunk of them, the copies of a method that repeats the prompt, its measures, and the making of its
state. On more than one device heads, MLP and vocabulary are spread over all of them. The bytes of all layers are those
of the largest program beside what stands while it runs. `--methods all` takes an example of every method; tables
are random numbers. Results are lines of `experiments/results/bench.reading.jsonl`,
and rows that it has are not compiled again. `cross_compile.py` says what this needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from experiments.bench.aot import write_tables
from experiments.bench.cross_compile import lower_for, make_mesh, trace_for
from experiments.gpu.models import SHAPES
from kvjax import KvjaxError
from kvjax.cache.calibration import table_file
from kvjax.cache.protocol import num_layer_slots
from kvjax.core import memory
from kvjax.core.mesh import axes_of_layer_array, spec
from kvjax.engine.forward import Target, apply_layer, layer_calls
from kvjax.engine.layer_prompt import LayerCall, compress_prompt
from kvjax.engine.modes import ChunkedPrefill, FullPrefill, PromptReplay
from kvjax.engine.plan import bind
from kvjax.engine.prefill import empty_prompt, measure_prompt
from kvjax.models.config import Config
from kvjax.models.sharding import abstract_params, param_shardings
from kvjax.planning.device_bytes import Setting, count_device_bytes
from kvjax.planning.hardware import find_hardware
from kvjax.planning.models import PlannedModel, find_model
from kvjax.registry.loading import load_all

RESULTS = Path(__file__).parents[1] / "results" / "bench.reading.jsonl"
METHODS = (
    *("full", "int8", "kivi:bits=4,residual=32", "kivi:bits=2", "streaming_llm:recent=1020", "snapkv:budget=25%"),
    *("offload", "specache:bits=2", "kcache:n=128", "quest:budget=1024", "shadowkv", "double_sparsity"),
)
INSTRUCTION_TOKENS = 64  # of the ids before a repeated chunk, about as many as those of `kvjax.prefill`


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison."""

    model: str
    tokens: int
    method: str
    chunk: int | None = None
    prompt_memory: str = "device"
    batch: int = 1
    topology: str = "h200"

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Row:
        """The comparison that a line of the results is of; older lines lack the newer fields."""
        return cls(**{field.name: record[field.name] for field in dataclasses.fields(cls) if field.name in record})

    @property
    def num_devices(self) -> int:
        """All devices of the topology: 1 of h200, 8 of h200:8 and of v5e:2x4, over which heads are spread."""
        return math.prod(map(int, re.findall(r"\d+", self.topology.partition(":")[2])))


def find_planned(name: str, tokens: int) -> PlannedModel:
    """The model of a name of `kvjax plan`, or of the shapes that a GPU measures."""
    if name not in SHAPES:
        return find_model(name)
    return PlannedModel(name, dataclasses.replace(SHAPES[name], max_positions=max(tokens, 2**17)), "a shape")


def make_setting(row: Row) -> Setting:
    """What `kvjax plan` would count with."""
    model, hardware = find_planned(row.model, row.tokens), find_hardware(row.topology.partition(":")[0])
    mesh = 1, row.num_devices
    return Setting(model, hardware, mesh, chunk=row.chunk, prompt_memory=row.prompt_memory)


def place(x: Any, partition: PartitionSpec, mesh: Any) -> jax.ShapeDtypeStruct:
    """Describes an array that lies on a mesh."""
    sharding = NamedSharding(mesh, partition, memory_kind=memory.memory_kind(x))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def compile_programs(row: Row) -> dict[str, int]:
    """Compiles all programs of a row; returns the temporary bytes of each, the most over the kinds of layers."""
    config, dtype = find_planned(row.model, row.tokens).config, jnp.dtype("bfloat16")
    T, B = row.tokens, row.batch
    layers = bind(row.method, config)
    calls = layer_calls(layers, config, tuple(num_layer_slots(layer, (T,) * B, T) for layer in layers))
    needs = [call.layer.needs for call in calls]
    waits = any(n.global_budget or n.replay or n.paired_layer for n in needs)
    mesh = make_mesh(row.topology, (1, row.num_devices), ("data", "model")) if row.num_devices > 1 else None
    found: dict[str, int] = {}
    with trace_for(row.topology):
        for call in dict.fromkeys(calls):
            for name, program, arguments in iterate_programs(call, config, row, dtype, waits, mesh):
                compiled = lower_for(row.topology, program, arguments, (), mesh).compile()
                size = compiled.memory_analysis().temp_size_in_bytes
                found[name] = max(found.get(name, 0), size)
    return found


def iterate_programs(
    call: LayerCall, config: Config, row: Row, dtype: Any, waits: bool, mesh: Any
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields (name, jitted function, its arguments) of each program that reads a prompt in this layer."""
    T, B, target, index = (
        row.tokens,
        row.batch,
        Target(config, mesh),
        config.pattern.index(config.kinds.index(call.kind)),
    )
    # A config needs a layer with attention.
    few = config.with_layers(config.pattern[: max(index, config.attention_layers[0]) + 1])
    params = nn.unbox(abstract_params(few, dtype))
    if mesh is not None:
        params = jax.tree.map(lambda x, at: place(x, at.spec, mesh), params, param_shardings(few, mesh))
    params = params[f"layer_{index}"]
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)

    def inputs(num_tokens: int) -> dict[str, Any]:
        pos = jax.ShapeDtypeStruct((B, num_tokens), jnp.int32)
        angles = tuple(jax.eval_shape(rope.angles, pos) for rope in config.ropes)
        hidden = jax.ShapeDtypeStruct((B, num_tokens, config.width), dtype)
        return {"params": params, "hidden": hidden, "angles": angles, "lengths": lengths}

    def read_whole(params: Any, hidden: Any, angles: Any, lengths: Any) -> Any:
        return apply_layer(params, hidden, angles, FullPrefill(lengths, T, None), None, None, call=call, target=target)

    own_chunk = call.layer.needs.prompt_chunk
    if row.chunk is None and not own_chunk and not waits:
        yield "layer", jax.jit(read_whole, donate_argnames="hidden"), inputs(T)
        return
    heads = call.kind.attention  # type: ignore[union-attr]

    def place_state(tree: Any) -> Any:
        """Describes on which devices each array of a layer lies, as `kvjax.core.mesh.per_device` divides them."""
        if mesh is None:
            return tree
        return jax.tree.map(lambda x: place(x, spec(axes_of_layer_array(x.shape, B, heads.kv_heads), mesh), mesh), tree)

    prompt = jax.eval_shape(lambda: empty_prompt(batch=B, width=T, dtype=dtype, call=call, target=target))
    prompt = place_state(prompt)

    def read_chunk(params: Any, hidden: Any, angles: Any, lengths: Any, start: Any, state: Any) -> Any:
        mode = ChunkedPrefill(start, lengths)
        return apply_layer(params, hidden, angles, mode, state, None, call=call, target=target)

    start = {"start": jax.ShapeDtypeStruct((), jnp.int32)}
    arguments = inputs(row.chunk or own_chunk or T) | start | {"state": prompt}
    yield "layer", jax.jit(read_chunk, donate_argnames=("hidden", "state")), arguments
    if own_chunk or heads.recurrence is not None:  # the layer has made its state of the chunk
        return
    if call.layer.needs.output_projection:
        shape = (1, heads.kv_heads, heads.groups, heads.value_dim, config.width)
        prompt = prompt._replace(output_projection=place_state(jax.ShapeDtypeStruct(shape, dtype)))
    if (replay := call.layer.needs.replay) is not None:
        scores = jax.ShapeDtypeStruct(prompt.k.shape[:3], jnp.float32)
        prompt = prompt._replace(replay_scores=place_state(scores))
        width = INSTRUCTION_TOKENS + replay.lead_tokens + min(replay.chunk_tokens, T)

        def repeat(params: Any, hidden: Any, angles: Any, lengths: Any, start: Any, pos: Any, state: Any) -> Any:
            mode, own = PromptReplay(start, pos, lengths), dataclasses.replace(call, num_slots=0)
            return apply_layer(params, hidden, angles, mode, state, None, call=own, target=target)

        positions = {"pos": jax.ShapeDtypeStruct((B, width), jnp.int32)}
        arguments = inputs(width) | start | positions | {"state": prompt}
        yield "replay", jax.jit(repeat, donate_argnames=("hidden", "state")), arguments
    prompt_only = {"prompt": prompt, "lengths": lengths}
    if call.layer.needs.global_budget:
        own = dataclasses.replace(call, num_slots=0)
        measure = jax.jit(lambda prompt, lengths: measure_prompt(prompt, lengths, call=own, capacity=T, mesh=mesh))
        yield "measure", measure, prompt_only
        kept = prompt_only | {"num_kept": lengths}
        measured = place_state(jax.eval_shape(measure, **prompt_only))
        compress = jax.jit(
            lambda prompt, lengths, num_kept, measure: compress_prompt(
                call, prompt, lengths, T, mesh, num_kept, measure
            )
        )
        yield "compress", compress, kept | {"measure": measured}
        return
    yield "compress", jax.jit(lambda prompt, lengths: compress_prompt(call, prompt, lengths, T, mesh)), prompt_only


def add_up(row: Row, workspaces: dict[str, int]) -> int:
    """Adds what stands while each program runs; returns the most, beside the weights."""
    setting = make_setting(row)
    config, T, B = setting.model.config, row.tokens, row.batch
    layers = setting.trace_layers(kvjax.parse(row.method), T, B)
    needed = count_device_bytes(setting, kvjax.parse(row.method), T, B)
    angles = sum(4 * rope.dim for rope in config.ropes)

    def hidden(num_tokens: int) -> int:
        return B * num_tokens * (2 * config.width + angles)

    def exact(x: Any) -> int:
        a, n = x.kind.attention, x.needs
        if a.recurrence is not None:
            return x.device_bytes()["device"]
        queries = T if n.observed_queries is None else n.observed_queries
        numbers = a.kv_heads * T * (a.head_dim + a.value_dim) + a.heads * queries * a.head_dim
        return B * (2 * numbers + (4 * a.kv_heads * T if n.replay else 0)) // row.num_devices

    own, largest = [x for x in layers if x.has_cache], max(exact(x) for x in layers if x.has_cache)
    own_chunk = min((x.needs.prompt_chunk for x in own if x.needs.prompt_chunk), default=0)
    state = min(x.device_bytes()["device"] for x in own if x.kind.attention.recurrence is None)
    everything, is_replayed = sum(x.count * exact(x) for x in own), "replay" in workspaces
    waits = any(x.needs.global_budget or x.needs.replay or x.needs.paired_layer for x in layers)
    most = {}
    for name, size in workspaces.items():
        if own_chunk:
            held = needed.cache + hidden(row.chunk or own_chunk)
        elif row.chunk is None and not waits:
            held = needed.cache + hidden(T)
        elif not waits:
            held = needed.cache + hidden(T) + largest - (state if name == "layer" else 0)
        elif row.prompt_memory == "host":
            copies = hidden(T) if is_replayed else 0
            held = needed.cache + largest if name == "compress" else hidden(T) + copies + largest
        else:
            held = everything + {"layer": hidden(row.chunk or T), "replay": hidden(T), "compress": state}.get(name, 0)
        most[name] = held + size
    return max(most.values())


def compare(row: Row, workspaces: dict[str, int]) -> tuple[int, int]:
    """Returns the bytes beside the weights that are planned, and those of the compiled programs."""
    planned = count_device_bytes(make_setting(row), kvjax.parse(row.method), row.tokens, row.batch).prefill
    return planned, add_up(row, workspaces)


def with_tables(run: Callable[[Row], Any], row: Row, folder: Path) -> Any:
    """Calls a function, and once more with tables of random numbers where kvjax ships none for this model."""
    try:
        return run(row)
    except KvjaxError as e:
        if "ships no table" not in str(e):
            raise
    own = folder / row.model
    if not own.exists():
        write_tables(own, find_planned(row.model, row.tokens).config)
    with mock.patch.object(table_file, "SHIPPED_TABLES", own):
        return run(row)


def read_records() -> list[dict[str, Any]]:
    """All lines of the results."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> None:
    """Compiles what is missing and prints all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--methods", default=";".join(METHODS))
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--prompt-memory", default="device")
    parser.add_argument("--topology", default="h200")
    args = parser.parse_args()
    methods = [x.example for x in load_all().values()] if args.methods == "all" else args.methods.split(";")
    wanted = [
        Row(model, args.tokens, method, args.chunk, args.prompt_memory, args.batch, args.topology)
        for model in filter(None, args.models.split(";"))
        for method in filter(None, map(str.strip, methods))
    ]
    records = {Row.of_record(record): record for record in read_records()}
    with tempfile.TemporaryDirectory() as folder:
        for row in wanted or records:
            if row not in records:
                workspaces = with_tables(compile_programs, row, Path(folder))
                records[row] = dataclasses.asdict(row) | {"workspaces": workspaces, "jax": jax.__version__}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(records[row]) + "\n")
            planned, compiled = with_tables(lambda row: compare(row, records[row]["workspaces"]), row, Path(folder))
            print(
                f"{row.topology:8} {row.model:14} {row.batch} x {row.tokens:7,} {row.method:34} {row.chunk!s:5} "
                f"{row.prompt_memory:7} {planned / 1e9:7.2f} {compiled / 1e9:7.2f} {planned / compiled:5.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
