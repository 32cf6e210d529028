"""Writes files for benchmark servers: the answers that `predict` found for one task.

File names and formats are those of GLUE and SuperGLUE (Wang et al. 2018, 2019) as their servers
read them, and of SQuAD's predictions.json (Rajpurkar et al. 2016, 2018). Rows are identified as in
the benchmarks' files: by `idx`, by `id` in SQuAD, and in GLUE's files by `index`, in QQP's by `id`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxprompt.data.sources.records import Record
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError
from jaxprompt.files import json_line

Answers = Sequence[Mapping[str, Any]]
Pairs = Sequence[tuple[Any, Mapping[str, Any]]]  # the id of a row, and its answer

_GLUE = {
    "cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP",
    "mnli": "MNLI-m", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI",
}  # fmt: skip
_NAMED = ("mnli", "qnli", "rte")  # GLUE's server reads class names for these, else indices
_SUPERGLUE = {
    "boolq": "BoolQ", "cb": "CB", "copa": "COPA", "multirc": "MultiRC", "record": "ReCoRD",
    "rte": "RTE", "wic": "WiC", "wsc": "WSC",
}  # fmt: skip
_INDICES = ("idx", "index", "id")
_PARTS = ("paragraph", "question", "answer")  # of MultiRC's idx
FORMATS = {
    "glue": {task: f"{name}.tsv" for task, name in _GLUE.items()},
    "superglue": {task: f"{name}.jsonl" for task, name in _SUPERGLUE.items()},
}


def format_names() -> tuple[str, ...]:
    """Returns the values of `predict --format`; jsonl is this project's format."""
    return ("jsonl", *sorted(FORMATS), "squad")


def submission_file_name(name: str, task: Task, columns: Sequence[str]) -> str:
    """Returns the file name that a format uses for a task.

    Args:
      name: name of the format.
      task: the task.
      columns: columns of an answer.

    Raises:
      InputError: if the format has no file for the task or cannot hold its answers.
    """
    if name == "squad":
        if task.kind != "spans" or "spans" in columns:
            raise InputError(
                f"--format=squad takes one span per question, but task {task.name} with this "
                f"prompt's head predicts {', '.join(columns)}; remove --format"
            )
        return "predictions.json"
    files = FORMATS[name]
    if task.name not in files:
        raise InputError(
            f"--format={name} has no file for task {task.name}; it supports: {', '.join(files)}"
        )
    return files[task.name]


def check_submission(name: str, task: Task, records: Sequence[Record]) -> None:
    """Raises InputError, with the place, for a row whose id is missing or not unique."""
    origins: dict[Any, str] = {}
    for record in records:
        row_id = _row_id(name, task, record)
        if row_id in origins:
            raise InputError(
                f"{record.origin} has the same id as {origins[row_id]}, {row_id!r}; a submission "
                "needs exactly one answer per id"
            )
        origins[row_id] = record.origin


def format_submission(name: str, task: Task, records: Sequence[Record], answers: Answers) -> str:
    """Returns the contents of a format's file; each record was checked and has an example."""
    ids = [_row_id(name, task, record) for record in records]
    pairs = list(zip(ids, answers, strict=True))
    if name == "squad":
        answers_by_id = {row_id: answer["prediction"] for row_id, answer in pairs}
        return json_line(answers_by_id) + "\n"
    if name == "glue":
        lines = [
            f"{row_id}\t{_glue_value(task, answer['prediction'])}\n" for row_id, answer in pairs
        ]
        return "".join(["index\tprediction\n", *lines])
    format_rows = {"multirc": _multirc_rows, "record": _record_rows}.get(task.name, _superglue_rows)
    return "".join(json_line(line) + "\n" for line in format_rows(task, pairs))


def _glue_value(task: Task, prediction: Any) -> str:
    if task.kind == "numbers":
        return f"{prediction:.3f}"
    return prediction if task.name in _NAMED else str(task.labels.index(prediction))


def _superglue_rows(task: Task, pairs: Pairs) -> Iterator[dict[str, Any]]:
    for row_id, answer in pairs:
        prediction = answer["prediction"]
        if task.name == "copa":
            prediction = task.labels.index(prediction)
        elif task.name == "wsc":
            # The server expects "True" and "False" for WSC, and lower case for other tasks.
            prediction = prediction.capitalize()
        yield {"idx": row_id, "label": prediction}


def _multirc_rows(task: Task, pairs: Pairs) -> Iterator[dict[str, Any]]:
    """Groups answers by question, and questions by paragraph."""
    paragraphs: dict[int, dict[int, list[dict[str, int]]]] = {}
    for (paragraph, question, number), answer in pairs:
        entry = {"idx": number, "label": task.labels.index(answer["prediction"])}
        paragraphs.setdefault(paragraph, {}).setdefault(question, []).append(entry)
    for paragraph, questions in paragraphs.items():
        entries = [{"idx": number, "answers": entry} for number, entry in questions.items()]
        yield {"idx": paragraph, "passage": {"questions": entries}}


def _record_rows(task: Task, pairs: Pairs) -> Iterator[dict[str, Any]]:
    """Takes the most probable candidate of each question, the first if several are equal."""
    best: dict[int, tuple[float, str]] = {}
    for (query, candidate), answer in pairs:
        # The second class is "true": the probability that the candidate is correct.
        score = answer["scores"][task.labels[1]]
        if query not in best or score > best[query][0]:
            best[query] = score, candidate
    for query, (_, candidate) in best.items():
        yield {"idx": query, "label": candidate}


def _row_id(name: str, task: Task, record: Record) -> Any:
    """Reads the id of a row: a number, a text (SQuAD), or all parts of an id that has several."""
    row = record.row or {}
    if name == "squad":
        return str(_id_column(record, "id"))
    if name == "glue":
        return _integer_id(record, column=next((name for name in _INDICES if name in row), "idx"))
    if task.name == "multirc":
        return tuple(_integer_id(record, part) for part in _PARTS)
    if task.name == "record":  # a query has a record for each of its candidates
        return _integer_id(record, "query"), row[task.candidate]
    return _integer_id(record)


def _id_column(record: Record, column: str) -> Any:
    value = (record.row or {}).get(column)
    if value is None:
        raise InputError(
            f"{record.origin}: there is no column {column!r}, which identifies the benchmark's "
            "rows; use the benchmark's file, or remove --format"
        )
    return value


def _integer_id(record: Record, part: str = "", column: str = "idx") -> int:
    """Reads the id of a row, or one `part` of an id with several."""
    value = number = _id_column(record, column)
    if part:
        number = value.get(part) if isinstance(value, Mapping) else None
    elif isinstance(value, str) and re.fullmatch(r"\d{1,99}", value):  # a cell of a table
        number = int(value)
    if type(number) is not int:
        expected = f"an object with a whole number {part!r}" if part else "a whole number"
        raise InputError(f"{record.origin}: {column} is {value!r:.60}; it must be {expected}")
    return number
