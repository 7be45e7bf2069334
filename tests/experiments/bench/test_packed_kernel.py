"""The benchmark of the packed kernel in miniature, on the CPU, where it leaves the kernel out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from experiments.bench import packed_kernel
from kvjax.core.kernels import packed_attention


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, value in {"K": 1, "G": 2, "H": 64}.items():
        monkeypatch.setattr(packed_kernel, name, value)
    jax.clear_caches()  # compiled with other sizes


def test_the_kernel_side_agrees(monkeypatch):
    monkeypatch.setattr(packed_attention, "attend", functools.partial(packed_attention.attend, interpret=True))
    runs = {name: x for name, x in packed_kernel.sides(8, 128, gpu=True).items() if name in ("kernel", "dequantized")}
    q = jax.random.normal(jax.random.key(1), (1, 1, 2, 1, 64), jnp.bfloat16)
    errors, _ = packed_kernel.relative_errors(runs, q, packed_kernel.random_layer(jax.random.key(0), 1, 128, 8))
    assert 0 < errors["kernel"] < packed_kernel.TOLERANCE
