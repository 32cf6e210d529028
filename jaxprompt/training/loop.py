"""The training loop of one run, or of several as one program: train, evaluate and save."""

import contextlib
import time
from typing import Any, NamedTuple, Protocol

import jax

from jaxprompt import signals
from jaxprompt.training.log import RunLog
from jaxprompt.types import Tokens

# Steps that the host may dispatch ahead of the device. Their batches stay in device memory, and a
# signal waits for all of them.
_MAX_AHEAD = 8


class StepActions(NamedTuple):
    """What to do after a step."""

    logs: bool
    evaluates: bool
    saves: bool


class Milestones(NamedTuple):
    """How long a run is and when it evaluates and saves, in steps."""

    total: int
    evaluate: int
    save: int

    def actions_after(self, step: int, log_steps: int) -> StepActions:
        """Returns what to do after a step; the last one is always logged and evaluated."""
        last = step == self.total
        evaluates = step % self.evaluate == 0 or last
        saves = self.save > 0 and step % self.save == 0
        return StepActions(step % log_steps == 0 or last, evaluates, saves)


class DispatchedSteps:
    """Step metrics on the device, read only when a step is logged, evaluated or saved.

    Nothing else is read from the device, so that the host prepares the next batches meanwhile.
    """

    def __init__(self) -> None:
        """Starts without any step."""
        self._unread: list[tuple[int, Any, Any]] = []  # step, its streak, skipped steps
        self.finished_step: int | None = None  # newest step known to be done

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds a dispatched step; waits for the step `_MAX_AHEAD` before it."""
        self._unread.append((step, metrics["streak"], metrics["skipped"]))
        jax.block_until_ready(self._unread[-_MAX_AHEAD - 1 : -_MAX_AHEAD])
        recent = self._unread[-_MAX_AHEAD - 1 :]
        self.finished_step = max(
            (number for number, x, _ in recent if x.is_ready()), default=self.finished_step
        )

    def wait(self) -> None:
        """Waits for all dispatched steps."""
        jax.block_until_ready(self._unread)

    def read(
        self, metrics_on_device: dict[str, Any]
    ) -> tuple[list[tuple[int, Any, Any]], dict[str, Any]]:
        """Waits for the newest step. Returns the counts since the last call, and its metrics."""
        counts, metrics = jax.device_get((self._unread, metrics_on_device))
        self.finished_step, self._unread = counts[-1][0], []
        return counts, metrics


class StepBatch(Protocol):
    """Input of a step: a tree of arrays with the tokens of its rows."""

    @property
    def encoder(self) -> Tokens:
        """The input."""


class Runs(Protocol):
    """Interface of what the loop trains: one run, or several as one program."""

    milestones: Milestones
    log_steps: int
    step: int  # the newest that was taken

    def live(self) -> bool:
        """Returns whether any run continues."""

    def next_batch(self) -> Any:
        """Returns the next batch, a StepBatch on the host; several runs stack theirs."""

    def is_new(self, batch: Any) -> bool:
        """Returns whether the step must still be compiled for the shapes of a batch."""

    def take_step(self, batch: Any) -> dict[str, Any]:
        """Takes a step. Returns its metrics, which may not be computed yet."""

    def write(self, metrics: dict[str, Any], taken: tuple[int, float], seconds: float) -> None:
        """Logs the newest step.

        Args:
          metrics: metrics of the step, on the host.
          taken: number of steps since the last record or pause, and their seconds.
          seconds: seconds since the start of the runs.
        """

    def end_broken(self, counts: list[tuple[int, Any, Any]], seconds: float) -> None:
        """Ends runs with too many steps in a row whose loss or gradient was not finite.

        Args:
          counts: (step, streak, skipped) of all steps since the last call.
          seconds: seconds since the start of the runs.
        """

    def evaluate(self, metrics: dict[str, Any], seconds: float) -> bool:
        """Evaluates on dev, and ends finished runs. Returns whether to save new best parameters.

        Args:
          metrics: metrics of the newest step, on the host.
          seconds: seconds since the start of the runs.
        """

    def save(self, seconds: float, *, state: bool, best: bool) -> None:
        """Saves the newest step in the background: `state` to resume from, `best` parameters."""

    def wait_for_saves(self) -> None:
        """Waits until all saves are on disk."""

    def stop_signal(self) -> int:
        """Returns the signal that requests a stop, 0 if there is none."""


def train_loop(runs: Runs, log: RunLog, seconds: float) -> float | None:
    """Trains until every run is done.

    Args:
      runs: runs at the step that they continue from.
      log: log of all runs.
      seconds: seconds that they took before.

    Returns:
      The total seconds. None if a signal stopped the runs, which are then saved.
    """
    milestones, first_step, dispatched = runs.milestones, runs.step, DispatchedSteps()
    start_time = time.monotonic() - seconds

    def elapsed() -> float:
        return time.monotonic() - start_time

    rate_start = runs.step, time.monotonic()  # speed is measured from this step and time
    log.finished_step = lambda: dispatched.finished_step
    while runs.step < milestones.total and runs.live():
        batch = runs.next_batch()
        is_new = runs.is_new(batch)
        # During the first step, which compiles, a stop loses nothing; several processes must agree.
        stops_immediately = runs.step == first_step and jax.process_count() == 1
        with (
            _compiling(log, batch) if is_new else contextlib.nullcontext(),
            signals.immediate() if stops_immediately else contextlib.nullcontext(),
        ):
            metrics_on_device = runs.take_step(batch)
        if is_new:  # the speed leaves out the compilation
            dispatched.wait()
            rate_start = runs.step - 1, time.monotonic()
        dispatched.add(runs.step, metrics_on_device)
        actions = milestones.actions_after(runs.step, runs.log_steps)
        if actions.logs or actions.evaluates or actions.saves:
            (counts, metrics), now = dispatched.read(metrics_on_device), time.monotonic()
            if actions.logs:
                runs.write(
                    metrics, (runs.step - rate_start[0], now - rate_start[1]), now - start_time
                )
                rate_start = runs.step, now
            runs.end_broken(counts, elapsed())
        log.progress(runs.step)
        improves = False
        if actions.evaluates:
            with log.activity(f"evaluating on dev after step {runs.step}"):
                improves = runs.evaluate(metrics, elapsed())
        signal = runs.stop_signal() if runs.live() else 0
        saves_state = actions.saves or (actions.evaluates and not (milestones.save and runs.live()))
        if saves_state or improves or signal:
            runs.save(elapsed(), state=bool(saves_state or signal), best=improves)
        if actions.evaluates or actions.saves:  # the speed leaves out evaluating and saving
            rate_start = runs.step, time.monotonic()
        if signal:
            runs.wait_for_saves()
            saved_message = f"at step {runs.step}; saved, run the same command again to resume"
            signals.log_stopped(log.info, signal, saved_message)
            return None
    return elapsed()


def format_runs(count: int) -> str:
    """Formats a number of runs, e.g. "2 runs"."""
    return "1 run" if count == 1 else f"{count} runs"


def _compiling(log: RunLog, batch: StepBatch) -> contextlib.AbstractContextManager[None]:
    *run_dims, num_rows, width = batch.encoder.ids.shape
    runs = "".join(f"{format_runs(count)} x " for count in run_dims)
    shape = f"{runs}{num_rows} sequences x {width} tokens"
    return log.activity(f"compiling the training step for {shape}")
