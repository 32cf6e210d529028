"""Rows that become several examples: one per question, candidate or predicate."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxprompt.data.rows import Rows
from jaxprompt.data.tasks.cells import cell_text, get_cell, spelling
from jaxprompt.data.tasks.published import is_published, published_rows
from jaxprompt.data.tasks.readers.predicates import predicate_rows
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError

_QUESTION = "task.question"  # column with the id of a candidate's question


def check_candidates(task: Task) -> None:
    """Raises InputError if a task's settings for questions and candidates do not fit."""
    if task.metric in ("f1a", "answer_f1") and not task.question:
        raise InputError(
            f"task.metric={task.metric} compares questions; set task.question to the columns that "
            "identify one"
        )
    if task.candidates and (len(task.candidates) != 2 or not task.candidate):
        raise InputError(
            f"task.candidates={','.join(task.candidates)} must be two columns, of the candidates "
            "and of the correct ones, with task.candidate as the field for one candidate"
        )
    needs_candidate = task.candidate or task.metric == "answer_f1"
    if needs_candidate and task.candidate not in task.fields:
        raise InputError(
            f"task.candidate={task.candidate!r} must be one of task.fields: "
            f"{', '.join(task.fields)}; it holds the answer to a question"
        )


def expand_rows(task: Task, rows: Rows) -> Rows:
    """Returns the rows of all examples, each with the origin of its row; see `example_rows`."""
    is_expanded = task.candidates or task.predicate
    # Only the first row is checked, so that a data set of the hub is not read twice.
    if not is_expanded and not (len(rows) and is_published(task, rows[0])):
        return rows
    return rows.expand(lambda number, row: example_rows(task, row, rows.origin(number)))


def example_rows(task: Task, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Makes the rows of the examples that a row of a file holds; most hold one.

    Rows that a benchmark nests in a row are unnested first, see `published_rows`; for predicates
    see `predicate_rows`. Candidates become one row each, with the candidate in the column
    `task.candidate` and the label 1 or 0: whether the second column lists it. If that lists none,
    there is no label: test rows hide their answers as an empty list. In texts, `task.placeholder`
    is replaced by the candidate. A row without candidates stays as it is.
    """
    return [
        new_row
        for nested_row in published_rows(task, row, where)
        for new_row in _expand_row(task, nested_row, where)
    ]


def example_rows_or_errors(
    task: Task, row: dict[str, Any], where: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """Makes the same rows, each with "" or with the reason why it cannot be read."""
    try:
        nested = published_rows(task, row, where)
    except InputError as error:
        yield row, str(error)
        return
    for nested_row in nested:
        try:
            yield from ((new_row, "") for new_row in _expand_row(task, nested_row, where))
        except InputError as error:
            yield nested_row, str(error)


def _expand_row(task: Task, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if task.predicate:
        return predicate_rows(task, row, where)
    if not task.candidates or task.candidates[0] not in row:
        return [row]
    column, correct_column = task.candidates
    has_correct = row.get(correct_column) not in (None, [])
    correct = _texts(row, correct_column, where) if has_correct else None
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    # Without correct answers there are no metrics, which need the question.
    new_rows, question = [], question_id(task, row, where, needed=correct is not None)
    candidates = _texts(row, column, where)
    if correct is not None and not set(correct) & set(candidates):
        raise InputError(
            f"{where}: none of the {len(correct)} answers in {correct_column!r} "
            f"(e.g. {correct[0]!r:.40}) is among the {len(candidates)} candidates in {column!r}; "
            "write them exactly as the candidates"
        )
    for candidate in candidates:
        filled = {
            name: value.replace(task.placeholder, candidate) if task.placeholder else value
            for name, value in texts.items()
        }
        # Hidden answers give no label; as an empty list they would make every candidate wrong.
        label = {} if correct is None else {task.label: int(candidate in correct)}
        new_rows.append({**row, **filled, task.candidate: candidate, **label, _QUESTION: question})
    return new_rows


# Keys of the numbers that identify a question in MultiRC and in ReCoRD.
_ID_PARTS = ("paragraph", "question", "passage", "query")


def question_id(task: Task, row: Mapping[str, Any], where: str, *, needed: bool) -> str:
    """Returns an id of the question that a row answers, "" if the task has none.

    Raises InputError if a column is missing and the question is `needed`.
    """
    if not task.question:
        return ""
    # The candidate may have replaced a placeholder in the columns of the question.
    if task.candidates and _QUESTION in row:
        return row[_QUESTION]
    if needed:
        for column in task.question:
            get_cell(row, column, where)
    question = "\n".join(spelling(row.get(column)) for column in task.question)
    # SuperGLUE numbers its questions, because two of a paragraph may have the same words.
    if isinstance(numbers := row.get("idx"), Mapping):
        question += "".join(f"\n{part}={numbers[part]}" for part in _ID_PARTS if part in numbers)
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def _texts(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    values = row[column]
    if not isinstance(values, (list, tuple)) or not values:
        raise InputError(f"{where}: column {column!r} must be a list of 1 or more texts")
    return list(dict.fromkeys(cell_text(text, column, where) for text in values))
