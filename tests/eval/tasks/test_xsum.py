"""XSUM from small files in their real formats."""

import json

import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Spec
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


def test_errors_name_the_file(tmp_path):
    with pytest.raises(KvjaxError, match="xsum/test.jsonl is missing; .*EdinburghNLP/xsum .* DATA/xsum/test.jsonl"):
        cases("xsum.rouge_1", tmp_path)
    write(tmp_path / "xsum" / "test.jsonl", [article("a"), {"document": "no summary"}])
    with pytest.raises(KvjaxError, match="test.jsonl, line 2 has no field 'summary'"):
        cases("xsum.rouge_1", tmp_path)
