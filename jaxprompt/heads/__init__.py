"""Heads, one file each, by name; the class `Head` of a file is all that defines a head.

A head declares what it needs of a backbone and a task, how its input is formatted and which
positions it reads, its modules and its loss, and how their outputs become predictions and metrics.
The modules of pre-training, in `pretraining/`, are not heads: they make no predictions.
"""

import dataclasses
import itertools
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.tasks.task import KINDS, Example, Task
from jaxprompt.data.text.class_list import ClassList
from jaxprompt.data.text.encode import Answer, ExampleEncoder
from jaxprompt.data.text.encoded import MetricData, Split, join_metric_data
from jaxprompt.data.text.overview import MANY, label_messages
from jaxprompt.data.text.specials import Specials, read_specials
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.verbalizer import Verbalizer
from jaxprompt.data.text.windows import USUAL, TextWindow, check_stride, cut_windows
from jaxprompt.errors import InputError, with_article
from jaxprompt.registry import HEADS
from jaxprompt.scoring import metrics
from jaxprompt.scoring.decisions import decide, drop_absent, probabilities
from jaxprompt.types import Objective


class BackboneInfo(NamedTuple):
    """What a head needs to know of a backbone."""

    family: str
    where: str  # its folder, for messages
    style: str  # one of data.text.specials.STYLES
    heads: frozenset[str]  # in its checkpoint
    types: int  # number of token types
    start: int  # id of the decoder's first token
    sentinel: str  # name of the n-th sentinel in its vocabulary
    first: tuple[int, ...] = ()  # the token that follows it in every output, if there is one


class TaskSetup(NamedTuple):
    """The task, template and settings of a run that a head depends on."""

    task: Task
    template: Template
    form: str = "cloze"
    answer: str = ""  # template of a decoder's target; "" = that of the form
    eos: bool = True
    max_target: int = 64


class HeadLayout(NamedTuple):
    """A head prepared for a task and a backbone."""

    head: "Kind"  # with all "auto" fields resolved
    modules: dict[str, nn.Module]  # "main" computes the scores
    specials: Specials
    answer: Answer = Answer()
    masks: int = 1  # number of mask tokens that [mask] stands for
    names: Sequence[str] = string.ascii_uppercase  # of the options in {choices}
    verbalizer: Verbalizer | None = None
    lists: Sequence[ClassList] = ()  # that [classes] stands for, one in each input


class Labelled(NamedTuple):
    """What metrics need of the examples with known answers, without their inputs."""

    gold: Any  # right answers: an array [examples], or a list
    pred: Any  # predictions: scores [examples, C], numbers [examples], or a list
    metric_data: MetricData | None = None
    has_predicates: bool = False  # tags are roles
    # How often each pair of classes in gold and pred occurs, see `Kind.count_pairs`; None = once.
    counts: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.gold) if self.counts is None else int(self.counts.sum())


@dataclasses.dataclass(frozen=True)
class Kind:
    """The base of all heads. Hyperparameters are fields, so a misspelt one is an error."""

    OF: ClassVar[str] = "classes"  # kind of task that it answers, a key of data.tasks.task.KINDS
    WRITES: ClassVar[bool] = False  # it generates texts, so its outputs are not scores
    READS_WORDS: ClassVar[bool] = False  # it reads label words from the backbone's LM head
    LISTS_CLASSES: ClassVar[bool] = False  # it reads the classes that [classes] lists
    PRETRAINS: ClassVar[bool] = False  # `pretrain` supports it, too
    COLUMNS: ClassVar[tuple[str, ...]] = ("prediction", "score", "scores")  # of `answers`
    CHANGEABLE: ClassVar[tuple[str, ...]] = ()  # fields that may change after training
    READ_WITH: ClassVar[Mapping[str, str]] = {}  # see `prompts.idle_fields`

    @property
    def name(self) -> str:
        """The name of its file or entry point, which is its config value."""
        return HEADS.name_of(type(self))

    def block(self) -> dict[str, Any]:
        """Returns the config block of this head."""
        return {"name": self.name} | dataclasses.asdict(self)

    # -- what it needs -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""

    def check_backbone(self, facts: BackboneInfo) -> None:
        """Raises InputError for a backbone that does not support this head."""

    def check_length(self, max_len: int) -> None:
        """Raises InputError if the maximum input length is too small for the fields."""

    def check_method(self, name: str, reads: tuple[str, ...]) -> None:
        """Raises InputError for a prompt method that does not work with this head."""

    def reads_rows(self) -> bool:
        """Returns whether it uses class vectors that a method trains."""
        return False

    def check_rows(self, name: str, count: int) -> None:
        """Raises InputError for a method whose class vectors it would not use."""
        if count and not self.reads_rows():
            raise InputError(
                f"prompt.name={name} trains {count} vectors for the classes, but head.name="
                f"{self.name} does not use them; use head.name=label_rows, discriminator with "
                "head.copies=True, or (for dart) prompt.labels=False"
            )

    def check_task(self, task: Task) -> None:
        """Raises InputError for a task with another type of answer."""
        if task.kind != self.OF:
            heads = HEADS.loadable().items()
            alternatives = " or ".join(name for name, cls in heads if cls.OF == task.kind)
            raise InputError(
                f"head.name={self.name} does not support a {KINDS[task.kind].name} task; use "
                f"head.name={alternatives}, or a task with {KINDS[self.OF].field}"
            )

    def check_form(self, form: str, style: str) -> None:
        """Raises InputError for a task.form that this style of backbone does not support."""
        if form == "text" and style == "masked":
            raise InputError("task.form=text needs a generative backbone; use cloze, or a T5")

    # -- layout ------------------------------------------------------------------------------------

    def fit_task(self, task: Task, choices: int) -> Task:
        """Completes a task whose examples have up to this many choices."""
        return task

    def template_for(self, task: Task, style: str, form: str) -> str:
        """Returns the task's template for this head; "" if it has none."""
        return task.plain

    def needs_mask(self, form: str) -> bool:
        """Returns whether a template must have a [mask]."""
        return False

    def check_template(self, template: Template) -> None:
        """Raises InputError for a template that does not fit this head."""

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Prepares this head for a task and a backbone, which were checked."""
        raise TypeError(f"{type(self).__name__} must define lay_out")

    def specials(
        self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer, sentinels: int = 0
    ) -> Specials:
        """Returns the special tokens of its input and its output."""
        return read_specials(
            tokenizer,
            facts.style,
            eos=setup.eos,
            sentinel=facts.sentinel,
            num_masks=max(int(setup.template.has_mask), sentinels),
        )

    def encode(
        self,
        encoder: ExampleEncoder,
        task: Task,
        examples: Sequence[Example],
        *,
        classes: int,
        targets: bool,
    ) -> Split:
        """Encodes examples; with `targets`, for training."""
        labels = np.array([example.label for example in examples], np.int32)
        # Examples of one task may have different numbers of choices, but all have all classes.
        counts = [len(e.choices) if task.choices else classes for e in examples]
        rows = encoder.encode_all(examples)
        texts = [example.references for example in examples]
        return Split(rows, labels, np.array(counts, np.int32), texts)

    def longest_example(self, task: Task, text: str, max_target: int) -> Example | None:
        """Returns an example of maximum length; None = one is made from the classes."""
        return None

    # -- training ----------------------------------------------------------------------------------

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the terms of the loss. Raises InputError for unsupported label smoothing."""
        raise TypeError(f"{type(self).__name__} must define objectives")

    # -- answers -----------------------------------------------------------------------------------

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Describes the answers of a run and how often each occurs."""
        names = task.labels or tuple(string.ascii_uppercase[:classes])
        return label_messages(names, {x: self.gold_labels(part) for x, part in splits.items()})

    def measure(self, metric: str, split: Split, outputs: Any, classes: int) -> dict[str, float]:
        """Computes metrics of a split's outputs, [units, C or C + 1].

        If words outside the classes may win, "other_words" is how often they do.
        """
        scores, gold = self.class_scores(split, outputs, classes), self.gold_labels(split)
        best = decide(scores, classes)
        measured = metrics.score_predictions(
            metric, gold, best, split.metric_data, scores[:, :classes]
        )
        other = {"other_words": float((best < 0).mean())} if scores.shape[1] > classes else {}
        return measured | other

    def fitted(self, dev: Mapping[str, float]) -> "Kind":
        """Returns a copy with values that were selected on dev, e.g. a threshold."""
        return self

    def check_outputs(self, outputs: Any) -> None:
        """Raises InputError if the scores of an example are NaN."""
        nan = np.flatnonzero(np.isnan(outputs).reshape(len(outputs), -1).any(-1))
        if nan.size:
            raise InputError(
                f"the scores of {nan.size} of {len(outputs)} examples are NaN, first in "
                f"example {nan[0] + 1}; the trained parameters are too large for this backbone: "
                "lower optim.lr, set optim.clip, or use backbone.dtype=float32"
            )

    def labelled(self, split: Split, outputs: Any, classes: int) -> Labelled:
        """Returns what metrics need of the examples with known answers."""
        gold = self.gold_labels(split)
        is_known = gold >= 0
        # The answer is the best of the classes, even if a word outside of them is more likely.
        scores = self.class_scores(split, outputs, classes)[is_known, :classes]
        metric_data = split.metric_data and split.metric_data.select(is_known)
        return Labelled(gold[is_known], scores, metric_data)

    def measure_labelled(
        self, metric: str, parts: Sequence[Labelled]
    ) -> tuple[dict[str, float], int]:
        """Computes metrics over the results of `labelled`. -> metrics, the number of examples"""
        labelled = join_labelled(parts)
        measured = self.compare(metric, labelled) if labelled.size else {}
        return measured, labelled.size if measured else 0

    def count_pairs(self, metric: str, labelled: Labelled) -> Labelled:
        """Counts the pairs of a right and a predicted class, if the metric needs nothing else.

        The results for all parts of a long input then take little memory.
        """
        if metric not in metrics.METRICS or type(self).compare is not Kind.compare:
            return labelled
        best = labelled.pred.argmax(-1)
        right = metrics.right_classes(labelled.gold, best, labelled.metric_data)
        pairs = np.array([right, best], np.int32)  # [2, N]
        (gold, pred), counts = np.unique(pairs, axis=1, return_counts=True)
        metric_data = labelled.metric_data and labelled.metric_data.select([])
        return Labelled(gold, pred, metric_data, counts=counts)

    def compare(self, metric: str, labelled: Labelled) -> dict[str, float]:
        """Computes metrics over at least one example; {} if all answers turn out to be unknown."""
        gold, pred, metric_data, _, counts = labelled
        best = pred if counts is not None else pred.argmax(-1)
        return metrics.score_predictions(metric, gold, best, metric_data, pred, counts)

    def gold_labels(self, split: Split) -> np.ndarray:
        """Returns the correct class of each example, -1 = unknown; only for classes."""
        return split.labels

    def class_scores(self, split: Split, outputs: Any, classes: int) -> np.ndarray:
        """Returns the score of each class, for heads that predict classes. -> [examples, C|C + 1]

        If words outside the classes may win, the last column is the best of them.
        """
        return drop_absent(outputs, split.counts, classes)

    def predicted_classes(self, split: Split, outputs: Any, classes: int) -> np.ndarray | None:
        """Returns the predicted class of each example; None if this head predicts no classes."""
        if self.OF != "classes":
            return None
        return self.class_scores(split, outputs, classes)[:, :classes].argmax(-1)

    def columns(self, task: Task) -> tuple[str, ...]:
        """Returns the names of the columns of `answers`."""
        return self.COLUMNS

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, outputs: Any, classes: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the output of each example, by `columns`: its class and all probabilities."""
        scores = self.class_scores(split, outputs, classes)[:, :classes]
        # Not that of the probabilities: rounding may make two of them equal.
        best = scores.argmax(-1)
        pairs = zip(examples, best, self.shown_scores(scores), strict=True)
        for example, index, shown in pairs:
            names = task.labels
            if task.choices:
                names = (names or example.choices)[: len(example.choices)]
            # Of many classes only the best; of equal ones the first, as in an argmax.
            ranked = np.argsort(-shown, kind="stable")[:MANY] if classes > MANY else range(classes)
            by_name = {names[i]: float(shown[i]) for i in ranked if i < len(names)}
            yield {"prediction": names[index], "score": float(shown[index]), "scores": by_name}

    def shown_scores(self, scores: np.ndarray) -> np.ndarray:
        """Returns the scores that `answers` shows: probabilities of the classes. [examples, C]"""
        return probabilities(scores, scores.shape[1])


class WindowHead(Kind):
    """The base of heads that read every token of a text, in windows if it is long."""

    DEFAULT_STRIDE: ClassVar[int]
    stride: int

    def check_backbone(self, facts: BackboneInfo) -> None:
        """Raises InputError for a backbone that is not bidirectional."""
        if facts.style != "masked":
            raise InputError(
                f"head.name={self.name} reads the whole input bidirectionally, which "
                f"{with_article(facts.family)} does not support; use a BERT, RoBERTa, ELECTRA, "
                "ALBERT, DeBERTa or ModernBERT"
            )

    def check_length(self, max_len: int) -> None:
        """Raises InputError if consecutive windows would overlap entirely."""
        check_stride(self.stride, max_len)

    def cut_windows(self, lengths: Sequence[int], room: int) -> list[TextWindow]:
        """Splits a text into windows, see `windows.cut_windows`."""
        stride = self.DEFAULT_STRIDE if self.stride == USUAL else self.stride
        return cut_windows(lengths, room, stride)


def select_labelled(gold: Sequence[Any], predictions: Iterable[Any]) -> Labelled:
    """Selects the examples with a right answer; () is an unknown answer."""
    # Predictions are not computed for input without labels.
    pairs = zip(gold, predictions, strict=True) if any(gold) else ()
    labelled = [pair for pair in pairs if pair[0]]
    return Labelled([right for right, _ in labelled], [predicted for _, predicted in labelled])


def join_labelled(parts: Sequence[Labelled]) -> Labelled:
    """Joins the examples of parts of the input, in order."""
    if not parts:
        return Labelled([], [])

    def join(values: Sequence[Any]) -> Any:
        is_array = isinstance(values[0], np.ndarray)
        return np.concatenate(values) if is_array else list(itertools.chain.from_iterable(values))

    data = [part.metric_data for part in parts if part.metric_data]
    return parts[0]._replace(
        gold=join([part.gold for part in parts]),
        pred=join([part.pred for part in parts]),
        metric_data=join_metric_data(data) if data else None,
        counts=None if parts[0].counts is None else join([part.counts for part in parts]),
    )


def label_table(labels: Sequence[Sequence[int] | np.ndarray], width: int) -> np.ndarray:
    """Pads the labels of windows with -1. -> int32 [windows, width]"""
    table = np.full((len(labels), width), -1, np.int32)
    for line, window_labels in zip(table, labels, strict=True):
        line[: len(window_labels)] = window_labels
    return table


def windows_by_text(owner: np.ndarray, num_texts: int) -> list[range]:
    """Returns the windows of each text; `owner` [windows] is the text of each, ascending."""
    bounds = np.searchsorted(owner, np.arange(num_texts + 1))
    return list(itertools.starmap(range, itertools.pairwise(bounds)))


def make_head(name: str, **fields: Any) -> Kind:
    """Creates a head by name.

    Raises:
      InputError: if the name is unknown, or a hyperparameter is unknown, of another type or out of
        range.
    """
    head_class = HEADS.load(name)
    # JSON has no tuples.
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    kinds.check_fields("head", name, head_class, fields)
    head = head_class(**fields)
    head.check()
    return head


def make_text_head() -> Kind:
    """Creates the head that generates text."""
    heads = (HEADS.load(name) for name in HEADS.built_in())
    return next(head() for head in heads if head.WRITES)
