"""The battery's cases in the order of the methods' names, below the formulas of the bytes that the methods take.

Every method has at least one line of `CASES`. A method that no shared formula fits has its own, derived from the paper.
"""

from __future__ import annotations

import math

from tests.contract.method_case import (
    BytesFormula,
    LayerShape,
    MethodCase,
    StateBytes,
    constant_bytes,
    full_bytes,
    paged_bytes,
    selection_bytes,
    sized_case,
)


def a2ats_bytes(shape: LayerShape) -> StateBytes:
    """Four codewords of each head, the second moment and a byte per token; keys and values on the host."""
    codebook = shape.kv_bytes(4) + 4 * shape.B * shape.K * shape.H * shape.H
    return StateBytes(
        codebook + shape.B * shape.K * shape.S + shape.position_bytes(shape.S) + shape.count_bytes(),
        2 * shape.kv_bytes(shape.S),
    )


def arkvale_bytes(shape: LayerShape) -> StateBytes:
    """A box for each page of 2 tokens, and a last page that is not full; keys and values on the host."""
    digests = 2 * shape.kv_bytes(-(-shape.S // 2)) + shape.kv_bytes(2)
    return StateBytes(digests + shape.position_bytes(shape.S) + shape.count_bytes(), 2 * shape.kv_bytes(shape.S))


def bfp_bytes(shape: LayerShape) -> StateBytes:
    """4 bits per number, an exponent for each block of 8, and the order of key channels."""
    mantissas_and_exponents = shape.H // 2 + shape.H // 8
    order = 4 * shape.B * shape.K * shape.H
    return StateBytes(
        2 * shape.B * shape.K * shape.S * mantissas_and_exponents
        + order
        + shape.position_bytes(shape.S)
        + shape.count_bytes()
    )


def cskv_bytes(shape: LayerShape) -> StateBytes:
    """Half of all channels for keys, a quarter for values; an exact window of 3, and a slot for the next token."""
    num_channels = shape.K * shape.H // 2 + shape.K * shape.H // 4
    coordinates = shape.B * shape.S * num_channels * shape.itemsize
    bases = 4 * shape.K * shape.H * (num_channels + 2)
    window = 2 * shape.kv_bytes(3 + 1) + 2 * shape.count_bytes()
    return StateBytes(coordinates + bases + window + shape.position_bytes(shape.S) + shape.count_bytes())


def double_sparsity_bytes(bytes_per_label: int) -> BytesFormula:
    """All tokens, and labels of 8 channels: `bytes_per_label` bytes a token, or 0 for unquantized ones."""

    def count(shape: LayerShape) -> StateBytes:
        labels = shape.B * shape.K * shape.S * (bytes_per_label or 8 * shape.itemsize)
        return StateBytes(full_bytes(shape).device + labels + 4 * shape.B * shape.K * 8)

    return count


def per_token_bytes(shape: LayerShape, bits: int) -> StateBytes:
    """Codes of `bits` bits, and 4 bytes of scale per token and head."""
    return StateBytes(
        2 * shape.B * shape.K * shape.S * (shape.H * bits // 8 + 4)
        + shape.position_bytes(shape.S)
        + shape.count_bytes()
    )


def block_bytes(k_block: int, v_block: int) -> BytesFormula:
    """Blocks of 32 channels; of keys each takes `k_block` bytes, of values `v_block`."""

    def count(shape: LayerShape) -> StateBytes:
        num_blocks = shape.B * shape.K * shape.S * shape.H // 32
        return StateBytes(num_blocks * (k_block + v_block) + shape.position_bytes(shape.S) + shape.count_bytes())

    return count


def int8_bytes(shape: LayerShape) -> StateBytes:
    return per_token_bytes(shape, 8)


def int4_bytes(shape: LayerShape) -> StateBytes:
    return per_token_bytes(shape, 4)


def int4_on_host_bytes(shape: LayerShape) -> StateBytes:
    on_device = shape.position_bytes(shape.S) + shape.count_bytes()
    return StateBytes(on_device, per_token_bytes(shape, 4).device - on_device)


def gear_bytes(shape: LayerShape) -> StateBytes:
    """2 bits, ranks 2 and 1, an eighth of all numbers outliers on either side, chunks of 3 decoded tokens."""
    num_heads, num_chunks = shape.B * shape.K, shape.S // 3
    codes = 2 * num_heads * shape.S * shape.H * 2 // 8
    # Of channels of keys, and of tokens of values.
    scales_and_minima = 2 * num_heads * shape.itemsize * (shape.H * (1 + num_chunks) + shape.S)
    recent = 2 * num_heads * 3 * shape.H * shape.itemsize
    coordinates_and_directions = 2 * num_heads * shape.itemsize * (shape.S * 2 + shape.H * 2 + num_chunks * shape.H * 1)
    channel_outliers = num_heads * shape.H * 2 * (shape.S // 8) * (shape.itemsize + 4)  # a chunk of 3 tokens has none
    token_outliers = num_heads * shape.S * 2 * (shape.H // 8) * (shape.itemsize + 1)
    counts = 5 * shape.count_bytes()  # slots in use; of keys and of values, those of the prompt and those in codes
    stored = codes + scales_and_minima + recent + coordinates_and_directions + channel_outliers + token_outliers
    return StateBytes(stored + shape.position_bytes(shape.S) + counts)


def infllm_bytes(shape: LayerShape) -> StateBytes:
    """On the device 1 sink, a ring of 14 tokens, their mass, and the keys of 9 blocks; keys and values on the host."""
    num_recent, num_blocks = 15, (shape.S - 1 - 4) // 2
    recent = (
        2 * shape.kv_bytes(num_recent)
        + 4 * shape.B * shape.K * shape.G * num_recent
        + shape.G * shape.kv_bytes(num_blocks)
    )
    return StateBytes(recent + shape.position_bytes(shape.S) + 2 * shape.count_bytes(), 2 * shape.kv_bytes(shape.S))


def kcache_bytes(shape: LayerShape) -> StateBytes:
    return StateBytes(
        shape.kv_bytes(shape.S) + shape.position_bytes(shape.S) + shape.count_bytes(), shape.kv_bytes(shape.S)
    )


def keyformer_bytes(shape: LayerShape) -> StateBytes:
    return StateBytes(constant_bytes(6, policy_bytes=4)(shape).device + shape.count_bytes())


def group_codes_bytes(shape: LayerShape, bits: int, group: int, residual: int) -> int:
    """KIVI's codes in words, a scale and a minimum per group, and the exact recent tokens.

    Codes have capacity for all whole residuals, in whole words and groups. A value stays exact one step longer than a
    key.
    """
    multiple = math.lcm(32 // bits, group)
    num_slots = max(-(-(shape.S // residual * residual) // multiple), 1) * multiple
    numbers = shape.B * shape.K * num_slots * shape.H
    recent = shape.kv_bytes(residual) + shape.kv_bytes(residual + 1)
    return 2 * (numbers * bits // 8 + 2 * (numbers // group) * shape.itemsize + shape.count_bytes()) + recent


def kvarn_bytes(shape: LayerShape) -> StateBytes:
    """4 bits of a key, 2 of a value, float16 scales of tokens and of tiles of 4, an unfinished tile, 2 exact sinks."""
    tokens, tiles = shape.B * shape.K * shape.S, shape.B * shape.K * -(-shape.S // 4)
    codes = tokens * shape.H * (4 + 2) // 8
    scales = 2 * tokens * (1 + 2) + 2 * tiles * shape.H * (2 + 1)
    stored = codes + scales + 2 * shape.kv_bytes(4 + 2) + 2 * shape.count_bytes()
    return StateBytes(stored + shape.position_bytes(shape.S) + shape.count_bytes())


def kvtc_bytes(shape: LayerShape) -> StateBytes:
    """Words for 4 bits of a key's channel and 2 of a value's; 2 sinks, 3 recent tokens and a slot for the next one.

    Of the example table's variances 28 components of keys and 16 of values are worth a bit.
    """
    words = shape.B * shape.K * shape.S * shape.H * (4 + 2) // 8
    bases_and_means = 4 * shape.K * shape.H * (28 + 16 + 2)
    exact = 2 * shape.kv_bytes(2 + 3 + 1) + 2 * shape.count_bytes()
    return StateBytes(words + bases_and_means + exact + shape.position_bytes(shape.S) + shape.count_bytes())


def kivi_bytes(bits: int, group: int, residual: int) -> BytesFormula:
    def count(shape: LayerShape) -> StateBytes:
        return StateBytes(
            group_codes_bytes(shape, bits, group, residual) + shape.position_bytes(shape.S) + shape.count_bytes()
        )

    return count


def kivi_paged_bytes(shape: LayerShape) -> StateBytes:
    """Pages of 4 slots for 6 tokens a head on average, in 4 bits and groups of 4, and the decoded tokens."""
    num_pages = shape.B * shape.K * -(-(shape.K * (6 + 3) // 4) // shape.K)
    numbers = num_pages * 4 * shape.H
    codes = 2 * (numbers // 2 + 2 * (numbers // 4) * shape.itemsize)
    positions_and_owners = num_pages * (4 * 4 + 4)
    decoded = shape._replace(S=shape.num_slots(0))
    store = codes + positions_and_owners + group_codes_bytes(decoded, 4, 4, 4)
    return StateBytes(store + shape.position_bytes(decoded.S) + shape.count_bytes())


def kvquant_bytes(shape: LayerShape) -> StateBytes:
    """4 bits per number; two outliers of every channel of the prompt and of chunks of 4, and of every token."""
    num_chunks = 1 + shape.S // 4
    codes = 2 * (shape.B * shape.K * shape.S * shape.H // 2 + shape.kv_bytes(4) + 2 * shape.count_bytes())
    keys = shape.kv_bytes(2 * num_chunks) + shape.B * shape.K * 2 * num_chunks * shape.H * (4 + shape.itemsize)
    values = shape.B * shape.K * shape.S * (2 * shape.itemsize + 2 * (1 + shape.itemsize))
    return StateBytes(
        codes + keys + values + 2 * shape.kv_bytes(1) + shape.position_bytes(shape.S) + shape.count_bytes()
    )


def matryoshka_bytes(shape: LayerShape) -> StateBytes:
    """A quarter of the channels for keys, half of them for values; a basis and a mean of each, in float32."""
    num_channels = shape.H // 4 + shape.H // 2
    coordinates = shape.B * shape.K * shape.S * num_channels * shape.itemsize
    bases = 4 * shape.K * shape.H * (num_channels + 2)
    return StateBytes(coordinates + bases + shape.position_bytes(shape.S) + shape.count_bytes())


def merged_heads_bytes(shape: LayerShape) -> StateBytes:
    """One head instead of two, for keys and for values, and the directions of each in both heads' channels."""
    coordinates = 2 * shape.B * shape.S * (shape.K // 2) * shape.H * shape.itemsize
    bases = 2 * 4 * shape.K * shape.H * (shape.H + 1)
    return StateBytes(coordinates + bases + shape.position_bytes(shape.S) + shape.count_bytes())


def mikv_bytes(shape: LayerShape) -> StateBytes:
    """60 % of the prompt in 2 bits, the rest and the decoded tokens exact."""
    num_low, num_heads = 3 * shape.prompt // 5, shape.B * shape.K
    num_slots = shape.num_slots(shape.prompt - num_low)
    codes_and_scales = 2 * num_heads * num_low * (shape.H * 2 // 8 + 2 * shape.itemsize)
    # Slots in use, and, of the low tier's keys and of its values, tokens of the prompt and tokens in codes.
    counts = 5 * shape.count_bytes()
    balance = 4 * num_heads * shape.H
    positions = shape.position_bytes(num_slots + num_low, per_head=True)
    return StateBytes(2 * shape.kv_bytes(num_slots) + codes_and_scales + balance + positions + counts)


def offload_bytes(shape: LayerShape) -> StateBytes:
    return StateBytes(shape.position_bytes(shape.S) + shape.count_bytes(), 2 * shape.kv_bytes(shape.S))


def oscar_bytes(shape: LayerShape) -> StateBytes:
    """2 bits, scales and minima of 4 channels, 4 + 1 recent tokens, 2 exact sinks, and a rotation of each head."""
    tokens = -(-(shape.S // 4 * 4) // 16) * 16  # whole words of 16 codes
    codes = shape.B * shape.K * tokens * shape.H * 2 // 8
    scales_and_minima = 2 * shape.kv_bytes(tokens) // 4
    stored = 2 * (codes + scales_and_minima + shape.kv_bytes(5 + 2) + shape.count_bytes())
    rotations = 2 * 4 * shape.K * shape.H * shape.H
    return StateBytes(stored + rotations + shape.position_bytes(shape.S) + shape.count_bytes())


def quest_bytes(shape: LayerShape) -> StateBytes:
    """All tokens, and a box for each page of 2."""
    return StateBytes(full_bytes(shape).device + 2 * shape.kv_bytes(-(-shape.S // 2)))


def recompress_bytes(num_slots: int, per_head: bool = True, num_queries: int = 2) -> BytesFormula:
    """The slots, and the last queries with their positions; `per_head` as in `selection_bytes`."""

    def count(shape: LayerShape) -> StateBytes:
        queries = num_queries * shape.B * (shape.K * shape.G * shape.H * shape.itemsize + 4)
        return StateBytes(2 * shape.kv_bytes(num_slots) + shape.position_bytes(num_slots, per_head) + queries)

    return count


def lag_bytes(shape: LayerShape) -> StateBytes:
    """A sink, one token of each of six partitions, two whole ones, an empty slot; where each sequence begins."""
    num_slots = 1 + 6 + 2 * 3 + 1
    return StateBytes(
        2 * shape.kv_bytes(num_slots) + shape.position_bytes(num_slots, per_head=True) + shape.count_bytes()
    )


def rekv_bytes(shape: LayerShape) -> StateBytes:
    """A mean key for each block of 2 tokens, and the sum of queries, in float32; keys and values on the host."""
    numbers = shape.B * shape.K * shape.H * (-(-shape.S // 2) + shape.G)
    return StateBytes(4 * numbers + shape.position_bytes(shape.S) + shape.count_bytes(), 2 * shape.kv_bytes(shape.S))


def retrieval_attention_bytes(shape: LayerShape) -> StateBytes:
    return StateBytes(
        2 * shape.kv_bytes(1 + 2) + shape.position_bytes(shape.S) + shape.count_bytes(), 2 * shape.kv_bytes(shape.S)
    )


def rocketkv_bytes(shape: LayerShape) -> StateBytes:
    """A selection of 7 tokens, and a box for each page of 2."""
    return StateBytes(selection_bytes(7)(shape).device + 2 * shape.kv_bytes(-(-shape.num_slots(7) // 2)))


def rotatekv_bytes(shape: LayerShape) -> StateBytes:
    """2 bits per number, a scale and a zero point per token and head, 2 exact sinks, and the order of channels."""
    codes = 2 * shape.B * shape.K * shape.S * (shape.H * 2 // 8 + 2 + 2)
    order = 4 * shape.B * shape.K * shape.H
    return StateBytes(codes + 2 * shape.kv_bytes(2) + order + shape.position_bytes(shape.S) + shape.count_bytes())


def saq_bytes(shape: LayerShape) -> StateBytes:
    """Blocks of 4 tokens: one exact, one in 8 bits, one in 4 bits, the others in 2; groups of 4."""
    num_blocks = {8: 1, 4: 1, 2: shape.S // 4 - 2}
    numbers = {bits: shape.B * shape.K * 4 * count * shape.H for bits, count in num_blocks.items()}
    codes = sum(n * bits // 8 for bits, n in numbers.items())
    scales_and_minima = 2 * sum(numbers.values()) // 4 * shape.itemsize
    stored = 2 * (codes + scales_and_minima + shape.kv_bytes(4) + shape.count_bytes())
    return StateBytes(stored + shape.position_bytes(shape.S) + shape.count_bytes())


def shadowkv_bytes(shape: LayerShape) -> StateBytes:
    """The first 6 of 9 tokens in chunks of 2, at rank 8; slots for an outlier chunk, a local one, and one token."""
    num_slots = shape.num_slots(5)
    exact = 2 * shape.kv_bytes(num_slots) + shape.position_bytes(num_slots, per_head=True) + shape.count_bytes()
    keys = shape.B * 6 * 8 * shape.itemsize + 4 * shape.B * shape.K * shape.H * 8
    return StateBytes(exact + keys + shape.kv_bytes(3) + shape.position_bytes(6, per_head=True), shape.kv_bytes(6))


def specache_bytes(bits: int, prefetches: bool = True) -> BytesFormula:
    """A copy in groups of 4 with a residual of 4, and 3 fetched tokens of each head with their positions."""

    def count(shape: LayerShape) -> StateBytes:
        fetched = prefetches * shape.B * shape.K * 3 * (2 * shape.H * shape.itemsize + 4)
        copy = group_codes_bytes(shape, bits, 4, 4)
        return StateBytes(
            copy + fetched + shape.position_bytes(shape.S) + shape.count_bytes(), 2 * shape.kv_bytes(shape.S)
        )

    return count


def think_bytes(shape: LayerShape) -> StateBytes:
    """The last 2 prompt tokens and the decoded ones in full; 20 of 32 key channels of the older tokens."""
    num_older, num_slots = shape.prompt - 2, shape.num_slots(2)
    keys = shape.B * shape.K * 20 * (num_older * shape.itemsize + 4)  # and the indices of these channels
    values = shape.kv_bytes(num_older)
    return StateBytes(
        2 * shape.kv_bytes(num_slots)
        + keys
        + values
        + shape.position_bytes(num_slots + num_older)
        + shape.count_bytes()
    )


def turboquant_bytes(k_bits: int, v_bits: int, value_ends: int = 2) -> BytesFormula:
    """Codes, a norm of each key, and two ends of each value's range, or its norm."""

    def count(shape: LayerShape) -> StateBytes:
        bytes_per_token = shape.H * k_bits // 8 + 2 + shape.H * v_bits // 8 + 2 * value_ends
        return StateBytes(
            shape.B * shape.K * shape.S * bytes_per_token + shape.position_bytes(shape.S) + shape.count_bytes()
        )

    return count


def two_tier_bytes(shape: LayerShape, num_high: int, num_low: int) -> StateBytes:
    """Capacity for `num_high` prompt tokens in 4 bits and `num_low` in 2, and chunks of 3 decoded tokens."""
    num_heads = shape.B * shape.K
    num_slots = shape.num_slots(num_high)
    codes = 2 * num_heads * shape.H * (num_slots * 4 + num_low * 2) // 8
    # Minimum and scale of keys and root of values by channel, of both tiers and of each chunk; the others by token.
    channels = 3 * num_heads * shape.H * shape.itemsize * (2 + num_slots // 3)
    tokens = 2 * num_heads * shape.itemsize * (num_slots + num_low)
    recent = 2 * num_heads * 3 * shape.H * shape.itemsize
    positions = shape.position_bytes(num_slots + num_low, per_head=True)
    counts = 9 * shape.count_bytes()  # slots in use; of four codecs those of the prompt, and those in codes
    return StateBytes(codes + channels + tokens + recent + positions + counts)


def zipcache_bytes(shape: LayerShape) -> StateBytes:
    """40 % of the prompt in 2 bits."""
    num_low = 2 * shape.prompt // 5
    return two_tier_bytes(shape, shape.prompt - num_low, num_low)


def zipvl_bytes(shape: LayerShape) -> StateBytes:
    """9 prompt tokens: capacity for 7 (70 %, rounded up) in 4 bits and for 8 (all but 20 %, rounded down) in 2."""
    return two_tier_bytes(shape, 7, 8)


CASES = (
    sized_case("a2ats", "a2ats:topk={},words=4,sinks=1,recent=2,distance=8", 3, 100, a2ats_bytes),
    sized_case("a_shape", "a_shape:sinks=1,recent={}", 2, 100, full_bytes),
    sized_case("accumulated", "accumulated:budget={},recent=2,normalise=visible,decay=0.9", 5, 100, selection_bytes(5)),
    sized_case("adakv", "snapkv:budget={},window=2,kernel=3 + adakv:page=4", 6, 100, paged_bytes(6, page=4)),
    sized_case(
        "adakv",
        "snapkv:budget={},window=2,kernel=3 + adakv:page=4,rule=kvpress",
        6,
        100,
        paged_bytes(6, page=4),
        variant="kvpress",
    ),
    # A layer that is planned alone gets one more page, and as many as the rounding of its slots may add: here the pages
    # of the whole prompt of 9 tokens, rounded up to 16 slots.
    sized_case(
        "adakv",
        "snapkv:budget={},window=2,kernel=3 + adakv:page=4,scope=model",
        6,
        100,
        paged_bytes(6, page=4, extra_pages=2),
        variant="scope=model",
    ),
    sized_case(
        "adaptive_rkv",
        "adaptive_rkv:budget={},window=2,kernel=2,block=2,sinks=1,recent=1,every=2",
        6,
        100,
        recompress_bytes(6 + 2 + 1, per_head=False),
    ),
    sized_case("arkvale", "arkvale:budget={},page=2,sinks=1,window=1,device_layers=0", 6, 100, arkvale_bytes),
    MethodCase(
        "attention_gate",
        "attention_gate:budget=5,sinks=1,recent=1,page=4",
        "attention_gate:budget=100,threshold=0,sinks=1,recent=1,page=4",
        paged_bytes(5, page=4),
    ),
    MethodCase("bfp", "bfp:block=8", "", bfp_bytes),
    sized_case("blocks", "snapkv:budget={},window=2,kernel=3 + blocks:size=3", 6, 100, recompress_bytes(6 + 3 + 1)),
    sized_case(
        "blocks", "keydiff:budget={} + blocks:size=2,attend=all", 5, 100, selection_bytes(5), variant="attended in full"
    ),
    sized_case("cake", "cake:budget={},window=2,kernel=3", 6, 100, selection_bytes(6)),
    sized_case("cam", "accumulated:budget={},recent=2 + cam:window=2", 6, 100, selection_bytes(6)),
    sized_case("cap", "cap:budget={},sinks=1,future=4", 5, 100, selection_bytes(5)),
    sized_case("chunk_budgets", "keynorm:budget={} + chunk_budgets:chunk=3", 6, 100, selection_bytes(6)),
    sized_case(
        "chunk_budgets",
        "snapkv:budget={},window=1,kernel=3 + chunk_budgets:chunk=4,score=chunk",
        6,
        100,
        selection_bytes(6),
        variant="score=chunk",
    ),
    sized_case("chunkkv", "chunkkv:budget={},chunk=2,window=2", 6, 100, selection_bytes(6, per_head=False)),
    sized_case("compactor", "compactor:budget={},sinks=1,recent=1,chunk=4,sketch=4", 6, 100, selection_bytes(6)),
    sized_case("criticalkv", "snapkv:budget={},window=2,kernel=3 + criticalkv", 6, 100, selection_bytes(6)),
    MethodCase("cskv", "cskv:keys=0.5,values=0.25,window=3", "cskv:keys=1,values=1,window=3", cskv_bytes),
    sized_case("cur", "cur:budget={},window=4,sinks=1", 5, 100, selection_bytes(5)),
    sized_case("d2o", "accumulated:budget={},recent=2 + d2o", 6, 100, selection_bytes(6)),
    sized_case(
        "d2o",
        "accumulated:budget={},recent=2 + d2o:rule=paper,count=true",
        6,
        100,
        selection_bytes(6, bias=True),
        variant="paper's rule, counted",
    ),
    MethodCase(
        "dms",
        "kvzap:budget=5,recent=1 + dms:threshold=0,page=4",
        "kvzap:budget=100,recent=1 + dms:threshold=-1e9,page=4",
        paged_bytes(5, page=4),
    ),
    MethodCase(
        "dms",
        "keynorm:budget=6,recent=2 + dms:threshold=-5.6,decode=true",
        "keynorm:budget=100,recent=2 + dms:threshold=-1e9,decode=true",
        constant_bytes(7, policy_bytes=4),
        variant="decode=true",
    ),
    sized_case(
        "double_sparsity", "double_sparsity:heavy={},factor=4,device_layers=0", 3, 100, double_sparsity_bytes(0)
    ),
    MethodCase(
        "double_sparsity",
        "double_sparsity:heavy=3,factor=4,device_layers=0,bits=4",
        "",
        double_sparsity_bytes(4 + 4),
        variant="labels in 4 bits",
    ),
    MethodCase(
        "double_sparsity",
        "double_sparsity:heavy=3,factor=4,device_layers=0,table=shipped",
        "",
        double_sparsity_bytes(0),
        variant="calibrated channels",
    ),
    # One of the battery's two heads keeps all 9 tokens, the other 3, which is 6 on average.
    sized_case("dropkv", "dropkv:budget={},window=2,kernel=3", 6, 100, selection_bytes(6)),
    sized_case("duo_attention", "duo_attention:sinks=1,recent={},page=4", 2, 100, paged_bytes(6, page=4)),
    MethodCase("e8", "e8:k_bits=4,v_bits=4", "", block_bytes(16 + 2, 16 + 2)),
    sized_case("elastic_cache", "elastic_cache:budget={},sinks=1,distance=3", 6, 100, constant_bytes(7)),
    MethodCase("ems", "ems:budget=6,window=2,threshold=0", "ems:budget=100,window=2", selection_bytes(6)),
    sized_case(
        "entropy_gated_chunks",
        "snapkv:budget={},window=2,kernel=3 + entropy_gated_chunks:chunk=3,kept=1",
        6,
        100,
        selection_bytes(6),
    ),
    MethodCase(
        "expected_attention",
        "expected_attention:budget=5,sinks=1,future=4",
        "expected_attention:budget=100,sinks=1",
        selection_bytes(5),
    ),
    sized_case("finch", "finch:budget={},window=2,chunk=4", 6, 100, selection_bytes(6)),
    MethodCase(
        "expected_attention",
        "expected_attention:budget=5,sinks=1,future=4,table=shipped",
        "",
        selection_bytes(5),
        variant="queries of a table",
    ),
    MethodCase(
        "fastkvzip",
        "fastkvzip:budget=5,sinks=1,page=4",
        "fastkvzip:budget=100,page=4",
        paged_bytes(5, page=4, extra_pages=2),
    ),
    MethodCase("fp8", "fp8", "", int8_bytes),
    MethodCase("full", "full", "full", full_bytes),
    MethodCase(
        "gear", "gear:bits=2,rank=2,later=1,share=0.25,every=3", "gear:bits=8,rank=32,later=32,every=3", gear_bytes
    ),
    MethodCase("ggml", "ggml:block=8", "", block_bytes(40, 40)),
    MethodCase("ggml", "ggml:k=q5_1,v=iq4_nl,pairs=true", "", block_bytes(24, 18), variant="5 and 4 bits"),
    MethodCase("h2o", "h2o:heavy=3,recent=2", "h2o:heavy=90,recent=10", constant_bytes(6, policy_bytes=4)),
    MethodCase(
        "h2o",
        "h2o:heavy=3,recent=2,decay=0.9,normalise=visible-count,granularity=layer",
        "h2o:heavy=90,recent=10,decay=0.9,normalise=visible-count,granularity=layer",
        constant_bytes(6, policy_bytes=4),
        variant="one set per layer",
    ),
    # The example table gives one of the battery's two heads 7 of 9 tokens, the other 5, in as many pages as 6 and 6.
    sized_case(
        "head_shares", "snapkv:budget={},window=2,kernel=3 + head_shares:page=4", 6, 100, paged_bytes(6, page=4)
    ),
    sized_case("headkv", "headkv:budget={},window=2,kernel=3,page=4", 6, 100, paged_bytes(6, page=4)),
    MethodCase("in_windows", "in_windows", "in_windows", full_bytes),
    sized_case("infllm", "infllm:block=2,sinks=1,local={},topk=9,representatives=1,chunk=4", 4, 24, infllm_bytes),
    MethodCase("int4", "int4", "", int4_bytes),
    MethodCase("int4", "int4:rotate=false", "", int4_bytes, variant="not rotated"),
    MethodCase("int4", "int4 + offload", "", int4_on_host_bytes, variant="on the host"),
    MethodCase("int8", "int8", "", int8_bytes),
    sized_case("kcache", "kcache:n={},device_layers=0", 3, 100, kcache_bytes),
    sized_case("kcache", "kcache:n={},device_layers=0,renormalise=true", 3, 100, kcache_bytes, variant="renormalised"),
    sized_case(
        "kcache", "kcache:n={},device_layers=0,granularity=kv", 3, 100, kcache_bytes, variant="one set per head"
    ),
    sized_case("keydiff", "keydiff:budget={}", 5, 100, selection_bytes(5)),
    MethodCase("keyformer", "keyformer:budget=5,recent=2", "keyformer:budget=100,recent=10", keyformer_bytes),
    sized_case("keynorm", "keynorm:budget={},per=layer", 5, 100, selection_bytes(5, per_head=False)),
    sized_case("kivi", "kivi:bits=4,group=4,residual={}", 4, 24, kivi_bytes(4, 4, 4)),
    sized_case("kivi", "kivi:bits=2,group=8,residual={}", 8, 24, kivi_bytes(2, 8, 8), variant="2 bits"),
    sized_case("kivi", "kivi:bits=1,group=4,residual={}", 4, 24, kivi_bytes(1, 4, 4), variant="1 bit"),
    MethodCase(
        "kivi",
        "snapkv:budget=6,window=2,kernel=3 + adakv:page=4 + kivi:bits=4,group=4,residual=4",
        "",
        kivi_paged_bytes,
        variant="in pages",
    ),
    sized_case(
        "kmeans", "snapkv:budget={},window=2,kernel=3 + kmeans:share=0.5,iterations=2", 7, 100, selection_bytes(7)
    ),
    sized_case("kvarn", "kvarn:tile={},sinks=2", 4, 24, kvarn_bytes),
    MethodCase("kvcompose", "kvcompose:budget=4", "kvcompose:budget=100", selection_bytes(4)),
    sized_case("kvcrush", "snapkv:budget={},window=2,kernel=3 + kvcrush:share=0.5", 7, 100, selection_bytes(7)),
    sized_case(
        "kvcrush",
        "accumulated:budget={},recent=2,sinks=2,unit=page2 + kvcrush:share=0.5,anchor=mean,rule=stride,bits=positions",
        8,
        100,
        selection_bytes(8),
        variant="pages",
    ),
    sized_case("kvmerger", "kvmerger:budget={},heavy=1,recent=2", 6, 100, selection_bytes(6)),
    sized_case(
        "kvmerger",
        "kvmerger:budget={},heavy=1,recent=2,count=true",
        6,
        100,
        selection_bytes(6, bias=True),
        variant="counted",
    ),
    MethodCase("kvquant", "kvquant:every=4", "kvquant:every=4,first=100", kvquant_bytes),
    sized_case("kvtc", "kvtc:k_bits=4,v_bits=2,sinks=2,recent={}", 3, 100, kvtc_bytes),
    MethodCase(
        "kvgrad", "kvgrad:budget=5,sinks=1,page=4", "kvgrad:budget=100,page=4", paged_bytes(5, page=4, extra_pages=2)
    ),
    MethodCase(
        "kvgrad",
        "kvgrad:budget=5,sinks=1,level=head",
        "kvgrad:budget=100,level=head",
        selection_bytes(5),
        variant="level=head",
    ),
    sized_case("kvzap", "kvzap:budget={},recent=2", 5, 100, selection_bytes(5)),
    MethodCase(
        "kvzip", "kvzip:budget=5,sinks=1,page=4", "kvzip:budget=100,page=4", paged_bytes(5, page=4, extra_pages=2)
    ),
    MethodCase(
        "kvzip",
        "kvzip:budget=5,sinks=1,level=layer,page=4",
        "kvzip:budget=100,level=layer,page=4",
        paged_bytes(5, page=4),
        variant="level=layer",
    ),
    MethodCase(
        "kvzip",
        "kvzip:budget=5,sinks=1,level=head",
        "kvzip:budget=100,level=head",
        selection_bytes(5),
        variant="level=head",
    ),
    MethodCase("kvzip", "kvzip:budget=5,sinks=1,plus=true,level=head", "", selection_bytes(5), variant="plus"),
    sized_case("lagkv", "lagkv:budget={},lag=2,sinks=1", 6, 100, selection_bytes(6)),
    MethodCase(
        "lagkv",
        "lagkv:budget=40%,lag=3,sinks=1,while_decoding=true",
        "lagkv:budget=40%,lag=12,sinks=1,while_decoding=true",
        lag_bytes,
        variant="while decoding",
    ),
    sized_case("leverage_score", "leverage_score:budget={},sketch=4", 5, 100, selection_bytes(5)),
    sized_case("lococo", "lococo:budget={},recent=1", 6, 100, selection_bytes(6)),
    sized_case("locret", "locret:budget={},recent=2", 5, 100, selection_bytes(5)),
    MethodCase(
        "lookm",
        "lookm:budget=6,recent=2,sinks=1,images=1-4",
        "lookm:budget=100,recent=2,images=1-4",
        selection_bytes(6),
    ),
    MethodCase("matryoshka", "matryoshka:keys=0.25,values=0.5", "matryoshka:keys=1,values=1", matryoshka_bytes),
    MethodCase("merged_heads", "merged_heads:heads=2", "", merged_heads_bytes),
    # The example table gives one of the battery's two heads 7 of 9 tokens, the other 5, in as many pages as 6 and 6.
    sized_case("lukv", "snapkv:budget={},window=2,kernel=3 + lukv:page=4", 6, 100, paged_bytes(6, page=4)),
    sized_case("merging", "keynorm:budget={} + merging", 6, 100, selection_bytes(6)),
    sized_case(
        "merging",
        "keynorm:budget={} + merging:threshold=0.1,fraction=0.5",
        6,
        100,
        selection_bytes(6),
        variant="the nearest half",
    ),
    MethodCase("mikv", "mikv:share=0.6", "mikv:share=0", mikv_bytes),
    sized_case("minference", "minference:vertical={0},slash={0},queries=2,sinks=1,recent=1,tile=2", 2, 100, full_bytes),
    # The battery's model has a single layer, which is half of no pair; see tests/oracles/test_minicache.py.
    MethodCase("minicache", "minicache", "minicache", full_bytes),
    MethodCase("mxfp4", "mxfp4:block=8,rotate=true", "", block_bytes(20, 20)),
    sized_case("noncausal_attention", "noncausal_attention:budget={},chunk=4", 5, 100, selection_bytes(5)),
    MethodCase("nvfp4", "nvfp4:block=8", "", block_bytes(20, 20)),
    MethodCase("offload", "offload", "offload", offload_bytes),
    sized_case("oscar", "oscar:group=4,sinks=2,recent={}", 4, 24, oscar_bytes),
    sized_case("pyramidkv", "pyramidkv:budget={},window=2,kernel=3,pool=avg", 6, 100, selection_bytes(6)),
    sized_case("qfilters", "qfilters:budget={}", 5, 100, selection_bytes(5)),
    sized_case("quest", "quest:budget={},page=2,device_layers=0", 6, 100, quest_bytes),
    sized_case(
        "quest", "quest:budget={},page=2,device_layers=0,per=head", 6, 100, quest_bytes, variant="one set per head"
    ),
    sized_case("random", "random:budget={},sinks=1,recent=1", 5, 100, selection_bytes(5)),
    # One of the battery's two heads keeps all 9 tokens, the other 4, which is 7 on average.
    sized_case(
        "razor_attention",
        "razor_attention:sinks=1,recent={},induction=0.5,page=4",
        2,
        100,
        paged_bytes(7, page=4, bias=True),
    ),
    sized_case(
        "recompress", "snapkv:budget={},window=2,kernel=3 + recompress:every=3", 6, 100, recompress_bytes(6 + 3 + 1)
    ),
    sized_case(
        "recompress",
        "snapkv:budget={},window=2,kernel=3 + kvcrush:share=0.5 + recompress:every=2",
        7,
        100,
        recompress_bytes(7 + 2 + 1),
        variant="over kvcrush",
    ),
    # The battery's text has at most 24 tokens, of which half is kept.
    MethodCase(
        "recompress",
        "snapkv:budget=50%,window=2,kernel=3 + recompress:every=3",
        "",
        recompress_bytes(12 + 3 + 1),
        variant="a fraction of the text",
    ),
    sized_case("rekv", "rekv:topk={},block=2,sinks=1,recent=2", 1, 99, rekv_bytes),
    sized_case("rerotated", "snapkv:budget={},window=2,kernel=3 + rerotated", 6, 100, selection_bytes(6)),
    sized_case(
        "retrieval_attention", "retrieval_attention:topk={},sinks=1,recent=2", 2, 100, retrieval_attention_bytes
    ),
    sized_case("rkv", "rkv:budget={},window=2,kernel=3,every=3", 6, 100, recompress_bytes(6 + 3 + 1)),
    MethodCase(
        "rocketkv",
        "rocketkv:budget=7,topk=4,page=2,window=2,kernel=3",
        "rocketkv:budget=100,topk=100,page=2,window=2,kernel=3",
        rocketkv_bytes,
    ),
    sized_case("rotatekv", "rotatekv:sinks={}", 2, 100, rotatekv_bytes),
    sized_case("saq", "saq:group=4,every={}", 4, 24, saq_bytes),
    sized_case("scissorhands", "scissorhands:budget={},history=4,recent=2", 6, 90, constant_bytes(7, policy_bytes=4)),
    MethodCase(
        "shadowkv",
        "shadowkv:budget=2,chunk=2,rank=8,outliers=1,local=1",
        "shadowkv:budget=100,chunk=2,rank=64,outliers=1,local=1",
        shadowkv_bytes,
    ),
    MethodCase(
        "simlayerkv",
        "simlayerkv:threshold=0,sinks=1,recent=4",
        "simlayerkv:threshold=1,sinks=1,recent=4",
        full_bytes,  # of a single layer's slots, before layers divide anything
    ),
    sized_case("sinks_and_recent", "sinks_and_recent:budget={},sinks=2", 5, 100, selection_bytes(5, per_head=False)),
    MethodCase("skip_softmax", "skip_softmax:threshold=0.8,tile=2", "skip_softmax:threshold=0,tile=2", full_bytes),
    sized_case("snapkv", "snapkv:budget={},window=2,kernel=3", 6, 100, selection_bytes(6)),
    sized_case("specache", "specache:bits=1,group=4,residual=4,topk={}", 3, 100, specache_bytes(1), exact_from=1),
    sized_case(
        "specache",
        "specache:bits=2,group=4,residual=4,topk={},reduce=max",
        3,
        100,
        specache_bytes(2),
        exact_from=1,
        variant="2 bits, maximum over query heads",
    ),
    sized_case(
        "specache",
        "specache:bits=1,group=4,residual=4,topk={},speculative=false",
        3,
        100,
        specache_bytes(1, prefetches=False),
        variant="waiting",
    ),
    sized_case("streaming_llm", "streaming_llm:recent={},sinks=2", 3, 90, constant_bytes(6)),
    sized_case(
        "streaming_llm",
        "streaming_llm:recent={},sinks=2,reindex=false",
        3,
        90,
        constant_bytes(6),
        variant="true positions",
    ),
    MethodCase("think", "think:recent=2,queries=2", "think:share=0,recent=2", think_bytes),
    sized_case("tidal_decode", "tidal_decode:topk={},dense=0", 3, 100, full_bytes),
    sized_case("tova", "tova:budget={}", 4, 100, constant_bytes(5)),
    sized_case("tova", "tova:budget={},keep_newest=true", 4, 100, constant_bytes(5), variant="keeps the newest"),
    MethodCase(
        "triattention",
        "triattention:budget=5,recent=2,furthest=8,every=2",
        "triattention:budget=100,recent=2,every=2",
        recompress_bytes(5 + 2 + 1),
    ),
    MethodCase(
        "triattention",
        "triattention:budget=5,recent=2,furthest=8,every=2,table=shipped",
        "",
        recompress_bytes(5 + 2 + 1, num_queries=0),
        variant="queries of a table",
    ),
    MethodCase(
        "triattention",
        "triattention:budget=5,recent=2,furthest=8,every=0",
        "triattention:budget=100,recent=2,every=0",
        selection_bytes(5),
        variant="the prompt alone",
    ),
    MethodCase("turboquant", "turboquant", "", turboquant_bytes(4, 4)),
    MethodCase("turboquant", "turboquant:k_bits=3,v_bits=3", "", turboquant_bytes(3, 3), variant="3 bits"),
    MethodCase(
        "turboquant", "turboquant:v_levels=normal", "", turboquant_bytes(4, 4, value_ends=1), variant="rotated values"
    ),
    MethodCase(
        "turned_queries",
        "turned_queries:budget=5,sinks=1,ahead=4,page=4",
        "turned_queries:budget=100,page=4",
        paged_bytes(5, page=4, extra_pages=2),
    ),
    MethodCase(
        "turned_queries",
        "turned_queries:budget=5,sinks=1,ahead=4,level=head",
        "turned_queries:budget=100,level=head",
        selection_bytes(5),
        variant="level=head",
    ),
    MethodCase("xattention", "xattention:threshold=0.5,stride=2,tile=2", "xattention:threshold=1,tile=8", full_bytes),
    MethodCase("zipcache", "zipcache:every=3", "", zipcache_bytes),
    MethodCase("zipvl", "zipvl:every=3,least=0.2,most=0.7", "", zipvl_bytes),
)

FIRST_CASES: dict[str, MethodCase] = {}
for _case in CASES:
    FIRST_CASES.setdefault(_case.method, _case)
"""The first case of each method."""
