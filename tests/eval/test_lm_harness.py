"""lm-evaluation-harness on a toy model: likelihoods against plain logits, texts against `generate`, and a whole run."""

import dataclasses
import functools
import json
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.tokenizer import Tokenizer
from kvjax.registry.strings import parse
from kvjax.testbed import vocab
from kvjax.testing import toy_model
from tests.helpers.scripted_model import scripted_model
from tests.helpers.tokenizer_files import sentencepiece

with warnings.catch_warnings():  # foreign packages
    warnings.simplefilter("ignore")
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    from kvjax.eval.lm_harness import KvjaxLM, main

pytestmark = pytest.mark.filterwarnings("ignore:::lm_eval", "ignore:::datasets", "ignore:::multiprocess")

METHODS = ("full", "snapkv:budget=24/window=8")
CONTEXT = "The pier lights were out, nobody knew why. "  # so short that all programs here are of 64 tokens


@functools.cache
def make_toy() -> kvjax.Model:
    return dataclasses.replace(
        toy_model(vocab_size=512, layers=1, eos_ids=(256,)), tokenizer=Tokenizer(vocab.tokenizer()), name="toy"
    )


def make_requests(kind, *args):
    return [Instance(kind, {}, a, i) for i, a in enumerate(args)]


def ids(text):
    return list(text.encode())


def logits(tokens):
    padded = [*tokens, *[0] * (64 - len(tokens))]  # causal: later tokens change nothing
    return np.asarray(kvjax.logits(make_toy(), [padded])[0], np.float64)[: len(tokens)]


def exact_likelihood(context, continuation):
    """The log-probability from one uncached forward pass, and whether each token is the likeliest."""
    tokens = context + continuation
    out = logits(tokens)[len(context) - 1 : -1]
    logp = out - np.log(np.exp(out - out.max(-1, keepdims=True)).sum(-1, keepdims=True)) - out.max(-1, keepdims=True)
    places = np.arange(len(continuation))
    return logp[places, continuation].sum(), bool((out.argmax(-1) == continuation).all())


def greedy_continuation(context, n):
    tokens = list(context)
    for _ in range(n):
        tokens.append(int(logits(tokens)[-1].argmax()))
    return tokens[len(context) :]


def test_a_model_by_name_holds_its_weights_in_codes():
    assert KvjaxLM("testbed", weights="int8").model.weights == "int8"


def test_loglikelihood_under_full_is_that_of_the_logits():
    lm = KvjaxLM(make_toy(), "full", batch_size=2)
    pairs = [(CONTEXT, "Fog."), (CONTEXT, "Nobody asked"), ("a b ", "c"), ("", "lights")]
    answers = lm.loglikelihood(make_requests("loglikelihood", *pairs), disable_tqdm=True)
    # a space at the end of a prompt goes with the continuation
    expected = [exact_likelihood(ids(c.strip()) or [256], ids(tail(c, t)))[0] for c, t in pairs]
    assert [g for g, _ in answers] == pytest.approx(expected, rel=1e-5) and not any(g for _, g in answers)
    greedy_tokens = greedy_continuation(ids(CONTEXT), 3)
    other_tokens = [*greedy_tokens[:2], (greedy_tokens[2] + 1) % 512]
    encoded = [(("", ""), ids(CONTEXT), tokens) for tokens in (greedy_tokens, other_tokens)]
    answers = lm._loglikelihood_tokens(encoded, disable_tqdm=True)
    assert [g for _, g in answers] == [True, False]


def test_a_continuation_without_tokens_is_no_certain_one():
    lm = KvjaxLM(make_toy(), "full")
    for context in (CONTEXT, ""):
        with pytest.raises(KvjaxError, match="is empty, and there is nothing to score"):
            lm.loglikelihood(make_requests("loglikelihood", (context, "")), disable_tqdm=True)
    with pytest.raises(KvjaxError, match="a continuation has no tokens"):
        lm._loglikelihood_tokens([(("", ""), ids(CONTEXT), [])], disable_tqdm=True)


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
def test_a_continuation_that_melts_into_the_context_is_encoded_by_itself(template):
    tokenizer = sentencepiece(template=template)
    config = {"vocab_size": tokenizer.vocab_size, "layers": 1, "bos_id": 1}
    model = dataclasses.replace(toy_model(**config), tokenizer=tokenizer, name="toy")
    lm = KvjaxLM(model, "full", batch_size=2)
    context = "the capital of Fran"
    pairs = [(context, "ce"), (context, "ce is"), (context, "k"), ("the capital of ", "France"), (" ", "is")]
    encoded = [lm._encode_pair(*pair) for pair in pairs]
    for (before, rest), pair in zip(encoded, pairs, strict=True):
        assert tokenizer.decode(before + rest).strip() == "".join(pair).strip() and before and rest
    assert [len(rest) for _, rest in encoded] == [2, 3, 1, 1, 2]
    # Where no token spans both texts, the tokens are those of the whole text.
    assert encoded[3][0] + encoded[3][1] == tokenizer.encode_prompt("the capital of France")
    answers = lm.loglikelihood(make_requests("loglikelihood", *pairs), disable_tqdm=True)
    scores = kvjax.score(model, *zip(*encoded, strict=True), "full")
    assert [logp for logp, _ in answers] == pytest.approx([float(x.sum()) for x in scores], rel=1e-4)
    assert all(logp < -0.1 for logp, _ in answers)


def test_loglikelihood_under_a_method_is_that_of_score():
    lm = KvjaxLM(make_toy(), METHODS[1], batch_size=2)
    pairs = [(CONTEXT, "Fog."), (CONTEXT, "Nobody asked"), (CONTEXT[:20], "Fog.")]
    values = [g for g, _ in lm.loglikelihood(make_requests("loglikelihood", *pairs), disable_tqdm=True)]
    prompts, rests = [ids(c.strip()) for c, _ in pairs], [ids(tail(*p)) for p in pairs]
    expected = [x.sum() for x in kvjax.score(make_toy(), prompts, rests, parse("snapkv:budget=24,window=8"))]
    assert values == pytest.approx(expected, rel=1e-5)
    exact = [exact_likelihood(*x)[0] for x in zip(prompts, rests, strict=True)]
    assert abs(values[0] - exact[0]) > 1e-3  # something was evicted
    assert values[2] == pytest.approx(exact[2], rel=1e-5)  # 20 tokens are within the budget


def tail(context, continuation):
    return context[len(context.rstrip()) :] + continuation


def test_prompts_and_texts_beyond_max_length():
    lm = KvjaxLM(make_toy(), "full", batch_size=2, max_length=17)
    ((log_likelihood, _),) = lm.loglikelihood(
        make_requests("loglikelihood", (CONTEXT.strip(), "Fog.")), disable_tqdm=True
    )
    assert log_likelihood == pytest.approx(exact_likelihood(ids(CONTEXT.strip())[-14:], ids("Fog."))[0], rel=1e-5)
    text = CONTEXT[:40]
    values = lm.loglikelihood_rolling(make_requests("loglikelihood_rolling", (text,), ("",)), disable_tqdm=True)
    t = ids(text)  # windows of 17 tokens; the last one keeps its full context
    windows = [([256], t[:17]), (t[16:17], t[17:34]), (t[22:34], t[34:])]
    expected = sum(exact_likelihood(*window)[0] for window in windows)
    assert values == [pytest.approx(expected, rel=1e-5), 0]
    lm = KvjaxLM(make_toy(), max_length=17, truncation="middle")
    assert lm._truncate(list(range(40)), 10) == [0, 1, 2, 36, 37, 38, 39]
    with pytest.raises(KvjaxError, match="truncation must be 'left' or 'middle', got 'right'"):
        KvjaxLM(make_toy(), truncation="right")
    with pytest.raises(KvjaxError, match="leave no room in max_length=17"):
        lm.loglikelihood(make_requests("loglikelihood", ("a", "b" * 30)), disable_tqdm=True)


@pytest.mark.parametrize("method", METHODS)
def test_generate_until_stops_where_it_must(method):
    lm = KvjaxLM(make_toy(), method, batch_size=2, max_gen_toks=10)
    full = kvjax.generate(
        make_toy(), [ids(CONTEXT), ids("a b")], parse(method.replace("/", ",")), max_new_tokens=10, eos_ids=(256,)
    )
    texts = [make_toy().tokenizer.decode(t) for t in full.tokens]
    stop = texts[0][4:6]
    args = [(CONTEXT, {"until": [stop, ""], "do_sample": False, "temperature": 0.7}), ("a b", {"max_tokens": 10})]
    generated = lm.generate_until(make_requests("generate_until", *args), disable_tqdm=True)
    assert generated == [texts[0][: texts[0].index(stop)], texts[1]]
    (generated,) = lm.generate_until(
        make_requests("generate_until", (CONTEXT, {"until": "no such"})), disable_tqdm=True
    )
    assert generated == texts[0]


def test_until_and_texts_may_have_special_tokens():
    lm = KvjaxLM(scripted_model("ab <|call|>c<|im_end|>defg"), max_gen_toks=9)
    for options, text in (
        ({"until": ["</s>", "<|im_end|>"]}, "ab c"),
        ({"until": "<|call|>c"}, "ab "),
        ({"until": ["f"], "skip_special_tokens": True}, "ab cde"),
        ({"until": ["f"], "skip_special_tokens": False}, "ab <|call|>c<|im_end|>de"),
        ({"until": ["<|im_end|>d"], "skip_special_tokens": False}, "ab <|call|>c"),
    ):
        (generated,) = lm.generate_until(make_requests("generate_until", ("x!", options)), disable_tqdm=True)
        assert generated == text
    with pytest.raises(KvjaxError, match="stop takes texts of at least one character, got 5"):
        lm.generate_until(make_requests("generate_until", ("x!", {"until": 5})), disable_tqdm=True)
    assert lm.tok_encode("<s>x!") == lm.tok_encode("x!") == lm.tok_encode("<s>x!", add_special_tokens=False)


def test_sampling_and_ends():
    first = int(logits(ids(CONTEXT))[-1].argmax())
    ended = dataclasses.replace(make_toy(), config=dataclasses.replace(make_toy().config, eos_ids=(first,)))
    lm = KvjaxLM(ended, batch_size=2, max_gen_toks=10)
    assert lm.generate_until(make_requests("generate_until", (CONTEXT, {})), disable_tqdm=True) == [""]
    lm = KvjaxLM(make_toy(), batch_size=2, max_gen_toks=10)
    warm = (CONTEXT, {"do_sample": True, "top_k": 50})
    both = [lm.generate_until(make_requests("generate_until", warm, warm), disable_tqdm=True) for _ in range(2)]
    assert both[0] == both[1] and both[0][0] != both[0][1]  # drawn apart, and the same in every run
    # The copy that fills a batch draws for itself, and its text is no answer.
    single = [KvjaxLM(make_toy(), batch_size=n, max_gen_toks=10) for n in (1, 2)]
    alone, filled = (x.generate_until(make_requests("generate_until", warm), disable_tqdm=True) for x in single)
    assert alone == filled
    assert lm.generate_until(make_requests("generate_until", ("", {})), disable_tqdm=True) != [""]
    assert lm._parse_options({"max_new_tokens": 3, "until": "x", "top_p": 0.5}) == (["x"], 3, {})
    assert lm._parse_options({"temperature": 0.5, "top_p": 0.5}) == ([], 10, {"temperature": 0.5, "top_p": 0.5})
    with pytest.raises(KvjaxError, match="'num_beams' is not supported; supported: until"):
        lm.generate_until(make_requests("generate_until", (CONTEXT, {"num_beams": 4})), disable_tqdm=True)


NEUTRAL = {"num_beams": 1, "do_sample": False, "temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": 0.0}
NEUTRAL |= {"repetition_penalty": 1.0, "presence_penalty": 0, "length_penalty": 1, "early_stopping": False}
NEUTRAL |= {"no_repeat_ngram_size": 0, "num_return_sequences": 1, "use_cache": True, "max_new_tokens": None}
NEUTRAL |= {"suppress_tokens": None, "skip_special_tokens": True}


def test_options_that_ask_for_nothing_pass():
    lm = KvjaxLM(make_toy(), max_gen_toks=10)
    args = [(CONTEXT, {}), (CONTEXT, NEUTRAL)]
    plain, neutral = lm.generate_until(make_requests("generate_until", *args), disable_tqdm=True)
    assert plain == neutral
    assert lm._parse_options({"do_sample": True, "top_p": 1, "top_k": 0, "min_p": 0})[2] == {"temperature": 1.0}
    assert lm._parse_options({"do_sample": True, "top_k": -1, "top_p": 0.9})[2] == {"temperature": 1.0, "top_p": 0.9}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2}, "'num_beams' is not supported; supported: until, .*; num_beams=1 asks for nothing"),
        ({"length_penalty": 0.5}, "'length_penalty' is not supported; .*; length_penalty=1 asks for nothing"),
        ({"use_cache": False}, "'use_cache' is not supported"),
        ({"no_repeat_ngram_size": 3}, "'no_repeat_ngram_size' is not supported"),
        ({"ignore_eos": True}, "'ignore_eos' is not supported"),
        ({"logit_bias": {1: 2}}, "'logit_bias' is not supported"),
        ({"presence_penalty": 9}, "presence_penalty must be a number from -2 to 2"),
    ],
)
def test_options_that_ask_for_something_else_are_named(options, says):
    with pytest.raises(KvjaxError, match=says):
        KvjaxLM(make_toy()).generate_until(make_requests("generate_until", (CONTEXT, options)), disable_tqdm=True)


def test_penalties_apply_to_greedy_texts_too():
    options = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    lm = KvjaxLM(make_toy(), max_gen_toks=6)
    args = (CONTEXT, {"do_sample": False, **options})
    (text,) = lm.generate_until(make_requests("generate_until", args), disable_tqdm=True)
    assert text == kvjax.generate(make_toy(), [ids(CONTEXT)], "full", max_new_tokens=6, **options).text[0]
    assert text != kvjax.generate(make_toy(), [ids(CONTEXT)], "full", max_new_tokens=6).text[0]


def test_chat_templates_as_lm_eval_asks_for_them():
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
    lm = KvjaxLM(dataclasses.replace(make_toy(), chat_template=template))
    messages = [{"role": "user", "content": "2 + 2?"}]
    assert lm.apply_chat_template(messages) == "[user]2 + 2?[assistant]"
    begun = [*messages, {"role": "assistant", "content": "It is"}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False) == "[user]2 + 2?[assistant]It is"
    assert lm.chat_template(True) == template.source
    with pytest.raises(KvjaxError, match="reads no variable 'enable_thinking'"):
        KvjaxLM(lm.model, enable_thinking=False).apply_chat_template(messages)
    thinking = ChatTemplate(template.source + "{{ '<think>' if enable_thinking else '</think>' }}")
    lm = KvjaxLM(dataclasses.replace(make_toy(), chat_template=thinking), chat_template_args={"enable_thinking": True})
    assert lm.apply_chat_template(messages) == "[user]2 + 2?[assistant]<think>"
    with pytest.raises(KvjaxError, match="none is called 'tool_use'"):
        lm.chat_template("tool_use")
    with pytest.raises(KvjaxError, match="no chat template"):
        KvjaxLM(make_toy()).apply_chat_template(messages)


def test_arguments():
    make = lm_eval.api.registry.get_model("kvjax").create_from_arg_string
    assert make("model=testbed,method=kcache:n=64/device_layers=1 + kivi:bits=2").method == parse(
        "kcache:n=64,device_layers=1 + kivi:bits=2"
    )
    with pytest.raises(KvjaxError, match="'device_layers' of the model kvjax; .*method=kcache:n=64/device_layers=1"):
        make("model=testbed,method=kcache:n=64,device_layers=1")
    with pytest.raises(KvjaxError, match="tables/bases.npz"):  # JSON keeps commas, so that "/" belongs to the path
        KvjaxLM(make_toy(), "cskv:window=8,table=tables/bases.npz")
    with pytest.raises(KvjaxError, match="batch_size must be an integer from 1 .*got 'auto'; for example 8"):
        KvjaxLM(make_toy(), batch_size="auto")
    nameless = dataclasses.replace(make_toy(), config=dataclasses.replace(make_toy().config, eos_ids=()))
    assert KvjaxLM(nameless, prefix_token_id=7).prefix_token_id == 7
    with pytest.raises(KvjaxError, match="pass prefix_token_id=ID"):
        _ = KvjaxLM(nameless).prefix_token_id


DOCS = [
    {"text": CONTEXT, "choices": ["Fog.", "It was a storm."], "label": 1},
    {"text": "Two ships", "choices": [" left", " came in"], "label": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
"""
CHOICE = "doc_to_choice: choices\ndoc_to_target: label\nmetric_list: [{metric: acc}]\n"
UNTIL = """
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 10, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    data = tmp_path / "docs.json"
    data.write_text("".join(json.dumps(d) + "\n" for d in DOCS))
    for name, kind, more in (("toy_choice", "multiple_choice", CHOICE), ("toy_until", "generate_until", UNTIL)):
        yaml = TASK.format(name=name, kind=kind, data=data, cache=tmp_path / "cache") + more
        (tmp_path / f"{name}.yaml").write_text(yaml)
    return tmp_path


def run(tasks, method):
    return lm_eval.simple_evaluate(
        KvjaxLM(make_toy(), method, batch_size=2),
        tasks=["toy_choice", "toy_until"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )


def test_a_whole_run_of_local_tasks(tasks):
    out = run(tasks, "full")
    samples = sorted(out["samples"]["toy_choice"], key=lambda s: s["doc_id"])
    right = []
    for sample, doc in zip(samples, DOCS, strict=True):
        expected = [exact_likelihood(ids(doc["text"].rstrip()), ids(tail(doc["text"], c)))[0] for c in doc["choices"]]
        assert [float(r[0][0]) for r in sample["resps"]] == pytest.approx(expected, rel=1e-4)
        right.append(int(np.argmax(expected)) == doc["label"])
    assert out["results"]["toy_choice"]["acc,none"] == np.mean(right)
    texts = {s["doc_id"]: s["resps"][0][0] for s in out["samples"]["toy_until"]}
    for i, doc in enumerate(DOCS):
        assert texts[i] == make_toy().tokenizer.decode(greedy_continuation(ids(doc["text"]), 10)).split("\n")[0]


def test_a_benchmark_of_lm_eval_reads_local_files_as_the_documentation_says(tasks):
    problems = [{"question": f"Tom has {i} eggs. How many?", "answer": f"He has {i}.\n#### {i}"} for i in range(3)]
    (tasks / "gsm8k.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    published = Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml"
    files = {"train": str(tasks / "gsm8k.jsonl"), "test": str(tasks / "gsm8k.jsonl")}
    (tasks / "gsm8k_local.yaml").write_text(
        f"include: {published}\ntask: gsm8k_local\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {json.dumps({'data_files': files, 'cache_dir': str(tasks / 'cache')})}\n"
    )
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    out = lm_eval.simple_evaluate(
        KvjaxLM(make_toy(), "full", max_gen_toks=2), tasks=["gsm8k_local"], task_manager=manager, num_fewshot=1, limit=1
    )
    (sample,) = [s for s in out["samples"]["gsm8k_local"] if s["filter"] == "strict-match"]
    prompt = sample["arguments"][0][0]
    assert prompt.startswith("Question: Tom has") and prompt.endswith("Question: Tom has 0 eggs. How many?\nAnswer:")


def test_the_command_line_knows_the_model(tasks, monkeypatch, capsys):
    options = {}
    monkeypatch.setattr("kvjax.core.compile_cache.use_compilation_cache", lambda: None)
    own_tasks = functools.partial(TaskManager, include_defaults=False)  # reading all that lm_eval ships takes seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own_tasks)
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **kwargs: options.update(kwargs))
    args = ["--model", "kvjax", "--model_args", "model=testbed,method=kcache:n=64", "--tasks", "toy_choice"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *args, "--include_path", str(tasks)])
    main()
    assert options["model"] == "kvjax" and options["tasks"] == ["toy_choice"]
    assert lm_eval.api.registry.get_model("kvjax") is KvjaxLM
    more = {k: options[k] for k in ("batch_size", "max_batch_size", "device")}
    assert KvjaxLM.create_from_arg_obj(dict(options["model_args"]), more).method == parse("kcache:n=64")
    assert jax.config.jax_numpy_dtype_promotion == "strict"
