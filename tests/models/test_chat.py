"""Chat: templates rendered as transformers 5.2.0 renders them, templates that mean harm, and answers."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from datetime import datetime

import jax
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

import kvjax
from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.tokenizer import Tokenizer
from kvjax.testing import toy_model

CHATML = (  # SmolLM2-135M-Instruct's
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""  # in the manner of Llama 3.2's
HELPERS = """\
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
{{ message | tojson(indent=1) }}
    {% generation %}
    {{ message.content }}{{ nothing }}
    {% endgeneration %}
    {% if loop.index == 3 %}
        {% break %}
    {% endif %}
{% endfor %}
{{ eos_token }}
"""
LOUD = "{{ messages[0].content }}!"
USER = [{"role": "user", "content": "Hi <b>é"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "Hello "},
    {"role": "user", "content": "Why?"},
]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why é?"}]


@pytest.mark.parametrize(
    ("source", "of_user", "of_talk"),
    [
        (
            CHATML,
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi <b>é<|im_end|>\n<|im_start|>assistant\n",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>é<|im_end|>\n"
            "<|im_start|>assistant\nHello <|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            DATED,
            "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 22 Nov 2026\n\n<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi <b>é<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 22 Nov 2026\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi <b>é<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            HELPERS,
            '{\n "role": "user",\n "content": "Hi <b>é"\n}\n    Hi <b>é\n</s>',
            '{\n "role": "user",\n "content": "Hi <b>é"\n}\n    Hi <b>é\n'
            '{\n "role": "assistant",\n "content": "Hello "\n}\n    Hello \n</s>',
        ),
    ],
    ids=["chatml", "dated", "helpers"],
)
def test_renderings_are_those_of_transformers(source, of_user, of_talk):
    template = ChatTemplate(source, (("bos_token", "<s>"), ("eos_token", "</s>")))
    assert template.render([USER, TALK], datetime(2026, 11, 22)) == [of_user, of_talk]


def test_the_date_is_todays():
    today = datetime.now()
    (text,) = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert text in {f"{today:%Y-%m-%d}", f"{datetime.now():%Y-%m-%d}"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError.*'__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "SecurityError.*'__init__'"),
        ("{{ messages.append(messages[0]) }}", "SecurityError.*'append' of 'list' object is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        (
            "{{ raise_exception('roles must take\x1b turns') }}",
            r"refuses these messages, saying 'roles must take\\x1b t",
        ),
        ("{{ nothing.at_all }}", "UndefinedError.*'nothing' is undefined.*fix chat_template.jinja"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{% for i in range(100001) %}{% endfor %}", "Range too big"),
        ("{{ messages[0].update(role='system') }}", "SecurityError.*'update' of 'dict' object is unsafe"),
        ("{{ raise_exception.__globals__.json }}", "SecurityError.*'__globals__'"),
        ("{{ strftime_now.__self__.year }}", "SecurityError.*'__self__'"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "SecurityError.*'__class__' of 'int' object is unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_or_means_harm(source, says):
    with pytest.raises(KvjaxError, match=says):
        ChatTemplate(source).render([USER])


def test_a_template_fails_on_what_json_does_not_have():
    with pytest.raises(KvjaxError, match="TypeError: 'Object of type set is not JSON serializable'"):
        ChatTemplate("{{ messages | tojson }}").render([[USER[0] | {"tools": {1, 2}}]])


def test_without_jinja2_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(KvjaxError, match=r'need jinja2: pip install "kvjax\[chat\]"'):
        ChatTemplate(CHATML).render([USER])


@pytest.fixture
def directory(tmp_path):
    def write(config=None, jinja=None):
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_bytes(jinja.encode())
        return tmp_path

    return write


def test_where_a_template_comes_from(directory):
    assert ChatTemplate.from_directory(directory()) is None
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None, "add_bos_token": True}
    expected = (("bos_token", "<s>"), ("eos_token", "</s>"))
    assert ChatTemplate.from_directory(directory(tokens)) is None
    read = ChatTemplate.from_directory(directory(tokens | {"chat_template": "a"}))
    assert read == ChatTemplate("a", expected) and hash(read) == hash(ChatTemplate("a", expected))
    several = [{"name": "rag", "template": "b"}, {"name": "default", "template": "c"}]
    assert ChatTemplate.from_directory(directory(tokens | {"chat_template": several})).source == "c"
    # As in transformers: a mapping is the same, and templates that all have a name are chosen by it.
    by_name = {"rag": "b", "default": "c"}
    read = ChatTemplate.from_directory(directory(tokens | {"chat_template": by_name}))
    assert read == ChatTemplate("c", expected, (("rag", "b"),))
    for named in (several[:1], {"rag": "b"}):
        read = ChatTemplate.from_directory(directory(tokens | {"chat_template": named}))
        assert read == ChatTemplate(None, expected, (("rag", "b"),)) and read.find("rag") == "b"
        with pytest.raises(KvjaxError, match="templates are called rag, and none is called 'default'"):
            read.find()
    assert ChatTemplate.from_directory(directory(jinja="d")) == ChatTemplate("d", expected)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "tokenizer_config.json is not valid JSON"),
        ("[" * 100_000, "tokenizer_config.json is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ({"chat_template": []}, "neither a text nor a list of names and templates; write"),
        ({"chat_template": {"rag": 3}}, "neither a text nor a list"),
        ({"chat_template": 3}, "neither a text nor a list"),
        ({"chat_template": [{"name": [], "template": "b"}]}, "neither a text nor a list"),
    ],
)
def test_damaged_files(directory, config, says):
    with pytest.raises(KvjaxError, match=says):
        ChatTemplate.from_directory(directory(config))


def tokenizer() -> tokenizers.Tokenizer:
    """256 byte tokens and three special ones; the post-processor puts <s> in front of plain prompts."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return inner


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    """A model whose every token ends its turn."""
    return dataclasses.replace(
        toy_model(vocab_size=259, eos_ids=tuple(range(259))),
        tokenizer=Tokenizer(tokenizer()),
        chat_template=ChatTemplate(CHATML),
    )


def test_ids_are_the_templates_text_with_no_special_token_added(model):
    ids = model.chat_ids([USER, TALK])
    texts = model.chat_template.render([USER, TALK])
    assert [model.tokenizer.decode(x, skip_special_tokens=False) for x in ids] == texts
    assert [x.count(257) for x in ids] == [3, 5] and [x.count(258) for x in ids] == [2, 4] and 256 not in sum(ids, [])
    assert model.chat_ids(tuple(USER)) == ids[:1]
    assert len(model.tokenizer.encode("a")) == 2  # a plain prompt does get its <s>


def test_chat_generates_behind_the_conversation_and_ends_with_the_turn(model):
    out = kvjax.chat(model, ASKED, "kcache:n=8", max_new_tokens=4)
    assert len(out.tokens[0]) == 1 and out.finish_reasons == ["stop"]
    on = {"max_new_tokens": 4, "eos_ids": ()}
    longer = kvjax.chat(model, ASKED, "kcache:n=8", **on)
    assert longer.tokens[0][:1] == out.tokens[0] and longer.finish_reasons == ["length"]
    same = kvjax.generate(model, model.chat_ids(ASKED), "kcache:n=8", **on)
    assert longer.tokens == same.tokens and longer.text == same.text


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Hello", "messages are a list such as .* got 'Hello'"),
        (USER[0], "messages are a list such as"),
        ([], "of one message or more"),
        ([USER, []], "of one message or more"),
        ([USER, "Hello"], "or a batch of such lists; got"),
        ([USER[0], "Hello"], "message 1 of conversation 0 needs a role and a content.*got 'Hello'"),
        ([USER, [{"role": "user"}]], "message 0 of conversation 1 needs a role and a content"),
        ([{"role": "usr", "content": "a"}], "role 'usr', which the chat template does not name; use one of system,"),
        ([{"role": None, "content": "a"}], "role None"),
        ([{"role": "user", "content": None}], "content None; give a text"),
        (TALK[:3], "ends with the assistant's message"),
    ],
)
def test_messages_that_are_none(model, messages, says):
    with pytest.raises(KvjaxError, match=says):
        kvjax.chat(model, messages)


def test_a_role_that_the_template_names_is_known(model):
    dated = dataclasses.replace(model, chat_template=ChatTemplate(DATED))
    (ids,) = dated.chat_ids([{"role": "ipython", "content": "1"}, *USER])
    assert "ipython" not in model.tokenizer.decode(ids)


def test_what_a_model_needs_for_a_chat(model):
    with pytest.raises(KvjaxError, match="has no chat template: .* put the chat_template.jinja"):
        kvjax.chat(dataclasses.replace(model, chat_template=None), USER)
    with pytest.raises(KvjaxError, match="no tokenizer.json"):
        kvjax.chat(dataclasses.replace(model, tokenizer=None), USER)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cache'"):  # whole conversations are read
        kvjax.chat(model, USER, cache=None)


@pytest.fixture
def save_model(model, tmp_path, monkeypatch):
    """Writes the model with a chat template; returns its directory."""
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)

    def save(template: str, **more: str) -> str:
        texts = {"tokenizer.json": tokenizer().to_str(), "chat_template.jinja": template, **more}
        files = {name: text.encode() for name, text in texts.items()}
        checkpoint.save(tmp_path / "model", model.config, model.params, extra_files=files)
        return str(tmp_path / "model")

    return save


def test_the_command_line_chats(model, save_model, monkeypatch, capsys):
    model_directory = save_model(CHATML)
    assert kvjax.load(model_directory).chat_template == model.chat_template
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Why é?".encode()), encoding="ascii"))
    args = ["generate", "--model", model_directory, "--method", "kcache:n=8", "--max-new-tokens", "4", "--json"]
    assert cli.main([*args, "--prompt-file", "-", "--chat", "--system", "Be brief."]) == 0
    out = kvjax.chat(model, ASKED, "kcache:n=8", max_new_tokens=4)
    assert json.loads(capsys.readouterr().out)["tokens"] == out.tokens


def test_the_command_line_gives_the_template_tools_and_variables(model, tmp_path, save_model, capsys):
    directory = save_model("{{ tools[0].function.name }}{{ documents[0].text }}{{ x }}{{ messages[0].content }}")
    tools, documents = [{"type": "function", "function": {"name": "f"}}], [{"title": "A", "text": "B"}]
    args = ["generate", "--model", directory, "--max-new-tokens", "4", "--json", "--chat", "--prompt", "a"]
    for name, value in (("tools", tools), ("documents", documents)):
        (tmp_path / name).write_text(json.dumps(value))
        args += [f"--{name}", str(tmp_path / name)]
    assert cli.main([*args, "--chat-template-kwargs", '{"x": 3}']) == 0
    expected = kvjax.generate(model, [model.tokenizer.encode("fB3a", special_tokens=False)], "full", max_new_tokens=4)
    assert json.loads(capsys.readouterr().out)["tokens"] == expected.tokens


def test_the_command_line_chooses_a_template(model, tmp_path, save_model, capsys):
    directory = save_model("{{ messages[0].content }}", **{"additional_chat_templates/loud.jinja": LOUD})
    args = ["generate", "--model", directory, "--max-new-tokens", "1", "--json", "--chat", "--prompt", "a"]
    for more, text in ((["loud"], "a!"), (["default"], "a"), ([LOUD], "a!")):
        assert cli.main([*args, "--chat-template", *more]) == 0
        expected = kvjax.generate(model, [model.tokenizer.encode(text, special_tokens=False)], "full", max_new_tokens=1)
        assert json.loads(capsys.readouterr().out)["tokens"] == expected.tokens
    assert cli.main([*args, "--chat-template", "lowd"]) == 2
    assert "are called default, loud, and none is called 'lowd'" in capsys.readouterr().err


def test_files_of_templates_and_tools_may_begin_with_a_byte_order_mark(model, tmp_path, directory):
    assert ChatTemplate.from_directory(directory(jinja="\ufeffd\ufeff")) == ChatTemplate("d\ufeff")
    (tmp_path / "tools").write_bytes(b"\xef\xbb\xbf[]")
    args = cli._parser().parse_args(["generate", "--prompt", "a", "--chat", "--tools", str(tmp_path / "tools")])
    assert cli._template_options(args)["tools"] == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--chat-template", "rag"], "--chat-template is part of what --chat asks for; add --chat"),
        (["--system", "Be brief."], "add --chat"),
        (["--tools", "tools.json"], "--tools is part of what --chat asks for; add --chat"),
        (["--chat-template-kwargs", "{}"], "--chat-template-kwargs is part of what --chat asks for; add --chat"),
        (["--chat", "--chat-template-kwargs", "{"], "--chat-template-kwargs is no JSON"),
        (["--chat", "--documents", "no-such-file"], "no-such-file"),
        (["--chat"], "this model has no chat template"),
    ],
)
def test_a_chat_that_cannot_be(args, says, capsys):
    assert cli.main(["generate", "--prompt", "a", *args]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("kvjax: ") and says in output.err
