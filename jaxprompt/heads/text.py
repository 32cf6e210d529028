"""Free text, written by the backbone's own language-model head."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.encode import Answer, ExampleEncoder
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.heads import BackboneFacts, HeadLayout, Kind, TaskSetup
from jaxprompt.layers.reading import TargetScores
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import free_text
from jaxprompt.types import Objective


@dataclasses.dataclass(frozen=True)
class Head(Kind):
    """A text of up to data.max_target tokens."""

    OF: ClassVar[str] = "texts"
    WRITES: ClassVar[bool] = True
    COLUMNS: ClassVar[tuple[str, ...]] = ("generated",)

    def check_backbone(self, facts: BackboneFacts) -> None:
        """Raises InputError for a backbone that does not write."""
        if facts.style == "masked":
            raise InputError(
                f"head.name={self.name} needs a backbone that writes, {facts.where} is a "
                f"{facts.family}; take a T5, a GLM, a GPT-2 or a Llama"
            )

    def layout_of(self, task: Task, style: str, form: str) -> str:
        """Picks the task's layout for a text-to-text model."""
        return task.text

    def lay_out(self, facts: BackboneFacts, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads every token of the target where it is predicted."""
        specials = self.specials(facts, setup, tokenizer)
        return HeadLayout(self, {"main": TargetScores()}, specials, Answer(text=setup.max_target))

    def encode(
        self, encoder: ExampleEncoder, task: Task, examples: Sequence[Example], *, classes: int,
        targets: bool,
    ) -> Split:  # fmt: skip
        """Encodes examples, with their targets where these are to be learned."""
        unknown, counts = np.full(len(examples), -1, np.int32), np.full(len(examples), classes)
        rows = encoder.encode_all(examples, targets=targets)
        return Split(rows, unknown, counts.astype(np.int32), [e.references for e in examples])

    def made_up(self, task: Task, text: str, max_target: int) -> Example:
        """Makes up an example whose target is as long as can be."""
        return Example(dict.fromkeys(task.fields, text), target="a " * (max_target - 1))

    def objectives(self, smoothing: float) -> list[Objective]:
        """Makes the mean over all tokens that are written."""
        if smoothing:
            raise InputError(f"optim.smoothing={smoothing} is for classes; set it to 0")
        return [Objective("main", free_text)]

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Says nothing: every text is its own."""
        return []

    def check_found(self, found: Any) -> None:
        """Raises nothing: a text is a text."""

    def measure(
        self, metric: str, split: Split, found: Sequence[str], classes: int
    ) -> dict[str, float]:
        """Compares texts with their references."""
        return metrics.score_texts(metric, split.references, found)

    def measure_known(
        self, metric: str, split: Split, found: Sequence[str], classes: int
    ) -> tuple[dict[str, float], int]:
        """Compares those texts that have a reference."""
        known = [(own, text) for own, text in zip(split.references, found, strict=True) if own]
        if not known:
            return {}, 0
        return metrics.score_texts(metric, *zip(*known, strict=True)), len(known)

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, found: Sequence[str],
        classes: int,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Yields the texts."""
        return ({"generated": text} for text in found)
