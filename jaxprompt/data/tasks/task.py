"""The data classes of tasks and examples."""

import functools
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxprompt.data.tasks.cells import is_number, spelling, whole_number
from jaxprompt.errors import InputError

BINARY_METRICS = ("f1", "f1a", "answer_f1")  # of the positive class of two
Definitions = dict[str, dict[str, Any]]  # task -> the fields of its Task
PREDICATE = "predicate"  # what a template calls the word whose roles are tagged


class AnswerKind(NamedTuple):
    """The name of a kind of answer, and the field of a task that selects it."""

    name: str  # of such a task
    field: str


KINDS = {
    "classes": AnswerKind("classification", "classes"),
    "texts": AnswerKind("free-text", "task.target, a column of texts"),
    "spans": AnswerKind("span", "task.answers, a column of answers and their positions"),
    "tags": AnswerKind("tagging", "task.tags, a column with one tag per word"),
    "numbers": AnswerKind("regression", "task.number, a column of numbers"),
}


class Example(NamedTuple):
    """One row of a task, read and checked."""

    fields: dict[str, str]
    choices: tuple[str, ...] = ()
    label: int = -1  # -1 = unknown
    target: str = ""  # the text to learn, "" = unknown
    references: tuple[str, ...] = ()  # all texts, or classes, that are right; the learned one first
    spans: tuple[tuple[int, int], ...] = ()  # characters of each reference in the last field
    words: tuple[str, ...] = ()  # of a text whose words are tagged
    tags: tuple[str, ...] = ()  # of each word, IOB2; () = unknown
    # Characters of each in the first field; of a task with predicates those of the predicate.
    entities: tuple[tuple[int, int], ...] = ()
    # Of a dialogue that is read up to some turn: which of the right classes it tells by then, and
    # the number of its pair of entities, the same at every turn.
    expressed: tuple[str, ...] = ()
    pair: int = -1
    question: str = ""  # of the task's metric: examples of one question are its answers
    number: float | None = None  # None = unknown
    is_moved: bool = False  # whether one of `spans` is elsewhere than the row says


@dataclass(frozen=True)
class Task:
    """One task. Every part is data, so that a custom task is built like a built-in one."""

    name: str
    fields: tuple[str, ...]  # names that the texts below may use
    lines: tuple[str, ...] = ()  # those of them that the data set has as a list of lines
    labels: tuple[str, ...] = ()  # class names by index; () = the choices are the classes
    label: str = "label"  # column of the label
    # raw labels by class where they are neither index nor name, "|" between several of a class
    values: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # raw labels that are no class: their examples are not read
    choices: tuple[str, ...] = ()  # columns of the choices, or one column that holds a list
    options: tuple[str, ...] = ()  # choices that all rows have, as they are listed; see `widest`
    # field -> (column, text for each value of that column)
    derive: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    hub: str = ""  # id on the Hugging Face hub
    subset: str = ""  # several, with commas between, are read one after the other
    revision: str = ""
    # our split -> split of the hub; a split that is not there has no public labels
    splits: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train", "dev": "validation", "test": "test"}
    )
    renames: Mapping[str, str] = field(default_factory=dict)  # column of the hub -> our column
    nested: str = ""  # column of the hub of which each item is a row with columns of its own
    template: str = ""  # layout for a verbalizer
    words: tuple[tuple[str, ...], ...] = ()  # label words of each class; those of choices name them
    spaced: bool = True  # label words are encoded behind a space
    # Names of the `options`: the masks of a template are as many as the longest of these needs.
    widest: tuple[str, ...] = ()
    option: str = ""  # how {choices} writes one: {name} and {text}; "" = " {name}. {text}"
    query: str = ""  # what the unified form asks, before the options; "" = the fields
    causal: str = ""  # layout for a verbalizer of a left-to-right model, the mask last
    causal_words: tuple[tuple[str, ...], ...] = ()  # label words there; () = `words`
    text: str = ""  # layout for a text-to-text model that writes the target, without a mask
    targets: tuple[str, ...] = ()  # target text of each class there
    plain: str = ""  # layout for a linear head
    target: str = ""  # column of a text to be written; "" = the task has classes
    answers: str = ""  # column of the answers that stand in the last field, and where
    number: str = ""  # column of a number to be predicted
    limits: tuple[float, ...] = ()  # the least and the greatest that it can be
    tags: str = ""  # column of the tags of the words of the one field
    scheme: str = ""  # of these tags, of tags.SCHEMES; "" = found in the training rows
    # Column of the word whose roles these are, its index from 0 on; see readers/predicates.py
    predicate: str = ""
    # Where each entity of the first field stands, in one of OFFSETS, and the words around one where
    # a template has |marked; see data/tasks/readers/entities.py
    entities: tuple[str, ...] = ()
    offsets: str = "tags"
    markers: tuple[str, ...] = ()
    # Columns with the words of each entity, which are looked for nearest to where it is said to be.
    called: tuple[str, ...] = ()
    negative: str = ""  # the class that is no relation, which metrics of relations leave out
    # Of a row of JSON that is a list, of a TSV without a header, and of a file of CoNLL-2012.
    columns: tuple[str, ...] = ()
    # Columns whose values make a question, of which examples are answers; see scoring/questions.py
    question: tuple[str, ...] = ()
    candidate: str = ""  # the field of such an answer
    # A column of candidates, and that of those which are right: a row of the data becomes an
    # example for each, with `candidate` and `label`, and what stands for it in other columns.
    candidates: tuple[str, ...] = ()
    placeholder: str = ""
    metric: str = "accuracy"
    positive: str = ""  # the positive class of BINARY_METRICS; "" = the second

    @property
    def texts(self) -> tuple[str, ...]:
        """Names that a template may use: the fields, and the entities or predicate in the first."""
        entities = tuple(f"entity{i}" for i in range(1, 1 + len(self.entities)))
        return self.fields + entities + (PREDICATE,) * bool(self.predicate)

    @property
    def marked(self) -> int:
        """Number of spans of the first field that |marked surrounds: entities, or the predicate."""
        return len(self.entities) or int(bool(self.predicate))

    def example(self, text: str, choices: tuple[str, ...] = ()) -> Example:
        """Makes a synthetic example: all fields are `text`, entities are letters of it."""
        places = [min(2 * i, len(text)) for i in range(self.marked)]
        spans = tuple((at, min(at + 1, len(text))) for at in places)
        fields = dict.fromkeys(self.texts, "a") | dict.fromkeys(self.fields, text)
        return Example(fields, choices, entities=spans)

    @property
    def kind(self) -> str:
        """The kind of its answers, one of KINDS."""
        columns = {
            "texts": self.target, "tags": self.tags, "spans": self.answers, "numbers": self.number
        }  # fmt: skip
        return next((kind for kind, column in columns.items() if column), "classes")

    @property
    def is_text(self) -> bool:
        """Whether the answer is free text rather than a class."""
        return self.kind == "texts"

    @functools.cached_property
    def label_table(self) -> dict[str, int]:
        """Class index of every spelling of a label: name, raw value, and index unless ambiguous."""
        names = self.labels or (tuple(string.ascii_uppercase) if self.choices else ())
        table = {name: i for i, name in enumerate(names)}
        if {name.lower() for name in names} == {"false", "true"}:  # as JSON and as Python has them
            table |= {name.lower(): i for i, name in enumerate(names)}
            table |= {name.capitalize(): i for i, name in enumerate(names)}
        for i, value in enumerate(self.values):
            for written in str(value).split("|"):
                table.setdefault(written, i)
        indices = {str(i): i for i in range(len(names))}
        # Where a name looks like an index, as "1" of ("1", "2"), numbers mean names alone, and
        # where all are numbers: 1 is no class of ("3", "4", "5"), and of ("+1", "-1") the first.
        numbers = bool(names) and all(map(is_number, names))
        if numbers:
            table = {
                whole_number(name.removeprefix("+")): i for i, name in enumerate(names)
            } | table
        return table if numbers or table.keys() & indices.keys() else table | indices

    @property
    def positive_class(self) -> int:
        """The index of the positive class of BINARY_METRICS."""
        return self.labels.index(self.positive) if self.positive else 1

    @property
    def positive_message(self) -> str:
        """Says which class a binary metric treats as positive; "" for other metrics."""
        if self.kind != "classes" or self.metric not in BINARY_METRICS:
            return ""
        name = (self.labels or string.ascii_uppercase)[self.positive_class]
        return f"{self.metric}: the positive class is {name}"

    def leaves_out(self, row: Mapping[str, Any]) -> bool:
        """Returns whether the label of a row is one of `left_out`."""
        return bool(self.left_out) and spelling(row.get(self.label)) in self.left_out


def check_column(task: Task, field: str, does: str, others: tuple[str, ...]) -> None:
    """Raises InputError if the column that selects a task's kind does not fit its other fields.

    Args:
      task: the task.
      field: name of the field with the column, e.g. "target".
      does: what such a task does, for messages.
      others: fields that are only valid for classes.
    """
    column = getattr(task, field)
    for other in others:
        if getattr(task, other):
            raise InputError(
                f"task.{field}={column!r} and task.{other} are both set, but a task either {does} "
                "or chooses a class; remove one of the two"
            )
    if column in task.fields:
        raise InputError(
            f"task.{field}={column!r} is also in task.fields, so the input would contain the "
            "answer; remove it from task.fields"
        )
