"""Every method, or every class of component, under every transformation of JAX, on the smallest model that can fail.

Tests that only trace run on every case. A scan inside `vmap` inside the caller's own `shard_map` inside `jit` is traced
for every class of component, since tracing fails where an operation has no rule for a transformation. The program is
compiled under a few methods that fill every slot and have every need; it is compared with `kvjax.prefill` and
`kvjax.generate`. Its logits are compared with those of an exported `extend` of several tokens, which runs under methods
that together have every class of component in a step.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import kvjax
from kvjax import functional
from kvjax.cache.protocol import Cache
from kvjax.core import memory
from kvjax.core.memory import array_bytes
from kvjax.core.types import Array
from kvjax.engine.decode import num_draft_tokens
from kvjax.models.model import Model
from kvjax.testing import toy_model
from tests.contract.cases import CASES, FIRST_CASES
from tests.contract.table import methods_of_distinct_parts, methods_of_every_slot_and_need, representative_methods

SMALL = {case.id: case.small for case in CASES}
STATE_KINDS = ("full", "offload", "kivi", "h2o", "adakv", "quest", "minicache")
"""Methods with states of different structure, for tests of a state as a whole."""

SEVERAL_LAYERS = ("a2ats", "adakv, scope=model", "cake", "kcache", "kvzip", "minicache", "specache", "tidal_decode")
"""Methods with layers that pass values to each other or share a budget; all others run on one layer."""

LENGTHS, NEW, CAPACITY = (12, 9), 4, 32
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 97, (len(LENGTHS), max(LENGTHS))), jnp.int32)
IDS = [row[:n].tolist() for row, n in zip(TOKENS, LENGTHS, strict=True)]  # two ragged prompts
PROMPTS = TOKENS, jnp.asarray(LENGTHS)


@functools.cache
def tiny_model(layers: int) -> Model:
    """A model of the shape for which example tables ship."""
    return toy_model(layers=layers, width=8, head_dim=32, mlp_width=16)


class Case:
    """A method on a model, and the results of the convenient calls."""

    def __init__(self, name: str):
        self.name, self.method = name, SMALL[name]
        self.model = tiny_model(2 if name in SEVERAL_LAYERS else 1)
        self.config, self.params = self.model.config, self.model.params
        self.plan = functional.bind(self.method, self.config)
        self.steps: Array | None = None  # logits of the tokens that follow, one by one

    def prefill(self, params: Any, tokens: Array, lengths: Array) -> tuple[Array, Cache]:
        return functional.prefill(params, tokens, lengths, self.plan, self.config, CAPACITY)

    @functools.cached_property
    def convenient_results(self) -> tuple[Array, Cache, Array]:
        """Logits and cache of the prompts, and the tokens i32[B NEW + 1] that follow."""
        logits, cache = kvjax.prefill(self.model, IDS, self.method, capacity=CAPACITY)
        options = {"max_new_tokens": NEW + 1, "capacity": CAPACITY, "eos_ids": ()}
        tokens = kvjax.generate(self.model, IDS, self.method, **options).tokens
        return logits, cache, jnp.asarray(tokens, jnp.int32)

    @functools.cached_property
    def traced(self) -> TracedPasses:
        """The types of what passes over the prompts, over decoded tokens and from an empty cache return."""

        def run(params: Any, tokens: Array, lengths: Array) -> TracedPasses:
            logits, prompt = self.prefill(params, tokens, lengths)
            decoded = functional.decode(params, prompt, logits.argmax(-1), NEW)
            extended = extend_one_by_one(params, tokens[:, :NEW], prompt)
            empty = functional.empty(self.plan, self.config, len(LENGTHS), CAPACITY)
            return TracedPasses(prompt, decoded, extended, empty, extend_one_by_one(params, tokens[:, :NEW], empty))

        return jax.eval_shape(run, self.params, *PROMPTS)


class TracedPasses(NamedTuple):
    """The prompts' cache; then (tokens or cache, cache or logits) of each pass, as the functions return them."""

    prompt: Cache
    decoded: tuple[Array, Cache]
    extended: tuple[Cache, Array]
    empty: Cache
    begun: tuple[Cache, Array]


make_case = functools.cache(Case)


@pytest.fixture(scope="module", params=SMALL)
def every_case(request: pytest.FixtureRequest) -> Case:
    """Every case of every method, for tests that only trace."""
    return make_case(request.param)


COMPILED = sorted({FIRST_CASES[method].id for method in methods_of_every_slot_and_need()} | {*STATE_KINDS})
TRACED = sorted({FIRST_CASES[method].id for method in methods_of_distinct_parts()} - {*COMPILED})


@pytest.fixture(scope="module", params=COMPILED)
def case(request: pytest.FixtureRequest) -> Case:
    """A method that fills slots or has needs that no other one has, for tests that compile and run."""
    return make_case(request.param)


@pytest.fixture(scope="module", params=TRACED)
def traced_case(request: pytest.FixtureRequest) -> Case:
    """Every other class of component, for tests that trace."""
    return make_case(request.param)


def extend_one_by_one(params: Any, tokens: Array, cache: Cache) -> tuple[Cache, Array]:
    """Scans over `extend` as a caller may do it -> (the cache, logits f32[B T V])."""

    def step(cache: Cache, token: Array) -> tuple[Cache, Array]:
        logits, cache = functional.extend(params, token[:, None], cache)
        return cache, logits[:, 0]

    cache, logits = lax.scan(step, cache, tokens.T)
    return cache, logits.swapaxes(0, 1)


def types_of(cache: Cache) -> Any:
    """The structure, static fields included, and the type of each array: a loop requires that its carry keeps both."""
    return jax.tree.structure(cache), [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(cache)]


def assert_close(actual: Any, expected: Any, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=atol)


def test_eval_shape_gives_the_planned_bytes_and_one_type_of_cache(every_case: Case):
    case, cache = every_case, every_case.traced.prompt
    (tokens, decoded), (extended, logits) = case.traced.decoded, case.traced.extended
    assert tokens.shape == (len(LENGTHS), NEW) and logits.shape == (len(LENGTHS), NEW, case.config.vocab_size)
    assert types_of(cache) == types_of(decoded) == types_of(extended)
    if not any(layer.needs.global_budget for layer in case.plan):  # its number of slots depends on values
        sizes = {"capacity": CAPACITY, "batch": len(LENGTHS), "width": max(LENGTHS)}
        planned = kvjax.planned_bytes(case.method, case.model, max(LENGTHS), **sizes)
        # By their sum: `jax.eval_shape` does not tell in which memory an array lies.
        assert sum(planned.total.values()) == sum(array_bytes(cache).values())


def test_an_empty_cache_takes_tokens(every_case: Case):
    prompt, _, _, empty, (after, logits) = every_case.traced
    assert types_of(after) == types_of(empty)
    assert jax.tree.map(lambda x: (x.ndim, x.dtype), empty) == jax.tree.map(lambda x: (x.ndim, x.dtype), prompt)
    assert logits.shape == (len(LENGTHS), NEW, every_case.config.vocab_size)


@pytest.fixture
def partitioner(case: Case):
    """The partitioner that compiles the case: Shardy of JAX 0.11.2 crashes on `kvzip`, as docs/limits.md says."""
    is_shardy = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", is_shardy and case.name != "kvzip")
    yield
    jax.config.update("jax_use_shardy_partitioner", is_shardy)


def scan_in_vmap_in_shard_map_in_jit(case: Case) -> Any:
    """The jitted function of (params, tokens, lengths, fed) -> (logits of the prompts, and of what is fed)."""

    def run_one(params: Any, tokens: Array, length: Array, fed: Array) -> tuple[Array, Array]:
        first, cache = case.prefill(params, tokens[None], length[None])
        _, steps = extend_one_by_one(params, fed[None], cache)
        return first[0], steps[0]

    rows = PartitionSpec("rows")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    mapped = jax.vmap(run_one, in_axes=(None, 0, 0, 0))
    return jax.jit(jax.shard_map(mapped, mesh=mesh, in_specs=(PartitionSpec(), rows, rows, rows), out_specs=rows))


def test_every_component_is_traced_by_a_scan_in_vmap_in_shard_map_in_jit(traced_case: Case):
    fed = TOKENS[:, :NEW]
    first, steps = jax.eval_shape(scan_in_vmap_in_shard_map_in_jit(traced_case), traced_case.params, *PROMPTS, fed)
    vocab_size = traced_case.config.vocab_size
    assert (first.shape, steps.shape) == ((len(LENGTHS), vocab_size), (*fed.shape, vocab_size))


@pytest.mark.usefixtures("partitioner")
def test_scan_in_vmap_in_shard_map_in_jit_gives_what_the_convenient_calls_give(case: Case):
    logits, cache, following = case.convenient_results
    run = scan_in_vmap_in_shard_map_in_jit(case)
    first, case.steps = run(case.params, *PROMPTS, following[:, :-1])
    assert_close(first, logits)
    if num_draft_tokens(case.plan):  # each call drafts anew, while `generate` continues its draft
        one_by_one = []
        for t in range(NEW):
            logits, cache = functional.extend(case.params, following[:, t : t + 1], cache)
            one_by_one.append(logits[:, 0])
        assert_close(case.steps, jnp.stack(one_by_one, 1))
    else:
        np.testing.assert_array_equal(case.steps.argmax(-1), following[:, 1:])


@pytest.mark.parametrize("name", [FIRST_CASES[method].id for method in representative_methods()])
def test_an_exported_extend_gives_the_same(name: str):
    case = make_case(name)
    _, cache, following = case.convenient_results
    exported = jax.export.export(jax.jit(functional.extend))(case.params, following[:, :-1], cache)
    loaded = jax.export.deserialize(exported.serialize())
    assert (loaded.in_tree, loaded.out_tree) == (exported.in_tree, exported.out_tree)
    logits, next_cache = loaded.call(case.params, following[:, :-1], cache)
    assert types_of(next_cache) == types_of(cache)
    if num_draft_tokens(case.plan):
        assert_close(logits, functional.extend(case.params, following[:, :-1], cache)[0])
    else:
        np.testing.assert_array_equal(logits.argmax(-1), following[:, 1:])
        if case.steps is not None:  # None if that test did not run before
            assert_close(logits, case.steps)


@pytest.mark.parametrize("name", (*STATE_KINDS, "int4, on the host", "specache", "kvzip"))
def test_jitted_prefill_and_decode_give_what_the_convenient_calls_give(name: str):
    case = make_case(name)

    def run(params: Any, tokens: Array, lengths: Array) -> tuple[Array, Array]:
        logits, cache = case.prefill(params, tokens, lengths)
        first = logits.argmax(-1).astype(jnp.int32)
        new, _ = functional.decode(params, cache, first, NEW)
        return logits, jnp.concatenate([first[:, None], new], 1)

    logits, tokens = jax.jit(run)(case.params, *PROMPTS)
    assert_close(logits, case.convenient_results[0])
    np.testing.assert_array_equal(tokens, case.convenient_results[2])


def split_floats(tree: Any) -> tuple[list[Array], Any]:
    """The float arrays of a tree, and the function that replaces them."""
    leaves, structure = jax.tree.flatten(tree)
    indices = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def replace(floats: list[Array]) -> Any:
        changed = list(leaves)
        for i, x in zip(indices, floats, strict=True):
            changed[i] = x
        return jax.tree.unflatten(structure, changed)

    return [leaves[i] for i in indices], replace


@pytest.mark.parametrize("name", ("full", "h2o", "adakv", "quest", "minicache", "cake", "tidal_decode"))
def test_gradients_reach_the_parameters_and_what_the_cache_holds(name: str):
    """The layers' own gradients are those of finite differences, under every method, in `test_gradients.py`."""
    case = make_case(name)
    cache, fed = case.convenient_results[1], case.convenient_results[2][:, :-1]
    floats, replace = split_floats(cache)

    def loss(params: Any, floats: list[Array]) -> Array:
        extend = jax.checkpoint(functional.extend)
        return extend(params, fed, replace(floats))[0].var()

    gradients = jax.jit(jax.grad(loss, (0, 1)))(case.params, floats)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradients[0]["layer_0"]))
    assert any(np.abs(x).max() > 0 for x in gradients[1])


@pytest.mark.parametrize("name", STATE_KINDS)
def test_tokens_on_an_empty_cache_are_those_of_a_text(name: str):
    case, fed = make_case(name), TOKENS[:, :NEW]
    cache = functional.empty(case.plan, case.config, len(LENGTHS), CAPACITY)
    next_cache, logits = jax.jit(extend_one_by_one)(case.params, fed, cache)
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(next_cache.length, [NEW] * len(LENGTHS))
    if name in ("full", "offload", "adakv"):  # these keep every decoded token exactly
        assert_close(logits, functional.logits(case.params, fed, case.config))


@pytest.mark.parametrize("name", STATE_KINDS)
def test_a_cache_is_an_ordinary_pytree(name: str, tmp_path):
    case = make_case(name)
    _, cache, following = case.convenient_results
    extend = jax.jit(functional.extend)
    expected = extend(case.params, following[:, :1], cache)[0]

    mapped = jax.tree.map(lambda x: x, cache)
    moved = jax.device_put(cache, jax.tree.map(lambda x: x.sharding, cache))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "cache", cache)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "cache", jax.tree.map(ocp.utils.to_shape_dtype_struct, cache))
    for other in (mapped, moved, restored):
        assert jax.tree.structure(other) == jax.tree.structure(cache)
        assert_close(extend(case.params, following[:, :1], other)[0], expected)
    # A cache that a caller moves from host memory to the device still works.
    on_device = jax.device_put(cache, memory.DEVICE)
    assert_close(jax.jit(functional.extend)(case.params, following[:, :1], on_device)[0], expected)


IN_A_FRESH_PROCESS = """
import sys
import jax
import numpy as np
from kvjax import functional
from kvjax.testing import toy_model
from tests.contract.cases import CASES, FIRST_CASES

jax.config.update("jax_num_cpu_devices", 4)
for method, layers, program, numbers in zip(*[iter(sys.argv[1:])] * 4):
    model = toy_model(layers=int(layers), width=8, head_dim=32, mlp_width=16)
    given = np.load(numbers)
    plan = functional.bind(method, model.config)
    step = jax.export.deserialize(open(program, "rb").read())
    cache = jax.jit(lambda params, tokens, lengths: functional.prefill(
        params, tokens, lengths, plan, model.config, 32)[1])(model.params, given["tokens"], given["lengths"])
    logits, cache = step.call(model.params, given["fed"], cache)
    np.testing.assert_allclose(logits, given["logits"], rtol=1e-5, atol=1e-5)
"""


def test_an_exported_step_runs_in_a_fresh_process(tmp_path):
    arguments = []
    for i, name in enumerate(("kivi", "quest", "h2o")):
        case = make_case(name)
        _, cache = jax.jit(case.prefill)(case.params, *PROMPTS)
        fed = TOKENS[:, :1]
        step = jax.jit(functional.extend)
        exported = jax.export.export(step)(case.params, fed, cache)
        (tmp_path / f"{i}.bin").write_bytes(exported.serialize())
        logits = step(case.params, fed, cache)[0]
        arrays = {"tokens": TOKENS, "lengths": PROMPTS[1], "fed": fed, "logits": logits}
        np.savez(tmp_path / f"{i}.npz", **arrays)
        arguments += [case.method, str(case.config.layers), str(tmp_path / f"{i}.bin"), str(tmp_path / f"{i}.npz")]
    subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS, *arguments], check=True)


def test_checkpoint_changes_no_gradient():
    case = make_case("tidal_decode")  # the first of its two layers passes a value to the second
    cache, fed = case.convenient_results[1], case.convenient_results[2][:, :-1]

    def loss(params: Any, extend: Any) -> Array:
        return extend(params, fed, cache)[0].var()

    expected = jax.grad(loss)(case.params, functional.extend)
    gradients = jax.grad(loss)(case.params, jax.checkpoint(functional.extend))
    jax.tree.map(functools.partial(assert_close, atol=1e-6), gradients, expected)


@pytest.mark.parametrize("name", ("snapkv", "offload", "cskv"))
def test_a_beam_search_in_a_scan(name: str):
    """The caches lie on the device, on the host, and hold an array that all sequences share."""
    case = make_case(name)
    logits, cache, _ = case.convenient_results
    width = len(LENGTHS)

    def step(beams: tuple[Cache, Array, Array], _: None) -> tuple[tuple[Cache, Array, Array], Array]:
        cache, tokens, log_probs = beams
        out, cache = functional.extend(case.params, tokens[:, None], cache)
        log_probs = log_probs[:, None] + jax.nn.log_softmax(out[:, 0])
        best, flat_indices = lax.top_k(log_probs.reshape(-1), width)
        parent, tokens = flat_indices // log_probs.shape[1], (flat_indices % log_probs.shape[1]).astype(jnp.int32)
        return (functional.take(cache, parent), tokens, best), tokens

    start = cache, logits.argmax(-1).astype(jnp.int32), jnp.zeros(width)
    (_, _, best), tokens = jax.jit(lambda start: lax.scan(step, start, length=NEW))(start)
    assert tokens.shape == (NEW, width) and np.isfinite(best).all() and best[0] >= best[1]
    swapped = functional.extend(case.params, tokens[:1].T, functional.take(cache, jnp.array([1, 0])))[0]
    assert_close(swapped[::-1], functional.extend(case.params, tokens[:1].T[::-1], cache)[0])


def test_wrong_static_arguments_are_named_with_the_remedy():
    case, (tokens, lengths) = make_case("full"), PROMPTS
    plan, config, params = case.plan, case.config, case.params
    cache = case.convenient_results[1]
    with pytest.raises(kvjax.KvjaxError, match="capacity must be an integer from 12 to .*, got 5"):
        functional.prefill(params, tokens, lengths, plan, config, 5)
    with pytest.raises(kvjax.KvjaxError, match=r"capacity .*is traced here.*static_argnames='capacity'"):
        jax.jit(lambda capacity: functional.prefill(params, tokens, lengths, plan, config, capacity))(32)
    with pytest.raises(kvjax.KvjaxError, match=r"num_tokens .*is traced here"):
        jax.jit(lambda n: functional.decode(params, cache, tokens[:, 0], n))(3)
    with pytest.raises(kvjax.KvjaxError, match=r"commit .*is traced here"):
        jax.jit(lambda n: functional.extend(params, tokens, cache, commit=n))(3)
    with pytest.raises(kvjax.KvjaxError, match="commit must be an integer from 0 to 12"):
        functional.extend(params, tokens, cache, commit=13)
    for wrong in (list(plan), "full", plan * 2):
        with pytest.raises(kvjax.KvjaxError, match=r"plan is the tuple of 1 bound layers that functional\.bind"):
            functional.prefill(params, tokens, lengths, wrong, config, 32)  # type: ignore[arg-type]
    with pytest.raises(kvjax.KvjaxError, match="config is that of a model, as in model.config, got Model"):
        functional.empty(plan, case.model, 1, 32)  # type: ignore[arg-type]
    with pytest.raises(kvjax.KvjaxError, match="sampling is static"):
        functional.decode(params, cache, tokens[:, 0], 3, sampling=0.7)  # type: ignore[arg-type]
