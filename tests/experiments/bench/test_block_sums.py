"""A prompt's blocks on a mesh: what programs for accelerators do with the sums over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.bench.cross_compile import LIBTPU, lower_for, make_mesh, trace_for
from kvjax.models import decoder

TOKENS, WIDTH, INNER = 4 * decoder.BLOCK_TOKENS, 128, 512


@pytest.mark.skipif(not LIBTPU.exists(), reason="no libtpu for this machine")
def test_sums_over_devices_stay_in_the_loop_over_blocks():
    """XLA moved them behind the loop, whose blocks were then zeros: results were wrong, and on a CPU they are not."""
    mesh = make_mesh("v5e:2x2", (1, 4), ("data", "model"))

    def place(shape: tuple[int, ...], *names: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*names)))

    def feed_forward(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return decoder.map_token_blocks(lambda x: jax.nn.silu((2 * x) @ up) @ down, jnp.add, x)

    arguments = {
        "x": place((1, TOKENS, WIDTH)),
        "up": place((WIDTH, INNER), None, "model"),
        "down": place((INNER, WIDTH), "model", None),
    }
    with trace_for("v5e:2x2"):
        lowered = lower_for("v5e:2x2", jax.jit(feed_forward), arguments, (), mesh)
    functions, entry = lowered.compile().as_text().split("ENTRY")
    assert "all-reduce" in functions and "all-reduce" not in entry
