"""The rates of this machine, measured for `kvjax plan --measured`.

Each rate is that of what a step does: a matrix times a vector for the weights, a product of matrices for a prompt,
copies between the two memories. Four figures are measured that data sheets do not have, since more than its memory
holds up a CPU: what a layer takes that has almost nothing to read; how fast attention reads an exact cache; how fast
the codes of a quantized cache are decoded; how fast scores are ranked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
DEFAULT_PRODUCT_WIDTH, CPU_PRODUCT_WIDTH = 8192, 1024  # of the square matrices that are multiplied
LAYERS = 2  # of the model with nothing to read
FEW_TOKENS = 64  # in its cache
STEPS = 8  # of a turn
RANKED, BEST = 2**18, 64  # scores, of 32 heads, and how many of each head's are found
SIZES: dict[str, Any] = {"width": 64, "heads": 4, "kv_heads": 4, "head_dim": 64, "mlp_width": 64, "vocab_size": 64}


class Probes:
    """Programs that are run and timed on one device of this machine.

    Args:
      dtype: of the products, as "bfloat16".
      megabytes: of the matrix that is read, more than the processor's caches hold; a quarter of it is copied.
      tokens: of the caches that are read.
      turns: how often each probe will be run.

    Raises:
      KvjaxError: the memory of the device is unknown.
    """

    runs: dict[str, Callable[[], float]]
    """Name -> a run, which returns its seconds."""

    def __init__(self, dtype: Any, megabytes: int = 256, tokens: int = 8192, turns: int = REPEATS):
        self.device = jax.devices()[0]
        self.installed = installed_memory([self.device])
        if self.installed.device is None or self.installed.host is None:
            raise KvjaxError(
                f"{self.device.device_kind} does not tell its memory; plan for a device of the catalogue by --hardware"
            )
        dtype, self.tokens = arguments.float_type(dtype), tokens
        matrix = jnp.ones((megabytes * 2**20 // 4096, 1024), jnp.float32)
        n = CPU_PRODUCT_WIDTH if self.device.platform == "cpu" else DEFAULT_PRODUCT_WIDTH
        square = jnp.ones((n, n), dtype)
        self.matrix_bytes, self.operations = matrix.nbytes, 2 * n**3
        product = jax.jit(jnp.matmul)
        scores = jax.random.normal(jax.random.key(0), (32, RANKED // 32))
        calls: dict[str, tuple[Any, ...]] = {
            "read": (product, matrix, jnp.ones((1024,), jnp.float32)),
            "product": (product, square, square),
            "rank": (jax.jit(lambda x: jax.lax.top_k(x, BEST)), scores),
        }
        vectors = jnp.ones((1, 1, megabytes * 2**20 // 16384, 1024), jnp.float32)
        self.copied_bytes = vectors.nbytes
        if "pinned_host" in {kind.kind for kind in self.device.addressable_memories()}:
            calls["copy"] = (jax.jit(memory.unpack), memory.pack(vectors, host=True))
        self.runs = {name: _make_run(*call) for name, call in calls.items()}
        self.runs["layer"] = _make_decoding("full", LAYERS, FEW_TOKENS, turns)
        self.runs["attention"] = _make_decoding("full", 1, tokens, turns)
        self.runs["codes"] = _make_decoding("int8", 1, tokens, turns)

    def hardware(
        self, seconds: Mapping[str, Sequence[float]], summarize: Callable[[Sequence[float]], float] = statistics.median
    ) -> Hardware:
        """The device that these seconds describe, by default their medians; seconds of other runs are left out."""
        typical = {name: summarize(seconds[name]) for name in self.runs}
        on_cpu = self.device.platform == "cpu"
        bandwidth = self.matrix_bytes / typical["read"]
        link = self.copied_bytes / typical["copy"] if "copy" in typical else bandwidth
        layer_seconds = typical["layer"] / LAYERS
        values = 2 * SIZES["kv_heads"] * SIZES["head_dim"] * self.tokens
        assert self.installed.device is not None and self.installed.host is not None
        return Hardware(
            f"this machine ({self.device.device_kind})",
            memory_bytes=self.installed.device,
            memory_bandwidth=bandwidth,
            flops=self.operations / typical["product"],
            host_link=link,
            device_link=link,  # of several devices of one host, through its memory
            host_bandwidth=bandwidth if on_cpu else link,
            # A CPU's two memories are one; a plan then compares each with all of it.
            host_bytes=self.installed.host // (1 if on_cpu else len(jax.devices())),
            source=f"measured: {len(seconds['read'])} runs of each probe, beside whatever else the machine did",
            layer_seconds=layer_seconds,
            # Attention does not read faster than a product does; below, the difference of two runs may be noise.
            cache_bandwidth=min(bandwidth, 4 * values / max(typical["attention"] - layer_seconds, 1e-9)),
            decoded_values=values / max(typical["codes"] - layer_seconds, 1e-9),
            ranked_values=RANKED / typical["rank"],
        )


def measure(dtype: Any) -> Hardware:
    """Measures one device of this machine."""
    probes = Probes(dtype)
    seconds: dict[str, list[float]] = {name: [] for name in probes.runs}
    for _ in range(REPEATS):  # in turns, so that a moment of other work slows no probe alone
        for name, run in probes.runs.items():
            seconds[name].append(run())
    return probes.hardware(seconds)


def _make_run(fun: Callable[..., Any], *args: Any) -> Callable[[], float]:
    """A run of a compiled function until its results are ready."""

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(fun(*args))
        return time.perf_counter() - start

    run()  # compiles
    return run


def _make_decoding(method: str, layers: int, tokens: int, turns: int) -> Callable[[], float]:
    """A run of some decode steps, which returns the seconds of one, of a model whose weights take next to nothing."""
    room = STEPS * (turns + 1) + 1
    config = kvjax.Config.llama(**SIZES, layers=layers, max_positions=tokens + 2 * room)
    context = kvjax.read(kvjax.random_model(config), np.zeros((1, tokens), np.int32), method, room=room)
    decoding = context.start(max_new_tokens=room, eos_ids=(), loop="while", use_up=True)

    def run() -> float:
        before = decoding.decode_seconds
        decoding.advance(decoding.tokens.shape[1] + STEPS)
        return (decoding.decode_seconds - before) / STEPS

    run()  # compiles
    return run
