"""Entities in a text: how their positions are given, and the names of their relations.

`Task.entities` has an entry for each entity of the first field; `Task.offsets` says how to read it:

    tags        "<e1>|</e1>"     the opening and closing tag in the text, which are removed
    characters  "head"           a column of [start, end], the end after the last character; or
                "start|end"      two columns of one number each
    words       "h.pos"          the same in words of a list, or of a text split at spaces; a dot
                                 selects a key of a column that holds an object
    last_word   "start|end"      the same, but the end is the last word (TACRED)
    text        "x"              a column of the entity's text; its first occurrence is taken, and
                                 if it does not occur as whole words it is not marked
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxprompt.data.tasks.cells import cell_text, cell_words, get_cell, whole_number
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, check_known, nearest

OFFSETS = ("tags", "characters", "words", "last_word", "text")
ABSENT = (-1, -1)  # of an entity that is not marked
_MAX_OCCURRENCES = 50  # of the text of an entity
# A letter of a word between spaces. Chinese, Japanese, Thai, Lao, Burmese and Khmer have no spaces,
# and Korean attaches particles, so in these a name may be part of a longer run of letters.
_LETTER = (
    r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uac00-\ud7af\uf900-\ufaff]"
)
_EXPANSIONS = {
    "per": "person", "org": "organization", "gpe": "geopolitical entity", "loc": "location",
    "na": "none",
    "stateorprovince": "state or province", "stateorprovinces": "states or provinces",
}  # fmt: skip


class MarkedText(NamedTuple):
    """A text and its entities."""

    text: str
    spans: tuple[tuple[int, int], ...]  # characters of each, in the order of Task.entities
    called: tuple[str, ...] = ()  # the name of each; () = its text

    def names(self) -> dict[str, str]:
        """Returns the entities by the names that templates use for them."""
        texts = self.called or [self.text[slice(*span)] for span in self.spans]
        return {f"entity{i}": text for i, text in enumerate(texts, 1)}


def check_entities(task: Task) -> None:
    """Raises InputError if a task's settings for entities do not fit."""
    if not task.entities:
        if task.markers and not task.predicate:
            raise InputError(
                f"task.markers={', '.join(task.markers)} needs entities, but task.entities is "
                "empty; set it, or leave task.markers empty"
            )
        return
    check_known("task.offsets", task.offsets, OFFSETS)
    if task.kind != "classes" or task.choices:
        raise InputError(
            "task.entities is only valid for a task with classes and without choices; remove "
            "task.target, task.tags, task.answers and task.choices"
        )
    max_parts = 1 if task.offsets == "text" else 2
    for entry in task.entities:
        parts = entry.split("|")
        are_two_tags = task.offsets != "tags" or len(set(parts)) == 2
        if not all(map(str.strip, parts)) or len(parts) > max_parts or not are_two_tags:
            raise InputError(
                f"task.entities: {entry!r} is not valid with task.offsets={task.offsets}; give "
                "tags as '<e1>|</e1>', positions as a column or as 'start|end', texts as a column"
            )
    if task.markers and len(task.markers) != 2 * len(task.entities):
        raise InputError(
            f"task.markers has {len(task.markers)} words for {len(task.entities)} entities; give "
            "two per entity: one before it and one after it"
        )
    if odd := [name for name in task.texts[len(task.fields) :] if name in task.fields]:
        raise InputError(
            f"task.fields: {odd[0]!r} is a reserved name for an entity in templates; rename the "
            "column"
        )


def read_entities(task: Task, row: Mapping[str, Any], where: str) -> MarkedText:
    """Reads the first field of a row and the positions of its entities.

    Raises InputError, starting with `where`, if a column is missing, an entity is empty, outside of
    the text or overlaps another, or a tag is missing.
    """
    column = task.fields[0]
    value = get_cell(row, column, where)
    if task.offsets in ("words", "last_word"):
        marked = _read_words(task, row, cell_words(value, column, where), where)
    else:
        text = cell_text(value, column, where, lines=column in task.lines)
        readers = {"tags": _read_tagged, "characters": _read_characters, "text": _read_texts}
        marked = readers[task.offsets](task, row, text, where)
    for (i, span), (j, other) in itertools.combinations(enumerate(marked.spans, 1), 2):
        if not _are_apart((span, other)):
            names = marked.text[slice(*span)], marked.text[slice(*other)]
            raise InputError(
                f"{where}: entity {i} {names[0]!r:.40} and entity {j} {names[1]!r:.40} overlap; "
                "fix their positions, or remove the example"
            )
    return marked


def _read_tagged(task: Task, row: Mapping[str, Any], text: str, where: str) -> MarkedText:
    """Removes the tags; the text itself may contain a closing tag elsewhere."""
    tags: list[tuple[int, int]] = []  # position, length; two per entity
    for i, entry in enumerate(task.entities, 1):
        opens, closes = entry.split("|")
        start = text.find(opens)
        end = text.find(closes, start + len(opens))
        if text.count(opens) != 1 or end < 0:
            raise InputError(
                f"{where}: column {task.fields[0]!r} must contain {opens.strip()} of entity {i} "
                f"once and {closes.strip()} after it; tag the entity, or remove the example"
            )
        tags += [(start, len(opens)), (end, len(closes))]
    # Positions in the text without the tags before them.
    bounds = [at - sum(length for other, length in tags if other < at) for at, _ in tags]
    for position, length in sorted(tags, reverse=True):
        text = text[:position] + text[position + length :]
    return _trimmed(text, list(zip(bounds[::2], bounds[1::2], strict=True)), where)


def _read_characters(task: Task, row: Mapping[str, Any], text: str, where: str) -> MarkedText:
    entities = range(len(task.entities))
    return _trimmed(text, [_read_span(task, row, i, len(text), where) for i in entities], where)


def _read_words(task: Task, row: Mapping[str, Any], words: Sequence[str], where: str) -> MarkedText:
    starts = [0, *itertools.accumulate(len(word) + 1 for word in words)]
    spans = []
    for i in range(len(task.entities)):
        first, end = _read_span(task, row, i, len(words), where)
        if task.called:
            first, end = _nearest(task, row, i, words, first, where)
        # Words are joined by one space, which the end of an entity leaves out.
        spans.append((starts[first], starts[end] - 1))
    return _trimmed(" ".join(words), spans, where)


def _nearest(
    task: Task, row: Mapping[str, Any], index: int, words: Sequence[str], first: int, where: str
) -> tuple[int, int]:
    """Finds the words of an entity, nearest to its given start.

    A few of WSC's pronouns are not at their given position.
    """

    def normalize(word: str) -> str:
        return re.sub(r"\W", "", word).casefold()

    column = task.called[index]
    name = cell_text(_column(row, column, where), column, where)
    name_words = [normalize(word) for word in name.split()]
    all_words = [normalize(word) for word in words]
    starts = range(len(words) if name_words else 0)
    positions = [i for i in starts if all_words[i : i + len(name_words)] == name_words]
    if not positions:
        raise InputError(
            f"{where}: entity {index + 1}, {name!r:.40} in {column!r}, does not occur in "
            f"{task.fields[0]!r}; fix one of them"
        )
    position = min(positions, key=lambda i: abs(i - first))
    return position, position + len(name_words)


def _read_texts(task: Task, row: Mapping[str, Any], text: str, where: str) -> MarkedText:
    """Takes the first occurrences, as whole words, of entities that do not overlap.

    An entity that does not occur as whole words is not marked, but a template can still name it: a
    few published dialogues have some.
    """
    names, candidates = [], []
    for i, column in enumerate(task.entities, 1):
        names.append(cell_text(_column(row, column, where), column, where).strip())
        if not names[-1]:
            raise InputError(f"{where}: entity {i}, column {column!r}, is empty; write its text")
        # ABSENT comes last, so of combinations that mark as many entities the first ones win.
        candidates.append([*_occurrences(names[-1], text), ABSENT])
    best = (ABSENT,) * len(candidates)  # marks most entities
    for spans in filter(_are_apart, itertools.product(*candidates)):
        best = min(best, spans, key=lambda some: some.count(ABSENT))
        if ABSENT not in best:
            break
    return MarkedText(text, best, tuple(names))


def _are_apart(spans: Sequence[tuple[int, int]]) -> bool:
    present = [span for span in spans if span != ABSENT]
    return all(a[1] <= b[0] or b[1] <= a[0] for a, b in itertools.combinations(present, 2))


def _occurrences(name: str, text: str) -> list[tuple[int, int]]:
    before = rf"(?<!{_LETTER})" if re.match(_LETTER, name[0]) else ""
    after = rf"(?!{_LETTER})" if re.match(_LETTER, name[-1]) else ""
    pattern = before + re.escape(name) + after
    for flags in (0, re.I):
        spans = [
            m.span() for m in itertools.islice(re.finditer(pattern, text, flags), _MAX_OCCURRENCES)
        ]
        if spans:
            return spans
    return []


def _trimmed(text: str, spans: Sequence[tuple[int, int]], where: str) -> MarkedText:
    """Strips white space from the ends of entities."""
    trimmed = []
    for i, (start, end) in enumerate(spans, 1):
        entity = text[start:end]
        if not entity.strip():
            raise InputError(f"{where}: entity {i} is empty or white space; fix its position")
        start += len(entity) - len(entity.lstrip())
        trimmed.append((start, start + len(entity.strip())))
    return MarkedText(text, tuple(trimmed))


def _read_span(
    task: Task, row: Mapping[str, Any], index: int, size: int, where: str
) -> tuple[int, int]:
    """Reads the start and the end of an entity in a text of `size` characters or words."""
    parts, number = task.entities[index].split("|"), index + 1
    value: Any = [_column(row, part, where) for part in parts]
    if len(parts) == 1:
        (value,) = value
        if isinstance(value, Mapping):
            value = [value.get("start"), value.get("end")]
    is_list = isinstance(value, (list, tuple))
    numbers = [whole_number(str(part)) for part in value] if is_list else []
    if len(numbers) != 2 or not all(re.fullmatch("-?[0-9]{1,9}", text) for text in numbers):
        raise InputError(
            f"{where}: entity {number}, {task.entities[index]}, must be a start and an end in "
            f"whole numbers, got {value!r:.40}"
        )
    start, end = int(numbers[0]), int(numbers[1]) + (task.offsets == "last_word")
    if not 0 <= start < end <= size:
        unit = "characters" if task.offsets == "characters" else "words"
        raise InputError(
            f"{where}: entity {number} is {unit} {start} to {end}, but the text has {size}, and "
            f"the end must be after its last {unit[:-1]}; fix its position"
        )
    return start, end


def _column(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Looks up a column; a dot selects a key of an object."""
    value: Any = row
    for part in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return get_cell(row, name, where)  # which is missing
        value = value[part]
    return value


# -- relations ------------------------------------------------------------------------------------


def check_negative(task: Task) -> None:
    """Raises InputError if the class for no relation is not one of the task's classes."""
    if task.negative and task.labels and task.negative not in task.labels:
        raise InputError(
            f"task.negative={task.negative!r} is not a class of task {task.name}; "
            f"{nearest(task.negative, task.labels)}"
        )


def relation_words(name: str) -> str:
    """Returns the name of a relation as words: "per:city_of_birth" as "person city of birth".

    Words are split at characters that are not letters or digits, and before capitals after small
    letters. A class whose name gives its direction, e.g. "Cause-Effect(e2,e1)", is inverse if it
    begins with the second entity.
    """
    base, _, direction = name.partition("(")
    inverse = bool(re.fullmatch(r"\s*e2\s*,\s*e1\s*\)", direction))
    directed = inverse or re.fullmatch(r"\s*e1\s*,\s*e2\s*\)", direction)
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", base if directed else name)
    words = [word.lower() for word in re.findall(r"[^\W_]+", spaced)]
    words = [_EXPANSIONS.get(word, word) for word in words]
    return " ".join(["inverse", *words] if inverse else words) or name
