"""Questions with several answers: one example per candidate."""

import pytest

from jaxprompt.data.tasks.readers.candidates import example_rows
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError

GAPS = {
    "fields": ("question", "word"), "question": ("question",), "metric": "answer_f1",
    "candidate": "word", "candidates": ("options", "answers"), "placeholder": "___",
}  # fmt: skip
ROW = {"question": "a ___ ?", "options": ["cat", "dog"], "answers": ["dog"]}


def test_candidates_fill_the_field_that_names_their_question():
    task = custom_task(**GAPS)
    rows = example_rows(task, ROW, "x:1")
    examples = [read_example(task, row, "x:1", False) for row in rows]
    assert [example.fields["question"] for example in examples] == ["a cat ?", "a dog ?"]
    assert [row["label"] for row in rows] == [0, 1]
    assert examples[0].question == examples[1].question != ""


def test_a_column_of_the_question_that_is_missing_is_named():
    """Of rows with answers: others are not scored, and need not tell their questions apart."""
    names = {"fields": ("text", "word"), "question": ("text", "aks"), "metric": "f1a"}
    task, row = custom_task(**names, labels=("0", "1")), {"text": "a", "ask": "b", "word": "c"}
    message = "x:1: column 'aks' of task.question is missing; columns: text, ask, word, label"
    for needed in (True, False):
        with pytest.raises(InputError, match=message):
            read_example(task, row | {"label": 1}, "x:1", needed)
    assert read_example(task, row, "x:1", False).label == -1
    names |= {"candidate": "word", "candidates": ("options", "answers")}
    task, row = custom_task(**names), {"text": "a", "ask": "b", "options": ["c", "d"]}
    with pytest.raises(InputError, match="x:1: column 'aks' of task.question is missing"):
        example_rows(task, row | {"answers": ["c"]}, "x:1")
    assert len(example_rows(task, row | {"answers": []}, "x:1")) == 2


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"question": ()}, "set task.question"),
        ({"candidate": "", "candidates": ()}, "set task.candidate"),
        ({"candidates": ("options",)}, "task.candidates=options must be two columns"),
        ({"candidate": "answer"}, "task.candidate='answer' is not in task.fields="),
    ],
)
def test_what_does_not_fit_is_named(fields, message):
    with pytest.raises(InputError, match=message):
        custom_task(**GAPS | fields)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"options": "beast"}, "x:3: column 'options' must be a list of 1 or more texts"),
        ({"options": []}, "x:3: column 'options' must be a list of 1 or more texts"),
        ({"options": ["beast", None]}, "x:3: column 'options' is null, not text"),
        ({"answers": ["bird"]}, r"x:3: none of the 1 answers in 'answers' \(e.g. 'bird'\)"),
    ],
)
def test_rows_that_are_wrong_are_named(row, message):
    with pytest.raises(InputError, match=message):
        example_rows(custom_task(**GAPS), ROW | row, "x:3")
