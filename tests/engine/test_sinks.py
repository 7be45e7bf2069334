"""A model with learned sinks computes the logits of its exact forward pass in every mode, on one device and on four."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import IncompatibleMethod
from kvjax.cache.protocol import LayerSpec, Traits
from kvjax.engine.forward import exact_logits
from kvjax.models.config import Config
from kvjax.models.model import random_model
from kvjax.models.sharding import param_shardings
from kvjax.reuse.cacheblend import blend
from kvjax.reuse.full_kv import read_exactly
from kvjax.reuse.prepacking import read_packed

TEXT = np.random.default_rng(0).integers(0, 96, 21).tolist()


@functools.cache
def sink_model(layers: int = 2) -> kvjax.Model:
    """Its sinks take about half of the weight, another part in each head and layer."""
    config = Config.llama(vocab_size=96, width=32, layers=layers, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
    (kind,) = config.kinds
    kind = dataclasses.replace(kind, attention=dataclasses.replace(kind.attention, sinks=True))
    model = random_model(dataclasses.replace(config, kinds=(kind,)))
    for i in range(layers):
        sinks = np.random.default_rng(i).normal(size=(2, 2)) + 2
        model.params[f"layer_{i}"]["attention"]["sinks"] = jnp.asarray(sinks, jnp.float32)
    return model


def exact(model: kvjax.Model, text: list[int]) -> np.ndarray:
    return np.asarray(exact_logits(model.params, jnp.asarray([text], jnp.int32), model.config)[0])


def test_the_sinks_are_seen():
    model = sink_model()
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 - 1e9 if "sinks" in jax.tree_util.keystr(path) else x, model.params
    )
    without = exact(dataclasses.replace(model, params=params), TEXT)
    assert np.abs(without - exact(model, TEXT)).max() > 0.1


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("full", {}),
        ("full", {"chunk": 5}),
        ("snapkv:budget=60,window=4 + recompress:every=4", {}),
        ("kvzip:budget=60,chunk=8,level=head", {}),
        ("infllm:block=2,sinks=2,local=8,topk=20,representatives=1,chunk=4", {}),
    ],
    ids=str,
)
def test_prompts_and_steps_have_the_logits_of_the_exact_pass(method, more):
    model = sink_model()
    expected = exact(model, TEXT)
    first = 6 if "infllm" in method else 14  # its far tokens are all at one distance, so that only near ones are exact
    last, cache = kvjax.prefill(model, [TEXT[:first]], method, capacity=64, **more)
    np.testing.assert_allclose(last[0], expected[first - 1], atol=1e-5)
    for t in range(first, first + 2):
        logits, cache = kvjax.extend(model, [[TEXT[t]]], cache)
        np.testing.assert_allclose(logits[0, 0], expected[t], atol=1e-5)


@dataclasses.dataclass(frozen=True)
class WithoutOutside:
    """A method of somebody whose layers were written before there were sinks."""

    traits: ClassVar[Traits] = Traits()

    def bind(self, spec: LayerSpec) -> Any:
        full = kvjax.parse("full").bind(spec)

        class Layer(type(full)):
            def extend(self, state, q, new, commit, cross_layer=None):
                return super().extend(state, q, new, commit, cross_layer)

        return Layer(**{f.name: getattr(full, f.name) for f in dataclasses.fields(full)})


def test_a_layer_that_cannot_count_sinks_is_refused():
    _, cache = kvjax.prefill(sink_model(), [[1, 2, 3]], WithoutOutside(), capacity=16)
    with pytest.raises(IncompatibleMethod, match="Layer.extend does not take `outside`.*learned sinks; write"):
        kvjax.extend(sink_model(), [[4]], cache)


def test_a_long_prompts_last_layer_computes_few_outputs():
    text = np.random.default_rng(1).integers(0, 96, 530).tolist()
    model = sink_model(1)
    last, _ = kvjax.prefill(model, [text], "snapkv:budget=600,window=4", capacity=600)
    np.testing.assert_allclose(last[0], exact(model, text)[-1], atol=1e-5)


def test_packed_and_recomputed_prompts_count_the_sinks():
    model, texts = sink_model(), [TEXT[:6], TEXT[6:13], TEXT[13:]]
    packed = read_packed(model, texts, "full", width=16)
    for last, text in zip(packed.last_logits, texts, strict=True):
        np.testing.assert_allclose(last, exact(model, text)[-1], atol=1e-5)
    blended = blend(read_exactly(model, texts[:2]), [[1, 0]], [texts[2]], ratio=1.0)
    np.testing.assert_allclose(blended.last_logits[0], exact(model, [*texts[1], *texts[0], *texts[2]])[-1], atol=1e-5)


def test_a_prompt_that_was_read_once_is_scored_with_its_sinks():
    """Whether a method reads the prompt or gets the keys, values and queries of it, it keeps the same tokens."""
    model, method = sink_model(), "turned_queries:budget=6,sinks=0,level=layer,page=1"
    read, given = (
        kvjax.read(model, [TEXT], method, headroom=3),
        read_exactly(model, [TEXT]).compress(method, len(TEXT) + 3),
    )
    kept = [[sorted(head.tolist()) for head in layer[0]] for layer in read.kept_positions()]
    assert kept == [[sorted(head.tolist()) for head in layer[0]] for layer in given.kept_positions()]


def test_a_shared_prefix_and_its_documents_count_the_sinks_once():
    model, documents = sink_model(), [TEXT[8:14], TEXT[3:5]]
    shared = kvjax.read(model, [TEXT[:8]], "full", headroom=0).extend_prefix(documents, "full", headroom=8)
    fed = shared.feed([TEXT[14:16]] * 2)
    for b, document in enumerate(documents):
        expected = exact(model, [*TEXT[:8], *document, *TEXT[14:16]])
        np.testing.assert_allclose(shared.last_logits[b], expected[-3], atol=1e-5)
        np.testing.assert_allclose(fed.last_logits[b], expected[-1], atol=1e-5)


def test_four_devices_divide_the_sinks_by_heads():
    mesh, model = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model")), sink_model()
    spread = dataclasses.replace(
        model, params=jax.device_put(model.params, param_shardings(model.config, mesh)), mesh=mesh
    )
    one, four = (
        kvjax.read(m, [TEXT[:12], TEXT[5:12]], "h2o:heavy=4,recent=4", headroom=8).feed([[3], [4]])
        for m in (model, spread)
    )
    np.testing.assert_allclose(four.last_logits, one.last_logits, atol=1e-5)
    scores = [[np.asarray(layer.policy_state) for layer in context.cache.layers] for context in (four, one)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *scores)
