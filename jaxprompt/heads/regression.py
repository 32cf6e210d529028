"""A number from a linear layer on a pooled hidden state, as for STS-B (Wang et al. 2018, GLUE)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.heads import BackboneInfo, HeadLayout, Labelled, TaskSetup, linear
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import squared_error
from jaxprompt.types import Objective


@dataclasses.dataclass(frozen=True)
class Head(linear.Head):
    """Predicts a number, in the unit of the data, by least squares."""

    OF: ClassVar[str] = "numbers"
    COLUMNS: ClassVar[tuple[str, ...]] = ("prediction",)

    def check_template(self, template: Template) -> None:
        """Raises InputError for a template with {choice}."""
        if template.uses_choice:
            raise InputError(
                f"template {template.source!r} has {{choice}}, but a regression task has no "
                "choices; remove it"
            )

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads the same state as head.name=linear."""
        head, module = self.classifier(facts, 1)
        return HeadLayout(head, {"main": module}, self.specials(facts, setup, tokenizer))

    def encode(
        self,
        encoder: ExampleEncoder,
        task: Task,
        examples: Sequence[Example],
        *,
        classes: int,
        targets: bool,
    ) -> Split:
        """Encodes examples with their numbers."""
        # Any number may be right, so NaN means unknown.
        numbers = [np.nan if example.number is None else example.number for example in examples]
        counts = np.ones(len(examples), np.int32)
        rows = encoder.encode_all(examples)
        return Split(rows, np.array(numbers, np.float32), counts, [()] * len(examples))

    def longest_example(self, task: Task, text: str, max_target: int) -> Example:
        """Returns an example whose fields have the maximum length."""
        return task.example(text)._replace(number=0.0)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the squared error. Raises InputError for label smoothing, which needs classes."""
        if smoothing:
            raise InputError(
                f"optim.label_smoothing={smoothing} is only valid with classes, which "
                "head.name=regression does not have; set it to 0"
            )
        return [Objective("main", squared_error)]

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Describes how many numbers there are, and their range."""
        return [
            f"{task.number} in {name}: {len(split.labels):,} numbers, {split.labels.min():g} to "
            f"{split.labels.max():g}, mean {split.labels.mean():.4g}"
            for name, split in splits.items()
        ]

    def measure(self, metric: str, split: Split, outputs: Any, classes: int) -> dict[str, float]:
        """Correlates predictions and labels."""
        return metrics.score_numbers(metric, split.labels, np.asarray(outputs)[:, 0])

    def labelled(self, split: Split, outputs: Any, classes: int) -> Labelled:
        """Returns the right and the predicted numbers of the examples with a known one."""
        is_known = ~np.isnan(split.labels)
        return Labelled(split.labels[is_known], np.asarray(outputs)[is_known, 0])

    def compare(self, metric: str, labelled: Labelled) -> dict[str, float]:
        """Correlates predictions and labels."""
        return metrics.score_numbers(metric, labelled.gold, labelled.pred)

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, outputs: Any, classes: int
    ) -> Iterator[dict[str, Any]]:
        """Yields each number, within the task's limits."""
        for (number,) in np.asarray(outputs):
            low, high = task.limits or (-np.inf, np.inf)
            yield {"prediction": float(min(max(number, low), high))}
