"""Decoder-only transformers as pure functions of parameters and an explicit KV state."""

from kvjax.models.config import Config, RopeScaling
from kvjax.models.decoder import Decoder

__all__ = ["Config", "Decoder", "RopeScaling"]
