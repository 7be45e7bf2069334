"""LongBench from small files in the official format."""

import gzip
import hashlib
import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, processors

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import data_files
from kvjax.eval.tasks.case import Spec
from kvjax.eval.tasks.encoding import encode_prompt
from kvjax.eval.tasks.longbench import TASKS
from kvjax.eval.tasks.metrics import METRICS
from kvjax.eval.tasks.suite import BENCHMARKS
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab

CONFIG = Config.llama(vocab_size=512, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, mlp_width=8)
MODEL = Model(CONFIG, {}, Tokenizer(vocab.tokenizer()))  # a loader reads nothing but the tokenizer


def words() -> Model:
    """A model whose tokens are words, with <s> before and </s> after every text."""
    inner = Inner(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return Model(CONFIG, {}, Tokenizer(inner))


def row(i=0, **changes):
    official = {
        "input": f"Who is {i}?",
        "context": "Ann met Bob. " * 20 + f"End {i}.",
        "answers": ["Ann", "Bob"],
        "length": 60,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": f"a{i}",
    }
    return official | changes


@pytest.fixture
def data(tmp_path):
    def write(task="qasper", rows=(), chat=None):
        (tmp_path / "longbench").mkdir(exist_ok=True)
        text = "".join(json.dumps(r) + "\n" for r in rows or [row(i) for i in range(3)])
        (tmp_path / "longbench" / f"{task}.jsonl").write_text(text, encoding="utf-8")
        if chat is not None:
            (tmp_path / "longbench" / "chat.txt").write_text(chat)
        return tmp_path

    return write


def cases(data, task="qasper", model=MODEL, **spec):
    return list(BENCHMARKS[f"longbench.{task}"](model, Spec(**{"lengths": (4096,), "data": data} | spec)))


def text(*ids):
    return MODEL.tokenizer.decode(np.concatenate(ids))


def test_the_tables_are_the_official_ones():
    assert len(TASKS) == 16 and all(t.metric in METRICS for t in TASKS.values())
    digest = hashlib.sha256(json.dumps({k: [t.prompt, t.new_tokens] for k, t in TASKS.items()}).encode()).hexdigest()
    assert digest == "618f5f31b12e0e303944670f8e409fc450df8ee0138505d4b07b860b918fa878"
    assert {k for k, t in TASKS.items() if not t.chat} == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert {k for k, t in TASKS.items() if t.metric.endswith("_line")} == {"trec", "triviaqa", "samsum"}


@pytest.mark.parametrize("task", TASKS)
def test_context_and_question_are_the_official_prompt(task, data):
    example = row(context="x = {y}\n", input="y {context}", all_classes=["Date", "City"])
    (case,) = cases(data(task, [example]), task)
    ask = case.asks[0]
    assert text(case.context, ask.prompt) == TASKS[task].prompt.format(**example)
    assert text(case.context).endswith("x = {y}\n")
    assert ask.references == ("Ann", "Bob") and ask.new_tokens == TASKS[task].new_tokens and ask.stop == ()
    assert ask.options == (("Date", "City") if task == "trec" else ask.options)
    assert case.task == f"longbench.{task}" and case.about["length"] == 4096 and case.about["words"] == 60


def test_the_first_examples_at_each_length_with_their_own_keys(data):
    both_lengths = cases(data(), lengths=(256, 4096), contexts=2)
    assert [c.about["length"] for c in both_lengths] == [256, 256, 4096, 4096]
    assert len({c.key for c in both_lengths}) == 4
    assert len(cases(data(), contexts=50)) == 3


def test_long_prompts_lose_their_middle(data):
    whole = TASKS["qasper"].prompt.format(**row())
    (case, *_) = cases(data(), lengths=(257,))
    shortened = text(case.context, case.asks[0].prompt)
    assert shortened == whole[:128] + whole[-128:]  # half of 257 at each end, as the official script has it
    (case, *_) = cases(data(), lengths=(len(whole),))
    assert text(case.context, case.asks[0].prompt) == whole
    short = row(context="Ann. " * 100, input="Who?")
    (case,) = cases(data("trec", [short | {"all_classes": ["Date"]}]), "trec", lengths=(64,))
    assert text(case.asks[0].prompt) == "\nWho?" and len(case.context) == 59


def test_special_tokens_come_first_and_never_last(data):
    model = words()
    (case, *_) = cases(data(), model=model)
    ids = np.concatenate([case.context, case.asks[0].prompt])
    assert ids[0] == 0 and 1 not in ids
    n = len(TASKS["qasper"].prompt.format(**row()).split())
    assert len(ids) == n + 1
    after = TASKS["qasper"].prompt.split("{context}")[1].format(input="Who is 0?")
    assert len(case.asks[0].prompt) == len(after.split())
    (case, *_) = cases(data(), model=model, lengths=(100,))
    assert case.context[0] == 0 and len(case.context) + len(case.asks[0].prompt) == 100
    assert len(case.asks[0].prompt) == 50  # what follows the context is longer than half: the question is cut too


def test_a_chat_template_goes_round_some_prompts_and_does_not_count(data):
    whole = TASKS["qasper"].prompt.format(**row())
    where = data(chat="[INST]{prompt}[/INST]\n")
    (case, *_) = cases(where)
    assert text(case.context, case.asks[0].prompt) == f"[INST]{whole}[/INST]" and case.key.endswith("/chat")
    (case, *_) = cases(data(chat="\ufeff[INST]{prompt}[/INST]\n"))
    assert text(case.context, case.asks[0].prompt) == f"[INST]{whole}[/INST]"
    (case, *_) = cases(where, lengths=(256,))
    assert text(case.context, case.asks[0].prompt) == f"[INST]{whole[:128]}{whole[-128:]}[/INST]"
    (case, *_) = cases(data("lcc", chat="[INST]{prompt}[/INST]"), "lcc")
    assert text(case.context).startswith("Please complete")
    with pytest.raises(KvjaxError, match=r"chat.txt must hold \{prompt\} once"):
        cases(data(chat="[INST]"))


def test_a_token_across_the_border_belongs_to_the_context():
    inner = Inner(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoded = encode_prompt(Model(CONFIG, {}, Tokenizer(inner)), "one two.Three four")
    assert [len(x) for x in encoded.split(len("one two."))] == [2, 1]
    assert [len(x) for x in encoded.split(0)] == [1, 2]  # neither is empty
    assert [len(x) for x in encoded.split(99)] == [2, 1]


def test_errors_name_the_file_and_the_line(data, tmp_path):
    with pytest.raises(KvjaxError, match="--data DATA.*qasper.jsonl of the Hugging Face data set THUDM/LongBench"):
        cases(None)
    with pytest.raises(KvjaxError, match="musique.jsonl is missing; .*put the file musique.jsonl of .* at DATA"):
        cases(data(), "musique")
    with pytest.raises(KvjaxError, match="line 2 has no field 'answers', only input, context"):
        cases(data(rows=[row(), {"input": "", "context": ""}]))
    with pytest.raises(KvjaxError, match="line 1: field 'answers' must be list, got 'Ann'"):
        cases(data(rows=[row(answers="Ann")]))
    with pytest.raises(KvjaxError, match="line 1: field 'answers' must be a list of at least one text"):
        cases(data(rows=[row(answers=[])]))
    with pytest.raises(KvjaxError, match="'all_classes' must be list, got None"):
        cases(data("trec"), "trec")
    path = data() / "longbench" / "qasper.jsonl"
    path.write_text(json.dumps(row()) + "\n\n{'input': 3}\n")
    with pytest.raises(KvjaxError, match="qasper.jsonl, line 3 is not JSON"):
        cases(tmp_path)
    path.write_text("[1]\n")
    with pytest.raises(KvjaxError, match="line 1 is list, not an object with the fields input, context, answers"):
        cases(tmp_path)
    with pytest.raises(KvjaxError, match="length 8 is too short"):
        cases(data(), lengths=(8,))


def test_files_that_were_damaged_are_named(tmp_path):
    def read(name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        list(data_files.read_json_lines(tmp_path / name, {"text": str}, "it there"))

    for line in (b'{"text": "\xff"}', b"[" * 100_000):
        with pytest.raises(KvjaxError, match="rows.jsonl, line 2 is not JSON .*copy the file again"):
            read("rows.jsonl", b'{"text": "a"}\n' + line + b"\n")
    packed = gzip.compress(json.dumps({"text": "a" * 1000}).encode())
    for damaged in (packed[:-9], b"no gzip"):
        with pytest.raises(KvjaxError, match="rows.jsonl.gz is damaged .*copy it again"):
            read("rows.jsonl.gz", damaged)


def test_every_task_has_a_line_of_its_own_in_lists():
    assert "qasper" in BENCHMARKS["longbench.qasper"].__doc__ and "ROUGE-2" in BENCHMARKS["xsum.rouge_2"].__doc__
    assert len({m.__doc__ for m in BENCHMARKS.values()}) == len(BENCHMARKS) == 21
