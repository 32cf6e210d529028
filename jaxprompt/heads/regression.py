"""A number by a linear layer on a pooled hidden state, as of STS-B (Wang et al. 2018, GLUE)."""

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
from jaxprompt.heads import BackboneFacts, HeadLayout, TaskSetup, linear
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import squared_error
from jaxprompt.types import Objective


@dataclasses.dataclass(frozen=True)
class Head(linear.Head):
    """A number, in the data's own unit, by least squares."""

    OF: ClassVar[str] = "numbers"
    COLUMNS: ClassVar[tuple[str, ...]] = ("prediction",)

    def check_template(self, template: Template) -> None:
        """Raises InputError for a template with a choice, of which a number is none."""
        if template.uses_choice:
            raise InputError(
                f"template {template.source!r} has {{choice}}, and a regression task has none; "
                "take it out"
            )

    def lay_out(self, facts: BackboneFacts, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads what head.name=linear reads."""
        head, module = self.classifier(facts, 1)
        return HeadLayout(head, {"main": module}, self.specials(facts, setup, tokenizer))

    def encode(
        self, encoder: ExampleEncoder, task: Task, examples: Sequence[Example], *, classes: int,
        targets: bool,
    ) -> Split:  # fmt: skip
        """Encodes examples with their numbers."""
        del classes, targets
        # Every number may be a right one, so NaN says that none is known.
        known = [np.nan if example.number is None else example.number for example in examples]
        counts = np.ones(len(examples), np.int32)
        rows = encoder.encode_all(examples)
        return Split(rows, np.array(known, np.float32), counts, [()] * len(examples))

    def made_up(self, task: Task, text: str, max_target: int) -> Example:
        """Makes up an example whose fields are as long as can be."""
        del max_target
        return task.example(text)._replace(number=0.0)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Makes the squared error. Raises InputError for a smoothing: it is of classes."""
        if smoothing:
            raise InputError(
                f"optim.smoothing={smoothing} is for classes, and head.name=regression has none; "
                "set it to 0"
            )
        return [Objective("main", squared_error)]

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Says how many numbers there are, and between which they lie."""
        return [
            f"{task.number} in {name}: {len(split.labels):,} numbers, {split.labels.min():g} to "
            f"{split.labels.max():g}, mean {split.labels.mean():.4g}"
            for name, split in splits.items()
        ]

    def measure(self, metric: str, split: Split, found: Any, classes: int) -> dict[str, float]:
        """Correlates what was found with what is right."""
        return metrics.score_numbers(metric, split.labels, np.asarray(found)[:, 0])

    def measure_known(
        self, metric: str, split: Split, found: Any, classes: int
    ) -> tuple[dict[str, float], int]:
        """Correlates the numbers of the examples whose right number is known."""
        known = ~np.isnan(split.labels)
        if not known.any():
            return {}, 0
        part = split._replace(labels=split.labels[known])
        return self.measure(metric, part, np.asarray(found)[known], classes), int(known.sum())

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, found: Any, classes: int
    ) -> Iterator[dict[str, Any]]:
        """Yields each number, within the task's limits."""
        for (number,) in np.asarray(found):
            least, most = task.limits or (-np.inf, np.inf)
            yield {"prediction": float(min(max(number, least), most))}
