"""Converts rows as benchmarks publish them to the columns of the tasks.

The hub's versions of GLUE, SuperGLUE and SQuAD are flat and share column names; the benchmarks'
files nest questions in passages, or use other column names. Rows of `Task.nested` are nested on the
hub too. A row that has our columns stays as it is.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jaxprompt.data.tasks.cells import spelling
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError

PublishedRow = dict[str, Any]

_PAIR = {"sentence1": "premise", "sentence2": "hypothesis"}
# Columns of the benchmarks' files -> ours; LCQMC and ChnSentiCorp as they are commonly shared.
_RENAMES = {
    "mrpc": {"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"},
    "stsb": {"score": "label"},
    "qqp": {"is_duplicate": "label"},
    "mnli": {**_PAIR, "gold_label": "label"},
    "rte": _PAIR,
    "snli": {**_PAIR, "gold_label": "label"},
    "conll2003": {"tags": "ner_tags"},
    "lcqmc": {"text_a": "sentence1", "text_b": "sentence2"},
    "chnsenticorp": {"text_a": "text"},
    "trec": {"lm_bff_label": "coarse_label"},
}
# Classes by their index in such a column, if the order is not ours.
_CLASSES_BY_NUMBER = {"lm_bff_label": ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")}


def is_published(task: Task, row: Mapping[str, Any]) -> bool:
    """Returns whether a row may have its benchmark's format instead of ours."""
    if task.nested:
        return task.nested in row
    if task.kind == "spans":
        return "paragraphs" in row
    return task.name in _NESTED or any(name in row for name in _RENAMES.get(task.name, ()))


def published_rows(task: Task, row: PublishedRow, where: str) -> list[PublishedRow]:
    """Converts a row in its benchmark's format to our rows; returns any other row as it is.

    Raises InputError, starting with `where`, if it is nested differently than in the benchmark.
    """
    if task.nested:
        return _unnested(row, task.nested, where) if task.nested in row else [row]
    if task.kind == "spans" and "paragraphs" in row:
        return list(_squad_rows(row, where))
    if task.name in _NESTED:
        return list(_NESTED[task.name](row, where))
    names = _RENAMES.get(task.name, {})
    # A column that already has our name takes precedence over one that would be renamed to it.
    names = {name: our_name for name, our_name in names.items() if our_name not in row}
    for name, classes in _CLASSES_BY_NUMBER.items():
        number = spelling(row.get(name))
        if name in names and re.fullmatch(r"\d{1,9}", number) and int(number) < len(classes):
            row = {**row, name: classes[int(number)]}
    return [{names.get(name, name): value for name, value in row.items()}]


def _unnested(row: PublishedRow, column: str, where: str) -> list[PublishedRow]:
    """Makes one row per item of a column, which is a list of rows or an object of lists."""
    value = row[column]
    if isinstance(value, Mapping) and all(map(_is_list, value.values())):
        length = max(map(len, value.values()), default=0)
        if all(len(items) == length for items in value.values()):
            value = [{name: items[i] for name, items in value.items()} for i in range(length)]
    if not _is_list(value) or not all(isinstance(item, Mapping) for item in value):
        raise InputError(
            f"{where}: column {column!r} must be a list of objects {{column: value}}, got "
            f"{value!r:.60}"
        )
    return [_without_columns(row, column) | dict(item) for item in value]


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


def _wsc_rows(row: PublishedRow, where: str) -> Iterator[PublishedRow]:
    if "target" in row:
        row = {**_without_columns(row, "target"), **_get(row, "target", dict, where)}
    yield row


def _multirc_rows(row: PublishedRow, where: str) -> Iterator[PublishedRow]:
    """Makes one row per answer, as on the hub."""
    if "passage" not in row:
        yield row
        return
    passage = _get(row, "passage", dict, where)
    rest = _without_columns(row, "passage", "idx")
    for question in _get_objects(passage, "questions", where):
        for answer in _get_objects(question, "answers", where):
            numbers = {"paragraph": row, "question": question, "answer": answer}
            yield {
                **rest,
                "paragraph": passage.get("text"),
                "question": question.get("question"),
                "answer": answer.get("text"),
                "idx": {name: part.get("idx") for name, part in numbers.items()},
                **{name: answer[name] for name in ("label",) if name in answer},
            }


def _record_rows(row: PublishedRow, where: str) -> Iterator[PublishedRow]:
    """Makes one row per query. Highlights become list items, as in P-tuning v2."""
    if "qas" not in row:
        yield _with_bullets(row)
        return
    passage = _get(row, "passage", dict, where)
    text = _get(passage, "text", str, where)
    entities = [
        # The end is inclusive.
        text[_get(span, "start", int, where) : _get(span, "end", int, where) + 1]
        for span in _get_objects(passage, "entities", where)
    ]
    for query in _get_objects(row, "qas", where):
        new_row = {
            **_without_columns(row, "passage", "qas", "idx"),
            "passage": text,
            "query": query.get("query"),
            "entities": entities,
            "idx": {"passage": row.get("idx"), "query": query.get("idx")},
        }
        if "answers" in query:
            new_row["answers"] = [
                answer.get("text") for answer in _get_objects(query, "answers", where)
            ]
        yield _with_bullets(new_row)


def _without_columns(row: PublishedRow, *excluded: str) -> PublishedRow:
    """Returns the other columns, which a user added to those of the benchmark."""
    return {name: value for name, value in row.items() if name not in excluded}


def _with_bullets(row: PublishedRow) -> PublishedRow:
    passage = row.get("passage")
    if not isinstance(passage, str):
        return row
    return {**row, "passage": passage.replace("@highlight\n", "- ")}


def _squad_rows(row: PublishedRow, where: str) -> Iterator[PublishedRow]:
    """Makes one row per question of an article."""
    for paragraph in _get_objects(row, "paragraphs", where):
        for question in _get_objects(paragraph, "qas", where):
            yield {"title": row.get("title"), "context": paragraph.get("context"), **question}


_NESTED: dict[str, Callable[[PublishedRow, str], Iterator[PublishedRow]]] = {
    "wsc": _wsc_rows, "multirc": _multirc_rows, "record": _record_rows,
}  # fmt: skip
_NOUNS = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


def _get(row: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = row.get(name)
    if not isinstance(value, kind):
        raise InputError(
            f"{where}: {name!r} is {value!r:.60}; in the benchmark's format it is {_NOUNS[kind]}"
        )
    return value


def _get_objects(row: Mapping[str, Any], name: str, where: str) -> list[Any]:
    values = _get(row, name, list, where)
    for number, value in enumerate(values):
        _get({name: value}, name, dict, f"{where}: item {number}")
    return values
