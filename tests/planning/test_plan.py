"""The planner: bytes are those of real arrays on real meshes, limits hold, and no step is faster than its bytes."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from experiments.bench import reading
from kvjax import cli
from kvjax.cache.protocol import num_layer_slots
from kvjax.core import memory
from kvjax.core.rope import Rope
from kvjax.engine.forward import Target, apply_layer, layer_calls
from kvjax.engine.modes import FullPrefill
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.models import Config
from kvjax.models.kinds import AttentionKind, Experts, GatedDelta, LayerKind, MlpKind
from kvjax.models.model import Model
from kvjax.models.sharding import abstract_params, param_shardings
from kvjax.planning.device_bytes import RESERVED, Setting, count_device_bytes
from kvjax.planning.hardware import CATALOGUE, Hardware, find_hardware
from kvjax.planning.live_bytes import count_live_bytes
from kvjax.planning.models import PlannedModel, find_model
from kvjax.planning.plan import PlanRow, find_largest_context, plan
from kvjax.planning.plan_command import format_parameters, write_notes
from kvjax.planning.traced_layers import MAX_TRACED_LAYERS, trace_layers

CONFIG = kvjax.Config.llama(vocab_size=96, width=32, layers=3, heads=8, kv_heads=4, head_dim=8, mlp_width=48)
TOY = PlannedModel("toy", CONFIG, "of the tests")
TOKENS, ROOM = 60, 4
METHODS = (
    "full",
    "int8",
    "kivi:bits=4,group=8,residual=16",
    "snapkv:budget=24,window=8",
    "kcache:n=8",
    "quest:budget=16,page=8",
)
DEVICE = Hardware("small", 2 * 10**7, 1e9, 1e8, 10**6, "of the tests")


@functools.cache
def toy_params() -> dict:
    return kvjax.random_model(CONFIG).params


def device_bytes(tree: object) -> dict[str, int]:
    """Bytes of the first device's shards, by memory kind."""
    total = dict.fromkeys(memory.MEMORY_KINDS, 0)
    for x in jax.tree.leaves(memory.without_guards(tree)):
        (shard,) = (s for s in x.addressable_shards if s.device == jax.devices()[0])
        total[memory.memory_kind(x)] += shard.data.size * x.dtype.itemsize
    return total


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2), (1, 4)])
def test_bytes_are_those_of_the_shards_on_a_device(mesh):
    devices = Mesh(np.array(jax.devices()[: mesh[0] * mesh[1]]).reshape(mesh), ("data", "model"))
    params = jax.device_put(toy_params(), param_shardings(CONFIG, devices))
    model = Model(CONFIG, params, mesh=devices)
    ids = [list(range(1, TOKENS + 1))] * 4
    for method in METHODS:
        _, cache = kvjax.prefill(model, ids, method, capacity=TOKENS + ROOM)
        real, weights = device_bytes(cache), device_bytes(params)["device"]
        setting = Setting(TOY, DEVICE, mesh, "float32", ROOM, None, RESERVED)
        need = count_device_bytes(setting, kvjax.parse(method), TOKENS, 4)
        assert (need.weights, need.cache, need.host) == (weights, real["device"], real["pinned_host"]), method
        assert (need.host > 0) == method.startswith("kcache")


def measure_reading(method: str, config: Config, tokens: int) -> tuple[int, int]:
    """Bytes of reading a prompt in a model's first layer: planned, and as this CPU's compiler reports them."""
    setting = Setting(PlannedModel("x", config, "tests"), DEVICE, (1, 1), "float32", 0, None, 0.0)
    planned = count_device_bytes(setting, kvjax.parse(method), tokens, 1).prefill
    params = nn.unbox(abstract_params(dataclasses.replace(config, vocab_size=8), jnp.float32))
    layers = bind(method, config)
    slots = tuple(num_layer_slots(layer, (tokens,), tokens) for layer in layers)
    call, *_ = layer_calls(layers, config, slots)
    hidden = jax.ShapeDtypeStruct((1, tokens, config.width), jnp.float32)
    angles = ((jax.ShapeDtypeStruct((1, tokens, config.ropes[0].dim // 2), jnp.float32),) * 2,)
    lengths: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    mode = FullPrefill(lengths, tokens, None)
    layer = jax.jit(apply_layer, static_argnames=("call", "target"), donate_argnames="hidden")
    arguments = (params["layer_0"], hidden, angles, mode, None, None)
    report: Any = layer.lower(*arguments, call=call, target=Target(config)).compile().memory_analysis()
    angle_bytes = sum(x.size * 4 for x in angles[0])
    return planned, report.temp_size_in_bytes + report.output_size_in_bytes + angle_bytes


@pytest.mark.parametrize("method", ["full", "int8", "kivi:bits=2", "snapkv:budget=25%", "streaming_llm:recent=252"])
def test_reading_a_prompt_takes_what_the_compiler_reports_for_a_layer(method):
    """Temporary bytes and results of a compiled layer that is given its hidden vectors.

    The plan is for GPUs, whose compiler makes a layer's state before its MLP runs. This CPU's runs the MLP first,
    beside the exact keys and values, where a method makes its state of all of them.
    """
    config, tokens = kvjax.Config.llama(96, 256, 1, heads=4, kv_heads=4, head_dim=64, mlp_width=1024), 4096
    planned, real = measure_reading(method, config, tokens)
    keys_and_values = 2 * 4 * tokens * 256
    waiting = 0 if method in ("full", "streaming_llm:recent=252") else keys_and_values
    assert 1 <= (planned + waiting) / real and planned / real < 1.15


def test_reading_a_prompt_takes_what_the_compiler_reports_for_a_recurrence():
    recurrence = AttentionKind(4, 2, 64, None, value_dim=64, recurrence=GatedDelta())
    kinds = tuple(LayerKind(a, MlpKind(32)) for a in (recurrence, AttentionKind(4, 2, 64, Rope(32))))
    planned, real = measure_reading("full", Config(96, 256, kinds, (0, 1)), 4096)
    keys_and_values = 2 * 4 * 4096 * 2 * 64  # of the other layer
    assert 1 <= planned / (real + keys_and_values) < 1.15


# Tables of Llama-3.1-8B's shape, which kvjax does not ship, take minutes to make.
READ_TABLES = ("duo_attention", "headkv", "locret", "matryoshka", "merged_heads", "oscar", "razor_attention")
COMPILED = {
    row: record["workspaces"]
    for record in reading.read_records()
    if (row := reading.Row.of_record(record)).method.split(":")[0] not in READ_TABLES
}
# XLA may compute where it is read what the plan counts as written, most of all in the clustering of a2ats.
MOST = dict.fromkeys(reading.METHODS, 1.15) | {"offload": 1.2, "a2ats:words=128": 2.6}
# What merging writes is counted too low, by less than the fraction of a device that every plan leaves free. On meshes
# two methods are 1% below for eight H200, and shadowkv 6% for eight v5e; why was not found.
LEAST = {"snapkv:budget=256 + merging": 0.98, "mikv": 0.99, "ems:budget=512": 0.99}
LEAST_ON_MESHES = {"kivi:bits=2": 0.98, "snapkv:budget=25%": 0.98, "shadowkv": 0.93}


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: " ".join(map(str, dataclasses.astuple(row))))
def test_reading_a_prompt_is_planned_as_programs_for_a_gpu_take_it(row):
    """Programs that `experiments.bench.reading` compiled; but for the named ones the plan is not below them."""
    planned, compiled = reading.compare(row, COMPILED[row])
    least = (LEAST if row.num_devices == 1 else LEAST_ON_MESHES).get(row.method, 1.0)
    assert least <= planned / compiled < MOST.get(row.method, 1.5)


def test_live_bytes_are_those_that_a_program_has_to_write():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def live(f: Any, num_arguments: int = 0) -> int:
        return count_live_bytes(jax.make_jaxpr(f)(x).jaxpr, num_arguments) // x.dtype.itemsize // 64**2

    assert live(lambda x: jnp.where(x > 0, 2 * x, 0) + 1) == 0  # computed where it is read
    assert live(lambda x: x @ x) == 0  # a result
    assert live(lambda x: (x @ x) @ x) == 1
    assert live(lambda x: (2 * x) @ x) == 1  # an operand is written
    assert live(lambda x: x + 1, 1) == 1
    assert live(lambda x: jnp.pad(x, 0).reshape(4096), 1) == 0  # the argument is the result
    assert live(lambda x: jnp.sort(x) + jnp.sort(-x)) == 2  # one of three is replaced by the result
    assert live(lambda x: (jnp.sort(x) + jnp.sort(-x)) @ x) == 3  # both operands and their sum


def test_exact_prompts_are_held_of_one_layer_or_of_all_on_device_or_host():
    llama = find_model("llama-3.1-8b")
    need = functools.partial(count_device_bytes, context=65_536, batch=1)
    exact = 2 * 32 * 8 * 128 * 65_536 * 2  # 8.6 GB
    at_once = Setting(llama, find_hardware("h100"), (1, 1), "bfloat16", 0, None, RESERVED)
    chunked = dataclasses.replace(at_once, chunk=1024)
    through_host = dataclasses.replace(at_once, prompt_memory="host")
    snapkv, cake = kvjax.parse("snapkv:budget=1024"), kvjax.parse("cake:budget=1024")
    assert need(at_once, cake).prefill > need(chunked, cake).prefill > exact
    assert need(chunked, snapkv).prefill < need(at_once, snapkv).prefill < exact / 2
    assert need(through_host, cake).prefill < exact / 3
    assert exact <= need(through_host, cake).host < 1.1 * exact
    assert need(through_host, snapkv) == need(at_once, snapkv)


def fits(p: PlanRow) -> bool:
    assert p.device_bytes is not None
    return p.fits


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
@pytest.mark.parametrize("method", ["full", "kcache:n=8", "snapkv:budget=24,window=8"])
def test_the_largest_batch_and_context_fit_and_more_do_not(method, mesh):
    model = PlannedModel("toy", dataclasses.replace(CONFIG, max_positions=16_384), "of the tests")
    make = functools.partial(plan, model, [method], mesh=mesh, dtype="float32", room=8)
    small = dataclasses.replace(DEVICE, host_bytes=300_000)
    (p,) = make([256], batch=mesh[0], hardware=small)
    assert p.largest_batch is not None and p.largest_context is not None
    assert p.largest_batch > 0 and p.largest_context > 256
    assert fits(make([256], batch=p.largest_batch, hardware=small)[0])
    assert not fits(make([256], batch=p.largest_batch + mesh[0], hardware=small)[0])
    assert fits(make([p.largest_context], batch=mesh[0], hardware=small)[0])
    assert not fits(make([p.largest_context + 64], batch=mesh[0], hardware=small)[0])
    limits = dict(p.largest_batches or {})
    assert p.batch_limit is not None and limits[p.batch_limit] == p.largest_batch


def test_the_bound_is_the_bytes_of_a_step_over_the_bandwidth_of_their_path():
    """That of `full`, written down again; a mesh divides all but the positions."""
    h = CATALOGUE["h100"]
    tokens, weights = 32_768, 2 * (8_030_261_248 - 128_255 * 4096)  # one row of the embedding is read
    keys_and_values = 2 * 32 * 8 * 128 * tokens * 2

    def bound(method: str, **options: Any) -> float:
        (row,) = plan("llama-3.1-8b", [method], [tokens], limits=False, **options)
        assert row.max_tokens_per_second is not None
        return row.max_tokens_per_second

    assert bound("full") == pytest.approx(h.memory_bandwidth / (weights + keys_and_values), rel=0.005)
    assert bound("full", mesh=(1, 4)) == pytest.approx(4 * bound("full"), rel=0.01)
    assert bound("offload") == pytest.approx(h.host_link / keys_and_values, rel=0.005)
    twice = dataclasses.replace(h, memory_bandwidth=2 * h.memory_bandwidth)
    assert bound("full", hardware=twice) == pytest.approx(2 * bound("full"))
    assert bound("full", batch=8) == pytest.approx(8 * h.memory_bandwidth / (weights + 8 * keys_and_values), rel=0.005)


def test_experts_that_every_token_draws_alike_are_the_least_that_is_read():
    model = find_model("gpt-oss-20b")
    rows = [plan(model, ["full"], [1024], batch=n, hardware="b200", limits=False)[0] for n in (1, 4)]
    one, four = (row.max_tokens_per_second or 0 for row in rows)
    assert 0.99 < one / (8e12 / (2 * model.active_parameters)) < 1
    assert 3.9 < four / one < 4


def test_bad_input_is_refused_before_anything_is_traced():
    with pytest.raises(
        KvjaxError, match=r"context 200,000 exceeds the 131,072 positions of llama-3.1-8b.*RoPE scaling"
    ):
        plan("llama-3.1-8b", ["full"], [200_000])
    with pytest.raises(KvjaxError, match=r"K of size 8 does not divide over the 3 devices.*kv_heads of llama-3.1-8b"):
        plan("llama-3.1-8b", ["full"], [1024], mesh=(1, 3))
    with pytest.raises(KvjaxError, match=r"B of size 3 does not divide.*multiple of 2"):
        plan("llama-3.1-8b", ["full"], [1024], mesh=(2, 1), batch=3)
    with pytest.raises(KvjaxError, match="unknown hardware"):
        plan("llama-3.1-8b", ["full"], [1024], hardware="h1000")
    (refused,) = plan("gpt-oss-20b", ["kivi:group=96,residual=96"], [1024])
    assert refused.refusal and not refused.fits and refused.device_bytes is None
    # As kvjax.prefill refuses it.
    (refused,) = plan("testbed", ["xattention:tile=128"], [1024], chunk=100)
    assert refused.refusal is not None and "chunks of 100 tokens would cut through them" in refused.refusal


def test_the_command_prints_a_table_json_and_a_plot(tmp_path, capsys):
    picture = tmp_path / "speed.png"
    command = ["plan", "smollm2", "--method", "full; kcache:n=64", "--context", "1k,4096", "--hardware", "l4"]
    assert cli.main([*command, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "smollm2 on l4: 1 sequence of 1,024 tokens" in out and "1 sequence of 4,096 tokens" in out
    assert "at most" in out and "NVIDIA L4 data sheet" in out and picture.stat().st_size > 10_000
    assert cli.main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(p["method"], p["context"]) for p in document["plans"]] == [
        ("full", 1024),
        ("full", 4096),
        ("kcache:n=64", 1024),
        ("kcache:n=64", 4096),
    ]
    assert document["plans"][0]["fits"] and document["hardware"]["name"] == "l4"
    for wrong, message in (
        (["--mesh", "4"], "'4' is no mesh: write batch x heads"),
        (["--context", "soon"], "--context 'soon' is no number of tokens"),
        (["--plot", str(tmp_path)], "must be a file whose name ends in .png"),
        (["--hardware", "cray"], "unknown hardware 'cray'"),
        (["--bandwidth", "0"], "--bandwidth must be"),
        (["--method", "nosuch"], "nosuch"),
    ):
        assert cli.main([*command, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        "--method full",
        "--method full --chunk 256",
        "--method full;int8 --batch 2 --context 1k,2k,1k",
        "--method full;int8 --batch 4 --mesh 2x1",
        "--method offload --host-gb 0 --memory-gb 40",
        "--method snapkv:budget=3000,window=8 --room 64",
        "--method turned_queries:budget=25% --memory-gb 0.5",
        "--method full --memory-gb 0.01 --bandwidth 900",
    ],
)
def test_where_no_method_fits_the_nearest_is_named_and_its_remedies_work(options, tmp_path, capsys):
    command = ["plan", "smollm2", "--context", "4k", "--hardware", "l4", "--memory-gb", "0.29", *options.split()]
    picture = tmp_path / "speed.svg"

    def plans(*more: str) -> dict[str, Any]:
        assert cli.main([*command, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    document = plans()
    contexts = list(dict.fromkeys(p["context"] for p in document["plans"]))
    assert not any(p["fits"] for p in document["plans"]) and len(document["plans"]) % len(contexts) == 0
    for note, context in zip(document["notes"], contexts, strict=False):
        own = {p["method"]: p for p in document["plans"] if p["context"] == context}
        assert note.startswith(f"{context:,} tokens: 0 of {len(own)} method")
        nearest = own[re.search(r"the nearest is (.*?), [\d.,]+ (?:GB|MB|bytes) over", note)[1]]  # type: ignore[index]
        assert ("up to" in note) == bool(nearest["largest_context"])
        flags = "context|batch|chunk|mesh|prompt-memory|weights|memory-gb|host-gb"
        remedies = re.findall(rf"(?:--(?:{flags}) [\w.]*\w ?)+", note)
        assert any("-gb" in remedy for remedy in remedies)
        for remedy in remedies:
            at = [] if "--context" in remedy else ["--context", str(context)]
            followed = plans(*at, *remedy.split(), "--method", nearest["method"])
            assert all(p["fits"] for p in followed["plans"]), remedy
    assert cli.main([*command, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert picture.stat().st_size > 5_000 and out.count("smollm2 on ") == len(contexts) and " over" in out


def test_a_plan_of_refused_methods_alone_says_why(tmp_path, capsys):
    command = ["plan", "gpt-oss-20b", "--method", "kivi:group=96,residual=96", "--context", "1k"]
    for more in ([], ["--json"], ["--plot", str(tmp_path / "speed.png")], ["--memory-gb", "1"]):
        assert cli.main([*command, *more]) == 0
        out = capsys.readouterr().out
        assert "0 of 1 method fit; all are refused, for the reasons below" in out and "is refused: " in out


def test_the_largest_context_is_one_that_the_method_serves():
    """Below 1,024 tokens the steps are finer."""
    model = PlannedModel("toy", dataclasses.replace(CONFIG, max_positions=65_536), "of the tests")
    setting = Setting(model, DEVICE, (1, 1), "float32", 0, None, 0.0)
    full, snapkv = kvjax.parse("full"), kvjax.parse("snapkv:budget=900,window=800")
    bytes_at_700 = count_device_bytes(setting, full, 700, 1).peak
    tight = dataclasses.replace(setting, hardware=dataclasses.replace(DEVICE, memory_bytes=bytes_at_700))
    found = find_largest_context(tight, full, 2048, 1)
    assert (
        count_device_bytes(tight, full, found, 1).peak
        <= bytes_at_700
        < count_device_bytes(tight, full, found + 64, 1).peak
    )
    served = find_largest_context(tight, snapkv, 2048, 1)
    assert served > 0 and count_device_bytes(tight, snapkv, served, 1).peak <= bytes_at_700


def test_layers_on_a_line_are_planned_as_if_all_were_traced():
    """PyramidKV gives each of twelve layers slots of its own; bytes and reads are those that are counted one by one."""
    config = dataclasses.replace(CONFIG.with_layers((0,) * 12), max_positions=2048)
    for method in ("pyramidkv:budget=96,window=8", "pyramidkv:budget=96,window=8 + int8"):
        layers = trace_layers(kvjax.parse(method), config, 512, 0, 2, "float32", (1, 1))
        assert len(layers) > MAX_TRACED_LAYERS
        planned = kvjax.planned_bytes(method, config, 512, batch=2, dtype="float32").total
        assert sum(x.count * x.total_bytes()["device"] for x in layers) + 4 * 2 == planned["device"]
        reads = functools.reduce(operator.add, (x.step * x.count for x in layers))
        assert reads == kvjax.step_bytes(method, config, 512, batch=2, dtype="float32")


@pytest.mark.parametrize("experts", [Experts(8, 2), Experts(8, 3), Experts(8, 1, shared_width=2048)])
def test_reading_a_prompt_takes_what_the_compiler_reports_for_a_layer_of_experts(experts):
    kind = LayerKind(AttentionKind(4, 2, 16, Rope(16)), MlpKind(512, experts=experts))
    planned, real = measure_reading("full", Config(64, 64, (kind,), (0,), max_positions=4096), 1024)
    assert 1 <= planned / real < 1.15


def test_small_figures_are_not_printed_as_zero():
    assert [format_parameters(n) for n in (1_190_000, 8_030_000_000)] == ["1.19M", "8.03B"]
    kind = LayerKind(AttentionKind(4, 2, 16, Rope(16)), MlpKind(64, experts=Experts(8, 2)))
    model = PlannedModel("x", Config(96, 64, (kind,), (0,)), "tests")
    options = {"hardware": DEVICE, "mesh": (1, 1), "dtype": "float32", "chunk": None, "weights": None}
    assert f"{model.active_parameters / 1e6:.2f}M of them for each token" in write_notes(model, (), options)[0]
