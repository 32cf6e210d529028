"""The data classes of tasks and examples."""

import functools
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxprompt.data.tasks.cells import is_number, spelling, whole_number
from jaxprompt.data.tasks.conversation import MESSAGES, Conversation

BINARY_METRICS = ("f1", "f1a", "answer_f1")  # of the positive class of two
Definitions = dict[str, dict[str, Any]]  # task -> the fields of its Task
PREDICATE = "predicate"  # name in templates of the word whose roles are tagged


class AnswerKind(NamedTuple):
    """The name of a kind of answer, and the field of a task that selects it."""

    name: str  # of such a task
    field: str


KINDS = {
    "classes": AnswerKind("classification", "classes"),
    "texts": AnswerKind("free-text", "task.target, a column of texts, or task.messages"),
    "spans": AnswerKind("span", "task.answers, a column of answers and their positions"),
    "tags": AnswerKind("tagging", "task.tags, a column with one tag per word"),
    "numbers": AnswerKind("regression", "task.number, a column of numbers"),
}


# The field of a task with the column of the answers, for each kind other than classes.
ANSWER_FIELDS = {"texts": "target", "tags": "tags", "spans": "answers", "numbers": "number"}


class Example(NamedTuple):
    """One row of a task, read and checked."""

    fields: dict[str, str]
    choices: tuple[str, ...] = ()
    label: int = -1  # -1 = unknown
    target: str = ""  # the text to learn, "" = unknown
    references: tuple[str, ...] = ()  # all correct texts or classes; the first is learned
    spans: tuple[tuple[int, int], ...] = ()  # characters of each reference in the last field
    words: tuple[str, ...] = ()  # of a text whose words are tagged
    tags: tuple[str, ...] = ()  # of each word, IOB2; () = unknown
    # Characters in the first field, of each entity or of the predicate.
    entities: tuple[tuple[int, int], ...] = ()
    # Of a dialogue up to some turn: the correct classes that it expresses, and the index of its
    # pair of entities, which is the same at every turn.
    expressed: tuple[str, ...] = ()
    pair: int = -1
    question: str = ""  # id of the question that the example answers, for metrics of questions
    number: float | None = None  # None = unknown
    is_moved: bool = False  # whether one of `spans` is not at the position in the row


@dataclass(frozen=True)
class Task:
    """One task. Every part is data, so that a custom task is built like a built-in one."""

    name: str
    fields: tuple[str, ...]  # names that the texts below may use
    lines: tuple[str, ...] = ()  # fields that the data set has as lists of lines
    labels: tuple[str, ...] = ()  # class names by index; () = the choices are the classes
    label: str = "label"  # column of the label
    # raw labels of each class if they are neither its index nor its name, separated by "|"
    values: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # raw labels of examples that are not read
    choices: tuple[str, ...] = ()  # columns of the choices, or one column with a list
    options: tuple[str, ...] = ()  # choices that are the same in all rows; see `widest`
    # field -> (column, text for each value of that column)
    derive: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    hub: str = ""  # id on the Hugging Face hub
    subset: str = ""  # one or several, separated by commas and read in order
    revision: str = ""
    # our split -> split of the hub; other splits have no public labels
    splits: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train", "dev": "validation", "test": "test"}
    )
    renames: Mapping[str, str] = field(default_factory=dict)  # column of the hub -> our column
    nested: str = ""  # column of the hub with lists of rows
    template: str = ""  # layout for a verbalizer
    words: tuple[tuple[str, ...], ...] = ()  # label words of each class, or names of the choices
    spaced: bool = True  # label words are encoded after a space
    # Names of the `options`; the longest determines the number of masks.
    widest: tuple[str, ...] = ()
    option: str = ""  # format of one choice, with {name} and {text}; "" = " {name}. {text}"
    query: str = ""  # layout of the unified form's question; "" = the fields
    causal: str = ""  # layout for a verbalizer of a left-to-right model, the mask last
    causal_words: tuple[tuple[str, ...], ...] = ()  # label words there; () = `words`
    text: str = ""  # layout for a text-to-text model, without a mask
    targets: tuple[str, ...] = ()  # target text of each class for a text-to-text model
    plain: str = ""  # layout for a linear head
    target: str = ""  # column of a text to be generated; "" = none
    # Column of a conversation, or those of the prompt's and the completion's messages, instead of
    # fields; see readers/conversations.py
    messages: tuple[str, ...] = ()
    # Regular expression of what is compared in a generated text; see scoring/answer_pattern.py
    answer_pattern: str = ""
    answers: str = ""  # column of the answers in the last field and their positions
    number: str = ""  # column of a number to be predicted
    limits: tuple[float, ...] = ()  # minimum and maximum of the number
    tags: str = ""  # column of the tags of the words of the only field
    scheme: str = ""  # of the tags, one of tags.SCHEMES; "" = detected from the training rows
    # Column of the index (from 0) of the word whose roles the tags are; see readers/predicates.py
    predicate: str = ""
    # Columns with the position of each entity of the first field, read by one of OFFSETS, and the
    # words around each for |marked in a template; see data/tasks/readers/entities.py
    entities: tuple[str, ...] = ()
    offsets: str = "tags"
    markers: tuple[str, ...] = ()
    # Columns with the words of each entity, whose occurrence nearest to its position is taken.
    called: tuple[str, ...] = ()
    negative: str = ""  # the class for no relation, which metrics of relations leave out
    # Names for rows of JSON that are lists, for a TSV without a header, and for CoNLL-2012.
    columns: tuple[str, ...] = ()
    # Columns that identify a question that examples answer; see scoring/questions.py
    question: tuple[str, ...] = ()
    candidate: str = ""  # the field of such an answer
    # Columns of the candidates and of the correct ones; a row becomes an example per candidate,
    # with `candidate` and `label`, and with the candidate instead of `placeholder` in its texts.
    candidates: tuple[str, ...] = ()
    placeholder: str = ""
    metric: str = "accuracy"
    positive: str = ""  # the positive class of BINARY_METRICS; "" = the second

    @property
    def texts(self) -> tuple[str, ...]:
        """Names that a template may use: the fields, and the entities or predicate in the first."""
        entities = tuple(f"entity{i}" for i in range(1, 1 + len(self.entities)))
        return self.fields + entities + ((PREDICATE,) if self.predicate else ())

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of the texts: the fields, or that of a conversation's messages."""
        return self.messages[:1] or self.fields

    @property
    def marked(self) -> int:
        """Number of spans of the first field that |marked surrounds: entities, or the predicate."""
        return len(self.entities) or int(bool(self.predicate))

    def example(self, text: str, choices: tuple[str, ...] = ()) -> Example:
        """Makes a synthetic example: all fields are `text`, entities are letters of it."""
        starts = [min(2 * i, len(text)) for i in range(self.marked)]
        spans = tuple((start, min(start + 1, len(text))) for start in starts)
        if self.messages:
            text = Conversation([{"role": "user", "content": text}], [], []).to_json()
            return Example({MESSAGES: text})
        fields = dict.fromkeys(self.texts, "a") | dict.fromkeys(self.fields, text)
        return Example(fields, choices, entities=spans)

    @property
    def kind(self) -> str:
        """The kind of its answers, one of KINDS."""
        if self.messages:
            return "texts"
        fields = ANSWER_FIELDS.items()
        return next((kind for kind, field in fields if getattr(self, field)), "classes")

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
            for raw_label in str(value).split("|"):
                table.setdefault(raw_label, i)
        indices = {str(i): i for i in range(len(names))}
        # If a name is equal to an index, such as "1" of ("1", "2"), or all names are numbers, then
        # numbers are names only: 1 is no class of ("3", "4", "5"), and the first of ("+1", "-1").
        are_numbers = bool(names) and all(map(is_number, names))
        if are_numbers:
            unsigned = (whole_number(name.removeprefix("+")) for name in names)
            table = {name: i for i, name in enumerate(unsigned)} | table
        return table if are_numbers or table.keys() & indices.keys() else table | indices

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
