"""Classes of texts, computed from a method's injection; the backbone is not run.

A topic classifier, whose word vectors and encoder initialise the prompts of other tasks (Jiang et
al. 2022, section 4.2 and appendix A.3).
"""

import dataclasses

from flax import linen as nn

from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.heads import BackboneInfo, HeadLayout, Kind, TaskSetup
from jaxprompt.layers.instance import mean_prompt_vector
from jaxprompt.layers.reading import Scores, score_layer
from jaxprompt.scoring.losses import make_loss
from jaxprompt.types import Batch, Injection, Objective


@dataclasses.dataclass(frozen=True)
class Head(Kind):
    """Scores classes by a linear layer on the mean of a text's prompt vectors."""

    PRETRAINS = True

    def check_task(self, task: Task) -> None:
        """Raises InputError for a task with choices."""
        super().check_task(task)
        if task.choices:
            raise InputError(
                f"head.name={self.name} needs classes, but task {task.name} has choices; use "
                "head.name=linear, or a task with labels"
            )

    def check_method(self, name: str, reads: tuple[str, ...]) -> None:
        """Raises InputError for a method whose prompt is the same for every text."""
        if not reads:
            raise InputError(
                f"head.name={self.name} needs a prompt that is computed from the text, but that of "
                f"prompt.name={name} is not; use prompt.name=ipt"
            )

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Prepares this head for a task."""
        specials = self.specials(facts, setup, tokenizer)
        return HeadLayout(self, {"main": Topics(len(setup.task.labels))}, specials)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the cross entropy of the classes."""
        return [Objective("main", make_loss("restricted", smoothing))]


class Topics(Scores):
    """Scores topics from the mean of an injection's vectors. -> float32 [B, C]

    See `mean_prompt_vector`.
    """

    classes: int

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection: Injection, backbone, *, deterministic):
        """Scores topics; the compiler removes `hidden` and `backbone`, which are unused."""
        return score_layer(self.classes)(mean_prompt_vector(injection))
