"""Tensors that a GGUF file splits or joins where Hugging Face's layout does not: experts, and latent attention.

llama.cpp's converter stacks the tensors of all experts, as transformers has them in memory, and keeps the two halves of
the gated part apart. For latent attention it stores two up-projections for each head, that of keys, transposed, and
that of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Stack(NamedTuple):
    """A tensor of Hugging Face's layout, and the function that makes it of a file's tensors.

    Attributes:
      name: Hugging Face's; `{i}` is the layer's number.
      own_names: of the tensors in the file.
      join: makes the tensor of those.
    """

    name: str
    own_names: tuple[str, ...]
    join: Callable[..., np.ndarray]

    def shape(self, *shapes: Shape) -> Shape:
        """The shape that `join` gives for tensors of these shapes; () where it cannot join them."""
        # Entries without bytes: joining the experts of a layer takes hundreds of megabytes even with one byte each.
        entry = np.zeros((), np.dtype([]))
        try:
            return self.join(*(np.broadcast_to(entry, shape) for shape in shapes)).shape
        except ValueError:
            return ()


def _join_rows(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.concatenate([gate, up], 1)


def _interleave(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Joins the halves of gpt-oss: the columns 0, 2, .. are the gate's, and matrices are transposed."""
    if gate.ndim == 3:
        gate, up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
    return np.stack([gate, up], -1).reshape(*gate.shape[:-1], -1)


def _join_latent(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Joins [heads rank unrotated] and [heads value rank] to rows of head after head, keys before values."""
    return np.concatenate([key.swapaxes(1, 2), value], 1).reshape(-1, value.shape[-1])


LAYER, OWN = "model.layers.{i}", "blk.{i}"
EXPERTS = f"{LAYER}.mlp.experts"
GATE, UP, DOWN = (f"{OWN}.ffn_{name}_exps.weight" for name in ("gate", "up", "down"))

JOINED_EXPERTS = (
    Stack(f"{EXPERTS}.gate_up_proj", (GATE, UP), _join_rows),
    Stack(f"{EXPERTS}.gate_up_proj", (f"{OWN}.ffn_gate_up_exps.weight",), lambda x: x),
    Stack(f"{EXPERTS}.down_proj", (DOWN,), lambda x: x),
)
LATENT = Stack(
    f"{LAYER}.self_attn.kv_b_proj.weight", (f"{OWN}.attn_k_b.weight", f"{OWN}.attn_v_b.weight"), _join_latent
)
STACKS = {
    "mixtral": JOINED_EXPERTS,
    "qwen3_moe": JOINED_EXPERTS,
    "deepseek_v2": (*JOINED_EXPERTS, LATENT),
    "deepseek_v3": (*JOINED_EXPERTS, LATENT),
    "glm4_moe": JOINED_EXPERTS,
    "gpt_oss": (
        Stack(f"{EXPERTS}.gate_up_proj", (GATE, UP), _interleave),
        Stack(
            f"{EXPERTS}.gate_up_proj_bias",
            (f"{OWN}.ffn_gate_exps.bias", f"{OWN}.ffn_up_exps.bias"),
            _interleave,
        ),
        Stack(f"{EXPERTS}.down_proj", (DOWN,), lambda x: x.swapaxes(1, 2)),
        Stack(f"{EXPERTS}.down_proj_bias", (f"{OWN}.ffn_down_exps.bias",), lambda x: x),
    ),
}
"""model_type -> its tensors that are no single tensor of the file."""
