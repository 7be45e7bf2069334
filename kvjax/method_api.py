"""The names that a method is written with: the components' base classes, and what methods share.

The files of `kvjax/methods/` take their names from here, as a user's file does, by
`from kvjax import method_api as kv`. `__all__` below lists all names, each with what it is for.
"""

from __future__ import annotations

from kvjax.cache.binding import bind_component, bind_fields
from kvjax.cache.calibration.bases import Bases, JointBases, sum_outer_products
from kvjax.cache.calibration.head_tables import HeadWeights, RetrievalHeads
from kvjax.cache.calibration.table_file import PublishedFile, TableFile
from kvjax.cache.calibration.table_kinds import TableKind, register_table_kind
from kvjax.cache.calibration.text_halves import fit_linear_map, split_halves, sum_moments
from kvjax.cache.codecs import bit_packing
from kvjax.cache.codecs.bit_packing import RowBits
from kvjax.cache.codecs.exact_prefix import ExactPrefix
from kvjax.cache.codecs.group_quant import Kivi
from kvjax.cache.codecs.low_rank import CalibratedLowRank
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.plain import CodecWrapper, Host, Plain
from kvjax.cache.codecs.quantizers import Fp4, Fp8, MinMax, Quantizer, lloyd_max_levels, step_size
from kvjax.cache.components import (
    Budget,
    Components,
    EvictableUnits,
    HeadBudgets,
    LayerBudgets,
    Policy,
    PromptSelection,
    Reader,
    ReadResult,
    Representatives,
    Scope,
    Scorer,
    Scores,
    SecondStageScorer,
    SelectedSlots,
    Selection,
    SideStore,
    Slots,
)
from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.eviction.decode_policy import evict_lowest, policy_state_at, require_observation, top_slots
from kvjax.cache.eviction.merging import evicted_mask, fold_into_kept, match_evicted, scatter_add, scores_of_kept
from kvjax.cache.eviction.representatives import IntOrArray, fraction_of
from kvjax.cache.eviction.scorers import (
    AccumulatedAttention,
    WindowAttention,
    head_scores,
    pre_window_mask,
    token_scores,
    window_query_mask,
)
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec, LayerState, Needs, Traits
from kvjax.cache.readers.full import Full
from kvjax.cache.readers.query_blocks import map_query_blocks
from kvjax.cache.readers.retrieval import Index, Retrieve, attend_slots
from kvjax.cache.readers.ring_buffer import RingBuffer
from kvjax.cache.side_store.mixed_precision import PrecisionTiers, ScoredTiers
from kvjax.cache.side_store.paged_heads import PagedHeads
from kvjax.cache.storage import Codec, HostLayout, KVStorage, ObservingCodec
from kvjax.core import attention, memory
from kvjax.core.attention import MASKED_LOGIT, ChosenKeys, TileChoosing
from kvjax.core.attention_mass import Observation, attention_mass, attention_rows
from kvjax.core.gradients import refuse_gradient
from kvjax.core.matmul import matmul_in_float32
from kvjax.core.mesh import over_heads, vary
from kvjax.core.random import draw
from kvjax.core.rope import Rope
from kvjax.core.step_bytes import StepBytes
from kvjax.core.top_k import covering_mask, mask_to_slots, rank, top_k, top_k_mask
from kvjax.core.types import Array, KVBlock, Partial, exportable, gather_tokens, pytree
from kvjax.errors import GradientThroughBits, IncompatibleMethod, KvjaxError
from kvjax.registry.loading import load_methods
from kvjax.registry.registration import register_method
from kvjax.utils.parameter_types import (
    NonNegativeFloat,
    NonNegativeInt,
    Odd,
    OneOf,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
    Within,
    check_fields,
)

__all__ = [
    # A method, its registration and its errors
    "Method",  # a method as a value: its components, one for each task
    "register_method",  # decorates the function that makes a method; its name works in strings from then on
    "load_methods",  # loads a file or a module that registers methods
    "KvjaxError",  # the error of kvjax: what was wrong, with the value, and what to do
    "IncompatibleMethod",  # a method that fits neither the model nor the method that it is composed with
    "GradientThroughBits",  # a gradient that would have to pass through integer codes
    "TokenBudget",  # type of a parameter: a number of tokens, or a share of each prompt such as "25%"
    "TableFile",  # type of a parameter: the path of a calibrated table
    # What a component is given
    "Array",  # any array, NumPy's included
    "KVBlock",  # keys, values and positions of tokens [B K S H]; a position of -1 marks an empty slot
    "Observation",  # queries of the prompt, their positions, and what else a component asks for
    "LayerSpec",  # heads, widths, rotary embedding, window and soft cap of one layer
    "LayerState",  # what a layer holds between calls: stored keys and values, positions, states of its components
    "KVStorage",  # how a layer stores keys and values: codecs, and rotation; for readers and side stores
    "PromptSelection",  # how a layer chooses the prompt tokens that stay; for budgets
    "Slots",  # slots that a prompt takes: kept, in the main slots, in a side store
    "Components",  # all components of a method; for checks of what goes together
    "StepBytes",  # what a component's `read_bytes` returns: the bytes that a decode step reads
    "Rope",  # the model's rotary embedding
    "Needs",  # what a bound layer asks the decoder for, in addition to keys, values and queries
    "Traits",  # facts of a method that reports show
    "KVMethod",  # protocol of a method that is not made of components
    "BoundLayer",  # protocol of such a method in one layer
    "pytree",  # makes a class a frozen dataclass that JAX transforms; for states
    "exportable",  # lets `jax.export` write programs with such a class
    # Selection: which prompt tokens stay
    "Scorer",  # base: scores the tokens of a prompt
    "Scores",  # the scores of query heads and of key/value heads
    "token_scores",  # makes `Scores` from one score for each key/value head and token
    "head_scores",  # makes `Scores` where query heads have scores of their own
    "WindowAttention",  # scorer: the attention of the prompt's last queries, pooled
    "AccumulatedAttention",  # scorer: the attention of all queries, summed
    "window_query_mask",  # marks a prompt's last queries
    "pre_window_mask",  # marks the tokens before them
    "make_selection",  # makes a selection from a scorer and the parameters that all selecting methods share
    "Selection",  # keeps a budget of each prompt's tokens; `make_selection` for more control
    "SelectedSlots",  # the tokens that a selection keeps, and their scores
    "Budget",  # base: tokens kept of a prompt, by layer
    "LayerBudgets",  # base: divides a budget among layers once their prompts are known
    "HeadBudgets",  # base: gives heads of a layer unequal numbers of tokens
    "PagedHeads",  # side store: heads of unequal length, in pages
    "SecondStageScorer",  # base: rescores what a first selection keeps
    "Representatives",  # protocol: keeps evicted units that stand for others
    "EvictableUnits",  # the units among which representatives are chosen
    # Merging: what becomes of the evicted tokens
    "evicted_mask",  # marks the tokens that a selection leaves out
    "match_evicted",  # finds the kept token whose key is most similar to an evicted one's
    "fold_into_kept",  # averages evicted tokens into kept ones
    "scatter_add",  # sums by slot
    "scores_of_kept",  # the scores of the kept tokens
    # Policies: which tokens stay while the answer is decoded
    "Policy",  # base: chooses at the end of the prompt and after every token
    "top_slots",  # the slots of the highest scores
    "evict_lowest",  # evicts the token of the lowest rank from each full head
    "policy_state_at",  # statistics of the chosen tokens, in their slots
    "require_observation",  # the observation, or an error where the caller brought none
    # Codecs: how keys and values are stored
    "Codec",  # base: encodes, appends, decodes and gathers keys or values
    "Plain",  # codec: exact, in the model's dtype
    "Host",  # codec: puts another codec's buffers into host memory
    "CodecWrapper",  # base: a codec around another one
    "ObservingCodec",  # base: a codec that observes a prompt's queries
    "HostLayout",  # base: a codec with another layout on the host
    "PerTokenCodec",  # codec: quantizes each token vector by itself
    "Quantizer",  # base: the rounding of `PerTokenCodec`
    "MinMax",  # quantizer: equal steps between minimum and maximum
    "Fp4",  # quantizer: blocks of 4-bit floats with 8-bit scales
    "Fp8",  # quantizer: 8-bit floats
    "Kivi",  # codec: groups of tokens or channels, and an exact window of the newest tokens
    "ExactPrefix",  # codec: the first tokens exactly, the others by another codec
    "CalibratedLowRank",  # codec: projects onto directions of a calibrated table
    "step_size",  # equal steps over a span
    "lloyd_max_levels",  # the levels of least error for normal numbers
    "bit_packing",  # module: packs codes of 1, 2, 4 and 8 bits into bytes
    # Readers: which stored tokens a query reads
    "Reader",  # base: attends queries to what is stored
    "ReadResult",  # what a reader returns: outputs, and weights where a policy asks for them
    "Full",  # reader: all slots
    "Retrieve",  # reader: the units with the highest scores of an index
    "Index",  # base: summaries of units, and their scores for a query
    "attend_slots",  # attends each query to slots of its own
    "map_query_blocks",  # runs a function on some queries at a time
    "RingBuffer",  # copies of the first and the latest tokens
    # Side stores: parts of a prompt apart from the slots
    "SideStore",  # base: stores some of the prompt's tokens apart from the slots
    "PrecisionTiers",  # base: stores some tokens by other codecs
    "ScoredTiers",  # side store: stores the tokens of the lowest scores by other codecs
    # Calibrated tables
    "TableKind",  # base: statistics of texts, and the arrays made of them
    "PublishedFile",  # the arrays of a file in the form that a method's authors publish
    "register_table_kind",  # registers a kind of table for `kvjax calibrate`
    "Bases",  # table: principal directions of keys and values
    "JointBases",  # table: those of several heads together
    "HeadWeights",  # table: each head's need for all tokens
    "RetrievalHeads",  # table: each head's attention to earlier copies of a text
    "split_halves",  # marks the tokens and queries of the two halves of a text
    "sum_moments",  # sums what a linear map from tokens' vectors to targets is fitted to
    "fit_linear_map",  # fits it, by ridge regression
    "sum_outer_products",  # sums outer products of vectors
    # Patterns: which keys a prompt's own queries read
    "TileChoosing",  # base: chooses keys for tiles of queries from the layer's queries and keys
    "ChosenKeys",  # the tiles of keys and the single keys that a tile of queries reads
    # Attention and arrays
    "attention",  # module: logits, weights, masks and merging of partial attention
    "attention_mass",  # the attention that tokens receive from the queries, without the full matrix
    "attention_rows",  # the attention that each query gives to each token, for a few queries
    "Partial",  # attention over some tokens, to be merged with that over others
    "MASKED_LOGIT",  # the logit of a hidden token
    "memory",  # module: device and host memory
    "gather_tokens",  # takes the token vectors [B K S H] of some slots, from either memory
    "matmul_in_float32",  # a product of matrices in full float32, on GPUs and TPUs too
    "top_k",  # the k highest entries and their indices, without a sort on a GPU
    "top_k_mask",  # marks the k highest of the allowed entries; ties go to the lower index
    "rank",  # the place of each entry, highest first
    "covering_mask",  # marks the fewest entries that reach a share of the sum
    "mask_to_slots",  # lists the marked slots
    "over_heads",  # runs a function on each device's heads
    "vary",  # marks constants as differing between devices, for the start of a loop
    "draw",  # random numbers by index, independent of padding and devices
    "refuse_gradient",  # raises `GradientThroughBits` where a gradient would pass
    # Fields and parameters: their ranges, choices and shares
    "check_fields",  # raises for a field outside its range or choice: `__post_init__ = kv.check_fields`
    "PositiveInt",  # type of a field or a parameter: 1 or more
    "NonNegativeInt",  # 0 or more
    "PositiveFloat",  # above 0
    "NonNegativeFloat",  # 0 or more
    "UnitFloat",  # from 0 to 1
    "Within",  # any other range, as in `Annotated[float, kv.Within("[0, 1)")]`
    "OneOf",  # some numbers, as in `Annotated[int, kv.OneOf((2, 4))]`; a choice of texts is a `Literal`
    "Odd",  # odd numbers, as in `Annotated[int, kv.Odd()]`
    "RowBits",  # the widths of packed codes
    "Scope",  # type of `per`: "head" or "layer"
    "fraction_of",  # a share of a whole number, rounded down, exactly
    "IntOrArray",  # a whole number or an array of them
    "bind_component",  # resolves a component in one layer
    "bind_fields",  # resolves the components in a component's fields
]
