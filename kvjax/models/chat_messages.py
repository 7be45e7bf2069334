"""Conversations as text: messages, tools and variables are checked, and written by the model's chat template."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from kvjax.errors import KvjaxError
from kvjax.models.chat_template import FILE, ChatTemplate, CompiledTemplate, Conversation
from kvjax.utils.arguments import suggest_name

Messages = Conversation | Sequence[Conversation]
"""One conversation, or a batch."""

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = '[{"role": "user", "content": "Hello"}]'
TOOL_EXAMPLE = (
    '[{"type": "function", "function": {"name": "f", "description": "..", "parameters": {"type": "object"}}}]'
)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names of one thing, as in transformers
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
PROBE, END_OF_MESSAGE = "kvjaxPROBE", "kvjaxENDOFMESSAGE "  # the latter ends in a space, as a template may trim


class TemplateOptions(TypedDict, total=False):
    """The inputs of a chat template in addition to the messages, in the words of transformers and vLLM.

    Attributes:
      tools: functions that the model may call, as JSON schemas: [{"type": "function", "function": {"name": ..}}].
      documents: texts that the model may cite, [{"title": .., "text": ..}].
      chat_template_kwargs: other variables of the template, such as {"enable_thinking": False}.
      continue_final_message: whether the last message, the assistant's, is the beginning of the answer, which the model
        continues; false by default.
      chat_template: the name of one of the model's templates, or a Jinja template; by default the one called "tool_use"
        if there is one and tools are given, the default one otherwise.
    """

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    chat_template: str | None


def render_conversations(template: ChatTemplate | None, messages: Messages, options: TemplateOptions) -> list[str]:
    """Checks one conversation or a batch and writes each as text, up to where the model's answer begins.

    Raises:
      KvjaxError: without a template; for a message without a known role or a text; for tools, documents and variables
        that the template does not read; and for a conversation whose last message cannot be answered, or continued.
    """
    batch: Any = [messages] if _is_list(messages) and messages and isinstance(messages[0], Mapping) else messages
    is_continued = options.get("continue_final_message", False)
    if not _is_list(batch) or not batch or not all(_is_list(x) and x for x in batch):
        mistakes = [
            f"messages are a list such as {EXAMPLE}, of one message or more, or a batch of such lists; got "
            f"{messages!r:.60}"
        ]
    elif template is None:
        mistakes = [
            f"this model has no chat template: if it was trained to chat, put the {FILE} of its checkpoint into its "
            "directory and load it again; if not, give kvjax.generate a plain prompt"
        ]
    else:
        compiled = template.compile(options.get("chat_template"), with_tools=bool(options.get("tools")))
        mistakes = list(_find_option_mistakes(compiled, options))
        for i, conversation in enumerate(batch):
            mistakes += _find_mistakes(compiled, i, conversation, is_continued)
        if not mistakes:
            variables = {name: list(options.get(name) or ()) or None for name in ("tools", "documents")}
            variables |= options.get("chat_template_kwargs") or {}
            texts: list[Any] = [_render(compiled, conversation, variables, is_continued) for conversation in batch]
            if None not in texts:
                return texts
            mistakes = [
                f"the model's chat template does not write the last message of conversation {texts.index(None)} as it "
                "is, and nothing can continue it; end with a message to be answered"
            ]
    raise KvjaxError("\n".join(mistakes))


def _find_option_mistakes(template: CompiledTemplate, options: TemplateOptions) -> Iterator[str]:
    """Yields mistakes in the inputs other than messages; an input that a template does not read would be lost."""
    tools, documents, variables = (options.get(x) for x in ("tools", "documents", "chat_template_kwargs"))
    if (is_continued := options.get("continue_final_message")) not in (True, False, None):
        yield f"continue_final_message is True or False, got {is_continued!r:.60}"
    for name, value in (("tools", tools), ("documents", documents)):
        if value and name not in template.names:
            yield (
                f"the model's chat template does not read {name}, so that the model would not see them; leave {name} "
                "out, or write them into a message"
            )
    if tools is not None and not (_is_list(tools) and all(_is_function(x) for x in tools)):
        yield (
            f"tools are a list of JSON schemas such as {TOOL_EXAMPLE}, which transformers.utils.get_json_schema makes "
            f"of functions; got {tools!r:.60}"
        )
    if documents is not None and not (_is_list(documents) and all(isinstance(x, Mapping) for x in documents)):
        yield f'documents are a list such as [{{"title": "A", "text": "B"}}], got {documents!r:.60}'
    if variables is not None and not isinstance(variables, Mapping):
        yield f'chat_template_kwargs are variables of the template, {{"enable_thinking": False}}, got {variables!r:.60}'
        return
    known = sorted(template.names - {*RESERVED, *template.tokens})
    for name in variables or ():
        if name in RESERVED:
            yield f"{name!r} is no entry of chat_template_kwargs; tools, documents and the prompt's end are arguments"
        elif name not in template.names:
            nearest = suggest_name(str(name), known) or f"; it reads {', '.join(known) or 'none'}"
            yield f"the model's chat template reads no variable {name!r:.60}{nearest}"


def _find_mistakes(template: CompiledTemplate, i: int, conversation: Conversation, is_continued: bool) -> Iterator[str]:
    """Yields what is wrong with the messages of conversation `i`, and with its end."""
    for j, message in enumerate(conversation):
        name, role = f"message {j} of conversation {i}", message.get("role") if isinstance(message, Mapping) else None
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        needed = {"role"} if role == "assistant" and calls else {"role", "content"}
        if not isinstance(message, Mapping) or not needed <= message.keys():
            yield f"{name} needs a role and a content, as in {EXAMPLE[1:-1]}; got {message!r:.60}"
            return
        # Templates skip a role that they do not know, so that a message would be lost in silence.
        is_known = role in ROLES or any(f"{quote}{role}{quote}" in template.source for quote in "'\"")
        if not isinstance(role, str) or not is_known:
            yield f"{name} has role {role!r:.60}, which the chat template does not name; use one of {', '.join(ROLES)}"
        if calls and role != "assistant":
            yield f"{name} is of role {role!r}, and the assistant alone calls tools"
        elif calls and "tool_calls" not in template.source:
            yield (
                f"{name} has tool_calls, which the model's chat template does not read, so that they would be lost; "
                "write them into its content"
            )
        elif calls and not (_is_list(calls) and all(_is_function(x) and _arguments(x) is not None for x in calls)):
            yield (
                f'{name} has the tool calls {calls!r:.200}; give [{{"type": "function", "function": {{"name": "f", '
                '"arguments": {}}}], with arguments that are an object or its JSON'
            )
        content = message.get("content")
        if isinstance(content, str) or (content is None and needed == {"role"}):
            continue
        if not _is_list(content) or not content:
            yield f"{name} has content {content!r:.60}; give a text"
        elif other := [x for x in content if not isinstance(_part_text(x), str)]:
            kind = other[0].get("type") if isinstance(other[0], Mapping) else other[0]
            yield (
                f'{name} has the part {kind!r:.60} in its content; the model reads {{"type": "text", "text": ..}} alone'
            )
    last = conversation[-1]
    if last["role"] == "assistant" and not is_continued:
        yield (
            f"conversation {i} ends with the assistant's message; end it with one to be answered, or let the model "
            "continue it with continue_final_message=True"
        )
    if is_continued and (last["role"] != "assistant" or last.get("content") is None):
        yield (
            f"continue_final_message continues a text of the assistant, and conversation {i} ends with {last!r:.60}; "
            "leave it out, or end with the beginning of the answer"
        )


def _render(
    template: CompiledTemplate, conversation: Conversation, variables: dict[str, Any], is_continued: bool
) -> str | None:
    """Writes a conversation; None where its last message is to be continued and the template changes that."""
    prepared = [_prepare_message(message, template) for message in conversation]
    if not is_continued:
        return template.render(prepared, **variables)
    # As in transformers, the end of the message is found by a mark.
    content = prepared[-1]["content"]
    if isinstance(content, str):
        prepared[-1]["content"] = content + END_OF_MESSAGE
    else:
        content = content[-1]["text"]
        prepared[-1]["content"][-1] = _part(content + END_OF_MESSAGE)
    text = template.render(prepared, **{"add_generation_prompt": False, **variables})
    end = text.rfind(END_OF_MESSAGE.strip())
    if end < 0 or content.strip() not in text:
        return None
    # A template that trims contents has cut the mark's space. It would cut the content's own, and not those before it.
    return text[:end] if text[end:].startswith(END_OF_MESSAGE) or not content.strip() else text[:end].rstrip()


def _prepare_message(message: Mapping[str, Any], template: CompiledTemplate) -> dict[str, Any]:
    """Returns a message in the form that the template reads."""
    prepared, role, content = dict(message), message["role"], message.get("content")
    if message.get("tool_calls"):
        prepared["tool_calls"] = []
        for call in message["tool_calls"]:
            function = {**_function(call), "arguments": _arguments(call)}
            prepared["tool_calls"].append({**call, "function": function} if "function" in call else function)
    reasoning = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    if isinstance(content, str):
        is_read = _reads(template, "user", is_list=False) or not _reads(template, "user", is_list=True)
        prepared["content"] = content if is_read else [_part(content)]
    elif content is not None:
        texts: list[Any] = [_part_text(part) for part in content]
        # vLLM joins the parts by newlines for a template that reads a text.
        reads_parts = _reads(template, role, is_list=True)
        prepared["content"] = [_part(text) for text in texts] if reads_parts else "\n".join(texts)
    return prepared


def _function(call: Any) -> Any:
    """Returns the function of a tool or a call: OpenAI's form has it as an entry, and some others are it."""
    return call.get("function", call) if isinstance(call, Mapping) else None


def _is_function(call: Any) -> bool:
    function = _function(call)
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _arguments(call: Any) -> dict[str, Any] | None:
    """Returns the arguments of a call, which OpenAI writes as JSON and templates read as a dict; None for others."""
    arguments = _function(call).get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            return None
    return dict(arguments) if isinstance(arguments, Mapping) else None


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _part_text(part: Any) -> Any:
    """Returns the text of a part of a content, which may be the text itself; None for a part of another kind."""
    if isinstance(part, Mapping):
        return part.get("text") if part.get("type", "text") == "text" else None
    return part


@functools.lru_cache(maxsize=64)
def _reads(template: CompiledTemplate, role: str, is_list: bool) -> bool:
    """Whether a template writes a content that is a text, or a list of parts, in a message of some role."""
    content = [_part(PROBE)] if is_list else PROBE
    probe = [{"role": role, "content": content}]
    if role != "user":  # templates want a user's message, behind the system's and before the others
        other = {"role": "user", "content": content}
        probe = [*probe, other] if role in ("system", "developer") else [other, *probe, other]
    try:
        text = template.render(probe)
    except KvjaxError:
        return False
    # A list that is written as Python's or JSON's own text was not read.
    return text.count(PROBE) >= len(probe) and not re.search(rf"text['\"]\s*:\s*['\"]{PROBE}", text)


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes))
