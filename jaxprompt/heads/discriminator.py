"""Classes listed in the input, each scored by ELECTRA's replaced-token head (DPT, section 3).

A class is right if the first token of its name looks original in the context.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.class_list import (
    ClassList,
    ClassTree,
    ListEntry,
    check_hierarchy,
    check_lists,
    make_tree,
)
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.tokenizer import Tokenizer, encode_texts
from jaxprompt.data.text.verbalizer import check_word, make_verbalizer
from jaxprompt.errors import InputError
from jaxprompt.heads import BackboneInfo, HeadLayout, Kind, TaskSetup
from jaxprompt.layers.reading import Scores, mask_absent, select_positions
from jaxprompt.scoring.decisions import drop_absent
from jaxprompt.scoring.losses import binary_cross_entropy
from jaxprompt.types import Batch, Objective

ORDERS, SCORES, LOSSES = ("task", "random"), ("original", "replaced"), ("sum", "mean")


class ListInputs(NamedTuple):
    """How examples were divided into inputs, each with one list of classes."""

    owner: np.ndarray  # int32 [inputs], index of its example
    list: np.ndarray  # int32 [inputs], index of its list
    gold: np.ndarray  # int32 [examples], -1 = unknown
    tree: ClassTree


@dataclasses.dataclass(frozen=True)
class Head(Kind):
    """Scores classes by whether the first subword of each in [classes] looks original."""

    READS_WORDS: ClassVar[bool] = True
    LISTS_CLASSES: ClassVar[bool] = True
    READ_WITH: ClassVar[Mapping[str, str]] = {"order=random": "order_seed"}

    score: str = kinds.option(
        "original", "score of a class. original: 1 - sigmoid; replaced: sigmoid (table 3)", SCORES
    )
    loss: str = kinds.option(
        "sum", "reduction over the classes of an example: sum (eq. 3) or mean", LOSSES
    )
    bias: bool = kinds.option(False, "add a trained bias per class to its logit")
    copies: bool = kinds.option(False, "list the classes with trained embeddings (prompt.name=dpt)")
    separator: str = kinds.option(", ", "text between two classes")
    order: str = kinds.option("task", "order of the classes: as in task.labels, or random", ORDERS)
    order_seed: int = kinds.option(0, "random: seed of the order", kinds.SEED)
    listed: tuple = kinds.option(
        (), "the labels in the order in which they are listed; () = see `order`"
    )
    group: int = kinds.option(0, "maximum number of classes per input; 0 = all", "at least 0")
    hierarchy: tuple = kinds.option(
        (), 'parents of each class, e.g. "animal/bird", in the order of task.labels'
    )

    def check(self) -> None:
        """Raises InputError for unknown or out-of-range values."""
        if self.bias and (self.group or self.hierarchy):
            raise InputError(
                "head.bias=True has one parameter per class of a single list; leave head.group and "
                "head.hierarchy out, or set head.bias=False"
            )

    def check_backbone(self, facts: BackboneInfo) -> None:
        """Raises InputError for a backbone without a replaced-token head."""
        check_discriminator(self, facts)

    def reads_rows(self) -> bool:
        """Returns whether trained vectors replace the class names."""
        return self.copies

    def check_task(self, task: Task) -> None:
        """Raises InputError for another type of answer, or if examples have separate choices."""
        super().check_task(task)
        if task.choices and not task.labels:
            raise InputError(
                f"head.name={self.name} lists the classes of a task, but the examples of "
                f"{task.name} have separate choices; use head.name=verbalizer, or linear with "
                "{choice}"
            )

    def check_template(self, template: Template) -> None:
        """Raises InputError for a template with a mask or with one input per choice."""
        if template.has_mask or template.uses_choice:
            extra = "[mask]" if template.has_mask else "{choice}"
            raise InputError(
                f"template {template.source!r} has {extra}, which head.name={self.name} does not "
                "use; remove it"
            )

    def check_form(self, form: str, style: str) -> None:
        """Raises InputError for a task.form without listed classes."""
        if form != "cloze":
            raise InputError(
                f"head.name={self.name} does not support task.form={form}; set task.form=cloze"
            )

    def template_for(self, task: Task, style: str, form: str) -> str:
        """Appends the classes to the task's template (eq. 1)."""
        return f"{task.plain} Class: [classes]." if task.plain else ""

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads each class at its first subword."""
        task = setup.task
        if len(task.labels) < 2:
            raise InputError(f"head.name={self.name} needs at least 2 classes; set task.labels")
        words = [entry[0] for entry in task.words or [(label,) for label in task.labels]]
        verbalizer = make_verbalizer(tokenizer, words, leading_space=task.spaced)
        head = dataclasses.replace(self, listed=self.order_of(task))
        tree = head.tree(task)
        names = [f"{' ' * task.spaced}{name}" for name in tree.names[len(words) :]]
        ids = [tuple(subwords[0][subwords[0] >= 0].tolist()) for subwords in verbalizer.ids]
        ids += map(tuple, encode_texts(tokenizer, names))
        for name, subwords in zip(tree.names[len(words) :], ids[len(words) :], strict=True):
            check_word(tokenizer, name, subwords, f"head.hierarchy: the parent {name!r}")
        check_lists(tree, ids)
        # The space after it belongs to the first subword of the next class.
        (between,) = encode_texts(tokenizer, [self.separator.rstrip()])
        if self.separator.strip():  # nothing may separate the classes
            field = f"head.separator={self.separator!r}"
            check_word(tokenizer, self.separator, between, field)
        starts = np.cumsum([0, *map(len, ids[: len(words)])])  # rows of the copies, class by class
        rows = int(starts[-1]) if self.copies else 0
        first_rows = starts[:-1].tolist() if self.copies else [-1] * len(words)
        first_rows += [-1] * (len(ids) - len(words))  # parents are not copied
        lists = tuple(
            ClassList(tuple(ListEntry(ids[n], n, first_rows[n]) for n in members), tuple(between))
            for members in tree.lists
        )
        module = ClassTokens(len(words), self.score == "original", self.bias, rows)
        specials = self.specials(facts, setup, tokenizer)
        return HeadLayout(
            head, {"main": module}, specials, names=words, verbalizer=verbalizer, lists=lists
        )

    def order_of(self, task: Task) -> tuple[str, ...]:
        """Returns the labels in the order in which they are listed."""
        if not self.listed and self.order == "task":
            return task.labels
        if not self.listed:  # numpy guarantees that RandomState's streams never change
            permutation = np.random.RandomState(self.order_seed).permutation(len(task.labels))
            return tuple(task.labels[number] for number in permutation)
        if sorted(self.listed) != sorted(task.labels):
            raise InputError(
                f"head.listed={', '.join(self.listed)} needs each class of {task.name} once: "
                f"{', '.join(task.labels)}"
            )
        return self.listed

    def tree(self, task: Task) -> ClassTree:
        """Divides the classes into lists."""
        check_hierarchy(task.labels, self.hierarchy)
        order = [task.labels.index(label) for label in self.order_of(task)]
        return make_tree(task.labels, order, self.hierarchy, self.group)

    def encode(
        self,
        encoder: ExampleEncoder,
        task: Task,
        examples: Sequence[Example],
        *,
        classes: int,
        targets: bool,
    ) -> Split:
        """Encodes examples; with several lists, one input for each.

        For training on a hierarchy, only the lists on the path to the right class are used.
        """
        tree = self.tree(task)
        if tree.is_flat:
            return super().encode(encoder, task, examples, classes=classes, targets=targets)
        # Scores are in the order of task.labels, whatever the order of the classes in a list.
        members = [sorted(list_members) for list_members in tree.lists]
        width = max(map(len, members))
        all_lists = range(len(tree.lists))
        class_lists = [
            tree.lists_of(e.label) if targets and e.label >= 0 else all_lists for e in examples
        ]
        inputs = []
        for number, list_members in enumerate(members):
            chosen = [i for i, lists in enumerate(class_lists) if number in lists]
            rows = encoder.with_list(number).encode_all([examples[i] for i in chosen])
            for i, row in zip(chosen, rows, strict=True):
                labels = np.full(width, -1, np.int32)
                label = examples[i].label
                if label >= 0 and number in tree.lists_of(label):
                    labels[: len(list_members)] = np.isin(list_members, tree.paths[label])
                inputs.append((i, number, [row[0]._replace(num_choices=len(list_members))], labels))
        inputs.sort(key=lambda row: row[:2])
        owner, lists = (np.array([row[part] for row in inputs], np.int32) for part in (0, 1))
        gold = np.array([example.label for example in examples], np.int32)
        return Split(
            [row[2] for row in inputs],
            np.array([row[3] for row in inputs]),
            np.array([len(members[number]) for number in lists], np.int32),
            [example.references for example in examples],
            ListInputs(owner, lists, gold, tree),
        )

    # -- training and answers ----------------------------------------------------------------------

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the binary cross entropy of the classes (eq. 3)."""
        loss = partial(binary_cross_entropy, smoothing=smoothing, is_mean=self.loss == "mean")
        return [Objective("main", loss)]

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Describes how often each class occurs, how classes are listed, and the cost."""
        tree = self.tree(task)
        words = [*(entry[0] for entry in task.words), *tree.names[classes:]]
        lists = (self.separator.join(words[n] for n in members) for members in tree.lists)
        num_lists = len(tree.lists)
        line = f"listed: {' | '.join(lists)}; forward passes per example: {num_lists}"
        in_training = f", {tree.depth} at most in training" if tree.depth < num_lists else ""
        return [*super().tell(task, classes, splits), line + in_training]

    def gold_labels(self, split: Split) -> np.ndarray:
        """Returns the right class of each example. -> int32 [examples], -1 = unknown"""
        return split.labels if split.parts is None else split.parts.gold

    def class_scores(self, split: Split, outputs: Any, classes: int) -> np.ndarray:
        """Returns log s of each class. -> [examples, C]"""
        return log_scores(split, outputs, classes)

    def shown_scores(self, scores: np.ndarray) -> np.ndarray:
        """Returns the scores s, which do not sum to 1. [examples, C]"""
        return np.exp(scores)


def check_discriminator(head: Kind, facts: BackboneInfo, other: str = "") -> None:
    """Raises InputError for a backbone without a replaced-token head; `other` is an alternative."""
    if "rtd" not in facts.heads:
        raise InputError(
            f"{facts.where} has no replaced-token head for head.name={head.name}; use the "
            "discriminator of an ELECTRA, such as google/electra-base-discriminator"
            f"{f', or {other}' if other else ''}"
        )


def log_scores(split: Split, outputs: np.ndarray, classes: int) -> np.ndarray:
    """Returns log s of each class; with parents, the sum over its path. -> [examples, C]

    Raises:
      InputError: if lists were left out because the split was encoded for training.
    """
    if split.parts is None:
        logits = drop_absent(outputs, split.counts, classes)[:, :classes]
        # The log of a sigmoid, which is finite even if s rounds to 0.
        return -np.logaddexp(0.0, -logits.astype(np.float64))
    owner, lists, _, tree = split.parts
    scores = np.full((split.size, len(tree.names)), np.nan)
    for number, members in enumerate(tree.lists):
        examples, logits = owner[lists == number], outputs[lists == number, : len(members)]
        scores[np.ix_(examples, sorted(members))] = -np.logaddexp(0.0, -logits.astype(np.float64))
    if np.isnan(scores[:, sorted(tree.listed)]).any():
        raise InputError(
            "head.hierarchy encodes only the lists that lead to the right class for training "
            "examples, which would reveal it; score dev or test"
        )
    paths = ([n for n in path if n in tree.listed] for path in tree.paths)
    return np.stack([scores[:, path].sum(1) for path in paths], axis=1)


class ClassTokens(Scores):
    """Scores the classes at their first tokens. [B, T, H] -> float32 [B, C]

    The score of a class is the logit of s = 1 - sigmoid(z), -z, with z from the replaced-token head
    (eq. 2), or z itself if not `original`. Missing choices of an example are ABSENT.
    """

    classes: int
    original: bool = True
    bias: bool = False
    rows: int = 0  # number of the method's vectors that replace the classes

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores the classes."""
        if self.rows and (injection.rows is None or len(injection.rows) < self.rows):
            count = 0 if injection.rows is None else len(injection.rows)
            raise InputError(
                f"head.copies=True replaces the classes by {self.rows} vectors, one per subword, "
                f"but the method trains {count}; use prompt.name=dpt, or set head.copies=False"
            )
        # In a bank, other heads may read more positions.
        states = select_positions(hidden, batch.label_pos[:, : self.classes])
        logits = backbone.rtd(states).astype(jnp.float32)  # [B, M]
        if self.bias:
            logits = logits + self.param("bias", nn.initializers.zeros, (self.classes,))
        return mask_absent(-logits if self.original else logits, batch.counts)
