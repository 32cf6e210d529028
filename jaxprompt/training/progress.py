"""How far a run is and how well it does: the same for a run alone and for one of many."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

from jaxprompt.config.documents import fields_to_plain
from jaxprompt.training.log import RunLog
from jaxprompt.training.optim import shown_rate

Metrics = dict[str, Any]  # of a step: numbers, arrays, texts, and dicts of them
# (metrics of a step, steps since the last record or pause, their seconds) -> what is written
Describe = Callable[[Metrics, int, float], Metrics]


def rank(value: float) -> float:
    """Orders what is to be high: NaN is below all else."""
    return -math.inf if math.isnan(value) else value


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores of a step. Those of the best one are saved with its parameters, as JSON."""

    step: int
    value: float  # that is to be high
    dev: Mapping[str, float]


@dataclasses.dataclass
class Progress:
    """Where a run stands. All of it is saved with a checkpoint, as JSON."""

    best: Evaluation | None = None
    since: int = 0  # evaluations without gain
    done: bool = False
    error: str = ""  # why it ended early
    steps: int = 0  # when it ended
    skipped: int = 0  # steps that were not finite, when it ended

    @classmethod
    def from_json(cls, saved: dict) -> Self:
        """Makes it of a saved position, which may have more fields."""
        fields = {field.name: saved[field.name] for field in dataclasses.fields(cls)}
        best = fields.pop("best")
        return cls(None if best is None else Evaluation(**best), **fields)

    def to_json(self) -> dict[str, object]:
        """Returns the values by field."""
        return fields_to_plain(self)

    def note_dev(
        self, step: int, value: float, dev: Mapping[str, float], *, last: bool, patience: int
    ) -> bool:
        """Compares an evaluation with the best one. -> whether it is better; a tie is not

        The run is done at its last step, or after `patience` evaluations without gain (0 = never).
        """
        # Strictly better: of equal evaluations the earliest stands, so a longer run changes
        # nothing.
        better = self.best is None or rank(value) > rank(self.best.value)
        if better:
            self.best, self.since = Evaluation(step, value, dev), 0
        else:
            self.since += 1
        self.done = last or 0 < patience <= self.since
        return better


def write_step(
    log: RunLog, step: int, found: Metrics, describe: Describe, taken: tuple[int, float],
    seconds: float,
) -> None:  # fmt: skip
    """Writes the metrics of a step to a run's log.

    `taken` are the steps since the last record or pause, and their seconds.
    """
    found["lr"] = shown_rate(found["lr"])
    said = describe(found, *taken)
    spent = {"seconds": seconds} | said.pop("time", {})
    log.write(step, **said, time=spent)
