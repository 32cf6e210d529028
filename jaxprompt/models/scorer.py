"""A backbone on disk, and the scorer that turns examples into predictions."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import linen as nn

from jaxprompt.backbones import with_lm_states
from jaxprompt.config.run import BackboneConfig
from jaxprompt.data.batches.batching import Layout, one_batch
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.demos import Demonstrations
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.encoded import Encoded, Split
from jaxprompt.data.text.identity import check_ids
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.verbalizer import Verbalizer
from jaxprompt.data.text.words import text_ids
from jaxprompt.errors import InputError, brief
from jaxprompt.heads import Kind, Labelled, make_text_head
from jaxprompt.layers.quantized import storage_of
from jaxprompt.models.model import Model
from jaxprompt.prompts import Method
from jaxprompt.scoring.answer_pattern import find_answer
from jaxprompt.scoring.metrics import LIKELIHOODS
from jaxprompt.scoring.relations import collect_facts
from jaxprompt.types import Batch


class Backbone(NamedTuple):
    """A pre-trained model on disk: its dimensions, without its weights."""

    config: BackboneConfig
    folder: Path
    family: str
    hf: dict[str, Any]
    module: Any  # a flax module, whose `apply` has no single type
    tokenizer: Tokenizer | None = None  # None = the one in `folder`

    @property
    def storage(self) -> str:
        """How the matrices are stored, see `storage_of`."""
        return storage_of(self.config.quantize, self.folder)


class Scorer(NamedTuple):
    """All that turns an example into a prediction, except the parameters."""

    task: Task
    head: Kind
    template: str
    verbalizer: Verbalizer | None
    encoder: ExampleEncoder
    layout: Layout  # of evaluation batches
    model: Model
    tokenizer: Tokenizer
    demos: Demonstrations | None = None

    @property
    def classes(self) -> int:
        """The number of classes, or of choices if these are the classes."""
        return len(self.task.labels) or self.layout.num_rows

    @property
    def scores_targets(self) -> bool:
        """Whether splits are scored by the likelihood of their target texts."""
        return self.head.WRITES and self.task.metric in LIKELIHOODS

    @property
    def generates(self) -> bool:
        """Whether splits are scored by generated texts."""
        return self.head.WRITES and not self.scores_targets

    def one_batch(
        self, rows: Sequence[Sequence[Encoded]], labels: np.ndarray | None = None
    ) -> Batch:
        """Combines a few encoded examples into one batch; labels are optional."""
        return one_batch(rows, [-1] * len(rows) if labels is None else labels, self.layout)

    def writing(self, tokens: int, reads_chat: bool = False) -> "Scorer":
        """Returns a scorer that generates text; with `reads_chat`, after conversations.

        Raises InputError if the backbone cannot.
        """
        if self.model.backbone.STYLE == "masked":
            raise InputError(
                "the backbone is an encoder, which cannot generate text; use a T5, a GLM, a GPT-2 "
                "or a Llama"
            )
        demos = self.demos and self.demos.single_sample()  # texts have no average
        encoder, layout = self.encoder.with_generation(tokens), self.layout
        if reads_chat:
            encoder, demos = encoder.for_conversations(), None
            layout = layout.with_ends(encoder.turn_ends)
        return self._replace(head=make_text_head(), encoder=encoder, layout=layout, demos=demos)

    def fitted(self, dev: Mapping[str, float]) -> "Scorer":
        """Returns a scorer with the values that the head selected on dev."""
        return self._replace(head=self.head.fitted(dev))

    def with_backbone(self, backbone: "Backbone") -> "Scorer":
        """Returns a scorer with the module of a backbone whose weights were loaded."""
        module = module_for(backbone, self.head)
        return self._replace(model=dataclasses.replace(self.model, backbone=module))

    def with_prompt(self, prompt: Method) -> "Scorer":
        """Returns a scorer with another method of the same slots."""
        return self._replace(model=dataclasses.replace(self.model, prompt=prompt))

    def with_vocabulary_of(self, *trains: Split) -> "Scorer":
        """Returns a scorer whose method knows the words of the training texts of all tasks."""
        ids = np.concatenate([np.unique(text_ids(train.rows)) for train in trains])
        return self.with_prompt(self.model.prompt.with_vocabulary(np.unique(ids)))

    def encode(self, examples: Sequence[Example], *, targets: bool = False) -> Split:
        """Encodes a split; with `targets`, including the texts to learn.

        With demonstrations, each example is encoded once per sample of them. An InputError shows
        the number and the text of the example, unless there is only one, which the caller knows.
        """
        try:
            return self._encode_split(examples, targets)
        except InputError:
            index = self._first_refused(examples, targets)
            try:
                self._encode_split(examples[index : index + 1], targets)
            except InputError as error:
                if len(examples) == 1:
                    raise
                text = next(iter(examples[index].fields.values()), "")
                raise InputError(f"example {index + 1}, {brief(text)}: {error}") from error
            raise

    def _first_refused(self, examples: Sequence[Example], targets: bool) -> int:
        """Returns the index of the first example that cannot be encoded, by bisection."""
        start, end = 0, len(examples)
        while end - start > 1:
            middle = (start + end) // 2
            try:
                self._encode_split(examples[start:middle], targets)
                start = middle
            except InputError:
                end = middle
        return start

    def _encode_split(self, examples: Sequence[Example], targets: bool) -> Split:
        if self.demos is None:
            split = self._encode(self.encoder, examples, targets)
        else:
            count = self.demos.settings.samples
            demos = [demo for samples in self.demos.sample(examples) for demo in samples]
            repeated = [example for example in examples for _ in range(count)]
            split = self._encode(self.encoder.with_demos(demos), repeated, targets)
            # The copies of an example are adjacent, and share its references.
            split = split._replace(references=split.references[::count], samples=count)
        if self.task.kind != "classes" or not self.task.labels:
            return split
        return split._replace(metric_data=collect_facts(self.task, examples))

    def _encode(self, encoder: ExampleEncoder, examples: Sequence[Example], targets: bool) -> Split:
        split = self.head.encode(
            encoder, self.task, examples, classes=self.classes, targets=targets
        )
        check_ids(split.rows, self.model.backbone.dims.vocab, self.tokenizer)
        if self.task.answer_pattern and not targets:
            split = split._replace(references=list(map(self._answers_in, split.references)))
        return split

    def _answers_in(self, references: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the answers in references. Raises InputError for one without an answer."""
        pattern = self.task.answer_pattern
        answers = tuple(find_answer(pattern, text) for text in references)
        if not all(answers):
            raise InputError(
                f"task.answer_pattern={brief(pattern)} finds no answer in the target "
                f"{brief(references[answers.index('')])}; fix the pattern, or remove the example"
            )
        return answers

    def _compared(self, split: Split, outputs: Any) -> tuple[Any, Split]:
        """Returns what metrics compare: one output per example, answers in place of texts."""
        outputs, split = split.average(outputs), split.without_samples()
        if self.task.answer_pattern and isinstance(outputs, list):
            pattern = self.task.answer_pattern
            outputs = [
                tuple(x._replace(text=find_answer(pattern, x.text)) for x in samples)
                for samples in outputs
            ]
        return outputs, split

    def answers(
        self, examples: Sequence[Example], split: Split, outputs: Any
    ) -> Iterator[dict[str, Any]]:
        """Yields the output of each example of a split, by the columns of the head."""
        outputs, split = split.average(outputs), split.without_samples()
        return self.head.answers(self.task, examples, split, outputs, self.classes)

    def measure(self, split: Split, outputs: Any) -> dict[str, float]:
        """Computes the task's metric of the outputs of a split."""
        outputs, split = self._compared(split, outputs)
        return self.head.measure(self.task.metric, split, outputs, self.classes)

    def labelled(self, split: Split, outputs: Any) -> Labelled:
        """Returns what metrics need of the examples with known answers."""
        outputs, split = self._compared(split, outputs)
        labelled = self.head.labelled(split, outputs, self.classes)
        return self.head.count_pairs(self.task.metric, labelled)

    def measure_labelled(self, parts: Sequence[Labelled]) -> tuple[dict[str, float], int]:
        """Computes metrics over the results of `labelled`. -> metrics, the number of examples"""
        return self.head.measure_labelled(self.task.metric, parts)


def module_for(backbone: Backbone, kind: Kind) -> nn.Module:
    """Returns the module that computes the states for a kind of head."""
    return with_lm_states(backbone.module) if kind.READS_WORDS else backbone.module


def with_shared_prefix(scorer: Scorer) -> Scorer:
    """Moves the shared prefix of all rows out of the template: soft tokens, words, special tokens.

    The scorer stays as it is if rows do not see such a prefix separately (encoders), if a method
    computes its tokens from the input, or if the head reads all positions.
    """
    model = scorer.model
    reads_all = any(head.reads_all for head in model.heads.values())
    if (
        not getattr(model.backbone, "supports_shared_prefix", False)
        or model.prompt.reads
        or reads_all
    ):
        return scorer
    front = scorer.encoder.shared_prefix()
    layout = dataclasses.replace(scorer.layout, shared_prefix=front)
    return scorer._replace(layout=layout, model=dataclasses.replace(model, shared_prefix=front))
