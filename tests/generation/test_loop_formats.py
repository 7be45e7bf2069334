"""A loop on a TPU gets host buffers in the layout in which it writes them, and gives them back in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.core import memory
from kvjax.testing import toy_model

PROMPTS = [list(range(1, 41)), list(range(7, 30))]


@pytest.fixture
def tpu_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has kvjax trace what it would on a TPU; nothing traced before or afterwards is reused."""
    jax.clear_caches()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "tpu")
        yield
    jax.clear_caches()


def host_buffers(state: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(state) if memory.is_host(x)]


@pytest.mark.parametrize(
    "method", ["kcache:n=8,device_layers=1", "offload", "specache:bits=2,group=8,topk=4,residual=8"]
)
def test_host_buffers_stay_in_place_and_in_the_loops_format(method, tpu_code):
    model = toy_model()
    session = kvjax.read(model, PROMPTS, method, headroom=16).start(max_new_tokens=9, loop="while")
    before = host_buffers(session.state)
    places = [x.unsafe_buffer_pointer() for x in before]
    assert before and all(x.format.layout.major_to_minor == (0, 2, 1, 3) for x in before)
    session.advance(5)
    tokens = session.finish().tokens
    after = host_buffers(session.state)
    assert [x.unsafe_buffer_pointer() for x in after] == places
    assert all(x.format.layout.major_to_minor == (0, 2, 1, 3) for x in after)
    # Layers one at a time keep the default formats; the tokens are the same.
    for row, other in zip(
        tokens, kvjax.generate(model, PROMPTS, method, max_new_tokens=9, loop="layers").tokens, strict=True
    ):
        np.testing.assert_array_equal(row, other)


def test_other_backends_keep_all_formats():
    session = kvjax.read(toy_model(), PROMPTS, "kcache:n=8", headroom=16).start(max_new_tokens=2, loop="while")
    assert host_buffers(session.state) and memory.loop_formats(session.state) == ()
    assert memory.to_loop_formats(session.state) is session.state
