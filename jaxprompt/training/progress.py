"""Progress of a run and its best evaluation, for single runs and grids."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

from jaxprompt.training.log import RunLog
from jaxprompt.training.optim import shown_lr

Metrics = dict[str, Any]  # of a step: numbers, arrays, texts, and dicts of them
# (metrics of a step, steps since the last record or pause, their seconds) -> what is written
DescribeStep = Callable[[Metrics, int, float], Metrics]


def score_key(value: float) -> float:
    """Returns a sort key for scores; NaN is lowest."""
    return -math.inf if math.isnan(value) else value


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores of a step. Those of the best step are saved with its parameters, as JSON."""

    step: int
    value: float  # to maximise
    dev: Mapping[str, float]


@dataclasses.dataclass
class Progress:
    """Progress of a run, saved with a checkpoint as JSON."""

    best: Evaluation | None = None
    since: int = 0  # evaluations without improvement
    done: bool = False
    error: str = ""  # why it ended early
    steps: int = 0  # when it ended
    skipped: int = 0  # steps that were not finite, when it ended

    @classmethod
    def from_json(cls, position: dict) -> Self:
        """Makes a Progress from a saved position, which may have more fields."""
        fields = {field.name: position[field.name] for field in dataclasses.fields(cls)}
        best = fields.pop("best")
        return cls(None if best is None else Evaluation(**best), **fields)

    def to_json(self) -> dict[str, object]:
        """Returns the fields as a dict."""
        return dataclasses.asdict(self)

    def note_dev(
        self, step: int, value: float, dev: Mapping[str, float], *, last: bool, patience: int
    ) -> bool:
        """Adds an evaluation. Returns whether it is better than the best one; a tie is not.

        The run is done after its last step, or after `patience` evaluations without improvement
        (0 = never).
        """
        # Strictly better: the earliest of equal evaluations stays, however long the run is.
        improves = self.best is None or score_key(value) > score_key(self.best.value)
        if improves:
            self.best, self.since = Evaluation(step, value, dev), 0
        else:
            self.since += 1
        self.done = last or 0 < patience <= self.since
        return improves


def log_step(
    log: RunLog,
    step: int,
    metrics: Metrics,
    describe: DescribeStep,
    elapsed: tuple[int, float],
    seconds: float,
) -> None:
    """Writes the metrics of a step to a run's log.

    `elapsed` is the number of steps since the last record or pause, and their seconds.
    """
    metrics["lr"] = shown_lr(metrics["lr"])
    record = describe(metrics, *elapsed)
    time = {"seconds": seconds} | record.pop("time", {})
    log.write(step, **record, time=time)
