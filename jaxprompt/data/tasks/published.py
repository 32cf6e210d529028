"""Converts rows as benchmarks publish them to the columns of the tasks.

The hub's versions of GLUE, SuperGLUE and SQuAD are flat and share column names; the benchmarks'
files nest questions in passages, or use other column names. Rows of `Task.nested` are nested on the
hub too. A row that has our columns stays as it is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jaxprompt.data.tasks.cells import spelling
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError

Row = dict[str, Any]

_PAIR = {"sentence1": "premise", "sentence2": "hypothesis"}
# Columns of the benchmarks' own files -> ours; LCQMC and ChnSentiCorp as they are handed about.
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
# Classes by the numbers of such a column, where the order is not ours.
_NUMBERED = {"lm_bff_label": ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")}


def is_published(task: Task, row: Mapping[str, Any]) -> bool:
    """Returns whether a row may have its benchmark's format instead of ours."""
    if task.nested:
        return task.nested in row
    if task.kind == "spans":
        return "paragraphs" in row
    return task.name in _NESTED or any(name in row for name in _RENAMES.get(task.name, ()))


def published_rows(task: Task, row: Row, where: str) -> list[Row]:
    """Converts a row in its benchmark's format to our rows; returns any other row as it is.

    Raises InputError, starting with `where`, if it is nested differently than in the benchmark.
    """
    if task.nested:
        return _unnested(row, task.nested, where) if task.nested in row else [row]
    if task.kind == "spans" and "paragraphs" in row:
        return list(_squad(row, where))
    if task.name in _NESTED:
        return list(_NESTED[task.name](row, where))
    names = _RENAMES.get(task.name, {})
    # A column of ours that is there goes before one that would take its name.
    names = {name: own for name, own in names.items() if own not in row}
    named = {
        name: _class_name(name, row[name]) for name in names.keys() & row.keys() & _NUMBERED.keys()
    }
    return [{names.get(name, name): value for name, value in {**row, **named}.items()}]


def _class_name(column: str, value: Any) -> Any:
    """Returns the name of a class by its number; any other value is returned as it is."""
    classes, number = _NUMBERED[column], spelling(value)
    known = number.isdecimal() and int(number) < len(classes)
    return classes[int(number)] if known else value


def _unnested(row: Row, column: str, where: str) -> list[Row]:
    """Makes one row per item of a column (a list of rows or a row of lists)."""
    items = _list_items(row[column])
    if items is None:
        raise InputError(
            f"{where}: column {column!r} must be a list of objects {{column: value}}, got "
            f"{row[column]!r:.60}"
        )
    return [_rest(row, column) | item for item in items]


def _list_items(value: Any) -> list[Row] | None:
    """Lists the rows of a column, a list of rows or a row of lists; None if it is neither."""
    # What a text or an object holds could be iterated too.
    is_list = lambda own: isinstance(own, Collection) and not isinstance(own, (str, bytes, Mapping))
    if isinstance(value, Mapping):
        columns = list(value.values())
        if not all(map(is_list, columns)) or len(set(map(len, columns))) > 1:
            return None
        return [dict(zip(value, own, strict=True)) for own in zip(*columns, strict=True)]
    if not is_list(value) or not all(isinstance(item, Mapping) for item in value):
        return None
    return [dict(item) for item in value]


def _wsc(row: Row, where: str) -> Iterator[Row]:
    if "target" in row:
        row = {**_rest(row, "target"), **_part(row, "target", dict, where)}
    yield row


def _multirc(row: Row, where: str) -> Iterator[Row]:
    """Makes one row per answer, as on the hub."""
    if "passage" not in row:
        yield row
        return
    passage = _part(row, "passage", dict, where)
    rest = _rest(row, "passage", "idx")
    for asked in _parts(passage, "questions", where):
        for answer in _parts(asked, "answers", where):
            numbers = {"paragraph": row, "question": asked, "answer": answer}
            yield {
                **rest,
                "paragraph": passage.get("text"),
                "question": asked.get("question"),
                "answer": answer.get("text"),
                "idx": {name: own.get("idx") for name, own in numbers.items()},
                **{name: answer[name] for name in ("label",) if name in answer},
            }


def _record(row: Row, where: str) -> Iterator[Row]:
    """Makes one row per query. Highlights become list items, as in P-tuning v2."""
    if "qas" not in row:
        yield _listed(row)
        return
    passage = _part(row, "passage", dict, where)
    text = _part(passage, "text", str, where)
    entities = []
    for span in _parts(passage, "entities", where):
        start, end = (_part(span, name, int, where) for name in ("start", "end"))
        if not 0 <= start <= end < len(text):
            raise InputError(
                f"{where}: entity {start} to {end} is outside of its passage, which has "
                f"{len(text)} characters; fix its position"
            )
        entities.append(text[start : end + 1])  # the last character belongs to it
    for asked in _parts(row, "qas", where):
        own = {
            **_rest(row, "passage", "qas", "idx"),
            "passage": text,
            "query": asked.get("query"),
            "entities": entities,
            "idx": {"passage": row.get("idx"), "query": asked.get("idx")},
        }
        if "answers" in asked:
            own["answers"] = [answer.get("text") for answer in _parts(asked, "answers", where)]
        yield _listed(own)


def _rest(row: Row, *known: str) -> Row:
    """Returns the columns that a user added to those of the benchmark."""
    return {name: value for name, value in row.items() if name not in known}


def _listed(row: Row) -> Row:
    passage = row.get("passage")
    if not isinstance(passage, str):
        return row
    return {**row, "passage": passage.replace("@highlight\n", "- ")}


def _squad(row: Row, where: str) -> Iterator[Row]:
    """Makes one row per question of an article."""
    for paragraph in _parts(row, "paragraphs", where):
        for asked in _parts(paragraph, "qas", where):
            yield {"title": row.get("title"), "context": paragraph.get("context"), **asked}


_NESTED: dict[str, Callable[[Row, str], Iterator[Row]]] = {
    "wsc": _wsc, "multirc": _multirc, "record": _record,
}  # fmt: skip
_CALLED = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


def _part(row: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = row.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        found = f"is {value!r:.60}" if name in row else "is missing"
        raise InputError(
            f"{where}: {name!r} {found}; in the benchmark's format it is {_CALLED[kind]}"
        )
    return value


def _parts(row: Mapping[str, Any], name: str, where: str) -> list[Any]:
    values = _part(row, name, list, where)
    for value in values:
        if not isinstance(value, dict):
            raise InputError(
                f"{where}: {name!r} contains {value!r:.60}; in the benchmark's format it contains "
                "objects"
            )
    return values
