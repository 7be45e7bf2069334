"""Eviction on whole models: where a leading library was seen to fail, each method that can mean it must work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.method import Method
from kvjax.engine.forward import Target, layer_calls
from kvjax.engine.modes import FullPrefill
from kvjax.engine.plan import bind
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.registry.strings import split_methods
from kvjax.testing import toy_model
from tests.contract.cases import FIRST_CASES
from tests.contract.table import methods_of_every_slot_and_need

PROMPTS = [list(range(1, 38)), [8, 3], list(range(40, 74)), list(range(5, 17))]
SELECT = [
    "snapkv:budget=12,window=4,kernel=3",
    "pyramidkv:budget=12,window=4,kernel=3",
    "pyramidkv:budget=12,window=4,kernel=3,rule=peer",
    "accumulated:budget=12,recent=2,normalise=visible",
    "keynorm:budget=12",
    "random:budget=12",
    "sinks_and_recent:budget=12",
    "snapkv:budget=12,window=4,kernel=3 + kvcrush:share=0.5",
    "accumulated:budget=12,recent=4,sinks=4,unit=page4 + kvcrush:share=0.5,anchor=mean",
    "snapkv:budget=12,window=4,kernel=3 + kmeans:share=0.5,iterations=2",
    "snapkv:budget=12,window=4,kernel=3 + kvcrush + kivi:bits=4,group=4,residual=4 + kcache:n=4,device_layers=0",
    "snapkv:budget=12,window=4,kernel=3 + kvcrush + recompress:every=3",
    "accumulated:budget=12 + specache:bits=1,group=8,residual=8,topk=3",
]
THEN_AGAIN = "accumulated:budget=12 + h2o:heavy=6,recent=2"  # two sums of attention: over all, and over what is kept
INFLLM = "infllm:block=4,sinks=4,local=8,topk=2,representatives=2,chunk=4"
PACKED = ("kvarn", "kvtc", "rotatekv", "saq")  # codes of each token's row in two bits
COMPOSED = [
    SELECT[8],
    SELECT[10],
    SELECT[11],
    "kivi:bits=4,group=8,residual=8 + specache:bits=1,group=8,residual=8,topk=3",
]
# The battery compares neighbours under every case in one layer; these tests ask about the model around the layers.
EACH = [FIRST_CASES[name].small for name in sorted({*methods_of_every_slot_and_need(), *PACKED})] + COMPOSED
FEW = [PROMPTS[i] for i in (0, 1, 3)]  # the last two, alone, share one set of shapes


@pytest.fixture(scope="module")
def model():
    return toy_model(windows=(None, 9), layers=2)


@pytest.fixture(scope="module")
def larger_heads():
    """A model for which small tables ship, and whose heads fill words of two bits a number."""
    return toy_model(layers=1, head_dim=32, width=8)


@pytest.fixture(scope="module")
def full(model):
    return kvjax.generate(model, FEW, kvjax.methods.full(), max_new_tokens=8).tokens


@pytest.mark.parametrize("method", EACH)
def test_a_row_of_a_padded_batch_does_not_depend_on_the_others(model, larger_heads, full, method):
    """Other neighbours in another order have the same shapes, so that nothing is compiled for them."""
    method += " + in_windows"  # in the layer with a window, too
    larger = any(part.values.get("table") == "shipped" or part.name in PACKED for part in split_methods(method))
    model = larger_heads if larger else model
    together = kvjax.read(model, FEW, method, capacity=64)
    tokens = together.generate(max_new_tokens=8).tokens
    others = kvjax.read(model, [FEW[2], FEW[0][::-1], FEW[1]], method, capacity=64).generate(max_new_tokens=8).tokens
    assert [others[2], others[0]] == tokens[1:]
    if method in COMPOSED:
        for row in (1, 2):
            alone = kvjax.generate(model, [FEW[row]], method, max_new_tokens=8, capacity=64).tokens[0]
            assert alone == tokens[row]
    if not any(layer.needs.global_budget for layer in together.cache.plan):  # then the prompts' contents decide
        planned = kvjax.planned_bytes(method, model.config, 37, capacity=64, batch=3, dtype=np.float32)
        assert planned.total == together.bytes.total
    parsed = kvjax.parse(method)
    if parsed == Method(select=parsed.select, representatives=parsed.representatives) and parsed.select and not larger:
        assert tokens[1] == full[1]  # within the budget with all that is decoded
        assert tokens != full


@pytest.mark.parametrize(
    ("method", "chunk"), [*((m, 8) for m in (*SELECT, THEN_AGAIN)), (SELECT[0], 64), (SELECT[3], 64)]
)
def test_a_prompt_prefilled_in_chunks_is_compressed_as_a_whole(model, method, chunk):
    parsed = kvjax.parse(method)
    whole, state = kvjax.prefill(model, PROMPTS, parsed, capacity=64)
    last, pieces = kvjax.prefill(model, PROMPTS, parsed, capacity=64, chunk=chunk)
    np.testing.assert_allclose(last, whole, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, kvjax.kept_positions(pieces), kvjax.kept_positions(state))


def test_accumulated_attention_never_holds_queries_times_keys():
    """The largest array of a layer's compiled prefill stays below T x T for one head."""
    model, T = toy_model(layers=1), 4096
    c = model.config
    (call,) = layer_calls(bind("accumulated:budget=64", c), c, (64,))
    angles = jnp.zeros((1, T, c.kind(0).attention.head_dim // 2))
    arguments = model.params["layer_0"], jnp.zeros((1, T, c.width)), ((angles, angles),)
    mode = FullPrefill(jnp.array([T], jnp.int32), T, None)
    target = Target(c)
    program = target.run_layer.lower(*arguments, mode, None, None, call=call, target=target).compile()
    stats = program.memory_analysis()
    assert stats.temp_size_in_bytes < 4 * T * T


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("snapkv:budget=30,window=32", "give budget>=32, or window<=30"),
        ("accumulated:budget=7,sinks=4,recent=4", r"give budget>=8, or sinks \+ recent<=7"),
    ],
)
def test_a_budget_below_what_is_always_kept_is_an_error(model, method, remedy):
    with pytest.raises(KvjaxError, match=remedy):
        kvjax.prefill(model, PROMPTS, kvjax.parse(method))


def test_what_stands_on_nothing_says_so(model):
    with pytest.raises(IncompatibleMethod, match=r"snapkv:budget=256 \+ kvcrush"):
        kvjax.prefill(model, PROMPTS, kvjax.parse("kvcrush"))


@pytest.mark.parametrize("unit", ["pages", "chunk", "page0", "32"])
def test_units_have_a_kind_and_a_size(unit):
    with pytest.raises(KvjaxError, match="page32|size must be at least 1"):
        kvjax.parse(f"snapkv:unit={unit}")


def test_compressing_again_keeps_the_budget_and_the_newest(model):
    parsed = kvjax.parse("snapkv:budget=12,window=4,kernel=3 + kvcrush + recompress:every=3 + in_windows")
    _, state = kvjax.prefill(model, PROMPTS, parsed, capacity=64)
    for step in range(7):
        _, state = kvjax.extend(model, [[9]] * 4, state, parsed)
        for heads in kvjax.kept_positions(state):
            for prompt, row in zip(PROMPTS, heads, strict=True):
                num_tokens = len(prompt) + step + 1
                for positions in row:
                    assert len(positions) <= min(num_tokens, 15)
                    assert len(positions) >= 12 or len(positions) == num_tokens
                    newest = np.arange(num_tokens - 2, num_tokens)[-len(positions) :]
                    np.testing.assert_array_equal(positions[-2:], newest)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("recompress", "finds none"),
        (
            "snapkv:budget=64 + kivi:group=4,residual=4 + recompress",
            "cannot lose one: its tokens, or its heads, are held together",
        ),
        ("snapkv:budget=64 + merging + recompress", "components `merge` and `layer_budgets`: lost tokens are folded"),
    ],
)
def test_what_cannot_be_compressed_again_says_so(model, method, why):
    with pytest.raises(IncompatibleMethod, match=why):
        kvjax.prefill(model, PROMPTS, kvjax.parse(method))


def test_a_stream_without_end_takes_constant_bytes(model):
    parsed = kvjax.parse("streaming_llm:recent=8,sinks=2")
    sizes = []
    for capacity in (64, 1024):
        _, state = kvjax.prefill(model, PROMPTS, parsed, capacity=capacity)
        sizes.append(kvjax.state_bytes(state))
    assert sizes[0] == sizes[1]


def test_blocks_on_the_host_are_kept(model):
    _, state = kvjax.prefill(model, PROMPTS, f"{INFLLM} + in_windows")
    for heads in kvjax.kept_positions(state):
        for prompt, row in zip(PROMPTS, heads, strict=True):
            np.testing.assert_array_equal(row[0], np.arange(len(prompt)))


def test_a_restricted_prefill_takes_no_chunk(model):
    with pytest.raises(KvjaxError, match="leave `chunk` out"):
        kvjax.prefill(model, PROMPTS, kvjax.parse(INFLLM), chunk=8)
