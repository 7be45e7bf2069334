"""A decoder in NumPy, float64 and without a cache, written from the families' definitions in transformers.

Nothing is folded or absorbed as in kvjax: YaRN's factor multiplies queries and keys, the scale multiplies logits,
latent attention makes keys and values of every head, and experts are run one after the other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvjax.models import Config
from kvjax.models.kinds import AttentionKind, LayerKind, MlpKind


def logits(config: Config, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Computes the logits [T V] of one sequence of tokens [T]."""
    kind = config.kind(0)
    x = _array(params["embedding"])[tokens] * config.embed_scale
    exact: list[tuple[np.ndarray, np.ndarray] | None] = []  # keys and values by layer, which later ones may read
    vectors = _token_vectors(config, params, tokens, x)
    for i in range(config.layers):
        x = _layer(config, config.kind(i), params[f"layer_{i}"], x, exact, vectors[:, i])
    x = _norm(x, params["final_norm"], config.norm_eps, kind.unit_offset)
    head = _array(params["embedding"]).T if config.tie_embeddings else _array(params["head"]["kernel"])
    s = x @ head * config.logit_scale
    return s if config.final_cap is None else config.final_cap * np.tanh(s / config.final_cap)


def _array(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def _norm(x: np.ndarray, params: Any, eps: float, unit_offset: bool = False) -> np.ndarray:
    scale = _array(params["scale"]) + unit_offset
    axes = tuple(range(-scale.ndim, 0))
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + eps) * scale


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softmax(s: np.ndarray) -> np.ndarray:
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def _token_vectors(config: Config, params: Any, tokens: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The vectors [T L J] of the tokens in all layers at once, of no width in most models."""
    own = config.per_layer_embedding
    if own is None:
        return np.zeros((len(tokens), config.layers, 0))
    projected = np.einsum("td,dlj->tlj", x, _array(params["per_layer_map"])) / config.width**0.5
    projected = _norm(projected, params["per_layer_norm"], config.norm_eps, config.kind(0).unit_offset)
    return (projected + _array(params["per_layer_table"])[tokens] * own.width**0.5) / 2**0.5


def _layer(config: Config, kind: LayerKind, params: Any, x: np.ndarray, exact: list, vectors: np.ndarray) -> np.ndarray:
    def run(name: str, part: Any) -> np.ndarray:
        y = x
        if kind.norms != "after":
            y = _norm(y, params[f"{name}_norm"], config.norm_eps, kind.unit_offset)
        y = part(y)
        if kind.norms != "before":
            y = _norm(y, params[f"{name}_post_norm"], config.norm_eps, kind.unit_offset)
        return x + kind.residual * y

    if kind.attention.recurrence is not None:
        exact.append(None)
        x = run("attention", lambda y: _gated_delta_net(config, kind.attention, params["recurrence"], y))
    else:
        attend = _latent_attention if kind.attention.latent else _attention
        x = run("attention", lambda y: attend(config, kind, params["attention"], y, exact))
    mlp, before = kind.mlp, x
    if mlp.experts is not None and mlp.experts.own_norms:
        x = run("mlp", lambda y: _experts_with_norms(config, mlp, params["mlp"], y, before))
    else:
        x = run("mlp", lambda y: (_mlp if mlp.experts is None else _experts)(mlp, params["mlp"], y))
    if config.per_layer_embedding is not None:
        opened = _gate(mlp, _project(x, params["token_gate"], "td,dj->tj"), vectors)
        added = _project(opened, params["token_up"], "tj,jd->td")
        x = x + _norm(added, params["token_norm"], config.norm_eps, kind.unit_offset)
    return x * _array(params["output_scale"]) if kind.output_scale else x


def _rotate(x: np.ndarray, a: AttentionKind) -> np.ndarray:
    """Rotates x [T .. H] as transformers does, with the attention factor in cos and sin of queries and of keys."""
    if a.rope is None:
        return x
    half, m = a.rope.dim // 2, 1.0 if a.rope.scaling is None else a.rope.scaling.attention_factor
    angle = np.arange(len(x))[:, None] * _array(a.rope.frequencies())
    angle = angle.reshape(len(x), *(1,) * (x.ndim - 2), half)
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle) * m
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)


def _attention(config: Config, kind: LayerKind, params: Any, x: np.ndarray, exact: list) -> np.ndarray:
    a = kind.attention

    def project(name: str, has_norm: bool = bool(a.qk_norm)) -> np.ndarray:
        y = _project(x, params[name], "td,d...->t...")
        if not has_norm:
            return y
        return _norm(y, params[f"{name}_norm"], config.norm_eps, kind.unit_offset)

    q = _rotate(project("q"), a)
    if a.reads_layer is None:
        v = project("k", False) if a.keys_as_values else project("v", False)
        if a.value_norm:
            v = _norm(v, {"scale": np.ones(a.value_dim)}, config.norm_eps)
        exact.append((_rotate(project("k"), a), v))
    else:
        exact.append(None)
    k, v = exact[-1 if a.reads_layer is None else a.reads_layer]
    scale = a.head_dim**-0.5 if a.scale is None else a.scale
    if a.query_temperature is not None:
        steps = np.floor(np.arange(len(x)) / a.query_temperature.positions)
        q = q * (1 + a.query_temperature.beta * np.log(1 + steps))[:, None, None, None]
    out = np.empty((len(x), a.kv_heads, a.groups, a.value_dim))
    for n in range(a.kv_heads):
        for g in range(a.groups):
            sink = _array(params["sinks"])[n, g] if a.sinks else None
            out[:, n, g] = _head(q[:, n, g], k[:, n], v[:, n], scale, a, sink)
    if a.output_gate:
        out = out * _sigmoid(_project(x, params["gate"], "td,d...->t..."))
    return _project(out, params["o"], "tkgh,kghd->td")


def _latent_attention(config: Config, kind: LayerKind, params: Any, x: np.ndarray, exact: list) -> np.ndarray:
    exact.append(None)
    a, latent = kind.attention, kind.attention.latent
    assert latent is not None
    rotated = 0 if a.rope is None else a.rope.dim
    x_q = (
        x
        if latent.query_rank is None
        else _norm(_project(x, params["q_down"], "td,dr->tr"), params["q_down_norm"], 1e-6)
    )
    q = _project(x_q, params["q"], "td,dgh->tgh")
    down = _project(x, params["kv_down"], "td,dr->tr")
    c = _norm(down[:, rotated:], params["kv_down_norm"], 1e-6)
    q_rotated, k_rotated = _rotate(q[..., :rotated], a), _rotate(down[:, :rotated], a)
    keys = np.einsum("tr,ghr->tgh", c, _array(params["key_up"]))
    values = np.einsum("tr,gvr->tgv", c, _array(params["value_up"]))
    scale = a.head_dim**-0.5 if a.scale is None else a.scale
    out = np.empty((len(x), 1, a.heads, latent.value))
    for g in range(a.heads):
        q_head = np.concatenate([q_rotated[:, g], q[:, g, rotated:]], -1)
        out[:, 0, g] = _head(q_head, np.concatenate([k_rotated, keys[:, g]], -1), values[:, g], scale, a, None)
    return _project(out, params["o"], "tkgh,kghd->td")


def _gated_delta_net(config: Config, a: AttentionKind, params: Any, x: np.ndarray) -> np.ndarray:
    """The recurrence of Gated DeltaNet (arXiv 2412.06464, equation 10), token by token."""

    def project(name: str) -> np.ndarray:
        return _project(x, params[name], "td,d...->t...")

    def convolve(name: str) -> np.ndarray:
        y, kernel = project(name), _array(params[f"{name}_convolution"])
        padded = np.concatenate([np.zeros((kernel.shape[-1] - 1, *y.shape[1:])), y])
        y = sum(padded[w : w + len(x)] * kernel[..., w] for w in range(kernel.shape[-1]))
        return y * _sigmoid(y)

    q, k, v = convolve("q"), convolve("k"), convolve("v")
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    softplus = np.log1p(np.exp(project("decay") + _array(params["decay_bias"])))
    decay, strength = np.exp(-np.exp(_array(params["log_rate"])) * softplus), _sigmoid(project("write"))
    out, states = np.empty(v.shape), np.zeros((a.kv_heads, a.groups, a.value_dim, a.head_dim))
    for t, n, g in np.ndindex(v.shape[:3]):
        S, key, b = states[n, g], k[t, n], strength[t, n, g]
        S = states[n, g] = S @ (decay[t, n, g] * (np.eye(len(key)) - b * np.outer(key, key))) + b * np.outer(
            v[t, n, g], key
        )
        out[t, n, g] = S @ q[t, n] * a.head_dim**-0.5
    gate = project("gate")
    out = _norm(out, params["norm"], config.norm_eps) * gate * _sigmoid(gate)
    return _project(out, params["o"], "tkgh,kghd->td")


def _head(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, a: AttentionKind, sink: float | None
) -> np.ndarray:
    t, s = np.arange(len(q))[:, None], np.arange(len(k))[None]
    x = q @ k.T * scale
    if a.rule.soft_cap is not None:
        x = a.rule.soft_cap * np.tanh(x / a.rule.soft_cap)
    x = np.where((s <= t) & (s > t - (a.rule.window or math.inf)), x, -np.inf)
    if sink is not None:
        x = np.concatenate([x, np.full((len(q), 1), sink)], -1)
    return _softmax(x)[:, : len(k)] @ v


def _project(x: np.ndarray, params: Any, einsum: str) -> np.ndarray:
    y = np.einsum(einsum, x, _array(params["kernel"]))
    return y + _array(params["bias"]) if "bias" in params else y


def _gate(kind: MlpKind, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if kind.activation == "clamped_swiglu":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    if kind.activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    return gate / (1 + np.exp(-gate)) * up


def _mlp(kind: MlpKind, params: Any, x: np.ndarray) -> np.ndarray:
    inner = _gate(kind, _project(x, params["gate"], "td,df->tf"), _project(x, params["up"], "td,df->tf"))
    return _project(inner, params["down"], "tf,fd->td")


def _experts_with_norms(config: Config, kind: MlpKind, params: Any, x: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Gemma 4: an MLP of x, and experts that read the hidden vectors `before` the norm of x."""

    def norm(y: np.ndarray, name: str) -> np.ndarray:
        return _norm(y, params[f"{name}_norm"], config.norm_eps)

    e, out = kind.experts, np.zeros_like(x)
    assert e is not None
    router = _softmax(_project(norm(before, "router") / config.width**0.5, params["router"], "td,de->te"))
    inputs, factors = norm(before, "experts"), _array(params["expert_factors"])
    for t, p in enumerate(router):
        chosen = np.argsort(p)[::-1][: e.top_k]
        for i in chosen:
            expert = {name: {part: _array(z)[i] for part, z in params[name].items()} for name in ("gate", "up", "down")}
            out[t] += p[i] / p[chosen].sum() * factors[i] * _mlp(kind, expert, inputs[t][None])[0]
    return norm(_mlp(kind, params["shared"], x), "shared_post") + norm(out, "experts_post")


def _experts(kind: MlpKind, params: Any, x: np.ndarray) -> np.ndarray:
    e, y = kind.experts, np.zeros_like(x)
    assert e is not None
    router = _project(x, params["router"], "td,de->te")
    is_sigmoid = e.scoring == "sigmoid"
    for t, s in enumerate(router):
        best = 1 / (1 + np.exp(-s)) + _array(params["choice_bias"]) if is_sigmoid else s.copy()
        if e.groups > 1:
            groups = best.reshape(e.groups, -1)
            rank = np.sort(groups, -1)[:, -2:].sum(-1) if is_sigmoid else groups.max(-1)
            groups[np.argsort(rank)[: e.groups - e.top_groups]] = -np.inf
        chosen = np.argsort(best)[::-1][: e.top_k]
        if is_sigmoid:
            w = 1 / (1 + np.exp(-s[chosen]))
            w = w / w.sum() if e.normalize else w
        else:
            w = _softmax(s[chosen]) if e.normalize else _softmax(s)[chosen]
        for i, weight in zip(chosen, w, strict=True):
            expert = {name: {part: _array(z)[i] for part, z in params[name].items()} for name in ("gate", "up", "down")}
            y[t] += e.factor * weight * _mlp(kind, expert, x[t][None])[0]
    if not e.shared_width:
        return y
    shared = _mlp(kind, params["shared"], x)
    return y + (shared * _sigmoid(_project(x, params["shared_gate"], "td,ds->ts")) if e.shared_gate else shared)
