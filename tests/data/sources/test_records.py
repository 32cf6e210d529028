"""Records as lines of JSON."""

import dataclasses
import io
import json
import os
import threading

import numpy as np
import pytest

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.records import (
    Record,
    UnknownLabels,
    from_file,
    from_rows,
    from_stdin,
    output_lines,
    with_examples,
)
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.errors import InputError


def test_what_is_not_finite_in_a_row_is_null_however_deep():
    nan, inf = float("nan"), float("inf")
    row = {"a": nan, "b": [1.0, [inf]], "c": {"d": -inf, "e": (nan, "x")}, "f": np.array([nan, 2])}
    (line,) = output_lines([Record("in:1", row)], [{"prediction": "cat"}], "")
    nulls = {"a": None, "b": [1.0, [None]], "c": {"d": None, "e": [None, "x"]}, "f": [None, 2.0]}
    assert json.loads(line) == nulls | {"prediction": "cat"}
    broken = Record("in:1", {"c": {"d": nan}}, error="why")
    assert list(map(json.loads, output_lines([broken], [], ""))) == [
        {"c": {"d": None}, "error": "why"}
    ]


def test_a_pipe_has_lines_of_json(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=['{"a": 1}\n\n{"a": 2}\n'])
    writer.start()
    records = list(from_file(str(pipe)))
    writer.join()
    assert [(record.origin, record.row) for record in records] == [
        (f"{pipe}:1", {"a": 1}), (f"{pipe}:2", None), (f"{pipe}:3", {"a": 2})
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line, is_header",
    [
        ("text,label", True), ('"id"\t"text"', True), ("text", True), ("\ufefftext\r", True),
        ("a text, b", False), ("Text", False),
    ],
)  # fmt: skip
def test_a_table_on_stdin_is_not_read_as_texts(line, is_header, monkeypatch):
    content = f"{line}\na,text\n".encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    records = from_stdin(["text"])
    if is_header:  # not an error of one line, because the other lines are no texts either
        with pytest.raises(InputError, match="^stdin:1: .*--input=FILE"):
            next(records)
    else:
        assert [record.row for record in records] == [{"text": line}, {"text": "a,text"}]


def test_scores_that_are_not_finite_are_none_of_a_row():
    with pytest.raises(InputError, match="in:1: the scores are not finite"):
        list(output_lines([Record("in:1", {"a": 1})], [{"score": float("nan")}], ""))


def test_lines_are_those_of_the_input():
    records = [Record("in:1", {"a": 1}), Record("in:2", error="why"), Record("in:3")]
    assert list(output_lines(records, [{"score": 1}], "p_")) == [
        '{"a": 1, "p_score": 1}\n', '{"p_error": "why"}\n', "\n"
    ]  # fmt: skip


def read(task, row):
    """Reads one row. -> its records, each by its text or by its error"""
    records = list(with_examples(task, from_rows(Rows([row], "in"))))
    return records, [record.error or record.example for record in records]


def test_what_is_wrong_with_one_example_of_a_row_leaves_its_others():
    """Of the questions of an article, of the predicates of a sentence, and of queries."""
    text = "the cat sat"
    question = lambda n, answers: {"id": str(n), "question": f"q{n}", "answers": answers}
    right, wrong = [{"text": "cat", "answer_start": 4}], [{"text": "cat", "answer_start": "4"}]
    paragraphs = [
        {"context": text, "qas": [question(0, right), question(1, wrong), question(2, right)]},
        {"context": text, "qas": [question(3, right)]},
    ]
    records, examples = read(get_task("squad"), {"title": "t", "paragraphs": paragraphs})
    assert [record.row["id"] for record in records] == ["0", "1", "2", "3"]
    assert "with whole numbers as answer_start" in examples[1]
    assert [example.fields["question"] for example in (examples[0], *examples[2:])] == [
        "q0",
        "q2",
        "q3",
    ]

    roles = custom_task(fields=("words",), tags="tags", predicate="verb")
    records, examples = read(roles, {"words": ["a", "b", "c"], "verb": [1, 9, 2]})
    assert "column 'verb' is 9; it must be the index" in examples[1] and records[1].row["verb"] == 9
    assert [record.row["verb"] for record in records if record.example] == [1, 2]

    queries = [
        {"query": f"q{n} @placeholder", "answers": [{"text": name}], "idx": n}
        for n, name in enumerate(["Ann", "Eve", "Bob"])
    ]
    passage = {
        "text": "Ann met Bob.",
        "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}],
    }
    records, examples = read(get_task("record"), {"passage": passage, "qas": queries, "idx": 7})
    assert len(examples) == 5 and "e.g. 'Eve'" in examples[2]
    assert [example.label for example in (*examples[:2], *examples[3:])] == [1, 0, 0, 1]


def test_tags_that_a_task_does_not_know_are_told():
    task = dataclasses.replace(
        custom_task(fields=("words",), tags="tags"), labels=("O", "B-A", "I-A"), scheme="iob2"
    )
    tag_rows = [["B-A"], ["B-Q"], [], ["O"], ["B-Q"]]
    rows = [{"words": ["cat"], "tags": tags} for tags in tag_rows]
    unknown = UnknownLabels(task)
    for number, record in enumerate(with_examples(task, from_rows(Rows(rows, "in")))):
        assert number != 1 or list(unknown.messages()) == []  # the first is known
        unknown.add(record)
    (line,) = unknown.messages()
    assert "tags unknown to task custom: 2 of 5 examples, the first ['B-Q'] at in:2;" in line


def test_a_prediction_asks_for_no_place_of_an_answer():
    """Answers are compared by their words, as the scripts of SQuAD and CMRC 2018 do."""
    row = {"question": "q", "context": "the cat sat"}
    row["answers"] = {"text": ["a cat", "cat", "sat"], "answer_start": [-1, 4, 0]}
    _, (example,) = read(get_task("squad"), row)
    assert example.references == ("a cat", "cat", "sat") and example.spans == ((4, 7),)
