"""Layers with a recurrence in place of attention, under methods, which act in the other layers alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import cache_ops, calibrate, custom_decoder, functional
from kvjax.cache.protocol import num_layer_slots
from kvjax.cache.recurrent_layer import RecurrentLayer, RecurrentState
from kvjax.core.attention import Rule
from kvjax.core.gated_delta import RecurrentInputs
from kvjax.core.rope import Rope
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.explore.exploration import explore
from kvjax.models import Config, checkpoint
from kvjax.models.kinds import AttentionKind, Experts, GatedDelta, LayerKind, MlpKind
from kvjax.models.sharding import param_shardings
from tests.models import decoder_oracle

V, D, K, H = 50, 24, 2, 8
LENGTHS, STEPS, CAPACITY = (21, 13), 6, 48
RECURRENCE = AttentionKind(4, K, 6, None, value_dim=10, recurrence=GatedDelta(3))
ATTENTION = AttentionKind(4, K, H, Rope(4), qk_norm="head", output_gate=True)
CONFIG = Config(
    V, D, tuple(LayerKind(a, MlpKind(32), unit_offset=True) for a in (RECURRENCE, ATTENTION)), (0, 0, 1, 0, 1)
)


@functools.cache
def model() -> Any:
    made, rng = kvjax.random_model(CONFIG), np.random.default_rng(0)
    # Slow decays: what a layer keeps of padding or of a draft shows for many tokens.
    for i in (0, 1, 3):
        recurrence = made.params[f"layer_{i}"]["recurrence"]
        recurrence["log_rate"] = jnp.asarray(rng.normal(size=(K, 2)) - 3, jnp.float32)
    return made


@functools.cache
def texts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, V, n + STEPS).tolist() for n in LENGTHS]


@functools.cache
def exact() -> np.ndarray:
    """Logits [2 STEPS+1 V] of each sequence's last prompt token and of those after it, from the definition."""
    every = [decoder_oracle.logits(CONFIG, model().params, np.array(text)) for text in texts()]
    return np.stack([row[n - 1 : n + STEPS] for row, n in zip(every, LENGTHS, strict=True)])


def prompts() -> list[list[int]]:
    return [text[:n] for text, n in zip(texts(), LENGTHS, strict=True)]


def later() -> list[list[int]]:
    return [text[n:] for text, n in zip(texts(), LENGTHS, strict=True)]


def read(method: str, model_: Any = None, **options: Any) -> kvjax.Context:
    return kvjax.read(model_ or model(), prompts(), method, capacity=CAPACITY, **options)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("full", {}),
        ("full", {"chunk": 8}),
        ("kvzip:budget=64", {}),
        ("cake:budget=64,window=4", {}),
        ("h2o:heavy=32,recent=32", {}),
    ],
)
def test_methods_that_keep_everything_equal_the_definition(method: str, options: dict) -> None:
    context = read(method, **options)
    np.testing.assert_allclose(context.last_logits, exact()[:, 0], atol=2e-5)
    logits, _ = kvjax.extend(model(), later(), context.cache)
    np.testing.assert_allclose(logits, exact()[:, 1:], atol=2e-5)


def test_tokens_in_pieces_of_unequal_lengths_equal_the_definition() -> None:
    # Padding stands between the tokens of one feed and those of the next, and a sequence may have none.
    context = read("full")
    for pieces in ([later()[0][:3], []], [later()[0][3:5], later()[1][:5]], [later()[0][5:], later()[1][5:]]):
        context = context.feed(pieces)
    np.testing.assert_allclose(context.last_logits, exact()[:, -1], atol=2e-5)
    assert context.cache.length.tolist() == [n + STEPS for n in LENGTHS]


def test_a_lossy_method_leaves_the_states_of_recurrent_layers_below_attention_alone() -> None:
    full, lossy = read("full"), read("streaming_llm:recent=6")
    for i in (0, 1):
        jax.tree.map(np.testing.assert_array_equal, full.cache.layers[i], lossy.cache.layers[i])
    held = [len(layer[0][0]) for layer in lossy.kept_positions()]
    assert held[:2] == [0, 0] and held[3] == 0 and held[2] == held[4] < LENGTHS[0]


def test_generation_streams_and_scores_equal_the_definition() -> None:
    result = kvjax.generate(model(), prompts(), "full", max_new_tokens=4)
    for text, row in zip(prompts(), result.tokens, strict=True):
        logits = decoder_oracle.logits(CONFIG, model().params, np.array(text + row))
        assert logits[len(text) - 1 : -1].argmax(-1).tolist() == row
    steps = list(kvjax.stream(model(), prompts(), "full", max_new_tokens=4))
    assert [list(row) for row in zip(*steps, strict=True)] == result.tokens
    for n, (scores, expected) in enumerate(
        zip(kvjax.score(model(), prompts(), later(), "full"), exact()[:, :-1], strict=True)
    ):
        log_probs = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
        np.testing.assert_allclose(scores, log_probs[np.arange(STEPS), later()[n]], atol=5e-5)


def test_branches_joined_and_saved_sequences_go_on_as_before(tmp_path: Any) -> None:
    context = read("full")
    branches = context.fork(2).take([3, 0]).join(context.take([1]))
    np.testing.assert_allclose(
        branches.feed([later()[i] for i in (1, 0, 1)]).last_logits, exact()[[1, 0, 1], -1], atol=2e-5
    )
    context.save(tmp_path / "context")
    resumed = kvjax.resume(model(), tmp_path / "context")
    jax.tree.map(np.testing.assert_array_equal, context.cache.layers, resumed.cache.layers)


def test_drafts_leave_no_trace_in_a_state() -> None:
    rng, layer, T = np.random.default_rng(2), RecurrentLayer.of(RECURRENCE), 5

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    channels = 2 * 6 + 2 * 10
    inputs = RecurrentInputs(
        draw(2, K, T, channels), -jnp.abs(draw(2, K, 2, T)), jax.nn.sigmoid(draw(2, K, 2, T)), draw(1, K, channels, 3)
    )
    state = RecurrentState(draw(2, K, 2, channels), draw(2, K, 2, 6, 10))
    is_real = jnp.array([[True] * 5, [True] * 4 + [False]])
    first = RecurrentInputs(inputs[0][:, :, :2], inputs[1][..., :2], inputs[2][..., :2], inputs[3])
    out, after = layer.run(state, inputs, is_real, commit=2)
    _, expected = layer.run(state, first, is_real[:, :2], commit=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after, expected)
    every, _ = layer.run(state, inputs, is_real, commit=T)
    np.testing.assert_array_equal(out[0], every[0])


@pytest.mark.filterwarnings("ignore:specache")  # eight tokens save nothing
def test_a_method_that_drafts_decodes_as_if_it_had_none() -> None:
    method = "specache:bits=8,group=8,topk=64,residual=8"
    result = kvjax.generate(model(), prompts(), method, max_new_tokens=4)
    assert result.tokens == kvjax.generate(model(), prompts(), "full", max_new_tokens=4).tokens


def test_heads_and_sequences_on_four_devices_equal_the_definition() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    split = dataclasses.replace(
        model(), params=jax.device_put(model().params, param_shardings(CONFIG, mesh)), mesh=mesh
    )
    context = read("full", split)
    np.testing.assert_allclose(context.last_logits, exact()[:, 0], atol=2e-5)
    matrix = context.cache.layers[0].matrix
    assert {shard.data.shape for shard in matrix.addressable_shards} == {(1, 1, *matrix.shape[2:])}
    logits, _ = kvjax.extend(split, [row[:1] for row in later()], context.cache)
    np.testing.assert_allclose(np.asarray(logits)[:, 0], exact()[:, 1], atol=2e-5)


def test_gradients_are_differences_of_losses() -> None:
    tokens, lengths = jnp.asarray([texts()[1][:9]]), jnp.array([9], jnp.int32)
    plan = functional.bind("full", CONFIG)

    def loss(params: Any) -> jax.Array:
        last, cache = functional.prefill(params, tokens[:, :8], lengths - 1, plan, CONFIG, capacity=16)
        step, _ = functional.extend(params, tokens[:, 8:], cache)
        return jax.nn.log_softmax(last)[0, 3] + jax.nn.log_softmax(step)[0, 0, 5]

    compute, params = jax.jit(jax.value_and_grad(loss)), model().params
    gradient = compute(params)[1]["layer_1"]["recurrence"]
    rng = np.random.default_rng(3)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 40, x.dtype), gradient)
    expected = sum(jax.tree.leaves(jax.tree.map(lambda a, b: (a * b).sum(), gradient, direction)))

    def moved(by: float) -> jax.Array:
        changed = jax.tree.map(lambda x, d: x + by * d, params["layer_1"]["recurrence"], direction)
        return compute(params | {"layer_1": params["layer_1"] | {"recurrence": changed}})[0]

    np.testing.assert_allclose((moved(0.01) - moved(-0.01)) / 0.02, expected, rtol=0.01)


def test_bytes_are_those_of_tokens_and_of_states() -> None:
    prompt, itemsize = 32, 4
    state = K * (itemsize * 2 * (2 * 6 + 2 * 10) + 4 * 2 * 6 * 10)
    token = K * 2 * H * itemsize + 4
    plan = kvjax.planned_bytes("full", CONFIG, prompt, capacity=CAPACITY, dtype="float32")
    # A count of slots for each layer with tokens, and the length.
    assert plan.held["device"] == plan.full == 3 * state + 2 * (prompt * token + 4) + 4
    context = kvjax.read(model(), [texts()[0]], "full", capacity=CAPACITY)
    assert context.bytes.held == kvjax.planned_bytes("full", model(), len(texts()[0]), capacity=CAPACITY).held
    # A step reads and writes each state whole; of tokens it writes one.
    step = kvjax.step_bytes("full", CONFIG, prompt, capacity=CAPACITY, dtype="float32")
    assert step.device == 3 * state + 2 * (CAPACITY * token + 4)
    assert step.device_written == 3 * state + 2 * (token - 4)
    assert num_layer_slots(RecurrentLayer.of(RECURRENCE), (prompt,), CAPACITY) == 1


def test_configs_and_checkpoints_round_trip(tmp_path: Any) -> None:
    experts = MlpKind(8, experts=Experts(4, 2, shared_width=6, shared_gate=True))
    config = dataclasses.replace(CONFIG, kinds=(dataclasses.replace(CONFIG.kinds[0], mlp=experts), CONFIG.kinds[1]))
    made = kvjax.random_model(config, dtype="bfloat16")
    assert Config.from_json(config.to_json()) == config
    assert eval(repr(config), vars(kvjax.models) | globals() | {"Rule": Rule}) == config  # noqa: S307
    checkpoint.save(tmp_path / "model", config, made.params)
    loaded = kvjax.load(tmp_path / "model")
    assert loaded.config == config and loaded.dtype == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, loaded.params, made.params)
    assert loaded.params["layer_0"]["recurrence"]["log_rate"].dtype == jnp.float32
    # Configs of before keep their text, and so their digests.
    old = kvjax.testing.toy_model().config
    for name in ("recurrence", "output_gate", "shared_gate"):
        assert name in config.to_json() and name not in old.to_json()


NO_ROLLBACK = (
    "recurrent state, a sum over all tokens so far, and no method can give back tokens.*keep the one of before"
)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.crop(4), NO_ROLLBACK),
        (lambda c: c.edit(2, 3, [[1], [2]]), NO_ROLLBACK),
        (lambda c: cache_ops.crop(c.cache, [1, 2]), NO_ROLLBACK),
        (
            lambda c: c.take([0]).extend_prefix([[1, 2]]),
            "layer 0 of this model holds a recurrent state.*fork the context",
        ),
        (
            lambda c: kvjax.speculative.speculate(c.model, prompts(), draft="full"),
            "rejected tokens.*use kvjax.generate",
        ),
        (
            lambda c: kvjax.reuse.read_exactly(c.model, prompts()),
            "layer 0 of this model has none: it holds a recurrent",
        ),
        (lambda c: kvjax.reuse.read_packed(c.model, prompts(), "full"), "recurrent state.*kvjax.read"),
        (
            lambda c: kvjax.cachegen.write("unwritten", c),
            "layer 0 of this model has none: it holds a recurrent state; .*keep it by kvjax.Context.save",
        ),
        (
            lambda c: calibrate.count_arrays(c.model, "bases", prompts()),
            "kvjax calibrate takes .*, and layer 0 of this model has none.*or take a method without a table",
        ),
        (lambda c: explore(c.model, prompts()[0], "full", 1), "hold a recurrent state and no tokens"),
        (lambda c: functional.bind("minicache:start=0.0", CONFIG), "no two neighbors with keys and values.*by itself"),
        (
            lambda c: custom_decoder.attach("full", kvjax.engine.plan.specs(CONFIG), capacity=8),
            "layer 0 has a recurrence.*write the model as a kvjax Config",
        ),
    ],
)
def test_what_a_state_cannot_do_is_refused_by_name(call: Any, says: str) -> None:
    with pytest.raises(KvjaxError, match=says) as raised:
        call(read("full"))
    assert says != NO_ROLLBACK or isinstance(raised.value, IncompatibleMethod)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dataclasses.replace(RECURRENCE, rope=Rope(4)), "rope is a part of one; leave out rope"),
        (lambda: dataclasses.replace(RECURRENCE, qk_norm="head"), "leave out qk_norm"),
        (lambda: dataclasses.replace(RECURRENCE, heads=3), "multiple of kv_heads"),
        (lambda: GatedDelta(0), "kernel_tokens"),
        (lambda: Experts(4, 2, shared_gate=True), "shared_width is 0; give its width"),
        (lambda: dataclasses.replace(CONFIG, kinds=CONFIG.kinds[:1], pattern=(0, 0)), "attention"),
    ],
)
def test_kinds_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises(KvjaxError, match=says):
        make()
