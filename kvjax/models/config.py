"""The configuration of a decoder: all that distinguishes one model family from another, as data."""

from __future__ import annotations

import dataclasses
import json
import sys

from kvjax.core.rope import Rope, RopeScaling
from kvjax.errors import KvjaxError
from kvjax.utils import arguments
from kvjax.utils.files import parse_json_object

MAX_SIZE = 2**31 - 1  # sizes and positions are 32-bit integers on a device


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder-only transformer with RoPE, RMSNorm and a gated SiLU MLP.

    Axis letters in the comments are those of `kvjax.core.types`.
    """

    vocab_size: int  # V
    width: int  # D
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    mlp_width: int  # F
    max_positions: int = 4096
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_fraction: float = 1.0  # fraction of the head dim that is rotated
    rope_scaling: RopeScaling | None = None
    windows: tuple[int | None, ...] | None = None  # by layer, latest positions that a query sees; None: all
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self):
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "max_positions"):
            arguments.integer(f"config field {name}", getattr(self, name), 1, MAX_SIZE)
        for window in self.windows or ():
            if window is not None:
                arguments.integer("config field windows", window, 1, MAX_SIZE)
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            arguments.integer("config field eos_ids or bos_id", token, 0, self.vocab_size - 1)
        switches = ("tie_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm")
        numbers = {name: getattr(self, name) for name in ("norm_eps", "rope_theta", "rope_fraction")}
        problems = [
            f"config field {name} must be true or false, got {getattr(self, name)!r:.80}"
            for name in switches
            if not isinstance(getattr(self, name), bool)
        ]
        problems += [
            f"config field {name} must be a positive number, got {x!r}"
            for name, x in numbers.items()
            if not (isinstance(x, float | int) and 0 < x <= sys.float_info.max)
        ]
        if self.heads % self.kv_heads:
            problems.append(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.windows is not None and len(self.windows) != self.layers:
            problems.append(f"windows has {len(self.windows)} entries for {self.layers} layers; give one per layer")
        if not problems and (self.rope_fraction > 1 or self.rotary_dim % 2):
            problems.append(
                f"config field rope_fraction is {self.rope_fraction}: at most all channels of a head are rotated, and "
                f"the rotary dim must be even, got {self.rotary_dim} of head_dim {self.head_dim}"
            )
        if problems:
            raise KvjaxError("; ".join(problems))

    @property
    def groups(self) -> int:
        """G, query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that are rotated, from the first on."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def rope(self) -> Rope:
        """The rotary embedding of queries and keys."""
        return Rope(self.rotary_dim, self.rope_theta, self.rope_scaling)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None."""
        return None if self.windows is None else self.windows[layer]

    def to_json(self) -> str:
        """Writes the config for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Reads what `to_json` wrote; raises KvjaxError for anything else."""
        raw = parse_json_object(text, "the model configuration", "convert the checkpoint again")
        try:
            scaling = raw.pop("rope_scaling", None)
            for name in ("windows", "eos_ids"):
                if raw.get(name) is not None:
                    raw[name] = tuple(raw[name])
            return cls(**raw, rope_scaling=RopeScaling(**scaling) if scaling else None)
        except (TypeError, AttributeError) as e:
            raise KvjaxError(f"not a kvjax model configuration ({e}); convert the checkpoint again") from e
