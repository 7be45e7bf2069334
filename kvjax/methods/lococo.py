"""LoCoCo: heavy hitters stay, and a learned convolution mixes all other tokens into a few slots."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.eviction.convolution import Convolution, convolved
from kvjax.cache.eviction.convolution_table import ConvolutionTable
from kvjax.cache.eviction.scorers import AccumulatedAttention
from kvjax.cache.eviction.selection import SelectedSlots, make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class ConvolutionMerge:
    """Of a budget the M slots that the table says mix tokens; all others are heavy hitters, or recent (2406.05317)."""

    given: TableFile
    budget: int
    recent: int

    def __call__(self, block: KVBlock, kept: KVBlock, choice: SelectedSlots, spec: LayerSpec) -> KVBlock:
        arrays = self.given.layer_arrays(
            spec, weight=(None, 2 * spec.head_dim, None), bias=(None,), normalizer=(1,)
        ).values()
        by = Convolution(*(jnp.asarray(x, jnp.float32) for x in arrays))
        slots, width = by.weight.shape[0], by.weight.shape[2]
        if by.bias.shape[0] != slots or width % 2 == 0:
            raise KvjaxError(
                f"{self.given.path} has {slots} slots with {by.bias.shape[0]} biases and a kernel of {width} tokens; "
                "give as many biases as slots and an odd kernel"
            )
        heavy = self.budget - slots
        if heavy < self.recent:
            raise KvjaxError(
                f"{self.given.path} mixes {slots} slots, and a budget of {self.budget} with {self.recent} recent tokens"
                f" leaves fewer; use a budget of at least {slots + self.recent}"
            )
        return convolved(block, kept, choice, by, heavy, self.recent)


@register_method(example="lococo:budget=256", family="merging")
def lococo(budget: int = 512, recent: int = 0, table: str = "shipped") -> Method:
    """Keeps each head's most attended prompt tokens, and mixes all others into a fixed number of slots.

    Formula:
      p_j = softmax over all but heavy hitters of relu(conv([K; V])_j); slot j, of the next best token s: x <- (1 - c)
      x_s + c sum of p_j x, for keys and values, c learned

    Differs:
      The prompt is compressed once, at its end, by the attention of all of its queries; the public code does so for
      each block of 512 tokens, by that of the block before. Query heads that share a key/value head select by their
      mean. The table says how many slots are mixed, in the authors' runs half of all. Calibrated tables are fitted by
      layer.

    Args:
      budget: slots per layer and key/value head, mixed ones included (512 in the authors' runs; 128 is their code's
        default).
      recent: last tokens, which stay as they are and count as heavy hitters (the code's local_len: 0).
      table: a file of kind `lococo`; the shipped tables are made by `kvjax calibrate lococo`.

    Reference:
      LoCoCo, Cai et al. 2024, arXiv 2406.05317; its public code, VITA-Group/LoCoCo
    """
    select = make_selection(AccumulatedAttention(), budget, 0, recent)
    return Method(select=select, merge=ConvolutionMerge(ConvolutionTable.table_file(table), budget, recent))
