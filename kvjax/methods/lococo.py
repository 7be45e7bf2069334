"""LoCoCo: heavy hitters stay, and a learned convolution mixes all other tokens into a few slots."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.selection import select_slots

LEARNING_RATE = 3e-3  # Adam's, in calibration


class Convolution(NamedTuple):
    """The weights by which M slots mix tokens, the same in all heads."""

    weight: kv.Array  # f32[M H+Hv w], over keys and values of w neighbors, w odd
    bias: kv.Array  # f32[M]
    normalizer: kv.Array  # f32[1], weight of the mix against a slot's own token


@kv.register_table_kind("lococo")
@dataclasses.dataclass(frozen=True)
class ConvolutionTable(kv.TableKind):
    """The weights of LoCoCo's convolution for M mixed slots, as its public code lays them out.

    They come from the `memory_saver` of each attention module: `weight` [M H+Hv w] and `bias` [M] are `layers.0.weight`
    and `layers.0.bias` of its only convolution, a token's key before its value, w odd; `normalizer` [1] is its own.

    Calibrated layer by layer, where the authors train through the model: of each text's earlier half 2 * M tokens are
    kept, half of them mixed, and Adam brings what the later half's queries read close to what they read of all tokens.

    Args:
      slots: M.
      kernel: w.
      length: tokens of each text that are used.
      steps: steps of Adam, each over all texts.
    """

    slots: kv.PositiveInt = 32
    kernel: Annotated[int, kv.Odd()] = 21
    length: kv.PositiveInt = 512
    steps: kv.PositiveInt = 100
    num_queries = None

    __post_init__ = kv.check_fields

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, kv.Array]:
        assert observation is not None

        def fit_length(x: kv.Array, axis: int) -> kv.Array:
            x = lax.slice_in_dim(x, 0, min(self.length, x.shape[axis]), axis=axis)
            padding = [(0, self.length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
            return jnp.pad(x.astype(jnp.float32), padding)[:, :, None]  # the axis of texts, which `join` lengthens

        q = jnp.where((observation.pos >= 0)[:, None, None, :, None], observation.q, jnp.zeros((), observation.q.dtype))
        real = jnp.broadcast_to(block.pos >= 0, block.k.shape[:3])
        texts = {
            "q": fit_length(q, 3),
            "k": fit_length(block.k, 2),
            "v": fit_length(block.v, 2),
            "real": fit_length(real, 2),
        }
        if observation.sinks is not None:  # the model's, the same for every text
            sinks = observation.sinks.astype(jnp.float32)
            texts["sinks"] = jnp.broadcast_to(sinks, (len(q), *sinks.shape[1:]))[:, :, None]
        return texts

    def join(self, before: np.ndarray, more: np.ndarray) -> np.ndarray:
        # Texts are not summed, so float32 loses nothing, and takes half the memory.
        return np.concatenate([before, more], 1, dtype=np.float32)

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        q, k, v, real = (jnp.asarray(np.moveaxis(counted[x], 1, 0), jnp.float32) for x in ("q", "k", "v", "real"))
        pos = jnp.where(real[:, :1] > 0, jnp.arange(self.length, dtype=jnp.int32)[None, None], -1)
        sinks = jnp.asarray(counted["sinks"][None, :, 0], jnp.float32) if "sinks" in counted else None
        texts = split_texts(kv.KVBlock(k, v, pos), q, 2 * self.slots, spec, sinks)
        if not kv.evicted_mask(texts.earlier, texts.choice).any():
            least = 4 * self.slots + 1
            raise kv.KvjaxError(
                f"no text loses a token; give texts of {least} tokens or more, as `length`, or fewer slots"
            )
        convolution = self._initial_weights(spec)
        # Adam (Kingma & Ba, 2014) with its usual decays; not lax.scan, in whose loops XLA:CPU convolves far slower.
        moments = (jax.tree.map(jnp.zeros_like, convolution),) * 2
        for step in range(1, self.steps + 1):
            convolution, moments = _adam_step(convolution, moments, jnp.float32(step), texts, self.slots, spec.rule)
        arrays = {name: np.asarray(array, np.float32) for name, array in convolution._asdict().items()}
        return arrays | {"weight": arrays["weight"].astype(np.float16)}

    def _initial_weights(self, spec: kv.LayerSpec) -> Convolution:
        num_inputs = spec.head_dim + spec.value_dim
        weight = np.random.default_rng(spec.index).normal(size=(self.slots, num_inputs, self.kernel))
        weight = jnp.asarray(weight / np.sqrt(num_inputs * self.kernel), jnp.float32)
        return Convolution(weight, jnp.zeros(self.slots), jnp.full(1, 0.5))

    def example(self, spec: kv.LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        weight = rng.normal(size=(3, spec.head_dim + spec.value_dim, 5))
        arrays = {"weight": weight, "bias": rng.normal(size=3), "normalizer": [0.5]}
        return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


class SplitTexts(NamedTuple):
    """Texts in halves: what is kept of the earlier one, and what the later one's queries read."""

    earlier: kv.KVBlock
    choice: kv.SelectedSlots
    q: kv.Array  # [B K G T H]
    q_pos: kv.Array  # i32[B T], -1 for queries of the earlier half
    later: kv.Partial  # what the queries read of their own half, with the model's sinks
    target: kv.Array  # f32[B K G T H], what they read of both halves


@functools.partial(jax.jit, static_argnames=("budget", "spec"))
def split_texts(
    block: kv.KVBlock, q: kv.Array, budget: int, spec: kv.LayerSpec, sinks: kv.Array | None = None
) -> SplitTexts:
    """Splits texts with all of their queries [B K G T H], and selects `budget` tokens of the earlier halves.

    Args:
      block: keys and values of the texts.
      q: queries.
      budget: tokens that stay of an earlier half.
      spec: the layer.
      sinks: its learned sinks [1 K G]; None for none.
    """
    pos = block.pos[:, 0]
    is_earlier, is_later_query = kv.split_halves(block, kv.Observation(q, pos))
    # The earlier half lies at the front, so that its block needs no more room than that.
    earlier = dataclasses.replace(block, pos=jnp.where(is_earlier, block.pos, -1)).first(-(-pos.shape[1] // 2))
    num_kept = jnp.minimum(is_earlier.sum((1, 2), dtype=jnp.int32), budget)
    observation = kv.Observation(q, jnp.where(is_earlier[:, 0], pos, -1), sinks=sinks)
    selection = kv.PromptSelection(spec, kv.make_selection(kv.AccumulatedAttention(), budget))
    choice = select_slots(selection, earlier, observation, num_kept, budget)
    later = dataclasses.replace(block, pos=jnp.where(is_later_query[:, None], block.pos, -1))
    q_pos = jnp.where(is_later_query, pos, -1)

    def read(half: kv.KVBlock) -> kv.Partial:
        return kv.map_query_blocks(lambda q, at: kv.attention.attend_dense(q, half, at, spec.rule), q, q_pos, 64)

    read_later = read(later)
    if sinks is not None:
        read_later = kv.attention.combine(read_later, kv.attention.sink_partial(sinks, q, block.v.shape[3]))
    return SplitTexts(earlier, choice, q, q_pos, read_later, kv.attention.merge([read(earlier), read_later]))


def relative_error(convolution: Convolution, texts: SplitTexts, slots: int, rule: kv.attention.Rule) -> kv.Array:
    """Computes the squared error of the queries' outputs, relative to the squares of those over all tokens."""
    kept = kv.gather_tokens(texts.earlier, texts.choice.slots)
    kept = merge_by_convolution(texts.earlier, kept, texts.choice, convolution, slots, 0)
    out = kv.attention.merge([kv.attention.attend_dense(texts.q, kept, texts.q_pos, rule), texts.later])
    counts = (texts.q_pos >= 0)[:, None, None, :, None]
    error, norm = (jnp.where(counts, jnp.square(x), 0.0).sum() for x in (out - texts.target, texts.target))
    return error / jnp.maximum(norm, 1e-30)


# At module level, so that the layers of a model share one compiled program.
@functools.partial(jax.jit, static_argnames=("slots", "rule"))
def _adam_step(
    convolution: Convolution,
    moments: tuple[Convolution, Convolution],
    step: kv.Array,
    texts: SplitTexts,
    slots: int,
    rule: kv.attention.Rule,
) -> tuple[Convolution, tuple[Convolution, Convolution]]:
    gradient = jax.grad(relative_error)(convolution, texts, slots, rule)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, moments[1], gradient)
    rate, correction = LEARNING_RATE / (1 - 0.9**step), 1 / (1 - 0.999**step)
    convolution = jax.tree.map(
        lambda x, m, s: x - rate * m / (jnp.sqrt(correction * s) + 1e-8), convolution, mean, square
    )
    return convolution, (mean, square)


def merge_by_convolution(
    block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, convolution: Convolution, heavy: int, recent: int
) -> kv.KVBlock:
    """Mixes evicted tokens into the kept ones that are no heavy hitters.

    Heavy hitters are the last `recent` tokens of a sequence, and the highest scores among the others. All other tokens,
    kept and evicted, stand side by side under the convolution, in their order; its ReLU is the logit of a softmax over
    them. The first M kept tokens that are no heavy hitters become (1 - normalizer) of themselves and normalizer of
    their mix, keys after RoPE. A head that evicts nothing stays as it is, bit for bit.

    Args:
      block: keys and values of the prompt, [B K T H].
      kept: what the choice keeps of it.
      choice: the slots that are kept, and their scores.
      convolution: the weights.
      heavy: heavy hitters of each head.
      recent: last tokens, which count among the heavy hitters.
    """
    block, kept = block.clean(), kept.clean()
    is_used = jnp.broadcast_to(choice.slots >= 0, kept.k.shape[:3])
    is_recent = is_used & (kept.pos > block.pos.max(2, keepdims=True) - recent)
    num_scored = jnp.full(is_used.shape[:2], heavy - recent, jnp.int32)
    is_heavy = is_recent | kv.top_k_mask(kv.scores_of_kept(kept, choice), is_used & ~is_recent, num_scored)
    is_mixed = kv.evicted_mask(block, choice._replace(slots=jnp.where(is_heavy, choice.slots, -1)))
    evicts = kv.evicted_mask(block, choice).any(2, keepdims=True)
    is_anchor = is_used & ~is_heavy & evicts
    rank, num_mixed = jnp.cumsum(is_anchor, 2, dtype=jnp.int32) - 1, convolution.bias.shape[0]
    every, own = (jnp.concatenate([x.k, x.v], -1).astype(jnp.float32) for x in (block, kept))
    mix = _convolve(every, kv.mask_to_slots(is_mixed, block.k.shape[2]), convolution)
    mix = kv.memory.take(mix, jnp.clip(rank, 0, num_mixed - 1))
    weight = convolution.normalizer[None, None, None]
    new = (1 - weight) * own + weight * mix
    new = jnp.where((is_anchor & (rank < num_mixed))[..., None], new, own).astype(kept.k.dtype)
    k, v = jnp.split(new, [kept.k.shape[3]], -1)
    return dataclasses.replace(kept, k=k, v=v)


def _convolve(x: kv.Array, slot: kv.Array, convolution: Convolution) -> kv.Array:
    """Mixes the tokens of x [B K T H+Hv] at slot i32[B K T], -1 behind the last: f32[B K M H+Hv], of M slots."""
    B, K, T, channels = x.shape
    real, edge = slot >= 0, (convolution.weight.shape[2] - 1) // 2
    x = jnp.where(real[..., None], kv.memory.take(x, jnp.maximum(slot, 0)), 0.0)
    heads = x.reshape(B * K, T, channels)
    axes = ("NTC", "OIT", "NCT")
    logits = lax.conv_general_dilated(
        heads, convolution.weight, (1,), [(edge, edge)], dimension_numbers=axes, precision=lax.Precision.HIGHEST
    )
    logits = jax.nn.relu(logits + convolution.bias[None, :, None]).reshape(B, K, -1, T)
    p, _, l = kv.attention.weights(jnp.where(real[:, :, None], logits, kv.MASKED_LOGIT))
    mix = jnp.einsum("bkmt,bktw->bkmw", p, x, precision=lax.Precision.HIGHEST)
    return mix / jnp.maximum(l, 1e-30)[..., None]


@dataclasses.dataclass(frozen=True)
class ConvolutionMerge:
    """Mixes evicted tokens into as many slots of the budget as the table has weights for; see `merge_by_convolution`.

    Args:
      given: a file of `ConvolutionTable`.
      budget: tokens that each head keeps.
      recent: last tokens, which are never mixed.
    """

    given: kv.TableFile
    budget: int
    recent: int

    def __call__(self, block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, spec: kv.LayerSpec) -> kv.KVBlock:
        num_inputs = spec.head_dim + spec.value_dim
        arrays = self.given.layer_arrays(spec, weight=(None, num_inputs, None), bias=(None,), normalizer=(1,)).values()
        convolution = Convolution(*(jnp.asarray(x, jnp.float32) for x in arrays))
        num_mixed, width = convolution.weight.shape[0], convolution.weight.shape[2]
        if convolution.bias.shape[0] != num_mixed or width % 2 == 0:
            raise kv.KvjaxError(
                f"{self.given.path} has {num_mixed} slots with {convolution.bias.shape[0]} biases and a kernel of "
                f"{width} tokens; give as many biases as slots and an odd kernel"
            )
        heavy = self.budget - num_mixed
        if heavy < self.recent:
            raise kv.KvjaxError(
                f"{self.given.path} mixes {num_mixed} slots, and a budget of {self.budget} with {self.recent} recent "
                f"tokens leaves fewer; use a budget of at least {num_mixed + self.recent}"
            )
        return merge_by_convolution(block, kept, choice, convolution, heavy, self.recent)


@kv.register_method(example="lococo:budget=256", family="merging")
def lococo(budget: int = 512, recent: int = 0, table: str = "shipped") -> kv.Method:
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
    select = kv.make_selection(kv.AccumulatedAttention(), budget, 0, recent)
    return kv.Method(select=select, merge=ConvolutionMerge(ConvolutionTable.table_file(table), budget, recent))
