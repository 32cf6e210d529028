"""How far a run is and how well it does: the same for a run alone and for one of many."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxprompt.training.log import RunLog
from jaxprompt.training.optim import shown_rate

# (metrics of a step, steps since the last record or pause, their seconds) -> what is written
Describe = Callable[[dict[str, Any], int, float], dict[str, Any]]


def rank(value: float) -> float:
    """Orders what is to be high: NaN is below all else."""
    return -math.inf if math.isnan(value) else value


@dataclasses.dataclass
class Progress:
    """Where a run stands. All of it is saved with a checkpoint, as JSON."""

    best: dict[str, Any] | None = None  # step, value, dev
    since: int = 0  # evaluations without gain
    done: bool = False
    error: str = ""  # why it ended early
    steps: int = 0  # when it ended
    skipped: int = 0  # steps that were not finite, when it ended

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "Progress":
        """Takes the fields of it out of a saved position."""
        return cls(**{field.name: saved[field.name] for field in dataclasses.fields(cls)})

    def note_dev(
        self, step: int, value: float, dev: Mapping[str, float], *, last: bool, patience: int
    ) -> bool:
        """Compares an evaluation with the best one. -> whether it is better; a tie is not

        The run is done at its last step, or after `patience` evaluations without gain (0 = never).
        """
        # Strictly better: of equal evaluations the earliest stands, so a longer run changes
        # nothing.
        better = self.best is None or rank(value) > rank(self.best["value"])
        if better:
            self.best, self.since = {"step": step, "value": value, "dev": dev}, 0
        else:
            self.since += 1
        self.done = last or 0 < patience <= self.since
        return better

    def result(
        self, about: Mapping[str, Any], *, trained: int, total: int, scored: str,
        test: Mapping[str, float] | None = None, time: Mapping[str, float],
    ) -> dict[str, Any]:  # fmt: skip
        """Makes the result of a run that is done.

        `trained` and `total` are numbers of parameters; `scored` is what the result calls the
        scores that it was chosen by.
        """
        result = {
            **about,
            "trained": trained,
            "total": total,
            "steps": self.steps,
            "skipped": self.skipped,
            "best_step": self.best["step"],
            scored: self.best["dev"],
        }
        if test is not None:
            result["test"] = test
        return result | {"time": time}


def write_step(
    log: RunLog, step: int, found: dict[str, Any], describe: Describe,
    taken: tuple[int, float], seconds: float,
) -> None:  # fmt: skip
    """Writes the metrics of a step to a run's log.

    `taken` are the steps since the last record or pause, and their seconds.
    """
    found["lr"] = shown_rate(found["lr"])
    said = describe(found, *taken)
    spent = {"seconds": seconds} | said.pop("time", {})
    log.write(step, **said, time=spent)
