"""Heads, one file each, by name; the class `Head` of a file is all that defines a head.

A head declares what it needs of a backbone and a task, how its input is formatted and which
positions it reads, its modules and its loss, and how their outputs become predictions and metrics.
The modules of pre-training, in `pretraining/`, are not heads: they make no predictions.
"""

import dataclasses
import string
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flax import linen as nn

from jaxprompt.data.tasks.task import KINDS, Example, Task
from jaxprompt.data.text.class_list import ClassList
from jaxprompt.data.text.encode import Answer, ExampleEncoder
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.overview import MANY, label_messages
from jaxprompt.data.text.specials import Specials, read_specials
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.verbalizer import Verbalizer
from jaxprompt.errors import InputError, check_kind, check_known, nearest, with_article
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

    def check_encoder(self, facts: BackboneInfo, reads: str) -> None:
        """Raises InputError for a backbone that is not bidirectional."""
        if facts.style != "masked":
            raise InputError(
                f"head.name={self.name} reads every {reads} of the input bidirectionally, which "
                f"{with_article(facts.family)} does not support; use a BERT, RoBERTa, ELECTRA, "
                "ALBERT, DeBERTa or ModernBERT"
            )

    # -- layout ------------------------------------------------------------------------------------

    def fit_task(self, task: Task, choices: int) -> Task:
        """Completes a task whose examples have up to this many choices."""
        del choices
        return task

    def template_for(self, task: Task, style: str, form: str) -> str:
        """Returns the task's template for this head; "" if it has none."""
        del style, form
        return task.plain

    def needs_mask(self, form: str) -> bool:
        """Returns whether a template must have a [mask]."""
        del form
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
            tokenizer, facts.style, eos=setup.eos, sentinel=facts.sentinel,
            num_masks=max(int(setup.template.has_mask), sentinels),
        )  # fmt: skip

    def encode(
        self, encoder: ExampleEncoder, task: Task, examples: Sequence[Example], *, classes: int,
        targets: bool,
    ) -> Split:  # fmt: skip
        """Encodes examples; with `targets`, for training."""
        del targets
        labels = np.array([example.label for example in examples], np.int32)
        # Examples of one task may have different numbers of choices, but all have all classes.
        counts = [len(e.choices) if task.choices else classes for e in examples]
        rows = encoder.encode_all(examples)
        texts = [example.references for example in examples]
        return Split(rows, labels, np.array(counts, np.int32), texts)

    def longest_example(self, task: Task, text: str, max_target: int) -> Example | None:
        """Returns an example of maximum length; None = one is made from the classes."""
        del task, text, max_target
        return None

    # -- training ----------------------------------------------------------------------------------

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the terms of the loss. Raises InputError for unsupported label smoothing."""
        raise TypeError(f"{type(self).__name__} must define objectives")

    # -- answers -----------------------------------------------------------------------------------

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Describes the answers of a run and how often each occurs."""
        names = task.labels or tuple(string.ascii_uppercase[:classes])
        return label_messages(names, {name: part.labels for name, part in splits.items()})

    def measure(self, metric: str, split: Split, outputs: Any, classes: int) -> dict[str, float]:
        """Computes metrics of a split's outputs, [units, C or C + 1].

        If words outside the classes may win, "other_words" is how often they do.
        """
        scores = drop_absent(outputs, split.counts, classes)
        best = decide(scores, classes)
        measured = metrics.score_predictions(
            metric, split.labels, best, split.metric_data, scores[:, :classes]
        )
        other = {"other_words": float((best < 0).mean())} if scores.shape[1] > classes else {}
        return measured | other

    def fitted(self, dev: Mapping[str, float]) -> "Kind":
        """Returns a copy with values that were selected on dev, e.g. a threshold."""
        del dev
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

    def measure_known(
        self, metric: str, split: Split, outputs: Any, classes: int
    ) -> tuple[dict[str, float], int]:
        """Computes metrics over the examples with known answers. -> metrics, their number"""
        is_known = split.labels >= 0
        if not is_known.any():
            return {}, 0
        part = split._replace(labels=split.labels[is_known], counts=split.counts[is_known])
        if split.metric_data:
            part = part._replace(metric_data=split.metric_data.select(is_known))
        # The answer is the best of the classes, even if a word outside of them is more likely.
        return self.measure(metric, part, outputs[is_known, :classes], classes), int(is_known.sum())

    def gold_labels(self, split: Split) -> np.ndarray:
        """Returns the right class of each example, for heads that predict classes."""
        return split.labels

    def predicted_classes(self, split: Split, outputs: Any, classes: int) -> np.ndarray | None:
        """Returns the predicted class of each example; None if this head predicts no classes."""
        if self.OF != "classes":
            return None
        return decide(drop_absent(outputs, split.counts, classes)[:, :classes], classes)

    def columns(self, task: Task) -> tuple[str, ...]:
        """Returns the names of the columns of `answers`."""
        del task
        return self.COLUMNS

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, outputs: Any, classes: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the output of each example, by `columns`: its class and all probabilities."""
        outputs = drop_absent(outputs, split.counts, classes)[:, :classes]
        best, probs = decide(outputs, classes), probabilities(outputs, classes)
        yield from class_answers(task, examples, best, probs)


def class_answers(
    task: Task, examples: Sequence[Example], best: np.ndarray, all_scores: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Yields the `best` [examples] class of each, with the `values` [examples, C] of all.

    With more than MANY classes, only the best ones are included.
    """
    classes = all_scores.shape[1]
    for example, scores, index in zip(examples, all_scores, best, strict=True):
        names = task.labels
        if task.choices:
            names = (names or example.choices)[: len(example.choices)]
        # Of equal values the first class, as in `decide`.
        shown = np.argsort(-scores, kind="stable")[:MANY] if classes > MANY else range(classes)
        scores_by_name = {names[i]: float(scores[i]) for i in shown if i < len(names)}
        yield {"prediction": names[index], "score": float(scores[index]), "scores": scores_by_name}


def make_head(name: str, **fields: Any) -> Kind:
    """Creates a head by name.

    Raises:
      InputError: if the name is unknown, or a hyperparameter is unknown, of another type or out of
        range.
    """
    check_known("head.name", name, HEADS.names())
    head_class = HEADS.load(name)
    hints = typing.get_type_hints(head_class)  # works with `from __future__ import annotations`
    types = {field.name: hints[field.name] for field in dataclasses.fields(head_class)}
    # JSON has no tuples.
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    for field, value in fields.items():
        if field not in types:
            raise InputError(f"head {name!r} has no field {field!r}; {nearest(field, types)}")
        check_kind(f"head.{field}", value, types[field])
    head = head_class(**fields)
    head.check()
    return head


def make_text_head() -> Kind:
    """Creates the head that generates text."""
    heads = (HEADS.load(name) for name in HEADS.built_in())
    return next(head() for head in heads if head.WRITES)
