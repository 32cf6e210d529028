"""Reads rows of tasks whose answer is a span of a text."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.data.tasks.cells import cell_text, get_cell
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import InputError


def read_answered(
    task: Task,
    row: Mapping[str, Any],
    fields: dict[str, str],
    where: str,
    need_label: bool,
    need_place: bool,
) -> Example:
    """Reads the answers of a row whose `fields` are already read.

    A row without an answer has "" as its only reference. An answer that is not where the row says
    is taken from the nearest position, and the example has `is_moved`. With need_place=False such
    an answer has no span and need not occur in the text.
    """
    if not need_label and row.get(task.answers) is None:
        return Example(fields)
    value = get_cell(row, task.answers, where)
    texts, starts = _texts_and_starts(task, value, where)
    text, spans, is_moved = fields[task.fields[-1]], [], False
    for answer, start in zip(texts, starts, strict=True):
        if not text.startswith(answer, start) or start < 0:
            if not need_place:
                continue
            is_moved, start = True, _nearest(answer, text, start)
            if start < 0:
                raise InputError(
                    f"{where}: the answer {answer!r:.60} does not occur in {task.fields[-1]!r}, "
                    f"which has {len(text)} characters; fix it, or remove the example"
                )
        spans.append((start, start + len(answer)))
    return Example(fields, references=texts or ("",), spans=tuple(spans), is_moved=is_moved)


def _nearest(answer: str, text: str, start: int) -> int:
    """Finds where `answer` occurs in `text` nearest to `start`; -1 = nowhere."""
    start = min(max(start, 0), len(text))
    before, after = text.rfind(answer, 0, start + len(answer)), text.find(answer, start)
    positions = [position for position in (before, after) if position >= 0]
    return min(positions, key=lambda position: abs(position - start), default=-1)


def _texts_and_starts(
    task: Task, value: Any, where: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Reads {"text": [...], "answer_start": [...]}, or a list of {"text", "answer_start"}."""
    if isinstance(value, (list, tuple)) and all(isinstance(answer, Mapping) for answer in value):
        value = {name: [answer.get(name) for answer in value] for name in ("text", "answer_start")}
    columns = value if isinstance(value, Mapping) else {}
    texts: Any = columns.get("text")
    starts: Any = columns.get("answer_start")
    are_lists = isinstance(texts, (list, tuple)) and isinstance(starts, (list, tuple))
    if not are_lists or len(texts) != len(starts) or not all(type(n) is int for n in starts):
        raise InputError(
            f'{where}: column {task.answers!r} must be {{"text": [...], "answer_start": [...]}} of '
            f"equal length, with whole numbers as answer_start, got {value!r:.60}"
        )
    answers = tuple(cell_text(text, task.answers, where) for text in texts)
    if not all(answer.strip() for answer in answers):
        raise InputError(
            f"{where}: column {task.answers!r} has an empty answer; write its text, or remove the "
            "example"
        )
    return answers, tuple(starts)
