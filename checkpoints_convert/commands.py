"""The commands of `python -m checkpoints_convert`: convert, check and inspect."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from checkpoints_convert.check import check
from checkpoints_convert.convert import convert
from checkpoints_convert.describe import describe
from checkpoints_convert.families import FAMILIES
from checkpoints_convert.progress import progress_bar
from kvjax.core.quantized_kernel import CODE_RANGES
from kvjax.errors import KvjaxError
from kvjax.utils import arguments
from kvjax.utils.files import Unwritable

EXAMPLES = f"""\
families: {", ".join(FAMILIES)}

examples:
  python -m checkpoints_convert inspect Llama-3.2-1B
  python -m checkpoints_convert convert Llama-3.2-1B llama-1b --dtype bf16
  python -m checkpoints_convert check   Llama-3.2-1B llama-1b
  python -m checkpoints_convert convert Qwen3-0.6B-Q8_0.gguf qwen3 --dtype bf16
"""

CONVERT = """Write SRC as a kvjax directory, one layer at a time. DST appears when it is complete; a checkpoint that
cannot be converted faithfully (unsupported config; tensors missing, left over, misshapen, truncated or not finite) is
refused, and nothing is written."""
CHECK = """Compare config, every tensor (bit for bit, in DST's type) and the logits of a few short prompts, for which
transformers is needed: pip install "kvjax[parity]". The exit status is 1 if anything differs."""
INSPECT = """Show format, sizes and config of a directory or a GGUF file from its headers, and why it cannot be
converted, if it cannot."""


def run_convert(args: argparse.Namespace) -> str:
    with progress_bar("convert") as progress:
        convert(args.src, args.dst, args.dtype, weights=args.weights, replace=args.force, progress=progress)
    return f"wrote {args.dst}; compare it with: python -m checkpoints_convert check {args.src} {args.dst}"


def run_check(args: argparse.Namespace) -> str:
    with progress_bar("check") as progress:
        report = check(args.src, args.dst, compare_logits=False if args.tensors_only else None, progress=progress)
    difference, equal = report.logit_difference, "equal the source"
    if report.weights is not None:
        equal, outcome = f"equal the source in {report.weights}", "not compared"
    elif difference is not None:
        outcome = f"within {difference:.1e} of the largest, against transformers"
    else:
        outcome = "not compared"
        if not args.tensors_only:
            outcome += f', for want of {", ".join(report.lacking)}: pip install "kvjax[parity]"'
    return f"{args.dst}: config and all {report.tensors} tensors {equal}; logits {outcome}"


def run_inspect(args: argparse.Namespace) -> Table:
    table = Table(title=str(args.dir), show_header=False, title_justify="left")
    for label, value in describe(args.dir).items():
        table.add_row(label, value)
    return table


def parser() -> argparse.ArgumentParser:
    """Builds the command line; each command's function returns what to print."""
    top = argparse.ArgumentParser(
        prog="python -m checkpoints_convert",
        description="Convert Hugging Face checkpoints (safetensors) and GGUF files to kvjax directories.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="convert | check | inspect")
    convert_command = commands.add_parser("convert", help="write SRC as a kvjax directory DST", description=CONVERT)
    convert_command.add_argument(
        "src", help="Hugging Face directory (config.json, *.safetensors, tokenizer.json), or a GGUF file"
    )
    convert_command.add_argument("dst", help="directory to write; it appears when it is complete")
    convert_command.add_argument(
        "--dtype",
        type=arguments.dtype_name,
        choices=arguments.DTYPES,
        help="type of the written weights, bf16 and the like are understood (default: as stored)",
    )
    convert_command.add_argument(
        "--weights",
        choices=tuple(CODE_RANGES),
        help="kernels in 8 bits with a scale by output channel, or in 4 by groups of 32 inputs (default: in --dtype)",
    )
    convert_command.add_argument(
        "--force", action="store_true", help="replace DST if it is a kvjax directory, once the new one is complete"
    )
    convert_command.set_defaults(run=run_convert)
    check_command = commands.add_parser(
        "check", help="compare DST with SRC: config, every tensor, logits", description=CHECK
    )
    check_command.add_argument("src", help="Hugging Face directory, or GGUF file")
    check_command.add_argument("dst", help="kvjax directory made from it")
    check_command.add_argument(
        "--tensors-only", action="store_true", help="leave out the logits (they need both models in memory)"
    )
    check_command.set_defaults(run=run_check)
    inspect_command = commands.add_parser("inspect", help="what a directory or a GGUF file holds", description=INSPECT)
    inspect_command.add_argument("dir", help="Hugging Face or kvjax directory, or GGUF file")
    inspect_command.set_defaults(run=run_inspect)
    return top


def run(argv: list[str] | None) -> int:
    """Runs one command; returns the exit status: 1 for a checkpoint that is refused, 2 where files cannot be used."""
    args = parser().parse_args(argv)
    try:
        Console(soft_wrap=True, markup=False, highlight=False).print(args.run(args))
        return 0
    except KvjaxError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, Unwritable) else 1
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
