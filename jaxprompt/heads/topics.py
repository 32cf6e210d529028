"""Classes of texts, read off what a method computes from them; the backbone is not run.

A topic classifier, whose rows of words and whose encoder then start the prompts of other tasks
(Jiang et al. 2022, section 4.2 and appendix A.3).
"""

import dataclasses

from flax import linen as nn

from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.heads import BackboneFacts, HeadLayout, Kind, TaskSetup
from jaxprompt.layers.instance import mean_vectors
from jaxprompt.layers.reading import Scores
from jaxprompt.scoring.losses import make_loss
from jaxprompt.types import Batch, Injection, Objective


@dataclasses.dataclass(frozen=True)
class Head(Kind):
    """Classes by a linear layer on the mean of the vectors that a text's prompt consists of."""

    PRETRAINS = True

    def check_task(self, task: Task) -> None:
        """Raises InputError for a task whose classes are choices."""
        super().check_task(task)
        if task.choices:
            raise InputError(
                f"head.name={self.name} gives texts topics, and task {task.name} has choices; take "
                "head.name=linear, or a task with labels"
            )

    def check_method(self, name: str, reads: tuple[str, ...]) -> None:
        """Raises InputError for a method whose prompt is the same for every text."""
        if not reads:
            raise InputError(
                f"head.name={self.name} reads a prompt that is computed from the text, and that of "
                f"prompt.name={name} is not; take prompt.name=ipt"
            )

    def lay_out(self, facts: BackboneFacts, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Lays itself out for a task."""
        specials = self.specials(facts, setup, tokenizer)
        return HeadLayout(self, {"main": Topics(len(setup.task.labels))}, specials)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Makes the cross entropy of the classes."""
        return [Objective("main", make_loss("restricted", smoothing))]


class Topics(Scores):
    """Scores topics from the vectors of an injection. -> float32 [B, C]

    It reads their mean, see `mean_vectors`.
    """

    classes: int

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection: Injection, backbone, *, deterministic):
        """Scores them; `hidden` and `backbone` are not read, so the compiler leaves them out."""
        mean = mean_vectors(injection)  # [B, X]
        init = nn.initializers.normal(0.02)
        return nn.Dense(self.classes, kernel_init=init, name="out")(mean)
