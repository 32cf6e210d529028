"""Reads conversations: lists of messages in OpenAI's format, with system and tool messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxprompt.data.tasks.cells import get_cell, is_blank
from jaxprompt.data.tasks.conversation import MESSAGES, Conversation
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import InputError, brief, check_known
from jaxprompt.files import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TOOLS = "tools"  # column of the functions that the assistant may call


def check_messages(task: Task) -> None:
    """Raises InputError if the columns of conversations do not fit the task's other fields."""
    if len(task.messages) > 2:
        raise InputError(
            f"task.messages={','.join(task.messages)} names {len(task.messages)} columns; give "
            "one, or that of the prompt and that of the completion"
        )
    for name in ("target", "answers", "tags", "number", "choices", "entities", "labels", "words"):
        if getattr(task, name):
            raise InputError(
                f"task.messages={','.join(task.messages)} and task.{name} are both set, but the "
                "answers of a conversation are its assistant's messages; remove one of the two"
            )


def read_conversation(task: Task, row: Mapping[str, Any], where: str, need_label: bool) -> Example:
    """Reads the conversation of a row, see `read_example`.

    With two columns, only the messages of the second are learned; a text is a user's message in the
    first column, and the assistant's in the second. A message of the assistant with "weight": 0 is
    not learned. With `need_label`, what follows the assistant's last message is dropped.
    """
    prompt, *completion = task.messages
    has_texts = bool(completion)  # two columns may have texts in place of messages
    messages = _read_column(row, prompt, "user", where, is_needed=True, may_be_text=has_texts)
    num_given = len(messages) if completion else 0
    for column in completion:
        messages += _read_column(
            row, column, "assistant", where, is_needed=need_label, may_be_text=True
        )
    # A weight is not part of the message that the chat template writes.
    weights = [message.pop("weight", 1) for message in messages]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [i for i in turns if i >= num_given and weights[i]]
    if need_label:
        if not trained:
            has_turns = any(i >= num_given for i in turns)
            turn = "assistant turn with a weight of 1" if has_turns else "assistant turn"
            raise InputError(
                f"{where}: column {task.messages[-1]!r} has no {turn} to learn; add a message with "
                "the role assistant, or remove the example"
            )
        messages = messages[: turns[-1] + 1]
    if not messages:
        raise InputError(f"{where}: column {prompt!r} has no messages; remove the example")
    tools = None if is_blank(row.get(_TOOLS)) else _parse(row.get(_TOOLS))
    if not isinstance(tools, list | tuple | None):
        raise InputError(
            f"{where}: column {_TOOLS!r} must be a list of functions, got {brief(tools)}; fix it, "
            "or remove the column"
        )
    conversation = Conversation(messages, trained, _without_nulls(tools or []))
    answer = str(messages[-1]["content"]) if conversation.is_answered else ""
    references = (answer,) if answer.strip() else ()
    return Example({MESSAGES: conversation.to_json()}, target=answer, references=references)


def has_answer(task: Task, row: Mapping[str, Any]) -> bool:
    """Returns whether the messages of a row end in one of the assistant."""
    value = _parse_messages(row.get(task.messages[-1]), len(task.messages) > 1)
    if isinstance(value, str):
        return len(task.messages) > 1 and bool(value.strip())
    messages = _as_list(value)
    last = messages[-1] if messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _read_column(
    row: Mapping[str, Any],
    column: str,
    role: str,
    where: str,
    *,
    is_needed: bool,
    may_be_text: bool,
) -> list[dict[str, Any]]:
    value = get_cell(row, column, where) if is_needed else row.get(column)
    value = _parse_messages(value, may_be_text)
    if is_blank(value):
        if is_needed:
            raise InputError(f"{where}: column {column!r} is empty; write messages, or remove it")
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = _as_list(value)
    if messages is None:
        raise InputError(
            f'{where}: column {column!r} must be a list of messages, e.g. [{{"role": "user", '
            f'"content": "Hi"}}], got {brief(value)}'
        )
    return [_read_message(x, f"{where}: message {i}") for i, x in enumerate(messages, 1)]


def _parse_messages(value: Any, may_be_text: bool) -> Any:
    """Parses messages in JSON. Other JSON is a text where a cell may be one."""
    parsed = _parse(value)
    if may_be_text and isinstance(value, str):
        messages = _as_list(parsed)
        if not messages or not all(isinstance(x, Mapping) and "role" in x for x in messages):
            return value
    return parsed


def _read_message(value: Any, where: str) -> dict[str, Any]:
    """Reads one message; without what is null, which columns of Parquet have for all messages."""
    message = _without_nulls(value)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(
            f'{where} must have a "role" and a "content", as in OpenAI\'s format, got '
            f"{brief(message)}; rename its parts"
        )
    check_known(f"{where}: role", message["role"], ROLES)
    if message.get("weight", 1) not in (0, 1):
        raise InputError(f"{where} has the weight {brief(message['weight'])}; it must be 0 or 1")
    for call in message.get("tool_calls", ()):
        function = call.get("function") if isinstance(call, dict) else None
        # OpenAI's format has them as text; chat templates write them as JSON themselves.
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = _parse(function["arguments"])
            function["arguments"] = arguments
    return message | {"content": _read_content(message.get("content", ""), where)}


def _read_content(value: Any, where: str) -> str:
    """Joins the texts of a content that is a list of parts."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(
            f'{where}: the content {brief(value)} is not text; only texts and parts with "text" '
            "are supported: remove the example"
        )
    return "".join(map(str, texts))


def _parse(value: Any) -> Any:
    """Parses a list or object that a cell has as text in JSON; other texts stay."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def _as_list(value: Any) -> Sequence[Any] | None:
    """Returns a list of messages; `datasets` may have an object of lists instead."""
    if isinstance(value, Mapping) and all(isinstance(x, list | tuple) for x in value.values()):
        columns = zip(*value.values(), strict=True)
        return [dict(zip(value, cells, strict=True)) for cells in columns]
    return value if isinstance(value, list | tuple) else None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list | tuple) else value
