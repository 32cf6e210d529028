"""result.json: scores, steps and time of a run."""

import dataclasses
from collections.abc import Mapping

from jaxprompt.config.documents import Document

Scores = Mapping[str, float]  # by metric, first the one that selects the best step


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult(Document):
    """Result of a finished run. It has `dev`, or `held_out` for a run on a corpus."""

    FIX = "delete it and train again"

    task: str | None = None  # of a run that pre-trains a prompt
    objective: str | None = None  # of one that continues a backbone's pre-training
    method: str | None = None
    seed: int | None = None
    tasks: tuple[str, ...] | None = None  # that share a prompt
    trained: int | None = None  # parameters; None where nothing was trained
    total: int | None = None  # parameters
    steps: int | None = None
    skipped: int | None = None  # steps that were not finite
    best_step: int
    dev: Scores | None = None  # at the best step, as all scores are
    held_out: Scores | None = None
    test: Scores | None = None
    # Seconds, and step_programs: the programs of the training step, one per shape of a batch.
    time: Scores = dataclasses.field(default_factory=dict)

    @property
    def selection(self) -> Scores:
        """The scores by which the best step was chosen; empty if there was no choice."""
        return self.dev or self.held_out or {}
