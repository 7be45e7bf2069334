"""GSM8K and XSUM from small files in their real formats."""

import json

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Spec
from kvjax.eval.tasks.metrics import METRICS
from kvjax.eval.tasks.suite import BENCHMARKS
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab

CONFIG = Config.llama(vocab_size=512, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, mlp_width=8)
MODEL = Model(CONFIG, {}, Tokenizer(vocab.tokenizer()))
QUESTION = "\n\nSummarize the above article in 1 sentence.\n"


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def solved_problem(i):
    return {"question": f"Tom has {i} eggs. How many?", "answer": f"He has <<{i}={i}>>{i}.\n#### {i}"}


@pytest.fixture
def gsm8k(tmp_path):
    write(tmp_path / "gsm8k" / "train.jsonl", [solved_problem(i) for i in range(10, 20)])
    write(tmp_path / "gsm8k" / "test.jsonl", [solved_problem(i) for i in range(3)])
    return tmp_path


def summary(words=12):
    return " ".join(["news"] * words)


def article(name, words=100, **changes):
    return {"document": f"{name}\n" + "word " * (words - 1), "summary": f"{summary()}\n", "id": name} | changes


@pytest.fixture
def xsum(tmp_path):
    furniture = article("played", document="Media playback is unsupported on your device " + "word " * 92)
    wordy = article("wordy", summary=summary(21))
    refused = [article("short", 49), article("long", 151), furniture, wordy, article("brief", summary=summary(10))]
    train = [refused[0], article("one"), *refused[1:], article("two", 150), article("three", 60), article("four")]
    write(tmp_path / "xsum" / "train.jsonl", train)
    write(tmp_path / "xsum" / "test.jsonl", [article("asked", 600), article("next")])
    return tmp_path


def cases(task, data, *lengths, contexts=8):
    return list(BENCHMARKS[task](MODEL, Spec(lengths=lengths or (8192,), contexts=contexts, data=data)))


def texts(case):
    return MODEL.tokenizer.decode(case.context), MODEL.tokenizer.decode(case.asks[0].prompt)


def test_gsm8k_is_the_harness_format(gsm8k):
    case, *rest = cases("gsm8k.strict", gsm8k)
    shots = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in map(solved_problem, range(10, 18)))
    assert texts(case) == (shots, "Question: Tom has 0 eggs. How many?\nAnswer:")
    assert len(rest) == 2 and case.about == {"length": 8192, "shots": 8}
    ask = case.asks[0]
    assert ask.metric == "gsm8k_strict" and ask.stop == ("Question:", "</s>", "<|im_end|>") and ask.new_tokens == 256
    assert METRICS[ask.metric](" So\n#### 0\n", ask) == 1 and METRICS[ask.metric]("0", ask) == 0
    other = cases("gsm8k.flexible", gsm8k)[0]
    assert METRICS[other.asks[0].metric]("I say 0.", other.asks[0]) == 1
    assert np.array_equal(other.context, case.context) and other.key != case.key


def test_gsm8k_takes_as_many_shots_as_fit(gsm8k):
    shot_tokens = len("Question: Tom has 10 eggs. How many?\nAnswer: He has <<10=10>>10.\n#### 10\n\n")
    question_tokens = len("Question: Tom has 0 eggs. How many?\nAnswer:")
    fitting = [cases("gsm8k.strict", gsm8k, question_tokens + shot_tokens * 2 + d, contexts=1)[0] for d in (-1, 0)]
    assert [c.about["shots"] for c in fitting] == [1, 2]
    case = cases("gsm8k.strict", gsm8k, question_tokens, contexts=1)[0]
    assert texts(case) == ("Question: Tom has 0 eggs. How many?", "\nAnswer:")
    with pytest.raises(
        KvjaxError, match=f"length {question_tokens - 1} is too short.*alone takes {question_tokens} tokens"
    ):
        cases("gsm8k.strict", gsm8k, question_tokens - 1)
    (gsm8k / "gsm8k" / "train.jsonl").unlink()
    assert {c.about["shots"] for c in cases("gsm8k.strict", gsm8k)} == {0}


def test_xsum_is_helms_format(xsum):
    case, _ = cases("xsum.rouge_2", xsum)
    shots = [("one", 100), ("two", 150), ("three", 60)]

    def text(name: str, num_words: int) -> str:
        return f"###\nArticle: {name} {' '.join(['word'] * (num_words - 1))}"

    before = "".join(f"{text(*s)}{QUESTION}{summary()}\n\n" for s in shots)
    assert texts(case) == (before + text("asked", 512), QUESTION)
    ask = case.asks[0]
    assert ask.references == (summary(),) and ask.stop == ("###",) and ask.new_tokens == 64
    assert ask.metric == "rouge_xsum_2" and case.about == {"length": 8192, "shots": 3}


def test_xsum_leaves_out_shots_and_then_the_middle(xsum):
    long, short = (
        [c for c in cases("xsum.rouge_l", xsum, length) if "next" in texts(c)[0]][0] for length in (1500, 400)
    )
    assert (long.about["shots"], short.about["shots"]) == (1, 0)
    context, question = texts(short)
    assert len(context) + len(question) == 400 and context.startswith("###\nArticle: next") and question == QUESTION


def test_xsum_takes_h2os_lines(tmp_path):
    prompt = f"###\nArticle: Two met.{QUESTION}They met.\n\n###\nArticle: Three met.{QUESTION}"
    line = {"article": prompt, "summary_gt": "Three people met.", "max_tokens": 64, "stop": ["###"]}
    write(tmp_path / "xsum" / "test.jsonl", [line])
    (case,) = cases("xsum.rouge_1", tmp_path)
    assert texts(case) == (prompt.removesuffix(QUESTION), QUESTION)
    assert case.asks[0].references == ("Three people met.",)


def test_errors_name_the_file(tmp_path, gsm8k):
    with pytest.raises(KvjaxError, match="xsum/test.jsonl is missing; .*EdinburghNLP/xsum .* DATA/xsum/test.jsonl"):
        cases("xsum.rouge_1", tmp_path)
    write(tmp_path / "gsm8k" / "test.jsonl", [solved_problem(1), {"question": "x", "answer": "1"}])
    with pytest.raises(KvjaxError, match="answer 1 of .*test.jsonl has no line '#### number'"):
        cases("gsm8k.strict", tmp_path)
    (tmp_path / "gsm8k" / "test.jsonl").unlink()
    with pytest.raises(KvjaxError, match="openai/grade-school-math at DATA/gsm8k/"):
        cases("gsm8k.strict", tmp_path)
