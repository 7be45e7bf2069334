"""Tensors that a GGUF file splits, joins or orders otherwise than Hugging Face's layout.

llama.cpp's converter stacks the tensors of all experts, as transformers has them in memory, and keeps the two halves of
the gated part apart. For latent attention it stores two up-projections for each head, that of keys, transposed, and
that of values. Of a gated delta rule it stores minus the rates of decay, where Hugging Face has their logarithms, and
its heads in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvjax.errors import KvjaxError

Shape = tuple[int, ...]


class Stack(NamedTuple):
    """A tensor of Hugging Face's layout, and the function that makes it of a file's tensors.

    Attributes:
      name: Hugging Face's; `{i}` is the layer's number.
      own_names: of the tensors in the file.
      join: makes the tensor of those, up to `restore`.
      restore: gives each number the value that it has in Hugging Face's layout.
    """

    name: str
    own_names: tuple[str, ...]
    join: Callable[..., np.ndarray]
    restore: Callable[[np.ndarray], np.ndarray] = lambda x: x

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


def _take_logarithm(x: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the rates of decay, which are stored with a minus."""
    if not (x < 0).all():
        raise KvjaxError(
            "the tensors ssm_a of this GGUF file must be negative everywhere, as minus the rates of decay; make it "
            "again, or convert the safetensors checkpoint instead"
        )
    return np.log(-x)


LAYER, OWN = "model.layers.{i}", "blk.{i}"
EXPERTS, LINEAR = f"{LAYER}.mlp.experts", f"{LAYER}.linear_attn"
GATE, UP, DOWN = (f"{OWN}.ffn_{name}_exps.weight" for name in ("gate", "up", "down"))

JOINED_EXPERTS = (
    Stack(f"{EXPERTS}.gate_up_proj", (GATE, UP), _join_rows),
    Stack(f"{EXPERTS}.gate_up_proj", (f"{OWN}.ffn_gate_up_exps.weight",), lambda x: x),
    Stack(f"{EXPERTS}.down_proj", (DOWN,), lambda x: x),
)
LATENT = Stack(
    f"{LAYER}.self_attn.kv_b_proj.weight", (f"{OWN}.attn_k_b.weight", f"{OWN}.attn_v_b.weight"), _join_latent
)
SHARED_GATE = Stack(
    f"{LAYER}.mlp.shared_expert_gate.weight", (f"{OWN}.ffn_gate_inp_shexp.weight",), lambda x: x.reshape(1, -1)
)
STACKS = {
    "mixtral": JOINED_EXPERTS,
    "qwen3_moe": JOINED_EXPERTS,
    "qwen3_next": (*JOINED_EXPERTS, SHARED_GATE),
    "qwen3_5_moe_text": (*JOINED_EXPERTS, SHARED_GATE),
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
"""model_type -> its tensors that are no single tensor of the file, without those of a recurrence."""


def list_stacks(config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Lists the stacks of a model, by its config.json."""
    stacks = STACKS.get(config["model_type"], ())
    if "linear_num_key_heads" not in config:
        return stacks
    kv_heads = config["linear_num_key_heads"]
    groups, keys = config["linear_num_value_heads"] // kv_heads, kv_heads * config["linear_key_head_dim"]
    is_next = config["model_type"] == "qwen3_next"

    def group(x: np.ndarray) -> np.ndarray:
        # Files of Qwen3.5 have the first value head of every key head, then the second of every one.
        by_head = x.reshape(groups, kv_heads, -1, *x.shape[1:]).swapaxes(0, 1)
        return x if is_next else by_head.reshape(x.shape)

    def group_values(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[: 2 * keys], group(x[2 * keys :])])

    def join_by_head(qkv: np.ndarray, gate: np.ndarray) -> np.ndarray:
        parts = (*np.split(qkv, (keys, 2 * keys)), gate)
        return np.concatenate([x.reshape(kv_heads, -1, x.shape[-1]) for x in parts], 1).reshape(-1, gate.shape[-1])

    stacks += (
        Stack(f"{LINEAR}.A_log", (f"{OWN}.ssm_a",), group, _take_logarithm),
        Stack(f"{LINEAR}.dt_bias", (f"{OWN}.ssm_dt.bias",), group),
        Stack(f"{LINEAR}.conv1d.weight", (f"{OWN}.ssm_conv1d.weight",), lambda x: group_values(x)[:, None]),
        Stack(f"{LINEAR}.out_proj.weight", (f"{OWN}.ssm_out.weight",), lambda x: group(x.T).T),
    )
    qkv, gate = f"{OWN}.attn_qkv.weight", f"{OWN}.attn_gate.weight"
    if is_next:  # the oldest files have one tensor of both, `ssm_in`, in Hugging Face's order
        return (*stacks, Stack(f"{LINEAR}.in_proj_qkvz.weight", (qkv, gate), join_by_head))
    return (
        *(*stacks, Stack(f"{LINEAR}.in_proj_qkv.weight", (qkv,), group_values)),
        Stack(f"{LINEAR}.in_proj_z.weight", (gate,), group),
        Stack(f"{LINEAR}.in_proj_b.weight", (f"{OWN}.ssm_beta.weight",), group),
        Stack(f"{LINEAR}.in_proj_a.weight", (f"{OWN}.ssm_alpha.weight",), group),
    )
