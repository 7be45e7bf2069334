"""`custom_decoder.attend` on the tensors of one layer: padding, layouts, transformations, models' rules, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import kvjax
from kvjax import custom_decoder
from kvjax.core import memory
from kvjax.engine.layer_prompt import LayerInputs
from kvjax.engine.modes import Decode, FullPrefill
from kvjax.errors import KvjaxError
from kvjax.testing import dense_attention
from tests.attach import plain_decoder

B, N, K, H, V, T, NEW, CAPACITY = 2, 4, 2, 8, 8, 10, 3, 32
LENGTHS = np.array([10, 7], np.int32)
ROPE = custom_decoder.Rope(H)
SPECS = custom_decoder.specs_of(1, N, K, H, rope=ROPE)
METHODS = ("full", "snapkv:budget=6,window=2,kernel=3", "h2o:heavy=3,recent=2", "kivi:bits=4,group=4,residual=4")


def random_tokens(seed: int = 0, num_tokens: int = T + NEW, value_dim: int = V) -> tuple[jax.Array, ...]:
    """q [B T N H], k [B T K H], v [B T K V] of whole texts."""
    rng = np.random.default_rng(seed)
    shapes = (N, H), (K, H), (K, value_dim)
    return tuple(jnp.asarray(rng.normal(size=(B, num_tokens, *shape)) * 2, jnp.float32) for shape in shapes)


def layer_cache(method="full", specs=SPECS, **given) -> custom_decoder.LayerCache:
    """The empty cache of a model of one layer."""
    return custom_decoder.attach(method, specs, CAPACITY, **given)[0]


def place(x: jax.Array, columns: np.ndarray, width: int) -> jax.Array:
    """Puts the first tokens of each sequence of x [B T ..] into columns i32[B T], -1 for none; the others are inf."""
    out = np.full((B, width, *x.shape[2:]), np.inf, np.float32)
    for b in range(B):
        for t, column in enumerate(columns[b]):
            if column >= 0:
                out[b, column] = x[b, t]
    return jnp.asarray(out)


def pad(side: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Columns of the prompts' tokens, their positions and the width of the padded prompts."""
    width = T + 4
    left = {"right": 0 * LENGTHS, "left": width - LENGTHS, "both": (width - LENGTHS) // 2}[side]
    columns, positions = np.full((B, T), -1), np.full((B, width), -1, np.int32)
    for b, n in enumerate(LENGTHS):
        columns[b, :n] = left[b] + np.arange(n)
        positions[b, left[b] : left[b] + n] = np.arange(n)
    return columns, positions, width


attend = jax.jit(custom_decoder.attend)


def steps_after(cache, tokens) -> list[np.ndarray]:
    """Outputs of the single steps that follow the prompts."""
    outs = []
    for i in range(NEW):
        at = LENGTHS + i
        q, k, v = (x[np.arange(B), at][:, None] for x in tokens)
        out, cache = attend(cache, q, k, v, jnp.asarray(at)[:, None])
        outs.append(np.asarray(out))
    return outs


@pytest.mark.parametrize("method", METHODS)
def test_padding_may_stand_on_any_side_and_may_hold_anything(method):
    tokens, results = random_tokens(), {}
    for side in ("right", "left", "both"):
        columns, positions, width = pad(side)
        out, cache = attend(layer_cache(method), *(place(x, columns, width) for x in tokens), positions)
        real = [np.asarray(out)[b, columns[b, :n]] for b, n in enumerate(LENGTHS)]
        results[side] = *real, *steps_after(cache, tokens)
    for side in ("left", "both"):
        for got, want in zip(results[side], results["right"], strict=True):
            assert np.isfinite(want).all()
            np.testing.assert_array_equal(got, want)


def test_a_step_of_padding_alone_changes_nothing_and_of_one_sequence_only_that():
    tokens = random_tokens()
    _, cache = custom_decoder.attend(
        layer_cache("h2o:heavy=3,recent=2"), *(x[:, :T] for x in tokens), right_positions()
    )
    q, k, v = (x[:, T:] for x in tokens)
    _, after = custom_decoder.attend(cache, q, k, v, np.full((B, NEW), -1))
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    jax.tree.map(np.testing.assert_array_equal, memory.without_guards(after), memory.without_guards(cache))
    only_second = np.array([[-1, -1, -1], [-1, 7, 8]])
    _, after = custom_decoder.attend(cache, q, k, v, only_second)
    assert after.length.tolist() == [10, 9]
    np.testing.assert_array_equal(after.positions[0], cache.positions[0])


def right_positions() -> np.ndarray:
    return np.where(np.arange(T) < LENGTHS[:, None], np.arange(T), -1).astype(np.int32)


def test_layouts_give_the_same_and_the_wrong_one_is_named():
    q, k, v = (x[:, :T] for x in random_tokens())
    out, cache = custom_decoder.attend(layer_cache(), q, k, v, right_positions())
    swapped = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    other, again = custom_decoder.attend(layer_cache(), *swapped, right_positions(), layout="BNTH")
    np.testing.assert_array_equal(jnp.swapaxes(other, 1, 2), out)
    jax.tree.map(np.testing.assert_array_equal, memory.without_guards(again), memory.without_guards(cache))
    with pytest.raises(KvjaxError, match="they fit the layout 'BNTH': say layout='BNTH'"):
        custom_decoder.attend(layer_cache(), *swapped, right_positions())


@pytest.mark.parametrize("soft_cap", [None, 1.0])
@pytest.mark.parametrize("window", [None, 4])
def test_windows_soft_caps_sinks_scales_and_narrow_values_reach_prompt_and_steps(window, soft_cap):
    value_dim, scale = 4, 0.7
    specs = custom_decoder.specs_of(1, N, K, H, rope=ROPE, window=window, soft_cap=soft_cap, value_dim=value_dim)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    q, k, v = tokens = random_tokens(value_dim=value_dim)
    prompt, cache = custom_decoder.attend(
        layer_cache(specs=specs), *(x[:, :T] for x in tokens), right_positions(), sinks=sinks, scale=scale
    )
    outs = [prompt]
    at = LENGTHS[:, None] + np.arange(NEW)
    new = [jnp.take_along_axis(x, jnp.asarray(at)[..., None, None], 1) for x in tokens]
    out, cache = custom_decoder.attend(cache, *new, at, sinks=sinks, scale=scale)
    outs.append(out)
    for b, n in enumerate(LENGTHS):
        total = int(n) + NEW
        heads = [np.asarray(x[b, :total]).swapaxes(0, 1) for x in (q * (scale * H**0.5), k, v)]
        want = dense_attention(*heads, np.arange(total), window, soft_cap=soft_cap, sinks=sinks).swapaxes(0, 1)
        np.testing.assert_allclose(prompt[b, :n], want[:n], atol=2e-5)
        np.testing.assert_allclose(out[b], want[n:], atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_shapes_are_the_same_before_and_after_a_step(method):
    q, k, v = (x[:, :T] for x in random_tokens())
    _, cache = jax.eval_shape(custom_decoder.attend, layer_cache(method), q, k, v, jnp.asarray(right_positions()))
    one = [jax.ShapeDtypeStruct((B, 1, *x.shape[2:]), x.dtype) for x in (q, k, v)]
    _, after = jax.eval_shape(custom_decoder.attend, cache, *one, jax.ShapeDtypeStruct((B, 1), jnp.int32))
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    assert jax.tree.leaves(after) == jax.tree.leaves(cache)


def test_a_donated_cache_is_a_carry_of_scan_and_while_loop():
    tokens = random_tokens()
    _, cache = custom_decoder.attend(layer_cache(METHODS[1]), *(x[:, :T] for x in tokens), right_positions())
    want = steps_after(cache, tokens)

    @jax.jit
    def loop(cache):
        def step(carry):
            i, cache, outs = carry
            q, k, v = (x[jnp.arange(B), jnp.asarray(LENGTHS) + i][:, None] for x in tokens)
            out, cache = custom_decoder.attend(cache, q, k, v, (jnp.asarray(LENGTHS) + i)[:, None])
            return i + 1, cache, outs.at[i].set(out)

        start = jnp.int32(0), cache, jnp.zeros((NEW, B, 1, N, V))
        return lax.while_loop(lambda carry: carry[0] < NEW, step, start)[2]

    np.testing.assert_array_equal(loop(cache), np.stack(want))
    donated, (q, k, v) = jax.tree.map(jnp.copy, cache), (x[np.arange(B), LENGTHS][:, None] for x in tokens)
    out, _ = jax.jit(custom_decoder.attend, donate_argnums=0)(donated, q, k, v, jnp.asarray(LENGTHS)[:, None])
    np.testing.assert_array_equal(out, want[0])


def test_a_step_is_exported_with_its_cache():
    tokens = random_tokens()
    _, cache = attend(layer_cache(METHODS[1]), *(x[:, :T] for x in tokens), right_positions())
    step = [x[:, T : T + 1] for x in tokens], jnp.asarray(LENGTHS)[:, None]
    exported = jax.export.export(jax.jit(lambda cache, qkv, pos: custom_decoder.attend(cache, *qkv, pos)))(cache, *step)
    read = jax.export.deserialize(exported.serialize())
    out, after = read.call(cache, *step)
    want, expected = attend(cache, *step[0], step[1])
    np.testing.assert_array_equal(out, want)
    assert jax.tree.structure(after) == jax.tree.structure(expected) and "LayerCache(" in repr(after)


def test_bfloat16_stays_bfloat16():
    tokens = [x.astype(jnp.bfloat16) for x in random_tokens()]
    exact = [x.astype(jnp.float32) for x in tokens]
    for method in METHODS[:2]:
        results = []
        for given in (tokens, exact):
            out, cache = attend(layer_cache(method), *(x[:, :T] for x in given), right_positions())
            assert out.dtype == given[0].dtype and cache.dtype == given[0].dtype.name
            results.append([np.asarray(out.astype(jnp.float32)), *steps_after(cache, given)])
        for low, high in zip(*results, strict=True):
            np.testing.assert_allclose(low[:, :7].astype(np.float32), high[:, :7], atol=0.05)


def test_vmap_gives_each_row_what_it_gives_alone():
    tokens = random_tokens()
    method = METHODS[1]

    def run(q, k, v):
        q, k, v = (x[None] for x in (q, k, v))
        pos = jnp.arange(T, dtype=jnp.int32)[None]
        _, cache = custom_decoder.attend(layer_cache(method), q[:, :T], k[:, :T], v[:, :T], pos)
        return custom_decoder.attend(
            cache, q[:, T : T + 1], k[:, T : T + 1], v[:, T : T + 1], jnp.full((1, 1), T, jnp.int32)
        )[0]

    together = jax.jit(jax.vmap(run))(*tokens)
    alone = jnp.stack([jax.jit(run)(*(x[b] for x in tokens)) for b in range(B)])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_gradients_are_those_of_dense_attention_and_pass_codes_on_request():
    q, k, v = random_tokens()
    pos = jnp.broadcast_to(jnp.arange(T + 1, dtype=jnp.int32), (B, T + 1))

    def loss(v, method, **given):
        cache = layer_cache(method, **given)
        _, cache = custom_decoder.attend(cache, q[:, :T], k[:, :T], v[:, :T], pos[:, :T])
        out, _ = custom_decoder.attend(cache, q[:, T : T + 1], k[:, T : T + 1], v[:, T : T + 1], pos[:, T:])
        return jnp.square(out).sum()

    def dense(v):
        groups = q[:, T].reshape(B, K, N // K, H)
        s = jnp.einsum("bkgh,bskh->bkgs", groups, k[:, : T + 1]) * H**-0.5
        return jnp.square(jnp.einsum("bkgs,bskv->bkgv", jax.nn.softmax(s), v[:, : T + 1])).sum()

    want = jax.grad(dense)(v)
    np.testing.assert_allclose(jax.jit(jax.grad(loss), static_argnums=1)(v, "full"), want, atol=1e-4)
    through = jax.grad(lambda v: loss(v, METHODS[3], differentiable=True))(v)
    assert np.abs(through).max() > 0 and np.isfinite(through).all()


def test_equal_layers_are_scanned_over_with_stacked_caches():
    specs = custom_decoder.specs_of(3, N, K, H, rope=ROPE)
    rng = np.random.default_rng(3)
    D = N * H
    weights = {
        name: jnp.asarray(rng.normal(size=(3, D, n * H)) * D**-0.5, jnp.float32)
        for name, n in (("q", N), ("k", K), ("v", K))
    }
    x = jnp.asarray(rng.normal(size=(B, T + 1, D)), jnp.float32)
    pos = jnp.broadcast_to(jnp.arange(T + 1, dtype=jnp.int32), (B, T + 1))

    def layer(x, pos, w, cache):
        q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, H) for name in "qkv")
        out, cache = custom_decoder.attend(cache, plain_decoder.rotate(q, pos), plain_decoder.rotate(k, pos), v, pos)
        return x + out.reshape(x.shape), cache

    @jax.jit
    def scanned(x, pos, stacked):
        return lax.scan(lambda x, xs: layer(x, pos, *xs), x, (weights, stacked))

    def unrolled(x, pos, cache):
        cache = dict(cache)
        for i in range(3):
            x, cache[i] = layer(x, pos, {name: w[i] for name, w in weights.items()}, cache[i])
        return x, cache

    cache = custom_decoder.attach(METHODS[1], specs, CAPACITY)
    stacked = jax.tree.map(lambda *states: jnp.stack(states), *cache.values())
    for part in (slice(0, T), slice(T, T + 1)):
        want, cache = unrolled(x[:, part], pos[:, part], cache)
        got, stacked = scanned(x[:, part], pos[:, part], stacked)
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert stacked.length.shape == (3, B)


class Layer(nnx.Module):
    """Attention of a Flax NNX model, which carries its cache as a variable."""

    def __init__(self, cache: custom_decoder.LayerCache, rngs: nnx.Rngs):
        self.project = nnx.Linear(N * H, (N + 2 * K) * H, rngs=rngs)
        self.cache = nnx.Cache(cache)

    def __call__(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.project(x).reshape(*x.shape[:2], -1, H), (N, N + K), 2)
        out, cache = custom_decoder.attend(self.cache.get_value(), q, k, v, pos)
        self.cache.set_value(cache)
        return out.reshape(x.shape)


def test_a_module_of_flax_nnx_keeps_the_cache_in_a_variable():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T + 1, N * H)), jnp.float32)
    pos = jnp.broadcast_to(jnp.arange(T + 1, dtype=jnp.int32), (B, T + 1))
    module = Layer(layer_cache(METHODS[1]), nnx.Rngs(0))
    q, k, v = jnp.split(module.project(x).reshape(B, T + 1, -1, H), (N, N + K), 2)
    _, cache = custom_decoder.attend(layer_cache(METHODS[1]), q[:, :T], k[:, :T], v[:, :T], pos[:, :T])
    want, _ = custom_decoder.attend(cache, q[:, T:], k[:, T:], v[:, T:], pos[:, T:])

    @jax.jit
    def run(state, x, pos):
        module = nnx.merge(graph, state)
        out = module(x, pos)
        return out, nnx.split(module)[1]

    graph, state = nnx.split(module)
    _, state = run(state, x[:, :T], pos[:, :T])
    out, state = run(state, x[:, T:], pos[:, T:])
    np.testing.assert_allclose(out.reshape(want.shape), want, atol=1e-6)


def test_a_mesh_divides_sequences_and_heads():
    tokens = random_tokens()
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    want, cache = custom_decoder.attend(layer_cache(METHODS[1]), *(x[:, :T] for x in tokens), right_positions())
    out, divided = custom_decoder.attend(
        layer_cache(METHODS[1], mesh=mesh), *(x[:, :T] for x in tokens), right_positions()
    )
    np.testing.assert_allclose(out, want, atol=1e-6)
    assert len(jax.tree.leaves(divided)[0].sharding.device_set) == 4
    for got, expected in zip(steps_after(divided, tokens), steps_after(cache, tokens), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_finish_finds_the_layers_of_a_foreign_cache_whatever_the_order_of_its_keys():
    specs = custom_decoder.specs_of(11, N, K, H, rope=ROPE)
    method = "cake:budget=6,window=2,kernel=3"
    tokens = [random_tokens(i) for i in range(11)]
    attached = custom_decoder.attach(method, specs, CAPACITY, gives=("finish",))
    ours, foreign = {}, {"end_index": jnp.int32(0)}
    for i, cache in attached.items():
        _, ours[i] = custom_decoder.attend(cache, *(x[:, :T] for x in tokens[i]), right_positions())
        foreign[f"layer_{i}"] = {"kv": ours[i]}
    ours, foreign = custom_decoder.finish(ours), jax.jit(custom_decoder.finish)(jax.tree.map(jnp.asarray, foreign))
    for i in range(11):
        for got, want in zip(
            steps_after(foreign[f"layer_{i}"]["kv"], tokens[i]), steps_after(ours[i], tokens[i]), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=1e-6)
    assert custom_decoder.finish(ours) is ours


@pytest.mark.parametrize("method", [METHODS[1], "offload"])
def test_sequences_of_a_foreign_cache_are_taken_and_its_other_entries_stay(method):
    q, k, v = (x[:, :T] for x in random_tokens())
    _, cache = attend(layer_cache(method), q, k, v, right_positions())
    foreign = {"kv": cache, "end_index": jnp.int32(5)}
    taken = jax.jit(kvjax.functional.take)(foreign, np.array([1, 1, 0]))
    assert taken["end_index"] == 5 and taken["kv"].length.tolist() == LENGTHS[[1, 1, 0]].tolist()
    pos = jnp.asarray(LENGTHS)[:, None]
    want, _ = attend(cache, q[:, :1], k[:, :1], v[:, :1], pos)
    order = np.array([1, 1, 0])
    got, _ = attend(taken["kv"], q[order, :1], k[order, :1], v[order, :1], pos[order])
    np.testing.assert_allclose(got, want[order], atol=1e-6)


# What is refused, each with its remedy.


@pytest.mark.parametrize(
    ("cache", "message"),
    [({}, "cache is what custom_decoder.attach returns"), ({0: layer_cache()}, "no sequence yet: attend the prompt")],
)
def test_sequences_are_taken_of_a_cache_that_has_some(cache, message):
    with pytest.raises(KvjaxError, match=message):
        kvjax.functional.take(cache, np.array([0]))


@pytest.mark.parametrize(
    ("method", "gives", "message"),
    [
        ("kvzip:budget=6", (), r"repeat=run.*turned_queries"),
        ("kvzip:budget=6", ("finish",), r"gives=\('repeat',\)"),
        ("cake:budget=40", (), r"finish\(cache\).*head_shares"),
        ("snapkv:budget=6,window=2 + adakv:scope=model", (), r"finish\(cache\).*head_shares"),
        ("tidal_decode:topk=3,dense=0", (), r"cross_layer=up"),
        ("minicache", ("finish",), r"cross_layer=up"),
        ("specache:bits=2,group=4,residual=4,topk=3", (), r"kcache has the same layout without drafts"),
        ("snapkv:budget=6,window=2 + criticalkv", (), r"output_projection=w.*gives=\('output_projection',\)"),
        ("full", ("hiden",), r"did you mean 'hidden'"),
    ],
)
def test_attach_refuses_what_the_decoder_does_not_give(method, gives, message):
    specs = custom_decoder.specs_of(4, N, K, H, rope=ROPE)
    with pytest.raises(KvjaxError, match=message):
        custom_decoder.attach(method, specs, CAPACITY, gives=gives)


def test_a_spec_that_contradicts_itself_is_refused():
    for changes, message in (
        ({"heads": 3}, r"layer 0: heads \(3\) must be a multiple of kv_heads \(2\)"),
        ({"rope": [ROPE]}, "rope has 1 entries and the model 2 layers"),
        (
            {"rope": custom_decoder.Rope(2 * H)},
            "layer 0: .* turns 16 channels: .* at most all 8 of a head",
        ),
        ({"rope": 10_000.0}, "layer 0: AttentionKind: rope must be a Rope, got 10000.0"),
        ({"window": [4, 0]}, r"layer 1: Rule: window must lie in \[1, 2147483647\], got 0"),
        ({"soft_cap": -1.0}, "layer 0: Rule: soft_cap must be above 0, got -1.0"),
    ):
        sizes = {"num_layers": 2, "heads": N, "kv_heads": K, "head_dim": H, "rope": ROPE}
        with pytest.raises(KvjaxError, match=message):
            custom_decoder.specs_of(**(sizes | changes))
    with pytest.raises(KvjaxError, match="specs name other layers"):
        custom_decoder.attach("full", custom_decoder.specs_of(2, N, K, H, rope=ROPE)[1:], CAPACITY)
    with pytest.raises(KvjaxError, match="specs are what custom_decoder.specs_of"):
        custom_decoder.attach("full", kvjax.testing.toy_model().config, CAPACITY)


def test_wrong_calls_are_named_and_leave_the_cache_as_it_was():
    q, k, v = tokens = tuple(x[:, :T] for x in random_tokens())
    pos = right_positions()
    _, cache = custom_decoder.attend(layer_cache(), *tokens, pos)
    one = [x[:, :1] for x in tokens]
    _, drafting = custom_decoder.attend(
        layer_cache("specache:bits=2,group=4,residual=4,topk=3", gives="drafts"), *tokens, pos
    )
    for call, message in (
        (lambda: custom_decoder.attend({0: layer_cache()}, *tokens, pos), r"give cache\[i\] in layer i"),
        (lambda: custom_decoder.attend(layer_cache(), q, k[:, :, :1], v, pos), r"q \[B T 4 8\], k \[B T 2 8\]"),
        (lambda: custom_decoder.attend(layer_cache(), q, k, v.astype(jnp.bfloat16), pos), "k and v of one dtype"),
        (
            lambda: custom_decoder.attend(layer_cache(), *tokens, pos[0]),
            r"positions are integers \[B T\], here \(2, 10\)",
        ),
        (lambda: custom_decoder.attend(layer_cache(), *tokens, pos.astype(np.float32)), "got float32"),
        (lambda: custom_decoder.attend(layer_cache(), *tokens, pos + 1), "a prompt has the positions 0, 1, 2"),
        (lambda: custom_decoder.attend(layer_cache(), *tokens, pos, commit=1), "a prompt has no drafts"),
        (lambda: custom_decoder.attend(layer_cache(), *tokens, pos, layout="NBTH"), "layout is one of"),
        (
            lambda: custom_decoder.attend(layer_cache(), *tokens, pos, sinks=np.zeros(3, np.float32)),
            "each of the 4 query heads",
        ),
        (lambda: custom_decoder.attend(cache, *tokens, pos), "another prompt needs a cache of its own"),
        (lambda: custom_decoder.attend(cache, *one, np.full((B, 1), 12)), "sequence 0 holds 10 tokens"),
        (
            lambda: custom_decoder.attend(cache, *(x[:1] for x in one), np.full((1, 1), 10)),
            "holds 2 sequences and q has 1",
        ),
        (
            lambda: custom_decoder.attend(cache, *(x.astype(jnp.bfloat16) for x in one), LENGTHS[:, None]),
            "the prompt's keys are float32 and these are bfloat16",
        ),
        (
            lambda: custom_decoder.attend(drafting, *one, LENGTHS[:, None]),
            "takes steps of a token and its draft.*commit=1",
        ),
        (lambda: custom_decoder.finish({0: layer_cache()}), "finish follows the prompt"),
        (lambda: custom_decoder.finish({}), "cache is what custom_decoder.attach returns"),
        (lambda: layer_cache().positions, "holds no compressed prompt yet"),
    ):
        with pytest.raises(KvjaxError, match=message):
            call()
    out, _ = custom_decoder.attend(cache, *one, LENGTHS[:, None])
    assert np.isfinite(out).all()


def test_a_prompt_that_waits_for_finish_takes_no_step_and_no_finish_without_all_layers():
    tokens = tuple(x[:, :T] for x in random_tokens())
    attached = custom_decoder.attach(
        "kvzip:budget=6,page=4", custom_decoder.specs_of(2, N, K, H, rope=ROPE), CAPACITY, gives="repeat"
    )
    cache = {i: custom_decoder.attend(attached[i], *tokens, right_positions())[1] for i in attached}
    with pytest.raises(KvjaxError, match=r"cache = finish\(cache\) after it"):
        custom_decoder.attend(cache[0], *(x[:, :1] for x in tokens), LENGTHS[:, None])
    with pytest.raises(KvjaxError, match=r"finish\(cache, tokens=tokens, repeat=run\)"):
        custom_decoder.finish(cache)
    with pytest.raises(KvjaxError, match="takes the caches of all layers"):
        custom_decoder.finish({1: cache[1]}, tokens=np.zeros((B, T), np.int32), repeat=lambda cache, tokens, pos: cache)
    with pytest.raises(KvjaxError, match=r"tokens are those of the prompt, of shape \(2, 10\)"):
        custom_decoder.finish(cache, tokens=np.zeros((B, 3), np.int32), repeat=lambda cache, tokens, pos: cache)


@pytest.mark.parametrize("side", ("left", "both"))
def test_a_prompt_is_repeated_without_its_padding_also_where_the_first_layer_has_a_window(side):
    columns, positions, width = pad(side)
    tokens = np.full((B, width), 96)  # of padding
    for b, n in enumerate(LENGTHS):
        tokens[b, columns[b, :n]] = 10 * b + np.arange(n)
    specs = custom_decoder.specs_of(2, N, K, H, rope=ROPE, window=[4, None])
    cache = custom_decoder.attach("kvzip:budget=6,page=4", specs, CAPACITY, gives="repeat")
    prompt = tuple(place(x[:, :T], columns, width) for x in random_tokens())
    cache = {i: custom_decoder.attend(cache[i], *prompt, positions)[1] for i in cache}
    repeated = []

    def repeat(cache, tokens, positions):
        repeated.append((np.asarray(tokens), np.asarray(positions)))
        return cache

    custom_decoder.finish(cache, tokens=tokens, repeat=repeat)
    ((copy, at),) = repeated
    for b, n in enumerate(LENGTHS):
        assert copy[b][at[b] >= 0].tolist() == (10 * b + np.arange(n)).tolist()
        assert at[b][at[b] >= 0].tolist() == (n + np.arange(n)).tolist()


def test_tokens_beyond_the_capacity_are_an_error_or_nan_and_never_silent():
    tokens = random_tokens(num_tokens=20)
    pos = np.broadcast_to(np.arange(20, dtype=np.int32), (B, 20))

    def run(method):
        cache = custom_decoder.attach(method, SPECS, 12)[0]
        _, cache = custom_decoder.attend(cache, *(x[:, :12] for x in tokens), pos[:, :12])
        return custom_decoder.attend(cache, *(x[:, 12:13] for x in tokens), pos[:, 12:13])[0]

    with pytest.raises(KvjaxError, match="13 tokens exceed the cache's capacity of 12"):
        run("full")
    assert np.isnan(jax.jit(run, static_argnums=0)("full")).all()
    assert np.isfinite(run("streaming_llm:recent=3,sinks=2")).all()  # its size is constant
    with pytest.raises(KvjaxError, match="20 tokens exceed the cache's capacity of 12"):
        custom_decoder.attend(custom_decoder.attach("full", SPECS, 12)[0], *tokens, pos)


def test_a_layer_with_a_window_holds_a_ring_and_is_exact_over_four_windows():
    window, total = 24, 110
    specs = custom_decoder.specs_of(2, N, K, H, rope=ROPE, window=[window, None])
    assert [spec.method_layers for spec in specs] == [(1,), (1,)]
    cache = custom_decoder.attach("full", specs, capacity=128)
    q, k, v = tokens = random_tokens(num_tokens=total)
    pos = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (B, total))

    @jax.jit
    def run(cache, tokens):
        first, cache = custom_decoder.attend(cache, *(x[:, :30] for x in tokens), pos[:, :30])

        def step(cache, i):
            at = [lax.dynamic_slice_in_dim(x, i, 1, 1) for x in tokens]
            out, cache = custom_decoder.attend(cache, *at, jnp.full((B, 1), i, jnp.int32))
            return cache, out[:, 0]

        cache, steps = lax.scan(step, cache, jnp.arange(30, total, dtype=jnp.int32))
        return jnp.concatenate([first, jnp.moveaxis(steps, 0, 1)], 1), cache

    out, after = run(cache[0], tokens)
    for b in range(B):
        heads = [np.asarray(x[b]).swapaxes(0, 1) for x in (q, k, v)]
        np.testing.assert_allclose(out[b], dense_attention(*heads, np.arange(total), window).swapaxes(0, 1), atol=2e-5)
    assert window <= after.positions.shape[2] <= window + 16 and after.length.tolist() == [total] * B
    assert run(cache[1], tokens)[1].positions.shape[2] == 128


def test_values_that_are_channels_of_their_keys_are_stored_once_and_others_are_refused():
    rope, first, width = custom_decoder.Rope(2), 4, 4
    q, k, _ = random_tokens()
    pos = np.broadcast_to(np.arange(T + NEW, dtype=np.int32), (B, T + NEW))
    outs = []
    for values_from in (None, first):
        specs = custom_decoder.specs_of(1, N, K, H, rope=rope, value_dim=width, values_from=values_from)
        v, cache = k[..., first:], layer_cache(specs=specs)
        out, cache = custom_decoder.attend(cache, q[:, :T], k[:, :T], v[:, :T], pos[:, :T])
        outs.append((out, custom_decoder.attend(cache, q[:, T:], k[:, T:], v[:, T:], pos[:, T:])[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *outs)
    with pytest.raises(KvjaxError, match="values are the channels of the keys from 4 on, and v holds others"):
        custom_decoder.attend(cache, q[:, T:], k[:, T:], v[:, T:] + 1, pos[:, T:])
    assert np.isnan(attend(cache, q[:, T:], k[:, T:], v[:, T:] + 1, jnp.asarray(pos[:, T:]))[0]).all()


def test_positions_that_do_not_continue_give_nan_under_jit_in_their_sequence_alone():
    tokens = random_tokens()
    _, cache = custom_decoder.attend(layer_cache(), *(x[:, :T] for x in tokens), right_positions())
    out, _ = attend(cache, *(x[:, :1] for x in tokens), jnp.array([[10], [3]]))
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@pytest.mark.parametrize("method", METHODS)
def test_the_modes_of_the_engine_give_the_same_bits(method):
    q, k, v = tokens = random_tokens()
    pos = jnp.broadcast_to(jnp.arange(T + 1, dtype=jnp.int32), (B, T + 1))
    empty = layer_cache(method)
    out, cache = attend(empty, *(x[:, :T] for x in tokens), pos[:, :T])
    step_out, after = attend(cache, *(x[:, T : T + 1] for x in tokens), pos[:, T:])

    @jax.jit
    def run(q, k, v):
        def inputs(part):
            grouped = jnp.moveaxis(q[:, part], 1, 2).reshape(B, K, N // K, -1, H)
            return LayerInputs(grouped, *(jnp.moveaxis(x[:, part], 1, 2) for x in (k, v)), None, None)

        mode = FullPrefill(jnp.full(B, T, jnp.int32), CAPACITY, None)
        out, state, _ = mode.attend(empty.layer.call(T), None, inputs(slice(0, T)), None, None)
        mode = Decode(pos[:, T:], 1)
        step_out, after, _ = mode.attend(empty.layer.call(T), state, inputs(slice(T, T + 1)), None, None)
        return [jnp.moveaxis(x, 3, 1).reshape(B, -1, N, V) for x in (out, step_out)], memory.without_guards(
            [state, after]
        )

    outs, states = run(q, k, v)
    jax.tree.map(np.testing.assert_array_equal, outs, [out, step_out])
    jax.tree.map(np.testing.assert_array_equal, states, memory.without_guards([cache.state, after.state]))
