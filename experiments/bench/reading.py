"""What reading a prompt takes: `kvjax plan` beside the programs of a layer, compiled for a GPU that this machine lacks.

python -m experiments.bench.reading [--models "llama-3.1-8b;1b"] [--methods "full;kivi:bits=2"] [--tokens 65536]
    [--chunk 4096] [--prompt-memory host] [--topology h200]

No model is run. The programs that read a prompt are compiled for one layer of each kind of the model: the layer over
all tokens or over a chunk of them, the copies of a method that repeats the prompt, its measures, and the making of its
state. The bytes of all layers are those of the largest program beside what stands while it runs. Results are lines of
`experiments/results/bench.reading.h200.jsonl`, and rows that it has are not compiled again. `cross_compile.py` says
what this needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import kvjax
from experiments.bench.cross_compile import compile_for, trace_for
from experiments.gpu.models import SHAPES
from kvjax.cache.protocol import num_layer_slots
from kvjax.engine.forward import Target, apply_layer, layer_calls
from kvjax.engine.layer_prompt import LayerCall, compress_prompt
from kvjax.engine.modes import ChunkedPrefill, FullPrefill, PromptReplay
from kvjax.engine.plan import bind
from kvjax.engine.prefill import empty_prompt, measure_prompt
from kvjax.models.config import Config
from kvjax.models.sharding import abstract_params
from kvjax.planning.device_bytes import Setting, count_device_bytes
from kvjax.planning.hardware import find_hardware
from kvjax.planning.models import PlannedModel, find_model

RESULTS = Path(__file__).parents[1] / "results" / "bench.reading.h200.jsonl"
METHODS = (
    *("full", "int8", "kivi:bits=4,residual=32", "kivi:bits=2", "streaming_llm:recent=1020", "snapkv:budget=25%"),
    *("offload", "specache:bits=2", "kcache:n=128", "quest:budget=1024", "shadowkv", "double_sparsity"),
)
INSTRUCTION_TOKENS = 64  # of the ids before a repeated chunk, about as many as those of `kvjax.prefill`
KEYS = ("model", "tokens", "method", "chunk", "prompt_memory")


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison."""

    model: str
    tokens: int
    method: str
    chunk: int | None = None
    prompt_memory: str = "device"


def find_planned(name: str, tokens: int) -> PlannedModel:
    """The model of a name of `kvjax plan`, or of the shapes that a GPU measures."""
    if name not in SHAPES:
        return find_model(name)
    return PlannedModel(name, dataclasses.replace(SHAPES[name], max_positions=max(tokens, 2**17)), "a shape")


def make_setting(row: Row) -> Setting:
    """What `kvjax plan` would count with."""
    model = find_planned(row.model, row.tokens)
    return Setting(model, find_hardware("h200"), chunk=row.chunk, prompt_memory=row.prompt_memory)


def compile_programs(row: Row, topology: str) -> dict[str, int]:
    """Compiles all programs of a row; returns the temporary bytes of each, the most over the kinds of layers."""
    config, dtype, T = find_planned(row.model, row.tokens).config, jnp.dtype("bfloat16"), row.tokens
    layers = bind(row.method, config)
    calls = layer_calls(layers, config, tuple(num_layer_slots(layer, (T,), T) for layer in layers))
    needs = [call.layer.needs for call in calls]
    waits = any(n.global_budget or n.replay or n.paired_layer for n in needs)
    found: dict[str, int] = {}
    for call in dict.fromkeys(calls):
        for name, program, arguments in iterate_programs(call, config, row, dtype, waits):
            compiled = compile_for(topology, program, arguments, ())
            size = compiled.memory_analysis().temp_size_in_bytes
            found[name] = max(found.get(name, 0), size)
    return found


def iterate_programs(
    call: LayerCall, config: Config, row: Row, dtype: Any, waits: bool
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields (name, jitted function, its arguments) of each program that reads a prompt in this layer."""
    T, target, index = row.tokens, Target(config), config.pattern.index(config.kinds.index(call.kind))
    params = nn.unbox(abstract_params(config.with_layers(config.pattern[: index + 1]), dtype))[f"layer_{index}"]
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)

    def inputs(num_tokens: int) -> dict[str, Any]:
        pos = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
        angles = tuple(jax.eval_shape(rope.angles, pos) for rope in config.ropes)
        hidden = jax.ShapeDtypeStruct((1, num_tokens, config.width), dtype)
        return {"params": params, "hidden": hidden, "angles": angles, "lengths": lengths}

    def read_whole(params: Any, hidden: Any, angles: Any, lengths: Any) -> Any:
        return apply_layer(params, hidden, angles, FullPrefill(lengths, T, None), None, None, call=call, target=target)

    if row.chunk is None and not waits:
        yield "layer", jax.jit(read_whole, donate_argnames="hidden"), inputs(T)
        return
    prompt = jax.eval_shape(lambda: empty_prompt(batch=1, width=T, dtype=dtype, call=call, target=target))

    def read_chunk(params: Any, hidden: Any, angles: Any, lengths: Any, start: Any, state: Any) -> Any:
        mode = ChunkedPrefill(start, lengths)
        return apply_layer(params, hidden, angles, mode, state, None, call=call, target=target)

    start = {"start": jax.ShapeDtypeStruct((), jnp.int32)}
    arguments = inputs(row.chunk or T) | start | {"state": prompt}
    yield "layer", jax.jit(read_chunk, donate_argnames=("hidden", "state")), arguments
    heads = call.kind.attention  # type: ignore[union-attr]
    if call.layer.needs.output_projection:
        shape = (1, heads.kv_heads, heads.groups, heads.value_dim, config.width)
        prompt = prompt._replace(output_projection=jax.ShapeDtypeStruct(shape, dtype))
    if (replay := call.layer.needs.replay) is not None:
        scores = jax.ShapeDtypeStruct(prompt.k.shape[:3], jnp.float32)
        prompt = prompt._replace(replay_scores=scores)
        width = INSTRUCTION_TOKENS + replay.lead_tokens + min(replay.chunk_tokens, T)

        def repeat(params: Any, hidden: Any, angles: Any, lengths: Any, start: Any, pos: Any, state: Any) -> Any:
            mode, own = PromptReplay(start, pos, lengths), dataclasses.replace(call, num_slots=0)
            return apply_layer(params, hidden, angles, mode, state, None, call=own, target=target)

        positions = {"pos": jax.ShapeDtypeStruct((1, width), jnp.int32)}
        arguments = inputs(width) | start | positions | {"state": prompt}
        yield "replay", jax.jit(repeat, donate_argnames=("hidden", "state")), arguments
    prompt_only = {"prompt": prompt, "lengths": lengths}
    if call.layer.needs.global_budget:
        own = dataclasses.replace(call, num_slots=0)
        measure = jax.jit(lambda prompt, lengths: measure_prompt(prompt, lengths, call=own, capacity=T, mesh=None))
        yield "measure", measure, prompt_only
        kept = prompt_only | {"num_kept": lengths}
        measured = jax.eval_shape(measure, **prompt_only)
        compress = jax.jit(
            lambda prompt, lengths, num_kept, measure: compress_prompt(
                call, prompt, lengths, T, None, num_kept, measure
            )
        )
        yield "compress", compress, kept | {"measure": measured}
        return
    yield "compress", jax.jit(lambda prompt, lengths: compress_prompt(call, prompt, lengths, T)), prompt_only


def add_up(row: Row, workspaces: dict[str, int]) -> int:
    """Adds what stands while each program runs; returns the most, beside the weights."""
    setting = make_setting(row)
    config, T = setting.model.config, row.tokens
    layers = setting.trace_layers(kvjax.parse(row.method), T, 1)
    needed = count_device_bytes(setting, kvjax.parse(row.method), T, 1)
    angles = sum(4 * rope.dim for rope in config.ropes)

    def hidden(num_tokens: int) -> int:
        return num_tokens * (2 * config.width + angles)

    def exact(x: Any) -> int:
        a, n = x.kind.attention, x.needs
        queries = T if n.observed_queries is None else n.observed_queries
        numbers = a.kv_heads * T * (a.head_dim + a.value_dim) + a.heads * queries * a.head_dim
        return 2 * numbers + (4 * a.kv_heads * T if n.replay else 0)

    own, largest = [x for x in layers if x.has_cache], max(exact(x) for x in layers if x.has_cache)
    state = min(x.device_bytes()["device"] for x in own)
    everything, is_replayed = sum(x.count * exact(x) for x in own), "replay" in workspaces
    waits = any(x.needs.global_budget or x.needs.replay or x.needs.paired_layer for x in layers)
    most = {}
    for name, size in workspaces.items():
        if row.chunk is None and not waits:
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


def compare(record: dict[str, Any]) -> tuple[int, int]:
    """Returns the bytes beside the weights that are planned, and those of the compiled programs."""
    row = Row(*(record[key] for key in KEYS))
    planned = count_device_bytes(make_setting(row), kvjax.parse(row.method), row.tokens, 1).prefill
    return planned, add_up(row, record["workspaces"])


def read_records() -> list[dict[str, Any]]:
    """All lines of the results."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> None:
    """Compiles what is missing and prints all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--methods", default=";".join(METHODS))
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--prompt-memory", default="device")
    parser.add_argument("--topology", default="h200")
    args = parser.parse_args()
    known = {tuple(record[key] for key in KEYS) for record in read_records()}
    for model in filter(None, args.models.split(";")):
        for method in filter(None, args.methods.split(";")):
            row = Row(model, args.tokens, method.strip(), args.chunk, args.prompt_memory)
            if dataclasses.astuple(row) in known:
                continue
            with trace_for(args.topology):
                workspaces = compile_programs(row, args.topology)
            record = dataclasses.asdict(row) | {"workspaces": workspaces, "jax": jax.__version__}
            with RESULTS.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(row, workspaces, flush=True)
    for record in read_records():
        planned, compiled = compare(record)
        print(
            f"{record['model']:14} {record['tokens']:7,} {record['method']:28} {record['chunk']!s:5} "
            f"{record['prompt_memory']:7} {planned / 1e9:7.2f} {compiled / 1e9:7.2f} {planned / compiled:5.3f}"
        )


if __name__ == "__main__":
    main()
