"""The decoder. Model families are values of `Config`, and the caller's `attend` decides what attention reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.gated_delta import RecurrentInputs
from kvjax.core.matmul import grouped_matmul, matmul, unembed
from kvjax.core.quantized_kernel import dequantize
from kvjax.core.rope import rotate
from kvjax.core.top_k import top_k
from kvjax.core.types import Array
from kvjax.models.config import Config
from kvjax.models.kinds import LayerKind, MlpKind, QueryTemperature
from kvjax.models.layers import Linear, RMSNorm, divide_by_root_mean_square
from kvjax.models.quantized_params import CHOICE_BIAS, DECAY_BIAS, LOG_RATE

Angles = tuple[tuple[Array, ...], ...]
"""cos and sin, each f32[B T pairs], for each of the `ropes` of a config; then a factor f32[B T] of queries for each of
its `query_temperatures`; and of a config with a `per_layer_embedding` the tokens' ids i32[B T], which `layer_angles` of
the engine replaces by the vectors [B T J] of the layer at hand."""
Attend = Callable[[int, Any, Any, Any, Array], tuple[Array, Any]]
"""(layer, q [B K G T H], k [B K T H], both after RoPE, v [B K T H], the attention's input x [B T D]) -> (attention
output [B K G T H], the layer's new state). Values and outputs have the width of values, which may be another one. k and
v are None in a layer that reads those of another one. A layer with a recurrence gives its `RecurrentInputs` as q, None
as k and v, and takes the output of all tokens [B K G T Hv]."""

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever that of the model's other norms is (DeepSeek-V2's own code)."""


class Attention(nn.Module):
    """The projections and RoPE around `attend`."""

    config: Config
    layer: int
    dtype: jnp.dtype
    kind: LayerKind

    @nn.compact
    def __call__(self, x: Array, angles: Angles, attend: Attend, query_indices: Array | None) -> tuple[Array, Any]:
        c, a = self.config, self.kind.attention
        project = self._project if a.latent is None else self._project_latent
        q, k, v, value_up = project(x, take_tokens(x, query_indices))
        dtype, factors = q.dtype, _query_factors(self.kind)
        if factors is not None or a.query_temperature is not None:
            q = q.astype(jnp.float32)  # until it is multiplied, so that it is rounded once
        if a.rope is not None:
            cos, sin = angles[c.ropes.index(a.rope)]
            q_cos, q_sin = take_tokens(cos, query_indices), take_tokens(sin, query_indices)
            q = rotate(q, q_cos[:, None, None], q_sin[:, None, None])
            k = None if k is None else rotate(k, cos[:, None], sin[:, None])
        if factors is not None:
            q = q * jnp.expand_dims(factors, range(q.ndim - 1))
        if a.query_temperature is not None:
            (temperature,) = angles[len(c.ropes) + c.query_temperatures.index(a.query_temperature)]
            q = q * take_tokens(temperature, query_indices)[:, None, None, :, None]
        q = q.astype(dtype)
        if a.sinks:
            # Read by the engine: they are part of the softmax, which is not the decoder's.
            init: Any = nn.with_logical_partitioning(nn.initializers.zeros, ("K", "G"))
            self.param("sinks", init, (a.kv_heads, a.groups), self.dtype)
        out, state = attend(self.layer, q, k, v, x)
        out, width = jnp.moveaxis(out.astype(x.dtype), 3, 1), a.value_dim
        if a.output_gate:
            gate_shape = (c.width, a.kv_heads, a.groups, a.value_dim)
            gate_linear = Linear("D K G H", gate_shape, bias=a.qkv_bias, dtype=self.dtype, name="gate")
            out = out * jax.nn.sigmoid(gate_linear(take_tokens(x, query_indices)))
        if a.latent is not None:
            out, width = jnp.einsum("btkgr,gvr->btkgv", out, value_up), a.latent.value
        shape = (a.kv_heads, a.groups, width, c.width)
        return Linear("K G H D", shape, contract=3, bias=a.out_bias, dtype=self.dtype, name="o")(out), state

    def _project(self, x: Array, x_q: Array) -> tuple[Array, Array | None, Array | None, None]:
        c, a = self.config, self.kind.attention
        D, K, G, H = c.width, a.kv_heads, a.groups, a.head_dim
        linear = functools.partial(Linear, bias=a.qkv_bias, dtype=self.dtype)
        norm = functools.partial(RMSNorm, eps=c.norm_eps, dtype=self.dtype, unit_offset=self.kind.unit_offset)
        q = linear("D K G H", (D, K, G, H), name="q")(x_q)
        if a.qk_norm == "all":
            q = norm((K, G, H), axes="K G H", name="q_norm")(q)
        q = jnp.moveaxis(q, 1, 3)
        if a.qk_norm == "head":
            q = norm((H,), axes="H", name="q_norm")(q)
        if a.reads_layer is not None:
            return q, None, None, None
        k = linear("D K H", (D, K, H), name="k")(x)
        v = k if a.keys_as_values else linear("D K H", (D, K, a.value_dim), name="v")(x)
        if a.qk_norm == "all":
            k = norm((K, H), axes="K H", name="k_norm")(k)
        k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
        if a.qk_norm == "head":
            k = norm((H,), axes="H", name="k_norm")(k)
        if a.value_norm:
            v = divide_by_root_mean_square(v, c.norm_eps).astype(v.dtype)
        return q, k, v, None

    def _project_latent(self, x: Array, x_q: Array) -> tuple[Array, Array, Array, Array]:
        """Projects to [rotated | latent]; the up-projection of keys is a part of the queries (absorbed)."""
        c, a = self.config, self.kind.attention
        latent, rotated = a.latent, 0 if a.rope is None else a.rope.dim
        assert latent is not None
        linear = functools.partial(Linear, dtype=self.dtype)
        norm = functools.partial(RMSNorm, eps=LATENT_NORM_EPS, axes="R", dtype=self.dtype)
        axes, size_in = "D G H", c.width
        if latent.query_rank is not None:
            x_q = linear("D R", (c.width, latent.query_rank), bias=a.qkv_bias, name="q_down")(x_q)
            x_q = norm((latent.query_rank,), name="q_down_norm")(x_q)
            axes, size_in = "R G H", latent.query_rank
        q = linear(axes, (size_in, a.heads, rotated + latent.unrotated), name="q")(x_q)  # [B T N rotated|unrotated]
        down = linear("D R", (c.width, rotated + latent.rank), bias=a.qkv_bias, name="kv_down")(x)
        v = norm((latent.rank,), name="kv_down_norm")(down[..., rotated:])
        init: Any = nn.with_logical_partitioning(nn.initializers.normal(latent.rank**-0.5), ("G", "H", "R"))
        key_up = self.param("key_up", init, (a.heads, latent.unrotated, latent.rank), self.dtype)
        value_up = self.param("value_up", init, (a.heads, latent.value, latent.rank), self.dtype)
        absorbed = jnp.einsum("btgh,ghr->btgr", q[..., rotated:], key_up)
        q = jnp.concatenate([q[..., :rotated], absorbed], -1)[:, :, None]
        k = jnp.concatenate([down[..., :rotated], v], -1)
        return jnp.moveaxis(q, 1, 3), k[:, None], v[:, None], value_up


class GatedDeltaNet(nn.Module):
    """The projections around a gated delta rule; the caller's `attend` holds its state (Yang et al., 2024)."""

    config: Config
    layer: int
    dtype: jnp.dtype
    kind: LayerKind

    @nn.compact
    def __call__(self, x: Array, angles: Angles, attend: Attend, query_indices: Array | None) -> tuple[Array, Any]:
        c, a = self.config, self.kind.attention
        assert a.recurrence is not None
        D, K, G, H, Hv = c.width, a.kv_heads, a.groups, a.head_dim, a.value_dim
        W = a.recurrence.kernel_tokens
        linear = functools.partial(Linear, dtype=self.dtype)

        def parameter(name: str, axes: str, *shape: int, dtype: Any = self.dtype) -> Array:
            init: Any = nn.with_logical_partitioning(nn.initializers.normal(shape[-1] ** -0.5), tuple(axes.split()))
            return cast(Array, self.param(name, init, shape, dtype))

        def per_head(y: Array) -> Array:
            return jnp.moveaxis(y.astype(jnp.float32), 1, 3)  # [B K G T]

        # Decays are products over thousands of tokens, in which roundings of a rate add up: it is float32 in any model.
        rate, bias = (
            parameter(name, "K G", K, G, dtype=jnp.float32).astype(jnp.float32) for name in (LOG_RATE, DECAY_BIAS)
        )
        step = linear("D K G", (D, K, G), name="decay")(x).astype(jnp.float32) + bias[None, None]
        q, k = (linear("D K H", (D, K, H), name=name)(x) for name in ("q", "k"))
        v = linear("D K G H", (D, K, G, Hv), name="v")(x)
        kernels = [parameter(f"{name}_convolution", "K H W", K, H, W) for name in ("q", "k")]
        kernels.append(parameter("v_convolution", "K G H W", K, G, Hv, W).reshape(K, G * Hv, W))
        inputs = RecurrentInputs(
            mixed=jnp.moveaxis(jnp.concatenate([q, k, v.reshape(*v.shape[:3], G * Hv)], -1), 1, 2),
            log_decay=per_head(-jnp.exp(rate)[None, None] * jax.nn.softplus(step)),
            write_strength=per_head(jax.nn.sigmoid(linear("D K G", (D, K, G), name="write")(x))),
            kernel=jnp.concatenate(kernels, 1)[None],
        )
        out, state = attend(self.layer, inputs, None, None, x)
        out = take_tokens(jnp.moveaxis(out, 3, 1).astype(x.dtype), query_indices)  # [B Q K G Hv]
        out = RMSNorm((Hv,), c.norm_eps, axes="H", dtype=self.dtype, name="norm")(out)
        gate = linear("D K G H", (D, K, G, Hv), name="gate")(take_tokens(x, query_indices))
        out = (out.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
        return linear("K G H D", (K, G, Hv, D), contract=3, name="o")(out), state


def _grow_queries(temperature: QueryTemperature, pos: Array) -> Array:
    """The factor f32[B T] of queries at these positions; that of padding is one."""
    steps = (jnp.maximum(pos, 0) // temperature.positions).astype(jnp.float32)
    return 1 + temperature.beta * jnp.log1p(steps)


def _query_factors(kind: LayerKind) -> np.ndarray | None:
    """Returns what each channel of a query is multiplied by, f32[H], or None where no factor differs from 1."""
    a = kind.attention
    factors = np.full(a.head_dim, a.query_factor, np.float32)
    if a.rope is not None:
        # Of keys and queries alike; all of it goes into the queries, so that keys are rotated and nothing else.
        factors[: a.rope.dim] *= a.rope.query_factor
    return None if np.all(factors == 1.0) else factors


def output_projection_of(params: Any, kind: LayerKind) -> Array:
    """Returns the map [K G H D] from a layer's attention output, as methods see it, to its residual stream.

    Args:
      params: of the layer.
      kind: of the layer. With latent attention the map contains the up-projection of values, so that H is its rank.
    """
    kernel = dequantize(params["attention"]["o"]["kernel"], num_inputs=3)
    if kind.attention.latent is None:
        return kernel
    return jnp.einsum("gvr,kgvd->kgrd", params["attention"]["value_up"], kernel)


def sinks_of(params: Any) -> Array | None:
    """Returns the sink logits [1 K G] of a layer with these parameters, None for one without."""
    sinks = params["attention"].get("sinks")
    return None if sinks is None else sinks[None]


def gate(kind: MlpKind, gate: Array, up: Array) -> Array:
    """Multiplies a gated feed-forward part's two projections (Shazeer, 2020)."""
    if kind.activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, kind.limit), jnp.clip(up, -kind.limit, kind.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(kind.slope * gate))
    activation = jax.nn.silu if kind.activation == "silu" else functools.partial(jax.nn.gelu, approximate=True)
    return activation(gate) * up


class MLP(nn.Module):
    """A gated feed-forward part (Shazeer, 2020)."""

    width: int  # D
    dtype: jnp.dtype
    kind: MlpKind

    @nn.compact
    def __call__(self, x: Array) -> Array:
        D, F = self.width, self.kind.width
        linear = functools.partial(Linear, bias=self.kind.bias, dtype=self.dtype)
        inner = gate(self.kind, linear("D F", (D, F), name="gate")(x), linear("D F", (D, F), name="up")(x))
        return linear("F D", (F, D), name="down")(inner)


class MixtureOfExperts(nn.Module):
    """A feed-forward part of experts; each token passes a few (Shazeer et al., 2017), and no token is dropped."""

    width: int  # D
    dtype: jnp.dtype
    kind: MlpKind
    norm_eps: float = 1e-6  # of the norms that experts may have of their own

    @nn.compact
    def __call__(self, x: Array, unnormed: Array | None = None) -> Array:
        """Computes the outputs for x [B T D]; `unnormed` is x before its norm, for experts with norms of their own."""
        D, F, experts = self.width, self.kind.width, self.kind.experts
        assert experts is not None
        norm = functools.partial(RMSNorm, (D,), self.norm_eps, dtype=self.dtype)
        tokens = routed = x.reshape(-1, D)
        if experts.own_norms:
            assert unnormed is not None
            tokens = norm(name="experts_norm")(unnormed.reshape(-1, D))
            routed = norm(name="router_norm")(unnormed.reshape(-1, D))
        chosen, weights = self._route(routed)
        # Tokens are sorted by expert: each expert then multiplies one run of rows.
        order = jnp.argsort(chosen.reshape(-1))
        expert = chosen.reshape(-1)[order]
        counts = jnp.bincount(expert, length=experts.count).astype(jnp.int32)
        rows = tokens[order // experts.top_k]
        multiply = functools.partial(ExpertLinear, experts.count, bias=self.kind.bias, dtype=self.dtype)
        inner = gate(
            self.kind,
            multiply("E D F", D, F, name="gate")(rows, counts, expert),
            multiply("E D F", D, F, name="up")(rows, counts, expert),
        )
        rows = multiply("E F D", F, D, name="down")(inner, counts, expert)
        rows = rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        # Back in the order of the tokens: a sum over each one's experts, and no scatter, whose order would vary.
        y = rows[jnp.argsort(order)].reshape(-1, experts.top_k, D).sum(1).astype(x.dtype).reshape(x.shape)
        if experts.own_norms:
            y = norm(name="experts_post_norm")(y)
        if experts.shared_width:
            shared_kind = MlpKind(experts.shared_width, self.kind.activation, experts.shared_bias)
            shared = MLP(D, self.dtype, shared_kind, name="shared")(x)
            if experts.shared_gate:
                shared = shared * jax.nn.sigmoid(Linear("D S", (D, 1), dtype=self.dtype, name="shared_gate")(x))
            y = y + (norm(name="shared_post_norm")(shared) if experts.own_norms else shared)
        return y

    def _route(self, x: Array) -> tuple[Array, Array]:
        """Chooses the experts of each token: indices i32[T top_k] and weights f32[T top_k]."""
        experts = self.kind.experts
        assert experts is not None
        shape, is_sigmoid = (self.width, experts.count), experts.scoring == "sigmoid"
        # In float32 where sigmoids are weights, as transformers has it: all are near one another, and rounding chooses.
        linear = functools.partial(Linear, "D E", shape, bias=experts.router_bias, dtype=self.dtype)
        logits = linear(in_float32=is_sigmoid, name="router")(x).astype(jnp.float32)
        if experts.own_norms:
            logits = logits * self.width**-0.5  # Gemma 4
        candidates = logits
        if is_sigmoid:
            scores = jax.nn.sigmoid(logits)
            # In float32 whatever the model's dtype is: biases are larger than the differences of the weights.
            zeros: Any = nn.with_logical_partitioning(nn.initializers.zeros, ("E",))
            bias: Any = self.param(CHOICE_BIAS, zeros, (experts.count,), jnp.float32)
            candidates = scores + bias.astype(jnp.float32)[None]
        if experts.groups > 1:
            by_group = candidates.reshape(len(x), experts.groups, -1)
            rank = top_k(by_group, 2)[0].sum(-1) if is_sigmoid else by_group.max(-1)
            _, best = top_k(rank, experts.top_groups)
            is_candidate = jax.nn.one_hot(best, experts.groups).sum(1) > 0
            candidates = jnp.where(is_candidate[:, :, None], by_group, -jnp.inf).reshape(logits.shape)
        best, chosen = top_k(candidates, experts.top_k)
        if is_sigmoid:
            weights = jnp.take_along_axis(scores, chosen, -1)
            if experts.normalize:
                weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        elif experts.normalize:
            weights = jax.nn.softmax(best, -1)
        else:
            weights = jnp.take_along_axis(jax.nn.softmax(logits, -1), chosen, -1)
        if experts.own_norms:
            init: Any = nn.with_logical_partitioning(nn.initializers.ones, ("E",))
            factors: Any = self.param("expert_factors", init, (experts.count,), self.dtype)
            weights = weights * factors.astype(jnp.float32)[chosen]
        return chosen, weights * experts.factor


class ExpertLinear(nn.Module):
    """One linear map for each expert, applied to rows that are sorted by expert."""

    count: int
    axes: str
    size_in: int
    size_out: int
    bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, rows: Array, counts: Array, expert: Array) -> Array:
        names, shape = tuple(self.axes.split()), (self.count, self.size_in, self.size_out)
        init: Any = nn.with_logical_partitioning(nn.initializers.normal(self.size_in**-0.5), names)
        kernel: Any = self.param("kernel", init, shape, self.dtype)
        y = grouped_matmul(rows, kernel, counts)
        if self.bias:
            zeros: Any = nn.with_logical_partitioning(nn.initializers.zeros, (names[0], names[2]))
            y = y + self.param("bias", zeros, (self.count, self.size_out), self.dtype)[expert]
        return y


BLOCK_TOKENS = 2048
"""Tokens that pass a feed-forward part at a time. Its inner vectors are several times as wide as the model's, so that
those of a long prompt, all at once, would be most of the memory that reading it takes. A block is still long enough for
a product with the weights to be bound by arithmetic, and not by reading them again."""


class Layer(nn.Module):
    """Attention and a feed-forward part with residuals, and norms before or after them."""

    config: Config
    layer: int
    dtype: jnp.dtype
    kind: LayerKind

    @nn.compact
    def __call__(
        self, x: Array, angles: Angles, attend: Attend, query_indices: Array | None = None
    ) -> tuple[Array, Any]:
        """Computes the outputs [B Q D] of the tokens at query_indices i32[B Q], or of all; keys and values of all."""
        c, kind = self.config, self.kind
        attention_norm, add_attention = self._norms("attention")
        mlp_norm, add_mlp = self._norms("mlp")
        with jax.named_scope("attention"):
            if kind.attention.recurrence is None:
                attention = Attention(c, self.layer, self.dtype, kind, name="attention")
            else:
                attention = GatedDeltaNet(c, self.layer, self.dtype, kind, name="recurrence")
            y, state = attention(attention_norm(x), angles, attend, query_indices)
            # Nothing, unless a caller brings zeros under this name: it then differentiates by them (KVgrad).
            y = self.perturb("attention_output", y)
            x = add_attention(take_tokens(x, query_indices), y)
        with jax.named_scope("mlp"):
            if kind.mlp.experts is None:
                mlp = MLP(c.width, self.dtype, kind.mlp, name="mlp")
                x = map_token_blocks(lambda x: mlp(mlp_norm(x)), add_mlp, x)
            else:
                experts = MixtureOfExperts(c.width, self.dtype, kind.mlp, c.norm_eps, name="mlp")
                x = map_token_blocks(lambda x: experts(mlp_norm(x), x), add_mlp, x)
        if c.per_layer_embedding is not None:
            x = x + self._project_token_vectors(x, take_tokens(angles[-1][0], query_indices))
        if kind.output_scale:
            init: Any = nn.with_logical_partitioning(nn.initializers.ones, ("one",))
            scale: Any = self.param("output_scale", init, (1,), self.dtype)
            x = x * scale[None, None]
        return x, state

    def _project_token_vectors(self, x: Array, vectors: Array) -> Array:
        """Computes what the layer's own vectors of the tokens [B T J] add to x [B T D]."""
        c, J = self.config, vectors.shape[-1]
        opened = Linear("D J", (c.width, J), dtype=self.dtype, name="token_gate")(x)
        y = Linear("J D", (J, c.width), dtype=self.dtype, name="token_up")(gate(self.kind.mlp, opened, vectors))
        norm = RMSNorm((c.width,), c.norm_eps, dtype=self.dtype, unit_offset=self.kind.unit_offset, name="token_norm")
        return norm(y)

    def _norms(self, part: str) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
        """Returns what makes the input of a part of the layer, and what adds its output to the hidden vectors."""
        c, kind = self.config, self.kind
        norm = functools.partial(RMSNorm, (c.width,), c.norm_eps, dtype=self.dtype, unit_offset=kind.unit_offset)
        before = (lambda x: x) if kind.norms == "after" else norm(name=f"{part}_norm")
        after = (lambda y: y) if kind.norms == "before" else norm(name=f"{part}_post_norm")

        def add(x: Array, y: Array) -> Array:
            y = after(y)
            return x + (y if kind.residual == 1.0 else (y.astype(jnp.float32) * kind.residual).astype(y.dtype))

        return before, add


def map_token_blocks(f: Callable[[Array], Array], add: Callable[[Array, Array], Array], x: Array) -> Array:
    """Computes add(x, f(x)), functions of single tokens, on x [B T D], a block of them after the other if T is long."""
    T = x.shape[1]
    if T < 2 * BLOCK_TOKENS:
        return add(x, f(x))

    # Each block's outputs replace its inputs: no second array of all tokens.
    def map_block(first: Any, length: int, x: Array) -> Array:
        block = lax.dynamic_slice_in_dim(x, first, length, 1)
        # On a mesh f ends with a sum over devices. Where XLA sees it added to what the loop carries, it moves the sum
        # behind the loop, which then begins with zeros, although f reads them too (WhileLoopAllReduceCodeMotion, in
        # programs for TPUs and GPUs). The barrier hides that the two are added.
        y = lax.optimization_barrier(f(block))
        return lax.dynamic_update_slice_in_dim(x, add(block, y), first, 1)

    x = lax.fori_loop(0, T // BLOCK_TOKENS, lambda i, x: map_block(i * BLOCK_TOKENS, BLOCK_TOKENS, x), x)
    return map_block(T - T % BLOCK_TOKENS, T % BLOCK_TOKENS, x) if T % BLOCK_TOKENS else x


def take_tokens(x: Array, indices: Array | None) -> Array:
    """Takes from x [B T ...] the tokens of each sequence at i32[B Q]: [B Q ...]; None takes all."""
    return x if indices is None else jnp.take_along_axis(x, jnp.expand_dims(indices, range(2, x.ndim)), 1)


def init(config: Config, key: Array, dtype: Any = jnp.float32) -> Any:
    """Initializes parameters, boxed with their axis letters (`flax.linen.unbox` drops these)."""
    zero = jnp.zeros((1, 1), jnp.int32)

    def attend(i: int, q: Any, k: Any, v: Any, x: Array) -> tuple[Array, None]:
        # Only shapes matter here.
        if isinstance(q, RecurrentInputs):
            return jnp.zeros((*q.log_decay.shape, config.kind(i).attention.value_dim)), None
        return jnp.zeros((*q.shape[:-1], config.kind(i).attention.value_dim), q.dtype), None

    return Decoder(config, dtype).init(key, zero, zero, attend, method=Decoder.logits)["params"]


class Decoder(nn.Module):
    """tokens i32[B T], pos i32[B T] -> (hidden states [B T D] after the final norm, the layers' states)."""

    config: Config
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        init: Any = nn.with_logical_partitioning(nn.initializers.normal(c.width**-0.5), ("V", "D"))
        self.embedding = self.param("embedding", init, (c.vocab_size, c.width), self.dtype)
        self.blocks = [Layer(c, i, self.dtype, c.kind(i), name=f"layer_{i}") for i in range(c.layers)]
        unit_offset = c.kind(0).unit_offset  # equal in all layers
        self.final_norm = RMSNorm((c.width,), c.norm_eps, dtype=self.dtype, unit_offset=unit_offset)
        if not c.tie_embeddings:
            self.head = Linear("D V", (c.width, c.vocab_size), dtype=self.dtype)
        if c.per_layer_embedding is not None:
            L, J = c.per_layer_embedding.layers, c.per_layer_embedding.width
            table_init: Any = nn.with_logical_partitioning(nn.initializers.normal(J**-0.5), ("V", "L", "J"))
            self.per_layer_table = self.param("per_layer_table", table_init, (c.vocab_size, L, J), self.dtype)
            map_init: Any = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("D", "L", "J"))
            self.per_layer_map = self.param("per_layer_map", map_init, (c.width, L, J), self.dtype)
            self.per_layer_norm = RMSNorm((J,), c.norm_eps, axes="J", dtype=self.dtype, unit_offset=unit_offset)

    def __call__(self, tokens: Array, pos: Array, attend: Attend) -> tuple[Array, tuple]:
        x, angles = self.embed(tokens, pos)
        states = []
        for i, block in enumerate(self.blocks):
            if self.config.per_layer_embedding is not None:
                angles = (*angles[:-1], (self.token_vectors(tokens, i),))
            x, state = block(x, angles, attend)
            states.append(state)
        return self.final_norm(x), tuple(states)

    def embed(self, tokens: Array, pos: Array) -> tuple[Array, Angles]:
        """Returns the first layer's input, x [B T D], and what its layers need of the positions."""
        angles = tuple(rope.angles(pos) for rope in self.config.ropes)
        factors = tuple((_grow_queries(temperature, pos),) for temperature in self.config.query_temperatures)
        # Their vectors in all layers would take more than the hidden vectors of a prompt: a layer asks for its own.
        ids = () if self.config.per_layer_embedding is None else ((tokens,),)
        return self._embed_tokens(tokens), angles + factors + ids

    def _embed_tokens(self, tokens: Array) -> Array:
        x, scale = self.embedding[tokens], self.config.embed_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def token_vectors(self, tokens: Array, layer: Array | int) -> Array:
        """Returns the vectors [B T J] of the tokens' `per_layer_embedding` in a layer, given by its index."""
        x, map_of_layer = self._embed_tokens(tokens), self.per_layer_map[:, layer]
        D, J = map_of_layer.shape
        projected = matmul(x.reshape(-1, D), map_of_layer).reshape(*x.shape[:-1], J)
        projected = self.per_layer_norm(projected * jnp.asarray(D**-0.5, x.dtype))
        row = self.per_layer_table[tokens, layer] * jnp.asarray(J**0.5, x.dtype)
        return (projected + row) * jnp.asarray(2**-0.5, x.dtype)

    def finish(self, x: Array) -> Array:
        """Turns the last layer's output [... D] into logits f32[... V]."""
        return self.unembed(self.final_norm(x))

    def unembed(self, hidden: Array) -> Array:
        """Turns hidden states after the final norm [... D] into logits f32[... V]."""
        c = self.config
        if c.tie_embeddings:
            logits = unembed(hidden.reshape(-1, hidden.shape[-1]), self.embedding).reshape(*hidden.shape[:-1], -1)
        else:
            logits = self.head(hidden).astype(jnp.float32)
        if c.logit_scale != 1.0:
            logits = logits * c.logit_scale
        return logits if c.final_cap is None else c.final_cap * jnp.tanh(logits / c.final_cap)

    def logits(self, tokens: Array, pos: Array, attend: Attend) -> tuple[Array, tuple]:
        """Runs `__call__`, then `unembed`: (logits f32[B T V], the layers' states)."""
        hidden, states = self(tokens, pos, attend)
        return self.unembed(hidden), states
