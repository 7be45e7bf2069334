"""`kvjax plan`: the options, the table, the notes and the plot of `kvjax.planning.plan`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvjax.core.mesh import parse_mesh
from kvjax.errors import KvjaxError
from kvjax.models.sharding import divided_sizes
from kvjax.planning.device_bytes import RESERVED, Setting
from kvjax.planning.hardware import GB, GIB, Hardware, find_hardware
from kvjax.planning.models import PlannedModel, find_model
from kvjax.planning.plan import PlanRow, plan
from kvjax.registry.strings import resolve
from kvjax.utils import arguments, display
from kvjax.utils.files import check_output
from kvjax.utils.packages import import_optional

TABLE_COLUMNS = 116
PLOT_CONTEXTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # in 1,024 tokens
OTHER_CHUNK_TOKENS = 4096
OTHER_CHUNK = f"--chunk {OTHER_CHUNK_TOKENS}"
FACTORS = {"": 1, "k": 1024, "m": 1024**2}


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    model, methods, mesh = find_model(args.model), resolve(args.method), parse_mesh(args.mesh)
    words = [word for word in args.context.split(",") if word.strip()]
    forms = "65536 or 64k, several with commas"
    contexts = list(dict.fromkeys(parse_tokens(word, forms=forms) for word in words))
    if not contexts:
        raise KvjaxError(f"no context in {args.context!r}; for example --context 32k,128k")
    if args.plot is not None:
        import_optional("altair", "plots need")
        if os.path.isdir(args.plot) or args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise KvjaxError(f"--plot {args.plot} must be a file whose name ends in .png, .svg or .pdf")
        check_output(args.plot)
    hardware = replace_figures(find_hardware(args.hardware), args)
    options: dict[str, Any] = {"batch": args.batch, "mesh": mesh, "hardware": hardware, "dtype": args.dtype}
    options |= {"room": args.room, "chunk": args.chunk, "prompt_memory": args.prompt_memory, "weights": args.weights}
    plans = plan(model, list(methods), contexts, **options)
    notes = write_notes(model, plans, options)
    if args.json:
        about = {"model": dataclasses.asdict(model) | {"parameters": model.parameters}, "mesh": mesh}
        about |= {"hardware": dataclasses.asdict(hardware), "dtype": args.dtype, "weights": args.weights}
        print(json.dumps(about | {"plans": [p.to_json() for p in plans], "notes": notes}, indent=2))
    else:
        console = Console(highlight=False, width=max(Console().width, TABLE_COLUMNS))
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
        if all(p.refusal is not None for p in known.values()):
            print(f"kvjax: all methods are refused, so {args.plot} is not drawn", file=sys.stderr)
            return
        draw(model, hardware, mesh, list(known.values()), args.plot)
        if not args.json:
            print(f"wrote {args.plot}")


def replace_figures(hardware: Hardware, args: argparse.Namespace) -> Hardware:
    """Replaces figures of a device by those that options give: --memory-gb, --host-gb and --bandwidth."""
    figures = {}
    if args.memory_gb is not None:
        figures["memory_bytes"] = int(arguments.number("--memory-gb", args.memory_gb, 0.001, 1e6) * GIB)
    if args.host_gb is not None:
        figures["host_bytes"] = int(arguments.number("--host-gb", args.host_gb, 0.0, 1e7) * GIB)
    if args.bandwidth is not None:
        figures["memory_bandwidth"] = arguments.number("--bandwidth", args.bandwidth, 0.001, 1e6) * GB
    return dataclasses.replace(hardware, **figures)


def parse_tokens(text: str, option: str = "--context", forms: str = "65536 or 64k") -> int:
    """Reads a number of tokens, as "65536" or "64k"; raises KvjaxError with the option for anything else."""
    match = re.fullmatch(r"(\d{1,9})([km]?)", text.strip().lower())
    if match is None or not int(match[1]):
        raise KvjaxError(f"{option} {text!r:.80} is no number of tokens; write {forms}")
    return int(match[1]) * FACTORS[match[2]]


def make_table(model: PlannedModel, hardware: Hardware, mesh: tuple[int, int], plans: Sequence[PlanRow]) -> Table:
    """Makes the table of the plans at one context."""
    batch = "1 sequence" if plans[0].batch == 1 else f"{plans[0].batch:,} sequences"
    all_needed = [p.device_bytes for p in plans if p.device_bytes is not None]
    unit, size = ("GB", 1e9) if any(needed.peak >= 1e9 for needed in all_needed) else ("MB", 1e6)
    where = describe_devices(hardware, mesh)
    title = f"{model.name} on {where}: {batch} of {plans[0].context:,} tokens; {unit} of a device"
    t = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    t.add_column("method", overflow="fold", min_width=18)
    t.add_column("fits", overflow="fold", min_width=9)
    columns = ("weights", "cache", "work-\nspace", "reading\nprompt", "host", "largest\nbatch", "largest\ncontext")
    for name in (*columns, "at most\ntok/s"):
        t.add_column(name, justify="right", no_wrap=True)
    for p in plans:
        n = p.device_bytes
        if n is None:
            t.add_row(p.method, "refused", *["-"] * len(columns), "see below")
            continue
        figures = [f"{x / size:,.2f}" for x in (n.weights, n.cache, n.workspace, n.prefill, n.host)]
        limits = [f"{p.largest_batch:,}", f"{p.largest_context:,}"]
        t.add_row(p.method, describe_fit(p), *figures, *limits, format_rate(p.max_tokens_per_second or 0))
    return t


def describe_devices(hardware: Hardware, mesh: tuple[int, int]) -> str:
    """Names a device, or those of a mesh."""
    devices = mesh[0] * mesh[1]
    return hardware.name if devices == 1 else f"{devices} x {hardware.name} as {mesh[0]}x{mesh[1]}"


def describe_fit(p: PlanRow) -> str:
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


def format_parameters(number: int) -> str:
    """Formats a number of parameters, never as 0."""
    return f"{number / 1e9:.2f}B" if number >= 1e8 else f"{number / 1e6:.2f}M"


def format_rate(rate: float) -> str:
    """Formats tokens per second."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:,.2f}"


def write_notes(model: PlannedModel, plans: Sequence[PlanRow], options: Mapping[str, Any]) -> list[str]:
    """Says what the plans assume, what was refused and why, and what would help; `options` are those of `plan`."""
    h, mesh, dtype, chunk = (options[name] for name in ("hardware", "mesh", "dtype", "chunk"))
    c = model.config
    notes = []
    for context in dict.fromkeys(p.context for p in plans):
        own = [p for p in plans if p.context == context]
        num_fitting = sum(p.fits for p in own)
        answer = "" if num_fitting else describe_nearest(model, own, options)
        notes.append(f"{context:,} tokens: {num_fitting} of {display.count(len(own), 'method')} fit{answer}")
        by_remedy: dict[str, list[str]] = {}
        for p in own if num_fitting else ():
            if not p.fits and p.device_bytes is not None and (found := find_fitting_options(model, p, options)):
                by_remedy.setdefault(" or ".join(found), []).append(p.method)
        for remedy, names in by_remedy.items():
            notes.append(f"{context:,} tokens: {', '.join(names)} would fit with {remedy}")
    kernels = "" if options["weights"] is None else f" with kernels in {options['weights']}"
    active = "" if not model.has_experts else f", {format_parameters(model.active_parameters)} of them for each token"
    notes += [
        f"{model.name}: {format_parameters(model.parameters)} parameters{active}, in {dtype}{kernels}; "
        f"{c.layers + model.other_layers} layers, {c.describe_heads()}, {c.max_positions:,} positions ({model.source})",
        *model.notes,
        f"{h.name}: {format_bytes(h.memory_bytes)}, of which programs use {1 - RESERVED:.0%}, "
        f"{h.memory_bandwidth / 1e9:,.0f} GB/s, host link {h.host_link / 1e9:,.0f} GB/s, "
        f"{h.host_bytes / 1e9:,.0f} GB of host memory a device ({h.source})",
        "GB are 10^9 bytes of one device, or of the host for it. "
        + ("Weights and caches are" if model.has_exact_weights else "Caches are")
        + " counted exactly, with all slots; the work of a step and of reading the prompt by formula. A prompt is read "
        + ("all at once" if chunk is None else f"{chunk:,} tokens at a time")
        + ", a layer after the other; beside the weights: hidden vectors, exact keys and values, states, activations.",
        "No program decodes more than at most tok/s, all sequences of the batch together: a step must read the weights "
        "of a token and the cache from a device's memory, at its bandwidth, and copy what it needs from the host over "
        "the link. Real programs are slower.",
    ]
    notes += [f"{p.method} is refused: {p.refusal}" for p in plans if p.refusal]
    for limit in ("host memory", "reading the prompt"):
        limited = [p for p in plans if p.batch_limit == limit]
        by_remedy = {}
        for p in limited:
            remedy = (
                "--host-gb plans for a host with more" if limit == "host memory" else find_remedy(model, p, options)
            )
            by_remedy.setdefault(remedy, []).append(p.method)
        for remedy, names in by_remedy.items():
            what = f"{limit[0].upper()}{limit[1:]} sets the largest batch of {', '.join(dict.fromkeys(names))}"
            notes.append(f"{what}: {remedy}" if remedy else what)
    return notes


READING_REMEDIES: Mapping[str, tuple[str, Any, str]] = {
    OTHER_CHUNK: ("chunk", OTHER_CHUNK_TOKENS, "reads it in parts, with the activations of one part"),
    "--prompt-memory host": ("prompt_memory", "host", "holds on the host what waits for other layers"),
}
"""Options that take less to read a prompt: the word on the command line -> (option of `plan`, value, what it does)."""
REMEDIES: Mapping[str, tuple[str, Any]] = {
    **{flag: (name, value) for flag, (name, value, _) in READING_REMEDIES.items()},
    "--weights int8": ("weights", "int8"),
    "--weights int4": ("weights", "int4"),
}
"""Options with which more fits: the word on the command line -> (option of `plan`, value)."""


def find_remedy(model: PlannedModel, p: PlanRow, options: Mapping[str, Any]) -> str:
    """Returns the options that let more sequences be read at this context, each tried by itself; "" for none."""
    remedies = []
    for flag, (name, value, what) in READING_REMEDIES.items():
        other = plan(model, [p.method], [p.context], **{**options, name: value})[0]
        if (other.largest_batch or 0) > (p.largest_batch or 0):
            remedies.append(f"{flag} {what}")
    return ", and ".join(remedies)


def find_fitting_options(model: PlannedModel, p: PlanRow, options: Mapping[str, Any]) -> list[str]:
    """Finds the fewest of `REMEDIES` with which a method fits that does not, as words of the command line.

    All is tried. Kernels of 4 bits are left out where those of 8 do.
    """
    changes = {flag: change for flag, change in REMEDIES.items() if options[change[0]] != change[1]}
    for size in range(1, len(changes) + 1):
        found = []
        for flags in itertools.combinations(changes, size):
            changed = dict(changes[flag] for flag in flags)
            if len(changed) < size:  # both kinds of kernels
                continue
            if plan(model, [p.method], [p.context], **{**options, **changed}, limits=False)[0].fits:
                found.append(" ".join(flags))
        if found:
            in_8_bits = {words.replace("int8", "int4") for words in found if "int8" in words}
            return [words for words in found if words not in in_8_bits]
    return []


def describe_nearest(model: PlannedModel, plans: Sequence[PlanRow], options: Mapping[str, Any]) -> str:
    """Names the method that misses by least where none fits, by how much, and what it fits with; all is tried."""
    hardware, (data, heads) = options["hardware"], options["mesh"]
    setting = Setting(model, hardware)
    counted = [(setting.excess(p.device_bytes), p) for p in plans if p.device_bytes is not None]
    if not counted:
        return "; all are refused, for the reasons below"
    _, nearest = min(counted, key=lambda pair: pair[0])
    needed = nearest.device_bytes
    assert needed is not None

    def fits(context: int = nearest.context, **changes: Any) -> bool:
        try:
            return plan(model, [nearest.method], [context], **{**options, **changes}, limits=False)[0].fits
        except KvjaxError:  # a mesh over which the model does not divide
            return False

    remedies = []
    if nearest.largest_batch:
        remedies.append(f"--batch {nearest.largest_batch}")
    remedies += find_fitting_options(model, nearest, options)
    sizes = {size for letter, size in divided_sizes(model.config) if letter in "KFV"}
    meshes = [n for n in range(heads + 1, math.gcd(*sizes) + 1) if math.gcd(*sizes) % n == 0]
    if n := next((n for n in meshes if fits(mesh=(data, n))), None):
        remedies.append(f"--mesh {data}x{n}")
    larger, flags = hardware, []
    for flag, size, has in (
        ("--memory-gb", needed.peak / (1 - RESERVED), nearest.spare),
        ("--host-gb", needed.host, nearest.host_spare),
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


def draw(model: PlannedModel, hardware: Hardware, mesh: tuple[int, int], plans: Sequence[PlanRow], path: Path) -> None:
    """Draws the bytes of a device against the context, one line a method, pale where it does not fit."""
    import altair as alt

    from kvjax.eval.page import charts

    values = [
        {"method": p.method, "context": p.context, "gigabytes": p.device_bytes.peak / 1e9, "fits": p.fits}
        for p in plans
        if p.refusal is None and p.device_bytes is not None
    ]
    methods = list(dict.fromkeys(value["method"] for value in values))
    x = alt.X(
        "context:Q", scale=alt.Scale(type="log", nice=False, padding=16), title="context, tokens (logarithmic)"
    ).axis(
        values=sorted({p.context for p in plans}),
        labelExpr="datum.value % 1024 ? format(datum.value, ',') : datum.value / 1024 + 'k'",
    )
    base = alt.Chart(alt.Data(values=values)).encode(
        x, alt.Y("gigabytes:Q", title="GB at the peak of prefill and decoding")
    )
    line = base.mark_line(strokeWidth=1.4).encode(charts.color_of(methods))
    inside = alt.condition("datum.fits", alt.value(1), alt.value(0.3))
    points = base.mark_point(filled=True).encode(charts.color_of(methods), charts.shape_of(methods), opacity=inside)
    usable = Setting(model, hardware).usable_bytes / 1e9
    limit = alt.Chart(alt.Data(values=[{"gigabytes": usable}])).mark_rule(strokeDash=[2, 2]).encode(y="gigabytes:Q")
    where = f"{model.name} on {describe_devices(hardware, mesh)}, batch {plans[0].batch:,}: bytes of a device"
    title = [where, f"dotted: {usable:,.1f} GB for programs; pale: does not fit"]
    (line + points + limit).properties(title=title, width=560, height=330).save(str(path), scale_factor=2)
