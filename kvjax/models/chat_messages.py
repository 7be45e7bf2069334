"""Conversations as text: messages, tools and variables are checked, and written by the model's chat template."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
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
    """

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool


def render_conversations(template: ChatTemplate | None, messages: Messages, options: TemplateOptions) -> list[str]:
    """Checks one conversation or a batch and writes each as text, up to where the model's answer begins.

    Raises:
      KvjaxError: without a template; for a message without a known role or a text; for tools, documents and variables
        that the template does not read; and for a conversation whose last message cannot be answered, or continued.
    """
    batch: Any = [messages] if _is_list(messages) and messages and isinstance(messages[0], Mapping) else messages
    if not _is_list(batch):
        raise KvjaxError(f"messages are a list such as {EXAMPLE}, got {messages!r:.60}")
    for i, conversation in enumerate(batch):
        if not _is_list(conversation):
            raise KvjaxError(f"conversation {i} must be a list such as {EXAMPLE}, got {conversation!r:.60}")
    if not batch or not all(batch):
        raise KvjaxError(f"a conversation needs at least one message, such as {EXAMPLE}; got {messages!r:.60}")
    if template is None:
        raise KvjaxError(
            f"this model has no chat template: if it was trained to chat, put the {FILE} of its checkpoint into its "
            "directory and load it again; if not, give kvjax.generate a plain prompt"
        )
    tools, documents = _check_tools(options.get("tools")), _check_documents(options.get("documents"))
    compiled = template.compile(with_tools=tools is not None)
    variables = {"tools": tools, "documents": documents}
    for name, value in variables.items():
        if value is not None and name not in compiled.names:
            raise KvjaxError(
                f"the model's chat template does not read {name}, so that the model would not see them; leave {name} "
                "out, or write them into a message"
            )
    variables |= _check_variables(compiled, options.get("chat_template_kwargs"))
    is_continued = options.get("continue_final_message", False)
    return [_render(compiled, i, conversation, variables, is_continued) for i, conversation in enumerate(batch)]


def _render(
    template: CompiledTemplate, i: int, conversation: Conversation, variables: dict[str, Any], is_continued: bool
) -> str:
    """Writes one conversation, number `i` of its batch."""
    prepared = [
        _prepare_message(f"message {j} of conversation {i}", message, template)
        for j, message in enumerate(conversation)
    ]
    ends_with_assistant = prepared[-1]["role"] == "assistant"
    if not is_continued:
        if ends_with_assistant:
            raise KvjaxError(
                f"conversation {i} ends with the assistant's message; end it with one to be answered, or let the model "
                "continue it with continue_final_message=True"
            )
        return template.render(prepared, **variables)
    content = prepared[-1].get("content")
    if not ends_with_assistant or not content:
        raise KvjaxError(
            f"continue_final_message continues a text of the assistant, and conversation {i} ends with "
            f"{conversation[-1]!r:.60}; leave it out, or end with the beginning of the answer"
        )
    # As in transformers, the end of the message is found by a mark.
    if isinstance(content, str):
        prepared[-1]["content"] = content + END_OF_MESSAGE
    else:
        content = content[-1]["text"]
        prepared[-1]["content"][-1] = {"type": "text", "text": content + END_OF_MESSAGE}
    text = template.render(prepared, **{"add_generation_prompt": False, **variables})
    end = text.rfind(END_OF_MESSAGE.strip())
    if end < 0 or content.strip() not in text:
        raise KvjaxError(
            f"the model's chat template does not write the last message of conversation {i} as it is, and nothing can "
            "continue it; end with a message to be answered"
        )
    return text[:end] if text[end:].startswith(END_OF_MESSAGE) else text[:end].rstrip()


def _prepare_message(name: str, message: Any, template: CompiledTemplate) -> dict[str, Any]:
    """Checks a message, and returns it in the form that the template reads."""
    has_calls = isinstance(message, Mapping) and message.get("role") == "assistant" and bool(message.get("tool_calls"))
    needed = {"role"} if has_calls else {"role", "content"}
    if not isinstance(message, Mapping) or not needed <= message.keys():
        raise KvjaxError(f"{name} needs a role and a content, as in {EXAMPLE[1:-1]}; got {message!r:.60}")
    role, prepared = message["role"], dict(message)
    # Templates skip a role that they do not know, so that a message would be lost in silence.
    is_known = role in ROLES or any(f"{quote}{role}{quote}" in template.source for quote in "'\"")
    if not isinstance(role, str) or not is_known:
        raise KvjaxError(
            f"{name} has role {role!r:.60}, which the chat template does not name; use one of {', '.join(ROLES)}"
        )
    if message.get("tool_calls"):
        prepared["tool_calls"] = _prepare_calls(name, message, template)
    reasoning = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    if message.get("content") is not None or not has_calls:
        prepared["content"] = _prepare_content(name, role, message["content"], template)
    return prepared


def _prepare_calls(name: str, message: Mapping[str, Any], template: CompiledTemplate) -> list[dict[str, Any]]:
    """Checks the tool calls of a message; arguments that are JSON, as OpenAI's, become what templates read: a dict."""
    calls = message["tool_calls"]
    if message["role"] != "assistant":
        raise KvjaxError(f"{name} is of role {message['role']!r}, and the assistant alone calls tools")
    if "tool_calls" not in template.source:
        raise KvjaxError(
            f"{name} has tool_calls, which the model's chat template does not read, so that they would be lost; write "
            "them into its content"
        )
    prepared = []
    for call in calls if _is_list(calls) else [None]:
        # OpenAI's form has the function as an entry, and some others are the function itself.
        entries = dict(call) if isinstance(call, Mapping) else {}
        function = entries.get("function", entries)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise KvjaxError(
                f'{name} has the tool calls {calls!r:.60}; give [{{"type": "function", "function": {{"name": "f", '
                '"arguments": {}}}]'
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError as e:
                raise KvjaxError(f"{name} calls {function['name']} with arguments that are no JSON: {e}") from e
        if not isinstance(arguments, Mapping):
            raise KvjaxError(f"{name} calls {function['name']} with {arguments!r:.60}; arguments are an object")
        function = {**function, "arguments": dict(arguments)}
        prepared.append({**entries, "function": function} if "function" in entries else function)
    return prepared


def _prepare_content(name: str, role: str, content: Any, template: CompiledTemplate) -> Any:
    """Checks a content, and returns it as the template reads it: a text, or a list of parts."""
    if isinstance(content, str):
        is_read = _reads(template, "user", is_list=False) or not _reads(template, "user", is_list=True)
        return content if is_read else [_part(content)]
    if not _is_list(content) or not content:
        raise KvjaxError(f"{name} has content {content!r:.60}; give a text")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise KvjaxError(
                f'{name} has the part {kind!r:.60} in its content; the model reads {{"type": "text", "text": ..}} alone'
            )
        texts.append(text)
    # vLLM joins the parts by newlines for a template that reads a text.
    return [_part(text) for text in texts] if _reads(template, role, is_list=True) else "\n".join(texts)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


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


def _check_tools(tools: Any) -> list[Any] | None:
    """Checks tools; None where there are none."""
    if tools is None:
        return None
    if not _is_list(tools):
        raise KvjaxError(f"tools are a list of JSON schemas such as {TOOL_EXAMPLE}, got {tools!r:.60}")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if callable(tool):
            raise KvjaxError(
                f"tool {i} is {tool!r:.60}; give its JSON schema, which transformers.utils.get_json_schema makes of a "
                f"function: {TOOL_EXAMPLE[1:-1]}"
            )
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise KvjaxError(f"tool {i} is a JSON schema such as {TOOL_EXAMPLE[1:-1]}, got {tool!r:.60}")
    return list(tools) or None


def _check_documents(documents: Any) -> list[Any] | None:
    """Checks documents; None where there are none."""
    if documents is None:
        return None
    if not _is_list(documents) or not all(isinstance(x, Mapping) for x in documents):
        raise KvjaxError(f'documents are a list such as [{{"title": "A", "text": "B"}}], got {documents!r:.60}')
    return list(documents) or None


def _check_variables(template: CompiledTemplate, variables: Any) -> dict[str, Any]:
    """Checks the variables of a template: one that it does not read would change nothing, in silence."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise KvjaxError(
            f'chat_template_kwargs are variables of the template, {{"enable_thinking": False}}, got {variables!r:.60}'
        )
    known = sorted(template.names - {*RESERVED, *template.tokens})
    for name in variables:
        if name in RESERVED:
            raise KvjaxError(
                f"{name!r} is no entry of chat_template_kwargs; tools, documents and the prompt's end are arguments"
            )
        if name not in template.names:
            has = f"it reads {', '.join(known)}" if known else "it reads none"
            nearest = suggest_name(str(name), known)
            raise KvjaxError(f"the model's chat template reads no variable {name!r:.60}" + (nearest or f"; {has}"))
    return dict(variables)


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes))
