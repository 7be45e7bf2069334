"""`kvjax plan`: the options, the table, the notes and the plot of `kvjax.planning.plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvjax.errors import KvjaxError
from kvjax.models.sharding import divided_sizes
from kvjax.planning import measurement
from kvjax.planning.hardware import GIB, GPU_OVERHEADS, Hardware, find_hardware
from kvjax.planning.models import PlannedModel, find_model
from kvjax.planning.plan import COLLECTIVE_SECONDS, RESERVED, Plan, plan
from kvjax.registry.strings import resolve
from kvjax.utils import arguments, display
from kvjax.utils.files import check_output
from kvjax.utils.packages import import_optional

TABLE_COLUMNS = 144
PLOT_CONTEXTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # in 1,024 tokens
OTHER_CHUNK_TOKENS = 4096
OTHER_CHUNK = f"--chunk {OTHER_CHUNK_TOKENS}"
FACTORS = {"": 1, "k": 1024, "m": 1024**2}


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    model, methods, mesh = find_model(args.model), resolve(args.method), parse_mesh(args.mesh)
    contexts = list(dict.fromkeys(parse_tokens(word) for word in args.context.split(",") if word.strip()))
    if not contexts:
        raise KvjaxError(f"no context in {args.context!r}; for example --context 32k,128k")
    if args.plot is not None:
        import_optional("matplotlib", "plots need")
        if os.path.isdir(args.plot) or args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise KvjaxError(f"--plot {args.plot} must be a file whose name ends in .png, .svg or .pdf")
        check_output(args.plot)
    hardware = find_hardware(args.hardware) if not args.measured else measurement.measure(args.dtype)
    if args.overheads:
        if args.measured or hardware.name.startswith("v"):
            raise KvjaxError(
                f"--overheads adds what was measured on an NVIDIA GPU, and {hardware.name} is none or has rates of its "
                "own: leave it out"
            )
        hardware = dataclasses.replace(hardware, **GPU_OVERHEADS)
    if args.memory_gb is not None:
        size = int(arguments.number("--memory-gb", args.memory_gb, 0.001, 1e6) * GIB)
        hardware = dataclasses.replace(hardware, memory_bytes=size)
    if args.host_gb is not None:
        size = int(arguments.number("--host-gb", args.host_gb, 0.0, 1e7) * GIB)
        hardware = dataclasses.replace(hardware, host_bytes=size)
    options: dict[str, Any] = {"batch": args.batch, "mesh": mesh, "hardware": hardware, "dtype": args.dtype}
    options |= {"room": args.room, "chunk": args.chunk}
    plans = plan(model, list(methods), contexts, **options)
    notes = write_notes(model, plans, options)
    if args.json:
        about = {"model": dataclasses.asdict(model) | {"parameters": model.parameters}, "mesh": mesh}
        about |= {"hardware": dataclasses.asdict(hardware), "dtype": args.dtype}
        print(json.dumps(about | {"plans": [p.to_json() for p in plans], "notes": notes}, indent=2))
    else:
        console = Console(highlight=False)
        console = Console(highlight=False, width=max(console.width, TABLE_COLUMNS))
        for context in contexts:
            console.print(make_table(model, hardware, mesh, [p for p in plans if p.context == context]))
        for note in notes:
            console.print(f"- {note}", markup=False, soft_wrap=True)
    if args.plot is not None:
        longest = model.config.max_positions - args.room
        grid = [n * 1024 for n in PLOT_CONTEXTS if n * 1024 <= longest] or [longest]
        known = {(p.method, p.context): p for p in plans}
        wanted = [(name, n) for name in methods for n in sorted({*grid, *contexts}) if (name, n) not in known]
        for name, context in wanted:
            known[name, context] = plan(model, [name], [context], **options, limits=False)[0]
        draw(model, hardware, mesh, list(known.values()), args.plot)
        if not args.json:
            print(f"wrote {args.plot}")


def parse_mesh(text: str) -> tuple[int, int]:
    """Reads "2x4": devices along the sequences, and along the heads; raises KvjaxError for anything else."""
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text.strip().lower())
    if match is None:
        raise KvjaxError(
            f"--mesh {text!r:.80} is not BATCHxHEADS: the devices over which sequences are divided, and those over "
            "which heads are; 1x8 is eight devices that share each sequence's heads"
        )
    return int(match[1]), int(match[2])


def parse_tokens(text: str) -> int:
    """Reads a number of tokens, as "65536" or "64k"; raises KvjaxError for anything else."""
    match = re.fullmatch(r"(\d{1,9})([km]?)", text.strip().lower())
    if match is None or not int(match[1]):
        raise KvjaxError(f"--context {text!r:.80} is no number of tokens; write 65536 or 64k, several with commas")
    return int(match[1]) * FACTORS[match[2]]


def make_table(model: PlannedModel, hardware: Hardware, mesh: tuple[int, int], plans: Sequence[Plan]) -> Table:
    """Makes the table of the plans at one context."""
    devices = mesh[0] * mesh[1]
    where = hardware.name if devices == 1 else f"{devices} x {hardware.name} as {mesh[0]}x{mesh[1]}"
    batch = "1 sequence" if plans[0].batch == 1 else f"{plans[0].batch:,} sequences"
    needs = [p.need for p in plans if p.need is not None]
    unit, size = ("GB", 1e9) if any(n.device >= 1e9 for n in needs) else ("MB", 1e6)
    title = f"{model.name} on {where}: {batch} of {plans[0].context:,} tokens; {unit} of a device"
    t = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    t.add_column("method", overflow="fold", min_width=18)
    t.add_column("fits", overflow="fold", min_width=9)
    sizes = ("weights", "cache", "work-\nspace", "reading\nprompt", "host")
    others = ("largest\nbatch", "largest\ncontext", "prefill\ns", "tok/s", "at largest\nbatch, tok/s")
    for name in (*sizes, *others):
        t.add_column(name, justify="right", no_wrap=True)
    t.add_column("binds", no_wrap=True)
    for p in plans:
        if p.need is None or p.speed is None:
            t.add_row(p.method, "refused", *["-"] * (len(sizes) + len(others)), "see below")
            continue
        n = p.need
        figures = [f"{x / size:,.2f}" for x in (n.weights, n.cache, n.workspace, n.reading, n.host)]
        at_largest = "-" if p.largest_tokens_per_second is None else format_rate(p.largest_tokens_per_second)
        limits = [f"{p.largest_batch:,}", f"{p.largest_context:,}", f"{p.prefill_seconds:,.2f}"]
        t.add_row(
            *(p.method, describe_fit(p), *figures, *limits, format_rate(p.tokens_per_second or 0), at_largest),
            p.speed.binds,
        )
    return t


def describe_fit(p: Plan) -> str:
    """Says whether a plan fits, or how much is missing of which memory."""
    if p.fits:
        return "yes"
    missing = [(p.spare, "over"), (p.host_spare, "over on host")]
    return ", ".join(f"{format_bytes(-size)} {words}" for size, words in missing if size is not None and size < 0)


def format_bytes(size: int) -> str:
    """Formats a number of bytes that is not 0, never as 0."""
    if size >= 5e7:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB" if size >= 5e4 else f"{size:,} bytes"


def format_rate(rate: float) -> str:
    """Formats tokens per second."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:,.2f}"


def write_notes(model: PlannedModel, plans: Sequence[Plan], options: Mapping[str, Any]) -> list[str]:
    """Says what the plans assume, what was refused and why, and what would help; `options` are those of `plan`."""
    h, mesh, dtype, chunk = (options[name] for name in ("hardware", "mesh", "dtype", "chunk"))
    c = model.config
    notes = []
    for context in dict.fromkeys(p.context for p in plans):
        own = [p for p in plans if p.context == context]
        fitting = sorted((p for p in own if p.fits), key=lambda p: -(p.tokens_per_second or 0))
        if fitting:
            rate = format_rate(fitting[0].tokens_per_second or 0)
            answer = f"; the fastest is {fitting[0].method}, {rate} tok/s at most"
        else:
            answer = describe_nearest(model, own, options)
        notes.append(f"{context:,} tokens: {len(fitting)} of {display.count(len(own), 'method')} fit{answer}")
    active = "" if not model.has_experts else f", {model.active_parameters / 1e9:.1f}B of them for each token"
    notes += [
        f"{model.name}: {model.parameters / 1e9:.2f}B parameters{active}, in {dtype}; "
        f"{c.layers + model.other_layers} layers, {c.describe_heads()}, {c.max_positions:,} positions ({model.source})",
        *model.notes,
        f"{h.name}: {h.memory_bytes / 1e9:.1f} GB, of which programs use {1 - RESERVED:.0%}, "
        f"{h.memory_bandwidth / 1e9:,.0f} GB/s, {h.flops / 1e12:,.1f} TFLOP/s, host link "
        f"{h.host_link / 1e9:,.0f} GB/s, {h.host_bytes / 1e9:,.0f} GB of host memory a device ({h.source})",
        "GB are 10^9 bytes of one device, or of the host for it. "
        + ("Weights and caches are" if model.has_exact_weights else "Caches are")
        + " counted exactly, with all slots; the work of a step and of reading the prompt by formula. A prompt is read "
        + ("all at once" if chunk is None else f"{chunk:,} tokens at a time")
        + ", beside the weights: exact keys and values, states, activations.",
        "Seconds are a roofline: bytes and operations over peak rates, copies from the host not overlapped"
        + (f", {COLLECTIVE_SECONDS * 1e6:.0f} us for each sum over devices" if mesh[1] > 1 else "")
        + (f"; as measured, {h.layer_seconds * 1e6:,.0f} us for each layer's own work" if h.layer_seconds else "")
        + (f", an exact cache read at {h.cache_bandwidth / 1e9:,.1f} GB/s" if h.cache_bandwidth else "")
        + (f", {h.decoded_values / 1e9:.2f}e9 codes decoded a second" if h.decoded_values else "")
        + (f", {h.ranked_values / 1e9:.2f}e9 scores ranked a second" if h.ranked_values else "")
        + ". Real programs are slower"
        + (
            ""
            if h.layer_seconds
            else ": on an H200, kvjax reached 6% to 52% of such figures. --overheads adds what it took there"
        )
        + ".",
    ]
    notes += [f"{p.method} is refused: {p.refusal}" for p in plans if p.refusal]
    for limit in ("host memory", "reading the prompt"):
        limited = [p for p in plans if p.batch_limit == limit]
        helped = limited if limit == "host memory" else [p for p in limited if is_helped_by_chunks(model, p, options)]
        remedy = "--host-gb plans for a host with more"
        if limit != "host memory":
            remedy = f"{OTHER_CHUNK} reads it in parts, with fewer activations but all layers' exact keys and values"
            if chunk is not None:
                remedy = "without --chunk one layer's exact keys and values are held at a time"
        others = [p for p in limited if p not in helped]
        for some, what in ((helped, f": {remedy}"), (others, ", with --chunk and without")):
            if names := ", ".join(dict.fromkeys(p.method for p in some)):
                notes.append(f"{limit[0].upper()}{limit[1:]} sets the largest batch of {names}{what}")
    return notes


def is_helped_by_chunks(model: PlannedModel, p: Plan, options: Mapping[str, Any]) -> bool:
    """Whether more sequences fit where the prompt is read in chunks, or at once if it is read in chunks now."""
    chunk = OTHER_CHUNK_TOKENS if options["chunk"] is None else None
    other = plan(model, [p.method], [p.context], **{**options, "chunk": chunk})[0]
    return (other.largest_batch or 0) > (p.largest_batch or 0)


def describe_nearest(model: PlannedModel, plans: Sequence[Plan], options: Mapping[str, Any]) -> str:
    """Names the method that misses by least where none fits, by how much, and what it fits with; all is tried."""
    hardware, (data, heads) = options["hardware"], options["mesh"]
    usable = int(hardware.memory_bytes * (1 - RESERVED))
    counted = [(p.need.excess(usable, hardware.host_bytes), p) for p in plans if p.need is not None]
    if not counted:
        return "; all are refused, for the reasons below"
    _, nearest = min(counted, key=lambda pair: pair[0])
    need = nearest.need
    assert need is not None

    def fits(context: int = nearest.context, **changes: Any) -> bool:
        try:
            return plan(model, [nearest.method], [context], **{**options, **changes}, limits=False)[0].fits
        except KvjaxError:  # a mesh over which the model does not divide
            return False

    remedies = []
    if nearest.largest_batch:
        remedies.append(f"--batch {nearest.largest_batch}")
    if options["chunk"] is None and fits(chunk=OTHER_CHUNK_TOKENS):
        remedies.append(OTHER_CHUNK)
    elif options["chunk"] is not None and fits(chunk=None):
        remedies.append("no --chunk")
    sizes = {size for letter, size in divided_sizes(model.config) if letter in "KFV"}
    meshes = [n for n in range(heads + 1, math.gcd(*sizes) + 1) if math.gcd(*sizes) % n == 0]
    if n := next((n for n in meshes if fits(mesh=(data, n))), None):
        remedies.append(f"--mesh {data}x{n}")
    larger, flags = hardware, []
    for flag, size, has in (
        ("--memory-gb", need.device / (1 - RESERVED), nearest.spare),
        ("--host-gb", need.host, nearest.host_spare),
    ):
        if (has or 0) < 0:
            # Whole GiB are what people write; a tenth of a percent more where the model is small.
            gib = math.ceil(size / GIB) if size > GIB else math.ceil(size / GIB * 1000 + 1) / 1000
            field = "memory_bytes" if flag == "--memory-gb" else "host_bytes"
            larger = dataclasses.replace(larger, **{field: int(gib * GIB)})
            flags.append(f"{flag} {gib}")
    if fits(hardware=larger):
        remedies.append(" ".join(flags))
    context = nearest.largest_context or 0
    up_to = "it fits at no context"
    if context and fits(context):
        up_to = f"it fits up to {context:,} tokens (--context {context})"
    others = f", and at {nearest.context:,} with {' or '.join(remedies)}" if remedies else ""
    return f"; the nearest is {nearest.method}, {describe_fit(nearest)}: {up_to}{others}"


def draw(model: PlannedModel, hardware: Hardware, mesh: tuple[int, int], plans: Sequence[Plan], path: Path) -> None:
    """Draws tokens per second against the context, one line a method, dotted where it does not fit."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, NullLocator

    from kvjax.eval.page.charts import assign_styles
    from kvjax.eval.page.plots import RC

    names = list(dict.fromkeys(p.method for p in plans if p.refusal is None))
    styles = assign_styles(names)
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(7.2, 4.6), layout="constrained")
        ax = fig.subplots()
        handles = []
        for name in names:
            own = sorted((p for p in plans if p.method == name), key=lambda p: p.context)
            style = styles[name]
            handles.append(Line2D([], [], color=style.color, marker=style.marker, markersize=5, label=name))
            points = [(p.context, p.tokens_per_second or 0, p.fits) for p in own]
            for (x, y, fits), (next_x, next_y, next_fits) in zip(points, points[1:], strict=False):
                dash = "-" if fits and next_fits else ":"
                ax.plot([x, next_x], [y, next_y], dash, color=style.color, linewidth=1.4)
            for kind in (True, False):
                chosen = [(x, y) for x, y, fits in points if fits is kind]
                xs, ys = [x for x, _ in chosen], [y for _, y in chosen]
                face = style.color if kind else "white"
                ax.plot(xs, ys, style.marker, color=style.color, markerfacecolor=face, markersize=5)
        contexts = sorted({p.context for p in plans})
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(contexts, [f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}" for n in contexts])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
        ax.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: f"{y:,g}" if f"{y:e}"[0] in "25" else ""))
        ax.grid(True)
        devices = mesh[0] * mesh[1]
        where = hardware.name if devices == 1 else f"{devices} x {hardware.name} as {mesh[0]}x{mesh[1]}"
        ax.set_title(f"{model.name} on {where}, batch {plans[0].batch:,}: roofline of decoding")
        ax.set_xlabel("context, tokens (logarithmic)")
        ax.set_ylabel("tokens per second (logarithmic)")
        handles.append(
            Line2D([], [], color="#888888", linestyle=":", marker="o", markerfacecolor="white", label="does not fit")
        )
        fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        fig.savefig(path, dpi=150)
