"""LoCoCo: heavy hitters stay, and a learned convolution mixes all other tokens into a few slots."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.calibration.table_file import Given
from kvjax.cache.eviction.convolution import Convolution, convolved
from kvjax.cache.eviction.convolution_table import ConvolutionTable
from kvjax.cache.eviction.scorers import Accumulated
from kvjax.cache.eviction.selection import SelectedSlots, make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Trial, selected


@dataclasses.dataclass(frozen=True)
class ConvolutionMerge:
    """Of a budget the M slots that the table says mix tokens; all others are heavy hitters, or recent (2406.05317)."""

    given: Given
    budget: int
    recent: int

    def __call__(self, block: KVBlock, kept: KVBlock, choice: SelectedSlots, spec: LayerSpec) -> KVBlock:
        arrays = self.given.of(spec, weight=(None, 2 * spec.head_dim, None), bias=(None,), normalizer=(1,)).values()
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


@recipe(
    "LoCoCo, Cai et al. 2024, arXiv 2406.05317; its public code, VITA-Group/LoCoCo",
    Trial("lococo:budget=6,recent=1", "lococo:budget=100,recent=1", selected(6)),
    formula="p_j = softmax over all but heavy hitters of relu(conv([K; V])_j); slot j, of the next best token s: "
    "x <- (1 - c) x_s + c sum of p_j x, for keys and values, c learned",
    differs="The prompt is compressed once, at its end, by the attention of all of its queries; the public code does "
    "so for each block of 512 tokens, by that of the block before. Heads of several queries choose by their mean. The "
    "table says how many slots are mixed, in the authors' runs half of all. Calibrated tables are fitted by layer.",
    example="lococo:budget=256",
    family="merging",
)
def lococo(budget: int = 512, recent: int = 0, table: str = "shipped") -> Method:
    """After the prompt each head keeps its most attended tokens, and slots into which all others are mixed.

    budget: slots per layer and key/value head, mixed ones included (512 in the authors' runs, 128 is their code's
    default). recent: the last tokens, which stay as they are and count among the heavy hitters (the code's local_len,
    0). table: a file of kind `lococo`, whose class says how the public code's weights are laid out; those that ship
    with kvjax are made as by `kvjax calibrate lococo`.
    """
    select = make_selection(Accumulated(), budget, 0, recent)
    return Method(select=select, merge=ConvolutionMerge(ConvolutionTable.given(table), budget, recent))
