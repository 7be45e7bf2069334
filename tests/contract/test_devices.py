"""Four devices return the results of one, with a state that is really sharded over them (C9)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax.cache.method import Method
from kvjax.cache.protocol import BoundLayer, LayerSpec, Needs, num_layer_slots
from kvjax.cache.readers.full import Full
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import axes_of_layer_array, named_sharding, over_heads, per_device
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock, Partial
from kvjax.engine.layer_prompt import prefill_layer
from kvjax.engine.modes import extend_layer
from kvjax.errors import KvjaxError
from kvjax.models.sharding import param_shardings
from kvjax.registry.strings import method_of
from kvjax.testing import toy_model
from tests.contract import layer
from tests.contract.cases import FIRST_CASES
from tests.contract.table import methods_of_distinct_parts

B, K, G, H = 4, 4, 2, 32
LENGTHS = np.array([9, 1, 6, 4], np.int32)
STEPS = 4
MESHES = ((1, 4), (2, 2), (4, 1))  # devices along the sequences, and along the key/value heads

# Methods whose states, selections or policies reduce over all heads of a layer; they run on every mesh.
ALL_HEADS = (
    "streaming_llm:recent=3,sinks=1",
    "h2o:heavy=2,recent=2,granularity=layer",
    "snapkv:budget=6,window=2,kernel=3,per=layer",
    "snapkv:budget=6,window=2,kernel=3 + kvcrush:share=0.5 + recompress:every=2",
    "keynorm:budget=6 + kmeans:share=0.5 + offload",
    "random:budget=5",
)


OTHERS = (
    ("snapkv:budget=6,window=2,kernel=3 + adakv:page=4 + kivi:bits=4,group=4,residual=4", (1, 4)),  # codes in pages
    ("snapkv:budget=6,window=2,kernel=3 + adakv:page=4 + kivi:bits=4,group=4,residual=4", (2, 2)),
    ("kivi:bits=2,group=8,residual=8,kernel=pallas", (2, 2)),  # a kernel, which the compiler cannot shard
    ("infllm:block=2,sinks=1,local=4,topk=1,representatives=1,chunk=4", (1, 4)),  # heads choose one block together
)


def method_mesh_pairs() -> list[tuple[str, tuple[int, int]]]:
    """Pairs (method, mesh): all meshes for `ALL_HEADS`, one that shards heads for each class of component."""
    first_cases = sorted({FIRST_CASES[name].small for name in methods_of_distinct_parts()} - set(ALL_HEADS))
    return [*itertools.product(ALL_HEADS, MESHES), *OTHERS, *zip(first_cases, itertools.cycle(MESHES[:2]))]


def make_mesh(shape: tuple[int, int]) -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(shape), ("data", "model"))


@dataclasses.dataclass(frozen=True)
class LayerOnMesh:
    """A bound layer as the decoder runs it on a mesh."""

    layer: BoundLayer
    mesh: Mesh

    @property
    def needs(self) -> Needs:
        return self.layer.needs

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Any:
        return prefill_layer(self.layer, block, observation, num_slots, self.mesh)

    def extend(
        self, state: Any, q: jax.Array, new: KVBlock, commit: int, cross_layer: Any, outside: Partial | None = None
    ) -> tuple[jax.Array, Any, Any]:
        return extend_layer(self.layer, state, q, new, commit, cross_layer, outside, mesh=self.mesh)

    def update_scores(
        self, block: KVBlock, start: jax.Array, observation: Observation, new: KVBlock, before: jax.Array
    ) -> jax.Array:
        update = per_device(self.layer.update_scores, *block.k.shape[:2], mesh=self.mesh)
        return update(block, start, observation, new, before)

    def measure(self, block: KVBlock, observation: Observation | None) -> jax.Array:
        return per_device(self.layer.measure, *block.k.shape[:2], mesh=self.mesh)(block, observation)

    def divide_budget(self, measures: jax.Array, lengths: jax.Array) -> jax.Array:
        return self.layer.divide_budget(measures, lengths)


@functools.cache
def inputs() -> tuple[Any, Any]:
    """Returns the prompts, and the tokens that follow them."""
    rng = np.random.default_rng(0)
    num_tokens = int(LENGTHS.max()) + STEPS
    q = jnp.asarray(rng.normal(size=(B, K, G, num_tokens, H)) * 2, jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(B, K, num_tokens, H)), jnp.float32) for _ in range(2))
    batch = layer.SequenceBatch(q, k, v, LENGTHS)
    return layer.prompt(batch, width=int(LENGTHS.max())), [batch.token(t) for t in range(STEPS)]


def run(bound: BoundLayer, mesh: Mesh | None) -> tuple[Any, np.ndarray, Any]:
    """Returns (the state after the prompts, the outputs of the steps, the state after them)."""
    num_slots = num_layer_slots(bound, tuple(LENGTHS.tolist()), layer.CAPACITY)
    runner = bound if mesh is None else LayerOnMesh(bound, mesh)

    def prefill_and_decode(prompt: Any, steps: Any) -> tuple[Any, jax.Array, Any]:
        prefilled = layer.make_state(runner, *prompt, num_slots)
        tokens = jax.tree.map(lambda *x: jnp.stack(x), *steps)
        outs, decoded = layer.scan_steps(runner, prefilled, tokens)
        return prefilled, outs, decoded

    arguments = inputs()
    if mesh is not None:
        arguments = jax.tree.map(
            lambda x: jax.device_put(x, named_sharding(axes_of_layer_array(x.shape, B, K), mesh)), arguments
        )
    return jax.jit(prefill_and_decode)(*arguments)


@functools.cache
def bind(method: str) -> BoundLayer:
    spec = LayerSpec(index=0, num_layers=1, num_kv_heads=K, num_groups=G, head_dim=H, rope=Rope(H))
    return method_of(method).bind(spec)


@functools.cache
def run_on_one_device(method: str) -> tuple[Any, np.ndarray, Any]:
    return run(bind(method), None)


@pytest.mark.parametrize(
    ("method", "shape"), method_mesh_pairs(), ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x))
)
def test_c9_four_devices_give_what_one_gives(method, shape):
    one, four = run_on_one_device(method), run(bind(method), make_mesh(shape))
    np.testing.assert_allclose(four[1], one[1], atol=1e-5)
    for sharded, single in ((four[0], one[0]), (four[2], one[2])):
        np.testing.assert_array_equal(*(bind(method).positions(state) for state in (sharded, single)))
        assert jax.tree.map(array_type, sharded) == jax.tree.map(array_type, single)
        for x in jax.tree.leaves(sharded):
            assert_sharded(x, *shape)


def array_type(x: jax.Array) -> tuple[Any, ...]:
    return x.shape, x.dtype, memory.memory_kind(x), x.sharding.memory_kind


def assert_sharded(x: jax.Array, data: int, model: int) -> None:
    """Asserts that sequences and heads are sharded wherever an array has both axes, and that replicas are equal."""
    sizes = [shard.data.size for shard in x.addressable_shards]
    num_data_parts = data if x.ndim and x.shape[0] > 1 else 1  # arrays without a batch axis are replicated
    num_model_parts = model if x.ndim >= 4 or (x.ndim == 3 and x.shape[1] > 1) else 1
    assert len(sizes) == 4 and max(sizes) <= x.size // (num_data_parts * num_model_parts)
    for shards in shards_by_index(x).values():
        for replica in shards[1:]:
            np.testing.assert_array_equal(np.asarray(replica), np.asarray(shards[0]))


def shards_by_index(x: jax.Array) -> dict[str, list[jax.Array]]:
    """Groups the shards of an array by the part of it that they hold."""
    shards: dict[str, list[jax.Array]] = {}
    for shard in x.addressable_shards:
        shards.setdefault(str(shard.index), []).append(shard.data)
    return shards


@dataclasses.dataclass(frozen=True)
class ChunkedFull(Full):
    """A reader that takes prompts in chunks, like decoded tokens."""

    prompt_chunk: ClassVar[int] = 8


SIZES = {"kv_heads": 4, "heads": 8, "vocab_size": 96, "layers": 2}
PROMPTS = [list(range(1, 14)), [7], [5, 3, 1], list(range(20, 30))]


@functools.cache
def make_model(shape: tuple[int, int] | None) -> kvjax.Model:
    model = toy_model(**SIZES)
    if shape is None:
        return model
    params = jax.device_put(model.params, param_shardings(model.config, make_mesh(shape)))
    return dataclasses.replace(model, params=params, mesh=make_mesh(shape))


@pytest.mark.whole
@pytest.mark.parametrize(
    "method",
    [
        "streaming_llm:recent=3,sinks=1",  # a state of constant size, in which heads share the positions
        "cake:budget=6,window=2,kernel=3",  # budgets that are measured over all layers
        "keydiff:budget=6,recent=1 + adakv:scope=model,page=4",  # one ranking over all heads of all layers
        "tidal_decode:topk=3,dense=0",  # a value from one layer to the next
        Method(read=ChunkedFull()),  # a prompt that is fed through the method
    ],
    ids=[
        "constant state",
        "budgets over all layers",
        "a ranking over the model",
        "a cross-layer value",
        "prompt through the method",
    ],
)
def test_c9_a_model_on_a_mesh_goes_on_as_on_one_device(method, tmp_path):
    one, four = (
        kvjax.generate(make_model(shape), PROMPTS, method, max_new_tokens=4, eos_ids=()) for shape in (None, (2, 2))
    )
    assert four.tokens == one.tokens and four.bytes == one.bytes
    read = kvjax.read(make_model((2, 2)), PROMPTS, method, headroom=4)
    resumed = kvjax.resume(read.model, read.save(tmp_path / "context"), method)
    for context in (read, resumed):
        for x in jax.tree.leaves(context.cache.layers):
            assert_sharded(x, 2, 2)


@pytest.mark.parametrize("shape", MESHES)
def test_what_concerns_all_heads_is_said_of_all_heads(shape):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(B, K, 5)), jnp.float32)

    def reduce_over_heads(x: jax.Array) -> dict[str, jax.Array]:
        first = over_heads.first_head(x.shape[1]) + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :, None]
        return {
            "sum": over_heads.sum(x),
            "mean": over_heads.mean(x),
            "max": over_heads.max(x),
            "any": over_heads.any(x > 1.5),
            "gather": x[:, :, :2] + over_heads.gather(x)[:, -1:, :2],
            "head": jnp.broadcast_to(first, x.shape),
        }

    four = jax.jit(per_device(reduce_over_heads, B, K, make_mesh(shape)))(x)
    expected = {
        "sum": x.sum(1, keepdims=True),
        "mean": x.mean(1, keepdims=True),
        "max": x.max(1, keepdims=True),
        "any": (x > 1.5).any(1, keepdims=True),
        "gather": x[:, :, :2] + x[:, -1:, :2],
        "head": jnp.broadcast_to(jnp.arange(K)[None, :, None], x.shape),
    }
    for name, result in four.items():
        np.testing.assert_allclose(result, expected[name], rtol=1e-6, err_msg=name)


def test_shapes_say_which_axes_are_divided():
    shapes = [(), (B,), (B, K), (B, K, 1), (B, 1, K), (1, K, 5), (1, 1, 5), (1,)]
    assert [axes_of_layer_array(s, B, K) for s in shapes] == ["", "B", "B", "B K", "B", "1 K", "1", "1"]


@pytest.mark.parametrize("shape", [(K,), (2, K, 5), (3, 5, K), (7, 3)])
def test_a_shape_that_a_mesh_cannot_divide_is_an_error(shape):
    with pytest.raises(KvjaxError, match="cannot tell what belongs to which device"):
        axes_of_layer_array(shape, 3, K)


def test_rows_that_do_not_divide_over_a_mesh_are_an_error():
    with pytest.raises(KvjaxError, match="axis B of size 3 does not divide over the 2 devices of mesh axis 'data'"):
        kvjax.prefill(make_model((2, 2)), PROMPTS[:3], "full")
