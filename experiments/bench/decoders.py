"""Decoders that the benchmarks compare: kvjax under one method, and transformers with the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.measuring import time_in_turns
from kvjax.eval.run.machine import cores, version
from kvjax.reuse.full_kv import full_kv_from_arrays


class KvjaxDecoder:
    """Greedy decoding of a batch under one method, in slices of a compiled loop."""

    def __init__(self, model: kvjax.Model, method: kvjax.Method):
        self.model, self.method = model, method

    def prefill(self, ids: np.ndarray, room: int = 0, chunk: int | None = None) -> float:
        """Runs the prompts i32[B T] with space for `room` more tokens per sequence; returns seconds."""
        start = time.perf_counter()
        context = kvjax.read(self.model, ids, self.method, headroom=room, chunk=chunk)
        jax.block_until_ready((context.last_logits, context.cache))
        seconds = time.perf_counter() - start
        self.begin(context, room)
        return seconds

    def begin(self, context: kvjax.Context, room: int) -> None:
        """Starts a loop of `room` decode steps after a context, whose buffers the loop takes over."""
        # One token more than steps: the first token comes from the context's logits. The loop is one program, so that
        # Python's dispatch of each layer is not measured, and no end token stops one side before the other.
        self.run = context.start(max_new_tokens=room + 1, eos_ids=(), loop="while", donate=True)

    def decode(self, steps: int) -> float:
        """Decodes `steps` more tokens per sequence; returns seconds without compilation."""
        before = self.run.decode_seconds  # kvjax counts compilation apart
        self.run.advance(self.tokens.shape[1] + steps)
        return self.run.decode_seconds - before

    def program(self) -> str:
        """The optimized HLO text of the decode loop."""
        return self.run.program()

    @property
    def cache(self) -> kvjax.Cache:
        """The cache of the loop at present."""
        return self.run.cache

    @property
    def tokens(self) -> np.ndarray:
        """i32[B n], all tokens so far; the first came from the prefill."""
        return self.run.tokens


def random_loop(model: kvjax.Model, method: str | kvjax.Method, batch: int, tokens: int, room: int) -> KvjaxDecoder:
    """A decode loop on a cache of random keys and values, so that no prompt has to be run.

    Args:
      model: the model.
      method: the method that compresses the keys and values.
      batch: number of sequences.
      tokens: length of each sequence.
      room: decode steps that fit the cache.
    """
    c = model.config
    a = c.kind(0).attention
    shape = (batch, a.kv_heads, tokens, a.head_dim)

    def draw(layer: int, which: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(jax.random.key(layer), which), shape, model.dtype)

    pairs = [(draw(i, 0), draw(i, 1)) for i in range(c.layers)]
    loop = KvjaxDecoder(model, method)
    exact = full_kv_from_arrays(model, pairs, jnp.full((batch,), tokens, jnp.int32))
    loop.begin(exact.compress(method, capacity=tokens + room), room)
    return loop


def time_decode_steps(
    sides: Mapping[Any, Any], steps: int, repeats: int, probes: Mapping[str, Callable[[], float]] | None = None
) -> dict[Any, list[float]]:
    """Times decoders in turns, `steps` tokens a turn, and probes of the machine between the same turns.

    Returns:
      seconds per step of each decoder, and seconds of each probe, by name.
    """
    # Several steps a turn: a single one would measure how fast threads wake up after the pause between turns.
    runs = {name: (lambda side=side: side.decode(steps) / steps) for name, side in sides.items()}
    return time_in_turns({**runs, **(probes or {})}, repeats)


def missing_packages() -> str | None:
    """Names the packages of `TransformersDecoder` that are not installed; None if all are."""
    return ", ".join(p for p in ("torch", "transformers") if version(p) is None) or None


def missing_note() -> list[str]:
    """The line below a table without transformers' column; none where the column is there."""
    names = missing_packages()
    return [f"transformers is left out: not installed: {names} (pip install 'kvjax[parity]')."] if names else []


def llama_config(config: kvjax.Config) -> Any:
    """Returns the configuration of the same model in transformers."""
    from transformers import LlamaConfig  # here, since it is optional and slow to import

    a = config.kind(0).attention
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        intermediate_size=config.kind(0).mlp.width,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": a.rope.theta},
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_embeddings,
    )


def transpose_kernel(kernel: Any, num_inputs: int) -> np.ndarray:
    """Makes transformers' matrix [out, in] of a weight whose input axes come first; heads are flattened."""
    return np.ascontiguousarray(np.asarray(kernel).reshape(num_inputs, -1).T)


def state_dict(
    config: kvjax.Config,
    params: Any,
    copy: Callable[[Any], Any] = np.array,
    transpose: Callable[[Any, int], Any] = transpose_kernel,
) -> Iterator[tuple[str, Any]]:
    """Yields kvjax's parameters under transformers' names.

    Args:
      config: of the model.
      params: its parameters.
      copy: makes an array of the other library from one that keeps its shape.
      transpose: makes a matrix [out, in] of the other library from a weight and its number of inputs.
    """
    a = config.kind(0).attention
    D, F, heads = config.width, config.kind(0).mlp.width, a.heads * a.head_dim
    yield "model.embed_tokens.weight", copy(params["embedding"])
    yield "model.norm.weight", copy(params["final_norm"]["scale"])
    head = copy(params["embedding"]) if config.tie_embeddings else transpose(params["head"]["kernel"], D)
    yield "lm_head.weight", head
    for i in range(config.layers):
        layer, prefix = params[f"layer_{i}"], f"model.layers.{i}."
        for name in ("q", "k", "v"):
            yield f"{prefix}self_attn.{name}_proj.weight", transpose(layer["attention"][name]["kernel"], D)
        yield f"{prefix}self_attn.o_proj.weight", transpose(layer["attention"]["o"]["kernel"], heads)
        for name, num_inputs in (("gate", D), ("up", D), ("down", F)):
            yield f"{prefix}mlp.{name}_proj.weight", transpose(layer["mlp"][name]["kernel"], num_inputs)
        yield f"{prefix}input_layernorm.weight", copy(layer["attention_norm"]["scale"])
        yield f"{prefix}post_attention_layernorm.weight", copy(layer["mlp_norm"]["scale"])


class TransformersDecoder:
    """Greedy decoding of a batch by transformers: its dynamic cache and sdpa attention, kvjax's dtype and threads."""

    def __init__(self, model: kvjax.Model):
        # Imported here, since both are optional and slow to import.
        import torch
        from transformers import AutoModelForCausalLM

        c = model.config
        torch.set_num_threads(cores())  # every core that the process may use, as XLA takes
        self.module = AutoModelForCausalLM.from_config(llama_config(c), attn_implementation="sdpa").eval()
        dtype = getattr(torch, model.dtype.name)
        # Through float32, which is exact: torch reads no bfloat16 from NumPy.
        weights = {k: torch.from_numpy(v.astype(np.float32)).to(dtype) for k, v in state_dict(c, model.params)}
        self.module.load_state_dict(weights, strict=True, assign=True)
        if c.tie_embeddings:
            # `assign` put two arrays in the place of the one that head and embedding share.
            self.module.tie_weights()

    def prefill(self, ids: np.ndarray, room: int = 0) -> float:
        """Runs the prompts i32[B T] into a new cache; returns seconds. The cache grows, so `room` has no effect."""
        import torch
        from transformers import DynamicCache

        tokens = torch.from_numpy(ids.astype(np.int64))
        start = time.perf_counter()
        with torch.inference_mode():
            self.cache = DynamicCache(config=self.module.config)
            # kvjax computes the last token's logits alone, too.
            out = self.module(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.outputs = [out.logits[:, -1].argmax(-1, keepdim=True)]
        return time.perf_counter() - start

    def decode(self, steps: int) -> float:
        """Decodes `steps` more tokens per sequence; returns seconds."""
        import torch

        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(steps):
                out = self.module(input_ids=self.outputs[-1], past_key_values=self.cache, use_cache=True)
                self.outputs.append(out.logits[:, -1].argmax(-1, keepdim=True))
        return time.perf_counter() - start

    @property
    def tokens(self) -> np.ndarray:
        """i64[B n], all tokens so far; the first came from the prefill."""
        return np.concatenate([t.numpy() for t in self.outputs], 1)
