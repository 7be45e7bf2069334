"""Bytes of caches: held by tokens, reserved for more, and taken by the exact cache of the same tokens."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import numpy as np
import pytest

import kvjax
from kvjax import CacheBytes, KvjaxError
from kvjax.cache.accounting import full_bytes
from kvjax.core.memory import array_bytes
from kvjax.errors import KvjaxWarning
from kvjax.generation import user_warnings
from kvjax.testing import toy_model

PROMPTS = [[1 + (i * i + 3 * i) % 50 for i in range(n)] for n in (70, 41)]
METHODS = (
    "full",
    "int4",
    "kivi:bits=2,group=8,residual=16",
    "snapkv:budget=16,window=4",
    "snapkv:budget=16,window=4 + kvcrush:share=0.5 + kivi:bits=4,group=8,residual=8",
    "pyramidkv:budget=24,window=4",
    "h2o:heavy=8,recent=8",
    "quest:budget=16,page=4,device_layers=1 + offload",
    "specache:bits=2,group=8,topk=4,residual=8",
    "kcache:n=8",
    "kvquant:bits=4,every=8",
)
PLANNED_AS_AN_UPPER_BOUND = (
    "snapkv:budget=16,window=4 + adakv:page=4",
    "snapkv:budget=16,window=4 + adakv:page=4 + kivi:bits=4,group=4,residual=8",
    "snapkv:budget=15,window=4 + adakv:page=32,scope=model + kivi:bits=2,group=8,residual=8",
    "cake:budget=24,window=8",
    "zipvl:every=8",
)


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=2, head_dim=16)


def prefill_bytes(prompts, method: str, capacity: int, model: kvjax.Model | None = None) -> CacheBytes:
    return kvjax.state_bytes(kvjax.prefill(model or make_model(), prompts, method, capacity=capacity)[1])


@pytest.mark.parametrize("method", METHODS)
def test_held_bytes_do_not_depend_on_the_room_and_are_the_planned_ones(method):
    tight, roomy = (prefill_bytes(PROMPTS[:1], method, capacity) for capacity in (70, 200))
    assert tight.held == roomy.held
    if not kvjax.parse(method).traits.constant:
        assert sum(roomy.reserved.values()) > sum(tight.reserved.values())
    for measured, capacity in ((tight, 128), (roomy, 256)):
        planned = kvjax.planned_bytes(method, make_model(), 70, capacity=capacity)
        assert planned == measured


@pytest.mark.parametrize("method", PLANNED_AS_AN_UPPER_BOUND)
@pytest.mark.parametrize("length", [70, 41])
def test_a_plan_is_never_below_what_is_held(method, length):
    measured = prefill_bytes([PROMPTS[0][:length]], method, 128)
    planned = kvjax.planned_bytes(method, make_model(), length, capacity=128)
    for kind in ("device", "pinned_host"):
        assert planned.held[kind] >= measured.held[kind]
        assert planned.total[kind] >= measured.total[kind]


@pytest.mark.parametrize("method", [*METHODS, *PLANNED_AS_AN_UPPER_BOUND])
def test_each_sequence_counts_as_if_it_were_alone(method):
    together = prefill_bytes(PROMPTS, method, 128)
    first, second = (prefill_bytes([prompt], method, 128) for prompt in PROMPTS)
    assert together.held == (first + second).held and together.full == first.full + second.full
    assert together.total == array_bytes(kvjax.prefill(make_model(), PROMPTS, method, capacity=128)[1])


def test_the_exact_cache_by_hand():
    c = make_model().config
    a = c.kind(0).attention
    for model, itemsize in ((make_model(), 4), (kvjax.random_model(make_model().config, dtype="bfloat16"), 2)):
        measured = prefill_bytes(PROMPTS, "full", 128, model)
        tokens = sum(map(len, PROMPTS))
        token_bytes = 2 * a.kv_heads * a.head_dim * itemsize  # in one layer
        keys_and_values = c.layers * tokens * token_bytes
        positions, lengths = c.layers * tokens * 4, c.layers * 2 * 4 + 2 * 4
        assert measured.held == {"device": keys_and_values + positions + lengths, "pinned_host": 0}
        assert measured.full == full_bytes(c, [70, 41], measured.dtype) == measured.held["device"]
        assert measured.fraction_of_full == 1 and measured.dtype == model.dtype.name
        assert measured.reserved["device"] == c.layers * (2 * 128 - tokens) * (token_bytes + 4)


def test_a_layer_with_a_window_is_compared_with_the_tokens_of_its_window():
    config = kvjax.Config.llama(97, 32, 2, heads=4, kv_heads=2, head_dim=16, mlp_width=48, windows=(None, 30))
    token_bytes = 2 * 2 * 16 * 4 + 4  # keys, values and a position, in one layer
    assert full_bytes(config, [70, 20], "float32") == (70 + 20 + 30 + 20) * token_bytes + 2 * 2 * 4 + 2 * 4


@pytest.mark.parametrize("method", ["full", "snapkv:budget=16,window=4", "h2o:heavy=8,recent=8"])
def test_decoded_tokens_are_held_and_no_longer_reserved(method):
    _, cache = kvjax.prefill(make_model(), PROMPTS[:1], method, capacity=128)
    _, next_cache = kvjax.extend(make_model(), [[5, 6, 7]], cache)
    before, now = kvjax.state_bytes(cache), kvjax.state_bytes(next_cache)
    assert before.total == now.total
    c = make_model().config
    a = c.kind(0).attention
    heads = 1 if method == "full" else a.kv_heads  # under a selection each head has its own tokens
    token_bytes = c.layers * (2 * a.kv_heads * a.head_dim * 4 + 4 * heads)
    growth = now.held["device"] - before.held["device"]
    assert growth == (0 if kvjax.parse(method).traits.constant else 3 * token_bytes)
    assert now.full - before.full == 3 * c.layers * (2 * a.kv_heads * a.head_dim * 4 + 4)


def test_a_prefix_that_sequences_share_is_held_once():
    shared = kvjax.read(make_model(), PROMPTS[:1], "full", headroom=0).extend_prefix([[1, 2, 3]] * 4, headroom=8)
    measured = shared.bytes
    alone = prefill_bytes(PROMPTS[:1], "full", 128)
    assert measured.full == full_bytes(make_model().config, [73] * 4, "float32")
    assert alone.held["device"] < measured.held["device"] < 0.4 * measured.full


def test_bytes_say_what_is_held_first_and_add_up():
    measured = prefill_bytes(PROMPTS[:1], "kcache:n=8", 128)
    device_bytes, host_bytes = measured.held["device"], measured.held["pinned_host"]
    assert str(measured).startswith(
        f"{device_bytes:,} bytes held ({measured.fraction_of_full:.1%} of the exact float32 cache)"
    )
    assert f" and {host_bytes:,} on the host ({measured.host_fraction_of_full:.1%}), " in str(measured)
    assert str(measured).endswith(f"{sum(measured.reserved.values()):,} reserved")
    assert measured.to_json()["fraction_of_full"] == device_bytes / measured.full
    double = measured + measured
    assert double.per_sequence(2) == measured and double.fraction_of_full == measured.fraction_of_full


def test_a_configuration_alone_is_asked_for_its_dtype():
    with pytest.raises(KvjaxError, match="say in which dtype keys and values are held, as in dtype='bfloat16'"):
        kvjax.planned_bytes("full", make_model().config, 9)
    half = kvjax.planned_bytes("full", make_model().config, 9, dtype="bfloat16")
    assert half.dtype == "bfloat16" and half == kvjax.planned_bytes("full", make_model(), 9, dtype="bfloat16")
    assert half.full < kvjax.planned_bytes("full", make_model(), 9).full


def test_a_cache_that_was_used_up_has_no_bytes():
    context = kvjax.read(make_model(), PROMPTS[:1], "full")
    context.start(max_new_tokens=4, donate=True).finish(4)
    with pytest.raises(KvjaxError, match="used up"):
        kvjax.state_bytes(context.cache)


def test_a_method_that_saves_nothing_says_so_once(monkeypatch):
    monkeypatch.setattr(user_warnings, "_WARNED_METHODS", set())
    short = [[1, 2, 3]]
    with pytest.warns(
        KvjaxWarning, match="^snapkv:budget=256 saves nothing on this prompt: .* a longer prompt"
    ) as warned:
        kvjax.generate(make_model(), short, "snapkv:budget=256", max_new_tokens=2)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert warned[0].filename == __file__  # the line that called kvjax
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvjax.read(make_model(), short, "snapkv:budget=256")  # the warning came before
        kvjax.read(make_model(), short, "full")
        kvjax.read(make_model(), short, "offload")  # saves on the device
        kvjax.read(make_model(), PROMPTS[:1], "snapkv:budget=16,window=4 + int4")


def test_a_layer_that_does_not_tell_counts_all_its_arrays_as_held():
    @dataclasses.dataclass(frozen=True)
    class Silent:
        inner: object

        def __getattr__(self, name):
            if name == "empty_bytes":
                raise AttributeError(name)
            return getattr(self.inner, name)

    _, cache = kvjax.prefill(make_model(), PROMPTS[:1], "full", capacity=128)
    silent = dataclasses.replace(cache, plan=tuple(map(Silent, cache.plan)))
    measured = kvjax.state_bytes(silent)
    assert measured.held == array_bytes(cache) and not any(measured.reserved.values())
    assert np.isclose(measured.held["device"], sum(x.nbytes for x in jax.tree.leaves(cache)))


@pytest.mark.parametrize("method", ["kivi:bits=2", "saq", "specache:bits=2,speculative=false"])
def test_a_window_that_is_not_full_holds_its_tokens_and_reserves_the_rest(method):
    model = toy_model(layers=2, head_dim=32)
    short = prefill_bytes(PROMPTS[:1], method, 128, model)
    assert 1 <= short.fraction_of_full < 1.05
    long = kvjax.planned_bytes(method, model, 1024)
    windows = kvjax.planned_bytes("full", model, 256).full  # of keys and values, 128 tokens each at most
    codes = 1024 * 2 * model.config.kind(0).attention.kv_heads * 32 // 4 * model.config.layers  # 2 bits a number
    assert codes < long.held["device"] < long.full - windows
