"""Random models of real shapes, filled quickly, for kvjax and for transformers on one GPU."""

from __future__ import annotations

import functools
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.decoders import llama_config, state_dict
from kvjax.models.decoder import init

SHAPES = {
    # The shapes of Llama-3.2-1B and of Llama-3.1-8B.
    "1b": kvjax.Config.llama(
        vocab_size=128_256,
        width=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        mlp_width=8192,
        tie_embeddings=True,
        max_positions=131_072,
    ),
    "8b": kvjax.Config.llama(
        vocab_size=128_256,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp_width=14_336,
        max_positions=131_072,
    ),
    "toy": kvjax.Config.llama(vocab_size=97, width=64, layers=3, heads=4, kv_heads=2, head_dim=32, mlp_width=96),
}


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(seed, shape: tuple[int, ...], dtype: jnp.dtype, scale):
    return (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * scale).astype(dtype)


def fill_model(config: kvjax.Config, dtype: Any) -> kvjax.Model:
    """A model of random weights; one small program for each shape of a weight, and none that makes all of them."""
    dtype = jnp.dtype(dtype)
    shapes = jax.eval_shape(lambda: nn.unbox(init(config, jax.random.key(0), dtype)))
    leaves, tree = jax.tree.flatten(shapes)

    def fill(seed: int, x: Any) -> jax.Array:
        if x.ndim == 1:  # the scale of a norm
            return jnp.ones(x.shape, dtype)
        return _draw(seed, x.shape, dtype, jnp.bfloat16(config.width**-0.5))

    return kvjax.Model(config, jax.tree.unflatten(tree, [fill(i, x) for i, x in enumerate(leaves)]), name="random")


class TorchDecoder:
    """Greedy decoding by transformers on the same GPU, over the same weights, from a cache of random numbers."""

    def __init__(self, model: kvjax.Model):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.config = torch, model.config
        jax.block_until_ready(model.params)  # torch reads the arrays themselves, whether or not JAX has written them
        config = llama_config(model.config)
        with torch.device("meta"):
            self.module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()

        def transpose(kernel: jax.Array, num_inputs: int) -> Any:
            return torch.from_dlpack(kernel).reshape(num_inputs, -1).T.contiguous()

        # No copy goes through the host: both libraries read the GPU's arrays.
        weights = dict(state_dict(model.config, model.params, torch.from_dlpack, transpose))
        self.device = weights["model.norm.weight"].device
        self.module.load_state_dict(weights, strict=True, assign=True)
        if model.config.tie_embeddings:
            self.module.tie_weights()
        # Buffers that no checkpoint has: the frequencies of RoPE.
        self.module.model.rotary_emb = type(self.module.model.rotary_emb)(config).to(self.device)

    def begin(self, batch: int, tokens: int) -> None:
        """Fills a new dynamic cache with random numbers."""
        from transformers import DynamicCache

        torch, c = self.torch, self.config
        self.cache = DynamicCache(config=self.module.config)
        a = c.kind(0).attention
        for i in range(c.layers):
            shape, dtype = (batch, a.kv_heads, tokens, a.head_dim), self.module.model.norm.weight.dtype
            k, v = (torch.randn(shape, dtype=dtype, device=self.device) for _ in "kv")
            self.cache.update(k, v, i)
        self.last = torch.zeros((batch, 1), dtype=torch.long, device=self.device)

    def decode(self, steps: int) -> float:
        """Decodes `steps` more tokens per sequence; returns seconds."""
        torch = self.torch
        torch.cuda.synchronize() if self.device.type == "cuda" else None
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(steps):
                out = self.module(input_ids=self.last, past_key_values=self.cache, use_cache=True)
                self.last = out.logits[:, -1].argmax(-1, keepdim=True)
        torch.cuda.synchronize() if self.device.type == "cuda" else None
        return time.perf_counter() - start

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """f32[B V], the logits of the last token of prompts i32[B T]."""
        torch = self.torch
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        with torch.inference_mode():
            return self.module(input_ids=tokens, logits_to_keep=1).logits[:, -1].float().cpu().numpy()
