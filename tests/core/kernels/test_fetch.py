"""The kernel that reads token vectors from host memory, against NumPy, and the GPU programs that contain it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kvjax.core import memory
from kvjax.core.kernels.fetch import ROWS_PER_PROGRAM, fetch, fits, gather


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32])
@pytest.mark.parametrize("n", [1, ROWS_PER_PROGRAM - 1, ROWS_PER_PROGRAM, 3 * ROWS_PER_PROGRAM + 2])
@pytest.mark.parametrize("width", [1, 24, 64])
def test_rows_are_the_rows_asked_for(width, n, dtype):
    rng = np.random.default_rng(n)
    data = rng.integers(0, np.iinfo(dtype).max, (2, 3, 40, width)).astype(dtype)
    idx = rng.integers(0, 40, (2, 3, n)).astype(np.int32)
    expected = np.take_along_axis(data, idx[..., None], 2)
    for vectors in (fetch(jnp.asarray(data), jnp.asarray(idx), interpret=True), gather(jnp.asarray(data), idx)):
        assert vectors.dtype == dtype
        np.testing.assert_array_equal(vectors, expected)


def test_what_the_kernel_cannot_address_it_is_not_asked_for():
    def kernel_fits(shape, num_tokens):
        return fits(jax.ShapeDtypeStruct(shape, jnp.uint8), jax.ShapeDtypeStruct((*shape[:2], num_tokens), jnp.int32))

    assert kernel_fits((1, 1, 2**21, 1023), 4)
    assert not kernel_fits((1, 1, 2**21, 1024), 4)
    assert not kernel_fits((1, 1, 0, 64), 4)
    assert not kernel_fits((1, 1, 16, 64), 0)


@pytest.mark.parametrize(("setting", "by_kernel"), [(None, True), ("0", False)])
def test_a_gpu_reads_host_rows_by_itself_unless_it_is_told_not_to(monkeypatch, setting, by_kernel):
    """The program alone is examined; only a GPU can run it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("KVJAX_GPU_KERNELS", raising=False)
    if setting is not None:
        monkeypatch.setenv("KVJAX_GPU_KERNELS", setting)
    buffer = memory.pack(jnp.zeros((1, 2, 32, 64), jnp.bfloat16), host=True)
    idx = jnp.zeros((1, 2, 5), jnp.int32)

    def gather_tokens(buffer, idx):  # a function of this test alone, so that no earlier trace of it is used again
        return memory.gather_tokens(buffer, idx)

    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        text = jax.jit(gather_tokens).trace(buffer, idx).lower(lowering_platforms=("cuda",)).as_text()
    assert ("__gpu$xla.gpu.triton" in text and "fetch_rows" in text) == by_kernel
    assert ('_xla_compute_type = "host"' in text) != by_kernel
    assert ("_xla_stream_annotation" in text) == by_kernel
