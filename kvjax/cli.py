"""The command line: kvjax demo | generate | explore | models | methods | check | calibrate | eval | recommend | ..."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvjax
from kvjax import processes
from kvjax.core.compile_cache import use_compilation_cache
from kvjax.errors import KvjaxError
from kvjax.utils import arguments
from kvjax.utils.files import check_output, expand_user, read_text_file

if TYPE_CHECKING:  # a command imports its modules when it runs, so that `kvjax --help` answers at once
    from jax.sharding import Mesh

    from kvjax.cache.protocol import KVMethod
    from kvjax.generation.inputs import Prompts
    from kvjax.generation.result import Result
    from kvjax.models.chat_messages import TemplateOptions
    from kvjax.models.model import Model

DTYPE: Any = {
    "type": arguments.dtype_name,
    "choices": arguments.DTYPES,
    "help": "of weights and cache, bf16 and the like are understood (default: as stored)",
}
WEIGHTS: Any = {
    "choices": ("int8", "int4"),
    "help": "kernels in 8 bits with a scale by output channel, or in 4 by groups of 32 inputs (default: as stored)",
}
GENERATE_OPTIONS = (
    "max_new_tokens",
    "stop",
    "skip_special_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
)
MODEL = "a directory of checkpoints_convert, or a name that kvjax models lists"


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status; an unusable input prints one line on stderr, with status 2."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    args.argv = argv
    try:
        with warnings.catch_warnings():
            # One line, without the place in the code that gave the warning.
            warnings.showwarning = lambda message, *_, **__: _print_warning(message)
            use_compilation_cache()
            _join_processes(args)
            _load_methods(args)
            status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError as e:  # the reader has enough, as in `kvjax generate .. | head`
        error, status = e, 141
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains as it ends
    except (KvjaxError, OSError, UnicodeDecodeError) as e:
        error, status = e, 2
        print(f"kvjax: {e}", file=sys.stderr)
    except KeyboardInterrupt as e:
        error, status = e, 130
        print("\nkvjax: stopped", file=sys.stderr)
    except Exception as e:  # where a computation of several processes fails because one of them is gone
        lost = processes.lost_process(e)
        if lost is None:
            raise
        error, status = lost, 1
        print(f"kvjax: {lost}", file=sys.stderr)
    processes.end_after_error(error, status)
    return status


def _print_warning(message: Warning | str) -> None:
    if processes.is_writer():
        print(f"kvjax: {message}", file=sys.stderr)


def _join_processes(args: argparse.Namespace) -> None:
    """Makes this process one of several, where the command line or the cluster says so, and compares their commands."""
    if not hasattr(args, "coordinator") or args.coordinator == "none":
        return
    if args.coordinator is None and args.process is None and not processes.is_started_by_a_cluster():
        return
    processes.initialize(None if args.coordinator == "auto" else args.coordinator, args.process)
    # Gloo prints to the standard output; what it and other libraries print goes to stderr, and ours where it belongs.
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
    own = ("run", "argv", "coordinator", "process", "json")  # what may differ between the processes
    processes.require_agreement(**{name: x for name, x in vars(args).items() if name not in own})


def _load_methods(args: argparse.Namespace) -> None:
    """Loads the methods of --load, and prints a hint if the command uses none of them."""
    if not getattr(args, "load", None):
        return
    from kvjax.registry.loading import load_methods

    names = [name for source in args.load for name in load_methods(source)]
    option = next((x for x in ("methods", "method") if hasattr(args, x)), None)
    if option and not set(names) & set(re.findall(r"\w+", getattr(args, option) or "")):
        forms = {"methods": f"--methods 'full; {names[0]}'", "method": f"--method {names[0]}"}
        hint = f"kvjax check {names[0]}" if args.run is _check else forms[option]
        print(f"kvjax: {', '.join(names)} is loaded and not used; ask for it, as in {hint}", file=sys.stderr)


def _integer(word: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,18}", word):  # more digits fit in no integer that arrays have
        raise argparse.ArgumentTypeError(f"{word!r:.60} is no whole number of at most 18 digits")
    return int(word)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvjax", description="KV-cache methods in JAX: measured, composed, generated with."
    )
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="methods on one model: quality, bytes and speed in one table")
    demo.add_argument("--out", type=expand_user, default=Path("out/demo"), help="where demo.json and demo.png go")
    demo.add_argument("--model", default="testbed", help=MODEL)
    demo.add_argument("--weights", **WEIGHTS)
    demo.add_argument("--methods", help="method strings separated by ';' (default: four, with --full eleven)")
    demo.add_argument("--full", action="store_true", help="longer contexts and more methods: minutes instead of one")
    demo.set_defaults(run=lambda args: import_module("kvjax.eval.run.eval_command").demo(args))

    _add_generate(commands.add_parser("generate", help="continue a prompt under a method"))
    _add_explore(commands.add_parser("explore", help="one page: what methods hold of each token, step by step"))

    models = commands.add_parser("models", help="the models that go by a name, and where each comes from")
    models.set_defaults(run=_models)

    methods = commands.add_parser("methods", help="every method in a line, or all that is known of some")
    methods.add_argument("names", nargs="*", metavar="NAME", help="methods whose parameters and sources to print")
    methods.add_argument("--json", action="store_true")
    methods.add_argument(
        "--api", action="store_true", help="the names that a method is written with, or the contracts of some (NAME)"
    )
    methods.set_defaults(run=_methods)

    check = commands.add_parser("check", help="try a method against the rules that all methods keep")
    check.add_argument("method", metavar="METHOD", help="for example my_method:budget=16")
    check.add_argument("--model", help=f"toy, {MODEL} (default: toy, or testbed where toy does not suit the method)")
    check.add_argument(
        "--length", type=_integer, default=90, help="tokens of the longest prompt (default: %(default)s)"
    )
    check.add_argument("--seed", type=_integer, default=0)
    check.add_argument("--quick", action="store_true", help="what breaks first: shapes, positions, numbers, codecs")
    check.set_defaults(run=_check)

    _add_calibrate(commands.add_parser("calibrate", help="a table that a method needs, from a model and a text"))
    _add_eval(
        commands.add_parser("eval", help="methods x tasks x lengths: quality, bytes and speed; goes on if killed")
    )
    _add_recommend(
        commands.add_parser("recommend", help="the method that loses least on your own texts, at a budget of bytes")
    )
    _add_plan(
        commands.add_parser("plan", help="what fits a device, how many sequences, how long a context; runs nothing")
    )
    report = commands.add_parser("report", help="one self-contained HTML page from what eval wrote; merges folders")
    report.add_argument(
        "dir",
        type=expand_user,
        nargs="+",
        metavar="DIR",
        help="the --out of kvjax eval, whose parts are put together; or several",
    )
    report.add_argument(
        "--out", type=expand_user, help="where several folders go (default: the folder that holds the parts)"
    )
    report.add_argument("--partial", action="store_true", help="of what is there, though parts are missing")
    report.set_defaults(run=lambda args: import_module("kvjax.eval.run.eval_command").report(args))
    text = "methods of your own: a Python file, or a module's dotted name; repeatable"
    for name, command in commands.choices.items():
        if name != "models":
            command.add_argument("--load", action="append", default=[], metavar="FILE", help=text)
    return parser


def _add_generate(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="testbed", help=MODEL)
    p.add_argument("--method", default="full", help="for example kcache:n=128,device_layers=1")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a prompt; give it again for a batch")
    source.add_argument(
        "--prompt-file", action="append", help="a text file holding one prompt, - for stdin; repeatable"
    )
    p.add_argument("--chat", action="store_true", help="each prompt is a message to which a chat model answers")
    p.add_argument("--system", metavar="TEXT", help="with --chat: the system message before each prompt")
    p.add_argument(
        "--tools", type=expand_user, metavar="FILE", help="with --chat: a JSON file, a list of tools' schemas"
    )
    p.add_argument(
        "--documents", type=expand_user, metavar="FILE", help="with --chat: a JSON file, a list of texts to cite"
    )
    p.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="with --chat: variables of the chat template, for example '{\"enable_thinking\": false}'",
    )
    p.add_argument(
        "--chat-template", metavar="NAME", help="with --chat: one of the model's templates, such as tool_use, or a text"
    )
    p.add_argument("--max-new-tokens", type=_integer, default=64)
    p.add_argument("--stop", action="append", default=[], help="a text before which the answer ends; repeatable")
    p.add_argument(
        "--skip-special-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="leave special tokens out of the texts (default), or show them",
    )
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    p.add_argument("--top-k", type=_integer)
    p.add_argument("--top-p", type=float)
    p.add_argument("--min-p", type=float)
    p.add_argument("--repetition-penalty", type=float, help="above 1, tokens of prompt and answer come less often")
    p.add_argument("--presence-penalty", type=float, help="subtracted from the logits of the answer's tokens")
    p.add_argument("--frequency-penalty", type=float, help="the same, times how often a token came")
    p.add_argument("--seed", type=_integer, default=0)
    p.add_argument("--dtype", **DTYPE)
    p.add_argument("--weights", **WEIGHTS)
    p.add_argument("--json", action="store_true", help="print the whole result as JSON, and nothing before it")
    p.add_argument(
        "--logprobs",
        type=_integer,
        metavar="K",
        help="with --json: the log-probabilities of the tokens and of the K likeliest at each step",
    )
    _add_processes(p)
    p.set_defaults(run=_generate)


def _add_processes(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--mesh",
        metavar="BATCHxHEADS",
        help="devices among which sequences and key/value heads are divided, as 2x4 or batch=2,heads=4",
    )
    p.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="one run of several processes: the address of the first; auto on Kubernetes and TPU pods; tasks of srun "
        "and mpirun find each other by themselves, unless this is none",
    )
    p.add_argument("--process", metavar="I/N", help="with --coordinator: which process this is, from 1/N to N/N")


def _add_explore(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="testbed", help=MODEL)
    p.add_argument("--methods", help="method strings separated by ';' (default: four of different kinds)")
    text = "a UTF-8 text to read and continue (default: some source code that kvjax brings)"
    p.add_argument("--text", type=expand_user, metavar="FILE", help=text)
    p.add_argument("--out", type=expand_user, default=Path("out/explore.html"), help="the page (default: %(default)s)")
    p.add_argument("--steps", type=_integer, default=32, help="most tokens of the answer (default: %(default)s)")
    p.add_argument("--tokens", type=_integer, help="read the text's first tokens only")
    p.add_argument("--chat", action="store_true", help="the text is a message to which a chat model answers")
    p.add_argument("--dtype", **DTYPE)
    p.add_argument("--weights", **WEIGHTS)
    p.set_defaults(run=lambda args: import_module("kvjax.explore.explore_command").run(args))


def _add_calibrate(p: argparse.ArgumentParser) -> None:
    p.add_argument("kind", metavar="KIND", help="which table, as the method's description says, for example bases")
    p.add_argument("model", metavar="MODEL", help=MODEL)
    p.add_argument("out", type=expand_user, metavar="OUT", help="the file to write, for the method's parameter `table`")
    p.add_argument("--text", type=expand_user, help="a UTF-8 text to read, for a kind that brings none itself")
    p.add_argument("--tokens", type=_integer, default=65_536, help="how much of it (default: %(default)s)")
    p.add_argument("--context", type=_integer, default=2048, help="tokens read as one document (default: %(default)s)")
    p.add_argument("--batch", type=_integer, default=1, help="documents at a time (default: %(default)s)")
    p.add_argument("--dtype", **DTYPE)
    p.add_argument("--weights", **WEIGHTS)
    p.set_defaults(run=_calibrate)


def _add_eval(p: argparse.ArgumentParser) -> None:
    p.add_argument("--list", action="store_true", help="list the tasks, and do nothing else")
    p.add_argument("--model", default="testbed", help=MODEL)
    p.add_argument(
        "--methods",
        default="full; kcache:n=64; specache:bits=1; snapkv:budget=256 + kvcrush",
        help="method strings separated by ';' (default: %(default)s)",
    )
    p.add_argument("--tasks", default="niah,ruler,ppl", help="names separated by commas (default: %(default)s)")
    p.add_argument("--lengths", default="512,1024,2048", help="tokens of a context (default: %(default)s)")
    p.add_argument("--out", type=expand_user, default=Path("out/eval"), help="where it writes, and goes on from")
    p.add_argument("--contexts", type=_integer, default=8, help="cases per task and length (default: %(default)s)")
    p.add_argument(
        "--questions",
        type=_integer,
        default=4,
        help="per context, where a task has several (default: %(default)s)",
    )
    p.add_argument("--depths", type=_integer, default=5, help="places of a needle (default: %(default)s)")
    p.add_argument("--batch", type=_integer, default=8, help="contexts at a time (default: %(default)s)")
    p.add_argument("--seed", type=_integer, default=0)
    p.add_argument(
        "--budget-bytes",
        help="fractions of full's bytes, such as 1/2,1/4: each method's size is chosen to take them",
    )
    p.add_argument(
        "--text",
        type=expand_user,
        help="a UTF-8 text, a folder of them, or essays: for perplexity and as haystack (default: source code)",
    )
    p.add_argument("--data", type=expand_user, help="the folder with the files of public benchmarks")
    p.add_argument("--dtype", **DTYPE)
    p.add_argument("--weights", **WEIGHTS)
    p.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="ask questions through the model's chat template (default: where it has one)",
    )
    p.add_argument(
        "--question-aware", action="store_true", help="each question ends the prompt, so that methods see it"
    )
    p.add_argument(
        "--part",
        metavar="I/N",
        help="run the I-th of N parts, into OUT/part-I-of-N; auto: that of the SLURM array or Kubernetes Indexed Job "
        "(default: where there is one); off: all",
    )
    p.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="share the work among the devices of a Ray cluster: local starts one here, auto finds the one that this "
        "machine belongs to, HOST:PORT is the address of its head",
    )
    p.add_argument(
        "--workers",
        type=_integer,
        metavar="N",
        help="with --ray: how many (default: one for each GPU or TPU, and without these for each CPU)",
    )
    p.add_argument("--no-speed", action="store_true", help="leave the measurement of speed out")
    _add_processes(p)
    p.set_defaults(
        run=lambda args: import_module("kvjax.eval.run.eval_command").run(
            args, _mesh(args, args.batch, "take a --batch that does, or another --mesh")
        )
    )


def _add_recommend(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL)
    p.add_argument("--texts", type=expand_user, required=True, help="a UTF-8 text, a folder of such files, or essays")
    p.add_argument(
        "--budget",
        help="of the cache on the device: 25%%, 1/4 or 2GB (default: a quarter, or what --hardware leaves)",
    )
    text = 'your own: JSON lines {"text": FILE, "question": .., "answer": ..}'
    p.add_argument("--questions", type=expand_user, metavar="FILE", help=text)
    p.add_argument("--hardware", help="a device by name, as kvjax plan takes it: what does not fit there is left out")
    p.add_argument(
        "--context", default="2k", help="tokens of the contexts that it is for, as 32k (default: %(default)s)"
    )
    p.add_argument("--length", help="tokens of those that are tried (default: --context, at most 2,048)")
    p.add_argument("--contexts", type=_integer, default=16, help="of each task (default: %(default)s)")
    p.add_argument("--candidates", help="method strings separated by ';', of any size (default: twelve)")
    p.add_argument("--out", type=expand_user, default=Path("out/recommend"), help="where it writes, and goes on from")
    p.add_argument("--batch", type=_integer, default=4, help="contexts at a time (default: %(default)s)")
    p.add_argument("--seed", type=_integer, default=0)
    p.add_argument("--dtype", **DTYPE)
    p.add_argument("--weights", **WEIGHTS)
    p.add_argument("--no-speed", action="store_true", help="leave the measurement of the winner's speed out")
    p.set_defaults(run=lambda args: import_module("kvjax.planning.recommend").run(args))


def _add_plan(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "model",
        metavar="MODEL",
        help="a checkpoint directory, a config.json of Hugging Face, or a name as llama-3.1-8b",
    )
    p.add_argument(
        "--method",
        default="full; int8; kivi:bits=4,residual=32; kivi:bits=2; turned_queries:budget=23%; kvzip:budget=19% + int4; "
        "quest:budget=256,device_layers=0 + offload; specache:bits=2; offload; streaming_llm:recent=1020",
        help="method strings separated by ';' (default: %(default)s)",
    )
    p.add_argument("--context", default="32k", help="tokens of a prompt, several with commas (default: %(default)s)")
    p.add_argument("--batch", type=_integer, default=1, help="sequences, on all devices together")
    p.add_argument(
        "--mesh", metavar="BATCHxHEADS", default="1x1", help="devices that share the work (default: %(default)s)"
    )
    p.add_argument("--hardware", default="h100", help="a device by name (default: %(default)s)")
    p.add_argument("--memory-gb", type=float, help="memory of a device in GiB, in place of the catalogue's")
    p.add_argument("--host-gb", type=float, help="memory of the host for each device in GiB")
    p.add_argument("--bandwidth", type=float, help="of a device's memory in GB/s, in place of the catalogue's")
    p.add_argument("--room", type=_integer, default=0, help="tokens that may follow the prompt (default: %(default)s)")
    p.add_argument("--chunk", type=_integer, help="tokens of the prompt read at a time (default: all at once)")
    p.add_argument(
        "--prompt-memory",
        choices=("device", "host"),
        default="device",
        help="where exact keys and values wait under methods that compress no layer before all have read the prompt",
    )
    p.add_argument("--dtype", **DTYPE | {"help": "of weights and cache (default: %(default)s)"}, default="bfloat16")
    p.add_argument("--weights", **WEIGHTS | {"help": "of kernels, as kvjax.load holds them (default: in --dtype)"})
    p.add_argument("--json", action="store_true", help="print everything as JSON, and nothing before it")
    p.add_argument(
        "--plot", type=expand_user, metavar="FILE", help="bytes of a device against context: .png, .svg or .pdf"
    )
    p.set_defaults(run=lambda args: import_module("kvjax.planning.plan_command").run(args))


def _calibrate(args: argparse.Namespace) -> None:
    from kvjax import calibrate

    calibrate.parse_kind(args.kind)  # an unknown kind is reported before a model is loaded
    for name in ("tokens", "context", "batch"):
        arguments.integer(f"--{name}", getattr(args, name))
    check_output(args.out, args.text, "--text")
    model = kvjax.load(args.model, dtype=args.dtype, weights=args.weights)
    documents, read = None, "documents of its own"
    if args.text is not None:
        documents = calibrate.split_documents(model, read_text_file(args.text, "--text"), args.tokens, args.context)
        read = f"{args.tokens} tokens of {args.text}"
    out = calibrate.calibrate(model, args.kind, args.out, documents, args.batch)
    print(f"{out}: {args.kind} of {args.model}, from {read}")


def _generate(args: argparse.Namespace) -> None:
    from kvjax.generation import user_warnings

    method = kvjax.parse(args.method)
    of_chat = ("system", "tools", "documents", "chat_template_kwargs", "chat_template")
    part_of = dict.fromkeys(of_chat, "chat") | {"logprobs": "json"}
    for name, whole in part_of.items():
        if getattr(args, name) is not None and not getattr(args, whole):
            option = f"--{name.replace('_', '-')}"
            raise KvjaxError(f"{option} is part of what --{whole} asks for; add --{whole}, or leave {option} out")
    template = _template_options(args)
    prompts = args.prompt or [
        read_text_file(expand_user(name), "--prompt-file", sys.stdin.buffer.read() if name == "-" else None)
        for name in args.prompt_file
    ]
    model = kvjax.load(
        args.model,
        dtype=args.dtype,
        weights=args.weights,
        mesh=_mesh(args, len(prompts), "give a number of prompts that does, or another --mesh"),
    )
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompts = model.chat_ids([[*system, {"role": "user", "content": p}] for p in prompts], **template)
    options = {name: getattr(args, name) for name in GENERATE_OPTIONS}
    if args.json:
        out = kvjax.generate(model, prompts, method, **options)
        _print(json.dumps(out.to_json() | {"method": args.method}, indent=2))
        return
    out = _print_texts(model, prompts, method, options)
    user_warnings.warn_of_windows(model, method)
    user_warnings.warn_of_no_saving(method, out.bytes)
    times = f"prefill {out.prefill_seconds:.2f} s, {out.tokens_per_second:,.1f} tokens/s"
    compiling = f"compilation {out.compile_seconds:.1f} s"
    _print(f"{args.method}: {out.bytes}; {times}, {compiling}", file=sys.stderr)


def _mesh(args: argparse.Namespace, num_sequences: int, remedy: str) -> Mesh | None:
    """Makes the mesh of --mesh; raises KvjaxError unless it has all devices and divides the sequences."""
    from kvjax.core.mesh import check_divides, make_mesh, parse_mesh

    if args.mesh is None and processes.process_count() > 1:
        raise KvjaxError(
            f"the {processes.process_count()} processes do not know how to divide the work: add --mesh BATCHxHEADS, "
            "the devices of all processes by which sequences and key/value heads are divided, as in --mesh 1x8"
        )
    if args.mesh is None:
        return None
    mesh = make_mesh(*parse_mesh(args.mesh))
    check_divides("B", num_sequences, mesh, remedy)
    return mesh


def _print(text: str, **options: Any) -> None:
    """Prints in one of several processes, which all have the same results."""
    if processes.is_writer():
        print(text, **options)


def _template_options(args: argparse.Namespace) -> TemplateOptions:
    """Reads the chat template's further inputs, from JSON files and from the command line itself."""
    texts = {
        name: read_text_file(path, f"--{name}") for name in ("tools", "documents") if (path := getattr(args, name))
    }
    if args.chat_template_kwargs is not None:
        texts["chat_template_kwargs"] = args.chat_template_kwargs
    options: Any = {"chat_template": args.chat_template}
    for name, text in texts.items():
        try:
            options[name] = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise KvjaxError(f"--{name.replace('_', '-')} is no JSON: {e}") from e
    return options


def _print_texts(model: Model, prompts: Prompts, method: KVMethod, options: dict[str, Any]) -> Result:
    """Generates, and prints each text with its finish reason: a single text as it grows, several when all are done."""
    from rich.console import Console

    from kvjax.generation.generate import start

    with Console(stderr=True, quiet=not processes.is_writer()).status(
        "reading the prompt; a new length or method is compiled first"
    ):
        run = start(model, prompts, method, **options)
    if len(run.state.out) == 1 and model.tokenizer is not None:
        for delta in run.text_deltas():
            _print(delta, end="", flush=True)
        out = run.result()
        _print(f"\n[{out.finish_reasons[0]}]")
        return out
    out = run.finish()
    for text, reason in zip(out.text or out.tokens, out.finish_reasons, strict=True):
        _print(f"{text}\n[{reason}]")
    return out


def _models(args: argparse.Namespace) -> None:
    from checkpoints_convert import package_models

    width = max(map(len, package_models.MODELS))
    print(f"{'testbed':{width}} in the box: 1.2M parameters, trained on recall and source code, 8,192 tokens")
    for name, model in package_models.MODELS.items():
        lines = (model.description, model.about, package_models.status(name))
        print(f"{name:{width}} " + f"\n{'':{width}} ".join(lines))


def _check(args: argparse.Namespace) -> int:
    """Prints the rules that a method keeps; or the first that it breaks, with status 1."""
    import jax

    from kvjax import testing

    # Programs run for milliseconds here, and compiling them is nearly all of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    kvjax.parse(args.method)  # a misspelled method is reported before a model is loaded
    model = testing.toy_model() if args.model == "toy" else kvjax.load(args.model) if args.model else None
    try:
        print(testing.check_method(args.method, model, length=args.length, seed=args.seed, quick=args.quick))
    except testing.BrokenRule as e:
        print(f"kvjax: {e}", file=sys.stderr)
        return 1
    return 0


def _methods(args: argparse.Namespace) -> None:
    if args.api:
        from kvjax import method_api
        from kvjax.registry import api_listing

        names = api_listing.find_names(method_api, args.names) or api_listing.list_names(method_api)
        if args.json:
            print(json.dumps([name._asdict() for name in names], indent=2))
        elif args.names:
            print("\n".join(api_listing.format_contract(method_api, name) for name in names), end="")
        else:
            print(api_listing.format_names(names))
        return
    from kvjax.registry import listing
    from kvjax.registry.loading import load_all
    from kvjax.registry.strings import find_entry

    entries = [find_entry(name) for name in args.names] or [entry for _, entry in sorted(load_all().items())]
    if args.json:
        print(json.dumps([listing.to_json(entry) for entry in entries], indent=2))
    elif args.names:
        print("\n".join(map(listing.format_details, entries)), end="")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(listing.format_overview(entries, width))
