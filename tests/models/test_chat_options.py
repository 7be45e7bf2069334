"""What a chat template gets beside plain messages, as transformers 5.24 renders it: tools, variables, parts, calls."""

from __future__ import annotations

import dataclasses
import json

import pytest

import kvjax
from kvjax.errors import KvjaxError, UnknownKeyword
from kvjax.models.chat_messages import render_conversations
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.tokenizer import Tokenizer
from kvjax.testing import toy_model
from tests.models.test_chat import CHATML, DATED, tokenizer

THINKING = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content is string %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""  # in the manner of Qwen3's
PARTS = """\
{% macro visible(content) %}
{% for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{%- endmacro %}
{% for message in messages %}[{{ message.role }}]{{ visible(message.content) }}{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}
"""  # lists alone, as Idefics' and SmolVLM's
BOTH = """\
{%- if messages[0].role == 'system' %}[system]{{ messages[0].content | trim }}
{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.content is string %}{{ message.content | trim }}
{%- else %}{% for part in message.content %}{{ part.text }}|{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}
"""  # texts and lists, the system message as text alone, as Llama 3.2 Vision's
DEFAULTS = """\
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if thinking is not defined %}{%- set thinking = true %}{%- endif %}
{{- date_string }}
{%- if tools is not none %}{% if tools_in_user_message %} user{% endif %} tools: {{ tools[0].function.name }}{% endif %}
{%- if documents %} documents: {% for d in documents %}{{ d.title }}={{ d.text }};{% endfor %}{% endif %}
{%- if not thinking %} no thoughts{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}
"""  # variables with defaults of their own, as Llama 3.1's and SmolLM3's

FUNCTION = {"name": "weather", "description": "The weather é.", "parameters": {"type": "object"}}
WEATHER = {"type": "function", "function": FUNCTION}
SHOWN = "<|im_start|>system\n# Tools\n<tools>\n" + json.dumps(WEATHER, ensure_ascii=False) + "\n</tools><|im_end|>\n"
USER = [{"role": "user", "content": "Hi"}]
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLED = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]
AFTER_CALL = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    "<|im_end|>\n<|im_start|>user\n<tool_response>sunny</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
PAIR = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
TWO = [{"role": "user", "content": PAIR}]
BEGUN = [*USER, {"role": "assistant", "content": "It is "}]
REASONED = [*USER, {"role": "assistant", "content": "A", "reasoning": "B"}, *USER]
OTHER_DEFAULTS = {"date_string": "today", "tools_in_user_message": False, "thinking": False}


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    inner = toy_model(layers=1, vocab_size=259)
    return dataclasses.replace(inner, tokenizer=Tokenizer(tokenizer()), chat_template=ChatTemplate(THINKING))


def render(source, messages, **options):
    (text,) = render_conversations(ChatTemplate(source), messages, options)
    return text


@pytest.mark.parametrize(
    ("source", "messages", "options", "text"),
    [
        (THINKING, USER, {}, ASKED),
        (THINKING, USER, {"chat_template_kwargs": {"enable_thinking": False}}, ASKED + "<think>\n\n</think>\n\n"),
        (THINKING, USER, {"chat_template_kwargs": {"enable_thinking": True}}, ASKED),
        (THINKING, USER, {"tools": [WEATHER]}, SHOWN + ASKED),
        (THINKING, USER, {"tools": []}, ASKED),
        (THINKING, CALLED, {"tools": [WEATHER]}, SHOWN + AFTER_CALL),
        (THINKING, BEGUN, {"continue_final_message": True}, ASKED + "It is "),
        (THINKING, REASONED, {}, ASKED + "<think>B</think>A<|im_end|>\n" + ASKED),
        (PARTS, TWO, {}, "[user]Helloyou[assistant]"),
        (
            PARTS,
            [*TWO, {"role": "assistant", "content": PAIR}],
            {"continue_final_message": True},
            "[user]Helloyou[assistant]Helloyou",
        ),
        (BOTH, TWO, {}, "[user]Hello|you|[assistant]"),
        (BOTH, BEGUN, {"continue_final_message": True}, "[user]Hi[assistant]It is"),
        (
            DEFAULTS,
            USER,
            {"tools": [WEATHER], "documents": [{"title": "A", "text": "B"}], "chat_template_kwargs": OTHER_DEFAULTS},
            "today tools: weather documents: A=B; no thoughts[user]Hi",
        ),
        (DEFAULTS, USER, {"chat_template_kwargs": {"thinking": False}}, "26 Jul 2024 no thoughts[user]Hi"),
    ],
)
def test_renderings_are_those_of_transformers(source, messages, options, text):
    assert render(source, messages, **options) == text


def test_a_template_gets_contents_in_the_form_that_it_reads():
    """transformers passes each form on, and the template then writes nothing, or Python's text of a list."""
    asked = "<|im_start|>user\nHello\nyou<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, TWO).endswith(asked)  # joined by newlines, as in vLLM
    assert render(THINKING, TWO) == asked
    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", TWO) == "Hello\nyou"
    assert render("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", TWO) == '"Hello\\nyou"'
    assert render(PARTS, USER) == "[user]Hi[assistant]"
    assert render(BOTH, [{"role": "system", "content": PAIR}, *TWO]) == "[system]Hello\nyou[user]Hello|you|[assistant]"
    assert render(THINKING, [{"role": "user", "content": ["Hello", {"text": "you"}]}]) == asked
    answered = [*CALLED[:2], {"role": "tool", "content": [{"type": "text", "text": "sunny"}]}]
    assert render(THINKING, answered) == AFTER_CALL


def test_arguments_of_a_call_are_what_templates_read():
    """OpenAI gives them as JSON, and templates write them as JSON again."""
    for function in ({"name": "weather", "arguments": '{"city": "Rome"}'}, CALL["function"]):
        for call in ({**CALL, "function": function}, function):
            messages = [USER[0], {"role": "assistant", "tool_calls": [call]}, CALLED[2]]
            assert render(THINKING, messages) == AFTER_CALL
    assert CALLED[1]["tool_calls"] == [CALL]  # the messages stay as they were
    empty = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]}
    assert '{"name": "now", "arguments": {}}' in render(THINKING, [USER[0], empty, CALLED[2]])


def weather(city: str) -> str:
    """Tells the weather."""
    return city


IMAGE = [{"role": "user", "content": [PAIR[0], {"type": "image_url", "image_url": {"url": "a.png"}}]}]


@pytest.mark.parametrize(
    ("source", "messages", "options", "says"),
    [
        (
            THINKING,
            USER,
            {"chat_template_kwargs": {"enable_thinkin": False}},
            "variable 'enable_thinkin'; did you mean 'enable_thinking'?",
        ),
        (
            CHATML,
            USER,
            {"chat_template_kwargs": {"enable_thinking": False}},
            "variable 'enable_thinking'; it reads none",
        ),
        (
            DEFAULTS,
            USER,
            {"chat_template_kwargs": {"x": 1}},
            "it reads custom_tools, date_string, thinking, tools_in_user_message",
        ),
        (THINKING, USER, {"chat_template_kwargs": {"tools": []}}, "'tools' is no entry of chat_template_kwargs"),
        (THINKING, USER, {"chat_template_kwargs": "enable_thinking"}, "are variables of the template"),
        (CHATML, USER, {"tools": [WEATHER]}, "does not read tools, so that the model would not see them"),
        (THINKING, USER, {"documents": [{"title": "A", "text": "B"}]}, "does not read documents"),
        (THINKING, USER, {"documents": "text"}, "documents are a list such as"),
        (
            THINKING,
            USER,
            {"tools": [weather]},
            "which transformers.utils.get_json_schema makes",
        ),
        (THINKING, USER, {"tools": WEATHER}, "tools are a list of JSON schemas"),
        (THINKING, USER, {"tools": [{"type": "function"}]}, "tools are a list of JSON schemas"),
        (THINKING, IMAGE, {}, "message 0 of conversation 0 has the part 'image_url' in its content"),
        (THINKING, [{"role": "user", "content": []}], {}, "content \\[\\]; give a text"),
        (THINKING, [{"role": "user", "content": [{"type": "text"}]}], {}, "the part 'text' in its content"),
        (THINKING, [*USER, {"role": "tool", "content": None}], {}, "content None; give a text"),
        (THINKING, [*USER, {"role": "assistant", "content": None}, *USER], {}, "content None; give a text"),
        (
            CHATML,
            CALLED,
            {},
            "message 1 of conversation 0 has tool_calls, which the model's chat template does not read",
        ),
        (THINKING, [{**USER[0], "tool_calls": [CALL]}], {}, "the assistant alone calls tools"),
        (THINKING, [*USER, {"role": "assistant", "tool_calls": [{"function": {}}]}, *USER], {}, "has the tool calls"),
        (THINKING, [*USER, {"role": "assistant", "tool_calls": CALL}, *USER], {}, "has the tool calls"),
        (
            THINKING,
            [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *USER],
            {},
            "with arguments that are an object or its JSON",
        ),
        (
            THINKING,
            [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}, *USER],
            {},
            "with arguments that are an object or its JSON",
        ),
        (THINKING, BEGUN, {}, "continue it with continue_final_message=True"),
        (THINKING, USER, {"continue_final_message": True}, "continues a text of the assistant, and conversation 0"),
        ("{{ messages[0].content }}", BEGUN, {"continue_final_message": True}, "does not write the last message"),
    ],
)
def test_what_a_template_would_lose_is_an_error(source, messages, options, says):
    with pytest.raises(KvjaxError, match=says):
        render(source, messages, **options)


def test_a_misspelled_option_is_named(model):
    for call in (model.chat_texts, model.chat_ids):
        with pytest.raises(UnknownKeyword, match="did you mean 'tools'?"):
            call(USER, tool=[WEATHER])
    for call in (kvjax.chat, kvjax.stream_chat):
        with pytest.raises(
            UnknownKeyword, match=r"'enable_thinking': .* chat_template_kwargs=\{'enable_thinking': ..\}"
        ):
            call(model, USER, enable_thinking=False)
        with pytest.raises(
            UnknownKeyword, match=r"'preserve_cot'; it takes .*; a variable of the chat template goes into"
        ):
            call(model, USER, preserve_cot=False)


def test_the_template_for_tools_is_taken_where_a_checkpoint_has_one(tmp_path):
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": THINKING}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = ChatTemplate.from_directory(tmp_path)
    assert render_conversations(template, USER, {})[0].startswith("<|im_start|>system\nYou are a helpful AI")
    assert render_conversations(template, USER, {"tools": [WEATHER]}) == [SHOWN + ASKED]


def write_templates(directory, config=None, **files):
    """Writes templates as a checkpoint has them: in `tokenizer_config.json`, in `chat_template.jinja` and by name."""
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": config, "bos_token": "<s>"}))
    for name, source in files.items():
        path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(source)
    return ChatTemplate.from_directory(directory)


LIST = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "list{{ tools }}"}]


@pytest.mark.parametrize(
    ("config", "files", "found"),
    [
        (None, {"default": "d", "tool_use": "t", "rag": "r"}, {"default": "d", "tool_use": "t", "rag": "r"}),
        ("c", {"tool_use": "t"}, {"default": "c", "tool_use": "t"}),
        ("c", {"default": "d"}, {"default": "d"}),
        (LIST, {}, {"default": "list", "tool_use": "list{{ tools }}"}),
        (LIST, {"default": "d"}, {"default": "d"}),  # the files stand above the list, as in transformers
        (LIST, {"tool_use": "t"}, {"default": "list", "tool_use": "t"}),
        (None, {"tool_use": "t"}, {"default": None, "tool_use": "t"}),
    ],
)
def test_templates_with_names_stand_in_files_or_in_a_list(config, files, found, tmp_path):
    template = write_templates(tmp_path, config, **files)
    assert {"default": template.source, **dict(template.named)} == found
    assert dict(template.tokens) == ({} if config is None else {"bos_token": "<s>"})
    (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
    (tmp_path / "additional_chat_templates" / "notes.txt").write_text("no template")
    assert ChatTemplate.from_directory(tmp_path) == template


def test_templates_are_chosen_as_in_transformers(tmp_path):
    template = write_templates(tmp_path, default=CHATML, tool_use=THINKING, rag="{{ documents[0].text }}")
    begins = "<|im_start|>system\nYou are a helpful AI"
    documents = {"documents": [{"title": "A", "text": "B"}]}
    assert render_conversations(template, USER, {})[0].startswith(begins)
    assert render_conversations(template, USER, {"chat_template": "default"})[0].startswith(begins)
    assert render_conversations(template, USER, {"tools": []})[0].startswith(begins)
    assert render_conversations(template, USER, {"tools": [WEATHER]}) == [SHOWN + ASKED]
    assert render_conversations(template, USER, {"chat_template": "tool_use"}) == [ASKED]
    assert render_conversations(template, USER, {"chat_template": "rag", **documents}) == ["B"]
    assert render_conversations(template, USER, {"chat_template": "<{{ messages[0].content }}>"}) == ["<Hi>"]
    with pytest.raises(KvjaxError, match="does not read tools"):
        render_conversations(template, USER, {"chat_template": "default", "tools": [WEATHER]})
    for wrong in ("tools", "", 3):
        with pytest.raises(KvjaxError, match="are called default, rag, tool_use, and none is called .*; give chat"):
            render_conversations(template, USER, {"chat_template": wrong})


def test_without_a_default_template_a_name_or_tools_choose(tmp_path):
    template = write_templates(tmp_path, tool_use=THINKING)
    assert render_conversations(template, USER, {"tools": [WEATHER]}) == [SHOWN + ASKED]
    assert render_conversations(template, USER, {"chat_template": "tool_use"}) == [ASKED]
    with pytest.raises(KvjaxError, match="are called tool_use, and none is called 'default'"):
        render_conversations(template, USER, {})


def test_calls_take_the_name_of_a_template(model):
    named = (("brief", "{{ messages[0].content }}!"),)
    several = dataclasses.replace(model, chat_template=ChatTemplate(THINKING, (), named))
    on = {"max_new_tokens": 3, "eos_ids": ()}
    right = kvjax.generate(model, [model.tokenizer.encode("Hi!", special_tokens=False)], "full", **on)
    assert several.chat_texts(USER, chat_template="brief") == ["Hi!"]
    assert kvjax.chat(several, USER, chat_template="brief", **on).tokens == right.tokens
    assert "".join(kvjax.stream_chat(several, USER, chat_template="brief", **on)) == right.text[0]
    # A template itself serves a model that has none; it knows the special tokens.
    without = dataclasses.replace(model, chat_template=None)
    assert without.chat_texts(USER, chat_template="{{ messages[0].content }}!") == ["Hi!"]
    with pytest.raises(KvjaxError, match="chat templates are called nothing, and none is called 'brief'"):
        without.chat_texts(USER, chat_template="brief")


@pytest.mark.parametrize("empty", ["", [{"type": "text", "text": ""}]])
@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        THINKING,
        BOTH,
        DATED,
        "{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n\n{% endif %}",
    ],
)
def test_an_empty_beginning_leaves_the_answer_to_begin(source, empty):
    begun = [*USER, {"role": "assistant", "content": empty}]
    assert render(source, begun, continue_final_message=True) == render(source, USER)


def test_nothing_to_continue_is_no_empty_beginning():
    for last in ({"role": "assistant", "content": None}, CALLED[1], {"role": "user", "content": ""}):
        with pytest.raises(KvjaxError, match="continues a text of the assistant|give a text"):
            render(THINKING, [*USER, last], continue_final_message=True)


OPTIONS = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": False}}


def test_chat_generates_behind_what_the_template_writes(model):
    ids = model.chat_ids(CALLED, **OPTIONS)
    assert [model.tokenizer.decode(x, skip_special_tokens=False) for x in ids] == model.chat_texts(CALLED, **OPTIONS)
    on = {"max_new_tokens": 6, "eos_ids": ()}
    out = kvjax.chat(model, CALLED, "int8", **OPTIONS, **on)
    assert out.tokens == kvjax.generate(model, ids, "int8", **on).tokens
    begun = kvjax.chat(model, BEGUN, "full", continue_final_message=True, **on)
    assert (
        begun.tokens
        == kvjax.generate(model, model.chat_ids(BEGUN, continue_final_message=True), **on, method="full").tokens
    )
    assert len(kvjax.chat(model, [USER, TWO], "full", **on).tokens) == 2


def test_stream_chat_yields_the_text_of_chat(model):
    on = {"max_new_tokens": 8, "eos_ids": (), "temperature": 1.0, "repetition_penalty": 1.2}
    for messages, more in ((CALLED, OPTIONS), (USER, {"stop": "z"}), (BEGUN, {"continue_final_message": True})):
        deltas = list(kvjax.stream_chat(model, messages, "int8", **more, **on))
        assert "".join(deltas) == kvjax.chat(model, messages, "int8", **more, **on).text[0]
    with pytest.raises(KvjaxError, match="stream_chat answers one conversation, got 2"):
        kvjax.stream_chat(model, [USER, USER])
    with pytest.raises(KvjaxError, match="a stream has no place for log-probabilities"):
        kvjax.stream_chat(model, USER, logprobs=True)
    with pytest.raises(KvjaxError, match="no tokenizer.json"):
        kvjax.stream_chat(dataclasses.replace(model, tokenizer=None), USER)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chat_template": ["brief"]}, r"none is called \['brief'\]"),
        (
            {"chat_template": "{% if"},
            "TemplateSyntaxError: .*; fix .*, or the template that you gave as chat_template, or",
        ),
        ({"continue_final_message": "no"}, "continue_final_message is True or False, got 'no'"),
        ({"continue_final_message": 2}, "continue_final_message is True or False, got 2"),
    ],
)
def test_a_template_that_fails_and_options_of_other_types_are_refused(options, says):
    with pytest.raises(KvjaxError, match=says):
        render_conversations(ChatTemplate(THINKING), USER, options)
