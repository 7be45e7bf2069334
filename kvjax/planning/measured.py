"""The rates of this machine, measured in some ten seconds for `kvjax plan --measured`.

Each rate is that of what a decode step does: a matrix times a vector for the weights, a product of matrices for a
prompt, copies between the two memories. Two constants are measured that data sheets do not have: what a layer of a
small model takes though it has almost nothing to read, and how fast a codec's numbers are decoded, which on a CPU, and
not the bytes, is what a quantized cache costs.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.core import memory
from kvjax.core.memory import installed_memory
from kvjax.errors import KvjaxError
from kvjax.planning.hardware import Hardware
from kvjax.utils import arguments

REPEATS = 7
PRODUCT_WIDTH = {"cpu": 1024}
"""Width of the square matrices that are multiplied, by platform."""
DEFAULT_PRODUCT_WIDTH = 8192
LAYERS = 8  # of the model with nothing to read
STEPS = 8  # of a turn


def measure(dtype: Any, megabytes: int = 256, tokens: int = 8192) -> Hardware:
    """Measures one device of this machine; the median of several runs counts.

    Args:
      dtype: of the products, as "bfloat16".
      megabytes: of the matrix that is read, more than the processor's caches hold; a quarter of it is copied.
      tokens: of the quantized cache that is read.

    Raises:
      KvjaxError: the memory of the device is unknown.
    """
    dtype, device = arguments.float_type(dtype), jax.devices()[0]
    installed = installed_memory([device])
    if installed.device is None or installed.host is None:
        raise KvjaxError(
            f"{device.device_kind} does not tell its memory; plan for a device of the catalogue by --hardware NAME"
        )
    matrix = jnp.ones((megabytes * 2**20 // 4096, 1024), jnp.float32)
    bandwidth = matrix.nbytes / time_median(jax.jit(jnp.matmul), matrix, jnp.ones((1024,), jnp.float32))
    del matrix
    n = PRODUCT_WIDTH.get(device.platform, DEFAULT_PRODUCT_WIDTH)
    square = jnp.ones((n, n), dtype)
    flops = 2 * n**3 / time_median(jax.jit(jnp.matmul), square, square)
    vectors = jnp.ones((1, 1, megabytes * 2**20 // 16384, 1024), jnp.float32)
    link = host = bandwidth
    if "pinned_host" in {kind.kind for kind in device.addressable_memories()}:
        on_host = memory.pack(vectors, host=True)
        link = vectors.nbytes / time_median(jax.jit(memory.unpack), on_host)
        host = link if device.platform != "cpu" else bandwidth
    layer_seconds = _time_layer("full", LAYERS, 64)
    coded = _time_layer("int8", 1, tokens) - layer_seconds
    num_devices = len(jax.devices()) if not installed.shared else 1
    return Hardware(
        f"this machine ({device.device_kind})",
        memory_bytes=installed.device,
        memory_bandwidth=bandwidth,
        flops=flops,
        host_link=link,
        device_link=link,  # of several devices of one host, through its memory
        host_bandwidth=host,
        # A CPU's two memories are one; a plan then compares each with all of it.
        host_bytes=installed.host // num_devices,
        source=f"measured: medians of {REPEATS} runs, with whatever else the machine did meanwhile",
        layer_seconds=layer_seconds,
        decoded_values=_num_values(tokens) / max(coded, 1e-9),
    )


_MODEL = functools.partial(kvjax.Config, vocab_size=64, width=64, heads=4, kv_heads=4, head_dim=64, mlp_width=64)


def _num_values(tokens: int) -> int:
    config = _MODEL(layers=1)
    return 2 * config.kv_heads * config.head_dim * tokens


def _time_layer(method: str, layers: int, tokens: int) -> float:
    """Seconds of one layer of a decode step of a model whose weights take next to nothing."""
    model = kvjax.random_model(_MODEL(layers=layers, max_positions=2 * tokens + 1024))
    ids = np.zeros((1, tokens), np.int32)
    run = kvjax.read(model, ids, method, room=STEPS * (REPEATS + 2)).start(
        max_new_tokens=STEPS * (REPEATS + 1) + 1, eos_ids=(), loop="while", use_up=True
    )
    seconds = []
    for i in range(1, REPEATS + 2):
        before = run.decode_seconds
        run.advance(1 + STEPS * i)
        seconds.append((run.decode_seconds - before) / STEPS)
    return statistics.median(seconds[1:]) / layers


def time_median(fun: Callable[..., Any], *args: Any) -> float:
    """Median of the seconds until the results of `fun(*args)` are ready, after a first call that compiles."""
    jax.block_until_ready(fun(*args))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(fun(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
