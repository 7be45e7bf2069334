"""Bytes that a decode step reads: by hand, against the traced step of every method, and against XLA's count."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kvjax
from experiments.bench.cross_compile import count_bytes
from kvjax import KvjaxError, StepBytes
from kvjax import method_api as kv
from kvjax.engine.forward import layer_calls
from kvjax.engine.plan import bind
from kvjax.generation.memory_plan import abstract_state
from kvjax.registry.loading import load_all
from kvjax.registry.registration import REGISTRY, is_builtin
from tests.contract.test_conformance import LastTokens
from tests.helpers.state_reads import count_reads

LLAMA = kvjax.Config.llama(512, 4096, 32, heads=32, kv_heads=8, head_dim=128, mlp_width=448, max_positions=131_072)
SMALL = kvjax.Config.llama(512, 96, 3, heads=6, kv_heads=2, head_dim=16, mlp_width=448, max_positions=8192)
HEADS = SMALL.kind(0).attention
NAMES = sorted(name for name, entry in load_all().items() if is_builtin(entry.make))


@functools.cache
def config_of_testbed() -> kvjax.Config:
    return kvjax.load("testbed").config


def by_hand(method: str, c: kvjax.Config, S: int, batch: int) -> StepBytes:
    """Bytes read at S tokens in bfloat16, from what each method's paper says that it reads."""
    a = c.kind(0).attention
    B, K, G, H, L = batch, a.kv_heads, a.groups, a.head_dim, c.layers
    side = B * K * S * H * 2  # the keys of a layer, or the values
    own = B * (4 * S + 4)  # positions, and the number of slots in use
    if method == "full":
        return StepBytes(device=L * (2 * side + own))
    if method == "offload":
        return StepBytes(device=L * own, link=L * 2 * side)
    if method == "int8":
        return StepBytes(device=L * (2 * B * K * S * (H + 4) + own))
    # KIVI codes whole residuals, in whole words; a value stays exact one step longer than a key.
    coded = S // 64 * 64
    codes = B * K * coded * H
    group_codes = 2 * (codes * 2 // 8 + 2 * codes // 16 * 2 + 4 * B) + B * K * (64 + 65) * H * 2
    if method == "kivi:bits=2,group=16,residual=64":
        return StepBytes(device=L * (group_codes + own))
    if method == "quest:budget=256,page=16,device_layers=2":
        # Boxes of two vectors for each page of 16; each query head reads 15 pages that it finds, and the newest one.
        boxes = 2 * B * K * -(-S // 16) * H * 2
        found = 2 * B * K * G * 256 * H * 2
        return StepBytes(device=2 * (2 * side + own) + (L - 2) * (boxes + found + own))
    if method == "kcache:n=32,device_layers=1":
        return StepBytes(device=L * (side + own) + side, link=(L - 1) * B * K * G * 32 * H * 2)
    if method == "specache:bits=2,group=16,topk=48,residual=64":
        fetched = 2 * B * K * 48 * H * 2
        return StepBytes(device=L * (group_codes + fetched + B * K * 48 * 4 + own), link=L * fetched)
    raise NotImplementedError(method)


@pytest.mark.parametrize(("config", "context", "batch"), [(LLAMA, 32_768, 1), (SMALL, 2_048, 3)], ids=("8B", "small"))
@pytest.mark.parametrize(
    "method",
    [
        "full",
        "offload",
        "int8",
        "kivi:bits=2,group=16,residual=64",
        "quest:budget=256,page=16,device_layers=2",
        "kcache:n=32,device_layers=1",
        "specache:bits=2,group=16,topk=48,residual=64",
    ],
)
def test_the_bytes_read_are_those_counted_by_hand(method, config, context, batch):
    counted = kvjax.step_bytes(method, config, context, batch=batch, dtype="bfloat16")
    assert dataclasses.replace(counted, device_written=0, host_written=0) == by_hand(method, config, context, batch)


def test_a_step_writes_one_token():
    a = LLAMA.kind(0).attention
    token = LLAMA.layers * a.kv_heads * a.head_dim * 2
    full, kcache = (kvjax.step_bytes(m, LLAMA, 4096, dtype="bfloat16") for m in ("full", "kcache:device_layers=0"))
    assert (full.device_written, full.host_written) == (2 * token, 0)
    assert (kcache.device_written, kcache.host_written) == (token, token)


MORE_THAN_FULL = {
    "minicache": "each head has positions of its own, and both layers of a pair read the shared directions"
}
"""Methods that read more bytes than `full` at 4,096 tokens of the testbed's small heads, and why."""


@pytest.mark.parametrize("name", NAMES)
def test_a_method_reads_what_its_traced_step_reads(name):
    example, total = REGISTRY[name].example, StepBytes()
    for index, (said, found) in enumerate(count_reads(kvjax.parse(example), config_of_testbed(), 4096, "bfloat16")):
        # Counters of a few bytes are read by an append alone, and an append that is rarely due counts nothing.
        assert 0 <= said.device - found.device <= 16, (index, said, found)
        assert (said.link, said.host) == (found.link, found.host), (index, said, found)
        total += said
    # Both as planned, which is an upper bound where layers divide a budget by the prompt.
    short, long = (kvjax.step_bytes(example, config_of_testbed(), n, dtype="bfloat16") for n in (2048, 4096))
    assert short.device <= long.device and short.link <= long.link and short.host <= long.host
    full = kvjax.step_bytes("full", config_of_testbed(), 4096, capacity=4112, dtype="bfloat16").device
    assert (total.device + total.link + total.host > full) == (name in MORE_THAN_FULL), (total, full)


COMPOSITIONS = (
    "quest:budget=256 + offload;quest:budget=64,per=head + kivi:bits=2;quest:budget=256 + rotatekv;"
    "quest:budget=64 + merged_heads;quest:budget=64 + cskv;kcache + int4;retrieval_attention + int8;"
    "retrieval_attention + rotatekv;specache:speculative=false;shadowkv:rank=16 + int8;minicache + int4;"
    "snapkv:budget=256 + adakv + int4;infllm:local=512 + int8;tidal_decode:topk=64,dense=1,reselect=2 + offload;"
    "kcache:granularity=kv;snapkv:budget=512 + quest:budget=128"
)


@pytest.mark.parametrize("method", COMPOSITIONS.split(";"))
def test_composed_methods_read_what_their_traced_steps_read(method):
    for index, (said, found) in enumerate(count_reads(kvjax.parse(method), config_of_testbed(), 3000, "float32")):
        assert 0 <= said.device - found.device <= 16, (index, said, found)
        assert (said.link, said.host) == (found.link, found.host), (index, said, found)


@dataclasses.dataclass(frozen=True)
class ReaderWithState(kv.Full):
    """A user's reader that says nothing about bytes."""

    def init_state(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> Any:
        return jnp.zeros((*block.k.shape[:2], 7), jnp.float32)


def test_a_users_own_components_read_all_that_they_hold():
    own, full = (
        kvjax.step_bytes(m, SMALL, 512, dtype="float32") for m in (kvjax.Method(read=ReaderWithState()), "full")
    )
    assert own.device - full.device == SMALL.layers * HEADS.kv_heads * 7 * 4
    held = kvjax.planned_bytes("full", SMALL, 512, dtype="float32").held["device"]
    assert full.device == held - 4  # all but the length of the cache itself
    # The layers of a method that is no `kvjax.Method` count nothing themselves.
    assert kvjax.step_bytes(LastTokens(100), SMALL, 512, dtype="float32").device == SMALL.layers * (
        2 * HEADS.kv_heads * 100 * HEADS.head_dim * 4 + 100 * 4
    )


def test_a_step_of_a_larger_cache_reads_its_empty_slots_and_arguments_are_checked():
    exact, roomy = (kvjax.step_bytes("full", SMALL, 512, capacity=n, dtype="bfloat16") for n in (512, 1024))
    assert roomy.device - exact.device == 512 * SMALL.layers * (4 * HEADS.kv_heads * HEADS.head_dim + 4)
    with pytest.raises(KvjaxError, match="step_bytes takes a model, whose dtype it counts in"):
        kvjax.step_bytes("full", SMALL, 512)
    with pytest.raises(KvjaxError, match="capacity must be an integer from 512"):
        kvjax.step_bytes("full", SMALL, 512, capacity=100, dtype="bfloat16")


@pytest.mark.parametrize(
    ("method", "gathered"),
    [("full", 0), ("quest:budget=256,device_layers=0", 2), ("kcache:n=32,device_layers=0", 1)],
)
def test_xla_counts_as_many_more_bytes_for_a_longer_cache(method, gathered):
    """Reading alone: XLA counts whole, and twice, what an append writes into, and what is gathered from whole, too."""
    config = kvjax.Config.llama(512, 768, 3, heads=6, kv_heads=2, head_dim=128, mlp_width=448)
    plan = bind(method, config)
    layer = plan[0]
    counted, said = [], []
    a = config.kind(0).attention
    for slots in (4096, 8192):
        (call, *_) = layer_calls(plan, config, (slots,) * len(plan))
        arrays, tree = abstract_state(call, config, slots, 1, jnp.dtype("float32"))
        state = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
        q = jax.ShapeDtypeStruct((1, a.kv_heads, a.groups, 1, a.head_dim), jnp.float32)
        program = jax.jit(lambda *args: layer.partial(*args)).lower(state, q, jax.ShapeDtypeStruct((1, 1), jnp.int32))
        counted.append(count_bytes(program.compile()))
        said.append(layer.step_bytes(state).device + gathered * slots * a.kv_heads * a.head_dim * 4)
    # XLA adds the logits and weights of a step, each time that they are written or read.
    assert 0.98 < (counted[1] - counted[0]) / (said[1] - said[0]) < 1.2
