"""Classes by their label words, on the backbone's language-model head."""

import dataclasses
import string
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.encode import Answer
from jaxprompt.data.text.specials import FED, Specials
from jaxprompt.data.text.target import (
    Frame,
    branch_plan,
    default_answer,
    make_answer_frame,
    masked_plan,
    read_answer,
)
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.tokenizer import Tokenizer, takes_one_space
from jaxprompt.data.text.verbalizer import Verbalizer, make_verbalizer
from jaxprompt.errors import InputError
from jaxprompt.heads import BackboneInfo, HeadLayout, Kind, TaskSetup
from jaxprompt.layers.capping import logit_cap, soft_cap
from jaxprompt.layers.quantized import score_table
from jaxprompt.layers.reading import Scores, mask_absent, select_positions
from jaxprompt.parallel.sharding import constrain
from jaxprompt.scoring.losses import count_classes, make_loss
from jaxprompt.types import ABSENT, Batch, Objective

SCORES, PIECES, SPANS = ("restricted", "full"), ("mean", "sum"), ("label", "target")


class ReadWords(NamedTuple):
    """The label words of a task in a backbone's vocabulary, and where they are."""

    style: str
    specials: Specials
    spaced: bool  # a space precedes each word
    verbalizer: Verbalizer
    frame: Frame  # of a decoder's target

    def plan(self, ids: np.ndarray, *, whole: bool = False) -> Any:
        """Returns where each subword is predicted; `whole` also that of the other target tokens."""
        if self.style == "masked":
            return masked_plan(ids)
        return branch_plan(ids, self.frame, whole=whole)

    def layout(
        self, head: Kind, modules: dict[str, nn.Module], plan: Any, masks: int
    ) -> HeadLayout:
        """Returns the layout of a head that reads the words."""
        names = [entry[0] for entry in self.verbalizer.words]
        answer = Answer(plan, self.frame.stem)
        return HeadLayout(head, modules, self.specials, answer, masks, names, self.verbalizer)


class LabelWordHead(Kind):
    """The base of heads that represent a class by words, on a language-model head."""

    READS_WORDS: ClassVar[bool] = True

    def read_words(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> ReadWords:
        """Tokenizes the label words of each class, preferably those for this kind of backbone."""
        task, style = setup.task, facts.style
        answer, sentinels = read_answer(setup.answer or default_answer(style, setup.form))
        specials = self.specials(facts, setup, tokenizer, sentinels)
        words: Any = task.targets or task.labels
        if setup.form != "text":
            words = (style == "causal" and task.causal_words) or task.words or task.labels
        # The space is not repeated if the template ends with one.
        spaced = task.spaced and not setup.template.writes_space(style, takes_one_space(tokenizer))
        verbalizer = make_verbalizer(tokenizer, words, leading_space=spaced)
        frame = make_answer_frame(answer, specials) if style in FED else Frame((), ())
        return ReadWords(style, specials, spaced, verbalizer, frame)

    def check_backbone(self, facts: BackboneInfo) -> None:
        """Raises InputError for a backbone without a language-model head."""
        if not {"mlm", "lm"} & facts.heads:
            raise InputError(
                f"{facts.where} has no MLM head for head.name={self.name}; use a checkpoint "
                "saved with one, or head.name=linear"
            )

    def fit_task(self, task: Task, choices: int) -> Task:
        """Names the choices by letters, or by the task's words for them."""
        if task.labels:
            return task
        letters = tuple(string.ascii_uppercase[:choices])
        words, targets = task.words[:choices], task.targets[:choices]
        return dataclasses.replace(task, labels=letters, words=words, targets=targets)

    def template_for(self, task: Task, style: str, form: str) -> str:
        """Returns the template for this form and for a left-to-right model."""
        if form == "text":
            return task.text
        return task.causal if style == "causal" else task.template

    def needs_mask(self, form: str) -> bool:
        """Returns True for a cloze."""
        return form != "text"

    def check_template(self, template: Template) -> None:
        """Raises InputError for a template with one input per choice."""
        if template.uses_choice:
            raise InputError(
                "a verbalizer needs one input for all choices; use {choices} instead of {choice}"
            )


@dataclasses.dataclass(frozen=True)
class Head(LabelWordHead):
    """Scores classes, or the choices of an example, by the words predicted at [mask]."""

    scores: str = kinds.option(
        "restricted", "softmax over the label words (restricted) or the vocabulary (full)", SCORES
    )
    pieces: str = kinds.option(
        "mean", "score of a label word: mean or sum over its subwords", PIECES
    )
    span: str = kinds.option(
        "label",
        "T5, GPT-2: loss on the tokens of the label, or on the whole target (scores=full)",
        SPANS,
    )

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads each word's subwords where the model predicts them."""
        words = self.read_words(facts, setup, tokenizer)
        masks, whole = words.verbalizer.num_masks, self.span == "target"
        if words.style == "masked" and setup.task.widest:
            widest = make_verbalizer(tokenizer, setup.task.widest, leading_space=words.spaced)
            masks = max(masks, widest.num_masks)
        plan = words.plan(words.verbalizer.ids, whole=whole)
        modules: dict[str, nn.Module] = {
            "main": LabelWords(
                plan.words.rows, plan.words.where, plan.words.at, self.scores, self.pieces
            )
        }
        if whole:
            modules["target"] = LabelWords(plan.whole.rows, plan.whole.where, plan.whole.at, "full")
        return words.layout(self, modules, plan, masks)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the loss of the label's tokens, or of the whole target."""
        if self.span == "target":
            return [Objective("main", make_loss("full", smoothing), head="target")]
        return [Objective("main", make_loss(self.scores, smoothing))]

    def counted_objective(
        self, modules: Mapping[str, nn.Module], smoothing: float
    ) -> tuple[dict[str, nn.Module], Objective]:
        """Returns modules and the same loss, which also counts right answers."""
        if self.span != "target":
            loss = make_loss(self.scores, smoothing)
            return dict(modules), Objective("main", loss, sums=count_classes)
        loss = make_loss("full", smoothing)

        def target_loss(scores, *args):
            return loss(scores.whole, *args)

        def count_hits(scores, *args):
            return count_classes(scores.words, *args)

        # The main module and the target's, in the order of `lay_out`.
        head = AnswerHead(*modules.values())
        return {"main": head}, Objective("main", target_loss, sums=count_hits)


def log_probabilities(backbone, hidden, rows=None):
    """Scores vocabulary rows, or all of them. [B, M, H] -> float32 [B, M, R or V]

    Normalised over the scored rows, and only that part of the output table is multiplied. A row of
    -1 is ignored.
    """
    features = constrain(backbone.lm_features(hidden), "act_batch", None, None)  # [B, M, X]
    table, bias = backbone.lm_table()
    if rows is not None:
        # An index of -1 reads the last row of the table, and is ABSENT below.
        table, bias = table[rows], None if bias is None else bias[rows]
    logits = soft_cap(score_table(features, table), logit_cap(backbone))
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if rows is not None:
        logits = jnp.where(rows >= 0, logits, ABSENT)
    logits = constrain(logits, "act_batch", None, "act_vocab" if rows is None else None)
    return jax.nn.log_softmax(logits, axis=-1)


class LabelWords(Scores):
    """Scores each class by its words. [B, T, H] -> [B, C]

    A word's score is the mean, or the sum, of its subwords' log-probabilities, each read where the
    model predicts it; a class's score is the mean over its words. "restricted" normalises over the
    verbalizer's subwords, and missing choices of an example are ABSENT. "full" normalises over the
    whole vocabulary, only at the read positions, and returns [B, C + 1]: the last column is the
    best log-probability of any other subword, where the first subword is read. A class without
    words is ABSENT.
    """

    rows: Any  # int [R], the pieces' vocabulary ids, -1 = none
    where: Any  # int [C, W, J], rows of each word's pieces, -1 = none
    at: Any  # int [C, W, J], which of the M read positions predicts each piece
    scores: str = "restricted"
    pieces: str = "mean"

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays of the words: rows, where, at."""
        return {name: getattr(self, name) for name in ("rows", "where", "at")}

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores the classes."""
        rows, where, at = (jnp.asarray(x) for x in (self.rows, self.where, self.at))
        restricted = self.scores == "restricted"
        states = select_positions(hidden, batch.label_pos)  # [B, M, H]
        logp = log_probabilities(backbone, states, rows if restricted else None)
        columns = where if restricted else rows[where]
        piece_logp = logp[:, jnp.maximum(at, 0), jnp.maximum(columns, 0)]  # [B, C, W, J]
        # Indices of -1 were read at 0, and do not count.
        piece_logp = jnp.where(where >= 0, piece_logp, 0.0)
        num_pieces = (where >= 0).sum(-1)  # [C, W]
        words = piece_logp.sum(-1)  # [B, C, W]
        if self.pieces == "mean":
            words = words / jnp.maximum(num_pieces, 1)
        num_words = (num_pieces > 0).sum(-1)  # [C]
        # A sum of no words is 0, which would be the best log-probability.
        classes = jnp.where(
            num_words > 0, words.sum(-1) / jnp.maximum(num_words, 1), ABSENT
        )  # [B, C]
        if restricted:
            return mask_absent(classes, batch.counts)
        inside = jnp.zeros(logp.shape[2], bool)
        # An index of -1 would mark the last token, so it is moved out of range and dropped.
        inside = inside.at[jnp.where(rows >= 0, rows, logp.shape[2])].set(True, mode="drop")
        outside = jnp.where(inside, -jnp.inf, logp[:, at[0, 0, 0]]).max(-1)  # [B]
        return jnp.concatenate([classes, outside[:, None]], axis=-1)


class AnswerScores(NamedTuple):
    """Scores of the classes as in `LabelWords`, [B, C] or [B, C + 1] each."""

    words: Any  # of their words
    whole: Any  # of their whole answers


class AnswerHead(Scores):
    """Scores classes by their words and by whole answers. [B, T, H] -> Answered"""

    words: nn.Module
    whole: nn.Module

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays of both."""
        return {part: getattr(self, part).arrays() for part in ("words", "whole")}

    def with_arrays(self, arrays: Mapping[str, Any]) -> nn.Module:
        """Returns a copy with other words."""
        heads = {
            part: getattr(self, part).with_arrays(part_arrays)
            for part, part_arrays in arrays.items()
        }
        return self.clone(**heads)

    def __call__(
        self, hidden, batch: Batch, injection, backbone, *, deterministic: bool
    ) -> AnswerScores:
        """Scores the classes twice, with the same log-probabilities."""
        inputs = hidden, batch, injection, backbone
        return AnswerScores(
            *(h(*inputs, deterministic=deterministic) for h in (self.words, self.whole))
        )
