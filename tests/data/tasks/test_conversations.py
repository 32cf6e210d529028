"""Conversations in rows of files."""

import json

import pytest

from jaxprompt.data.sources.files import read_file
from jaxprompt.data.tasks.conversation import Conversation
from jaxprompt.data.tasks.readers.reading import has_label, read_all, read_example
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError

TASK = custom_task(fields=(), messages=["messages"])
PAIR = custom_task(fields=(), messages=["prompt", "completion"])
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def read(task=TASK, need_label=True, **row):
    example = read_example(task, row, "f:1", need_label)
    return Conversation.from_json(example.fields["messages"]), example.references


def test_all_turns_of_the_assistant_are_learned():
    system = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"text": "kind."}]}
    chat, references = read(messages=[system, HI, CALL, RESULT, HELLO, HI], tools=TOOLS)
    assert chat.trained == [2, 4] and references == ("Hello",)
    assert len(chat.messages) == 5  # without what follows the last answer
    assert chat.messages[0] == {"role": "system", "content": "Be kind."}
    assert chat.messages[2]["content"] == ""
    assert chat.messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert chat.tools == TOOLS


def test_a_weight_of_0_is_not_learned():
    chat, _ = read(messages=[HI, HELLO | {"weight": 0}, HI, HELLO | {"weight": 1}])
    assert chat.trained == [3] and not any("weight" in message for message in chat.messages)


def test_of_two_columns_the_second_is_learned():
    chat, references = read(PAIR, prompt=[HI, HELLO, HI], completion=[HELLO])
    assert chat.trained == [3] and references == ("Hello",)
    assert read(PAIR, prompt="Hi", completion="Hello")[0].messages == [HI, HELLO]
    chat, references = read(PAIR, need_label=False, prompt="Hi")
    assert chat.messages == [HI] and references == ()


@pytest.mark.parametrize("text", ['{"name": "Ann"}', '["a", "b"]', "[]", "[INST] a"])
def test_a_text_that_looks_like_json_is_a_text(text):
    chat, references = read(PAIR, prompt="Extract it.", completion=text, tools="")
    assert chat.messages[1] == {"role": "assistant", "content": text} and references == (text,)
    assert has_label(PAIR, {"prompt": "a", "completion": text})


def test_an_input_may_end_in_a_question():
    chat, references = read(need_label=False, messages=[HI, HELLO, HI])
    assert len(chat.messages) == 3 and references == ()
    assert read(need_label=False, messages="Hi")[0].messages == [HI]
    assert has_label(TASK, {"messages": [HI, HELLO]})
    assert not has_label(TASK, {"messages": [HI]}) and not has_label(TASK, {})
    assert has_label(PAIR, {"prompt": "a", "completion": "b"})
    assert not has_label(PAIR, {"prompt": "a"})


def test_formats_of_files(tmp_path):
    """Parquet has null for what a message lacks, and tables have JSON."""
    import pyarrow
    from pyarrow import csv, parquet

    row = {"messages": [HI, CALL, RESULT, HELLO], "tools": TOOLS}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    texts = {name: json.dumps(value) for name, value in row.items()}
    csv.write_csv(pyarrow.Table.from_pylist([texts]), tmp_path / "a.csv")
    columns = {name: [message.get(name) for message in row["messages"]] for name in CALL | RESULT}
    (tmp_path / "b.jsonl").write_text(json.dumps(row | {"messages": columns}))
    expected = read(**row)
    for path in sorted(tmp_path.iterdir()):
        rows = read_file(path)
        (example,) = read_all(TASK, rows, rows.origin)
        assert Conversation.from_json(example.fields["messages"]) == expected[0], path


@pytest.mark.parametrize("messages, line", [
    ([HI], "f:1: column 'messages' has no assistant turn to learn"),
    ([HI, HELLO | {"weight": 0}], "no assistant turn with a weight of 1"),
    ([], "column 'messages' has no assistant turn"), (None, "is empty"),
    (3, "must be a list of messages"),
    ([HI, HELLO | {"role": "asistant"}], "message 2: role 'asistant' is unknown; nearest: assi"),
    ([{"from": "human", "value": "Hi"}], 'message 1 must have a "role" and a "content"'),
    ([HI | {"content": [{"type": "image_url"}]}, HELLO], "message 1: the content"),
    ([HI, HELLO | {"weight": 2}], "message 2 has the weight 2; it must be 0 or 1"),
])  # fmt: skip
def test_what_is_refused(messages, line):
    with pytest.raises(InputError) as error:
        read(messages=messages)
    assert line in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("columns, line", [
    ({"messages": ["a", "b", "c"]}, "names 3 columns"),
    ({"messages": ["a"], "fields": ["b"]}, "task.fields=b are both set"),
    ({"messages": ["a"], "target": "b"}, "task.target are both set"),
    ({"messages": ["a"], "answer_pattern": "("}, "is no regular expression"),
    ({"fields": ["a"], "answer_pattern": "number"}, "has classes"),
])  # fmt: skip
def test_tasks_that_are_refused(columns, line):
    with pytest.raises(InputError, match="task") as error:
        custom_task(**({"fields": ()} | columns))
    assert line in str(error.value)
