"""What a benchmark's server takes."""

import json
import re

import pytest

from jaxprompt.data.sources import submissions
from jaxprompt.data.sources.records import Record, with_examples
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head


def read(name, rows):
    """-> task, its records"""
    task = get_task(name)
    records = [Record(f"in.jsonl:{i}", row) for i, row in enumerate(rows, 1)]
    return task, [r for r in with_examples(task, records) if r.example]


def submit(form, name, rows, answers):
    """Returns the text of the file for answers of rows."""
    task, records = read(name, rows)
    submissions.check_submission(form, task, records)
    return submissions.format_submission(form, task, records, answers)


def classes(*names):
    return [{"prediction": name} for name in names]


RTE = [{"premise": "a", "hypothesis": "b", "idx": i} for i in (0, 1)]
COPA = [{"premise": "a", "question": "cause", "choice1": "b", "choice2": "c", "idx": 7}]
BOOLQ = [{"question": "a", "passage": "b", "idx": 4}]
WIC = [{"word": "a", "sentence1": "a b", "sentence2": "c a", "idx": 9}]
PAIR = [{"sentence1": "a", "sentence2": "b", "idx": i} for i in (0, 1)]
ASKED = [{"question": "a", "context": "b c", "id": name} for name in ("x1", "x2")]


@pytest.mark.parametrize(
    "form, name, rows, answers, text",
    [
        ("superglue", "rte", RTE, classes("entailment", "not_entailment"),
         '{"idx": 0, "label": "entailment"}\n{"idx": 1, "label": "not_entailment"}\n'),
        ("superglue", "copa", COPA, classes("choice2"), '{"idx": 7, "label": 1}\n'),
        ("superglue", "boolq", BOOLQ, classes("true"), '{"idx": 4, "label": "true"}\n'),
        ("superglue", "cb", RTE, classes("contradiction", "neutral"),
         '{"idx": 0, "label": "contradiction"}\n{"idx": 1, "label": "neutral"}\n'),
        ("superglue", "wic", WIC, classes("false"), '{"idx": 9, "label": "false"}\n'),
    ],
)  # fmt: skip
def test_files_have_the_servers_form(form, name, rows, answers, text):
    assert submit(form, name, rows, answers) == text


def test_questions_of_the_same_words_are_told_apart_by_their_numbers():
    """As the official script groups them."""
    task = get_task("multirc")
    row = {"paragraph": "p", "question": "Who?", "answer": "a", "label": 1}
    numbers = [(0, 0), (0, 1), (1, 2)]  # of the question and the answer
    rows = [row | {"idx": {"paragraph": 0, "question": q, "answer": a}} for q, a in numbers]
    first, second, third = (read_example(task, row, "rows:1").question for row in rows)
    assert first == second != third
    assert len({read_example(task, row | {"answer": a}, "rows:1").question for a in "ab"}) == 1


def test_multirc_groups_answers_by_question_and_paragraph():
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3)]
    rows = [
        {"paragraph": f"p{p}", "question": f"q{q}", "answer": f"a{a}",
         "idx": {"paragraph": p, "question": q, "answer": a}}
        for p, q, a in places
    ]  # fmt: skip
    text = submit("superglue", "multirc", rows, classes("true", "false", "true", "false"))
    assert [json.loads(line) for line in text.splitlines()] == [
        {"idx": 0, "passage": {"questions": [
            {"idx": 0, "answers": [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]},
            {"idx": 1, "answers": [{"idx": 2, "label": 1}]},
        ]}},
        {"idx": 1, "passage": {"questions": [{"idx": 2, "answers": [{"idx": 3, "label": 0}]}]}},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "form, name, rows, message",
    [
        ("glue", "mrpc", [{"sentence1": "a", "sentence2": "b"}], "no column 'idx'"),
        ("glue", "mrpc", [PAIR[0] | {"idx": "x"}], "in.jsonl:1: idx is 'x'; it must be a whole"),
        ("glue", "mrpc", [PAIR[0], PAIR[0]], "in.jsonl:2 has the same id as in.jsonl:1, 0"),
        ("squad", "squad", [ASKED[0], ASKED[0]], "in.jsonl:2 has the same id as in.jsonl:1, 'x1'"),
        ("superglue", "multirc", [{"paragraph": "p", "question": "q", "answer": "a", "idx": 1}],
         "in.jsonl:1: idx is 1; it must be an object with a whole number 'paragraph'"),
    ],
)  # fmt: skip
def test_rows_that_the_server_would_not_know_are_named(form, name, rows, message):
    with pytest.raises(InputError, match=re.escape(message)):
        submissions.check_submission(form, *read(name, rows))


@pytest.mark.parametrize(
    "form, name, head, message",
    [
        ("squad", "rte", "linear", "--format=squad takes one span per question"),
        ("squad", "squad", "multi_spans", "--format=squad takes one span per question"),
        ("glue", "boolq", "linear", "--format=glue has no file for task boolq; it supports: cola,"),
    ],
)
def test_a_task_of_another_benchmark_is_refused(form, name, head, message):
    task = get_task(name)
    with pytest.raises(InputError) as error:
        submissions.submission_file_name(form, task, make_head(head).columns(task))
    assert str(error.value).startswith(message)
