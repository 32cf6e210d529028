"""The training loop of one run, or of several as one program: train, evaluate and save."""

import contextlib
import time
from typing import Any, NamedTuple, Protocol

import jax

from jaxprompt import signals
from jaxprompt.training.log import RunLog
from jaxprompt.types import Tokens

# Steps that the host may be ahead of the device. Their batches wait in its memory, and a signal
# waits for all of them.
_AHEAD = 8


class Due(NamedTuple):
    """What to do after a step."""

    last: bool
    logs: bool
    evaluates: bool
    saves: bool


class Milestones(NamedTuple):
    """How long a run is and when it evaluates and saves, in steps."""

    total: int
    evaluate: int
    save: int

    def due(self, step: int, log_steps: int) -> Due:
        """Returns what to do after a step; the last one is always logged and evaluated."""
        last = step == self.total
        evaluates = step % self.evaluate == 0 or last
        saves = self.save > 0 and step % self.save == 0
        return Due(last, step % log_steps == 0 or last, evaluates, saves)


class LookAhead:
    """Step metrics on the device, read only when a step is logged, evaluated or saved.

    Nothing else is read from the device, so that the host prepares the next batches meanwhile.
    """

    def __init__(self) -> None:
        """Starts without any step."""
        self._unread: list[tuple[int, Any, Any]] = []  # step, its streak, skipped steps
        self.done: int | None = None  # the newest step that the device is known to have ended

    def add(self, step: int, measured: dict[str, Any]) -> None:
        """Adds a dispatched step; waits for the step _AHEAD before it."""
        self._unread.append((step, measured["streak"], measured["skipped"]))
        jax.block_until_ready(self._unread[-_AHEAD - 1 : -_AHEAD])
        newest = self._unread[-_AHEAD - 1 :]
        self.done = max((number for number, x, _ in newest if x.is_ready()), default=self.done)

    def wait(self) -> None:
        """Waits for all dispatched steps."""
        jax.block_until_ready(self._unread)

    def read(self, measured: dict[str, Any]) -> tuple[list[tuple[int, Any, Any]], dict[str, Any]]:
        """Waits for the newest step. Returns the counts since the last call, and its metrics."""
        counts, metrics = jax.device_get((self._unread, measured))
        self.done, self._unread = counts[-1][0], []
        return counts, metrics


class StepBatch(Protocol):
    """Input of a step: a tree of arrays with the tokens of its rows."""

    @property
    def encoder(self) -> Tokens:
        """The input."""


class Runs(Protocol):
    """Interface of what the loop trains: one run, or several as one program."""

    plan: Milestones
    log_steps: int
    step: int  # the newest that was taken

    def live(self) -> bool:
        """Returns whether any run continues."""

    def take(self) -> Any:
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

    def evaluate(self, seconds: float) -> bool:
        """Evaluates on dev, and ends finished runs. Returns whether to save new best parameters."""

    def save(self, seconds: float, *, state: bool, best: bool) -> None:
        """Saves the newest step in the background: `state` to resume from, `best` parameters."""

    def settle(self) -> None:
        """Waits until all saves are on disk."""

    def stop_signal(self) -> int:
        """Returns the signal that requests a stop, 0 if there is none."""


def train(runs: Runs, log: RunLog, seconds: float) -> float | None:
    """Trains until every run is done.

    Args:
      runs: runs at the step that they continue from.
      log: log of all runs.
      seconds: seconds that they took before.

    Returns:
      The total seconds. None if a signal stopped the runs, which are then saved.
    """
    plan, first, ahead = runs.plan, runs.step, LookAhead()
    clock = time.monotonic() - seconds
    elapsed = lambda: time.monotonic() - clock
    pause = runs.step, time.monotonic()  # what a rate counts from
    log.done = lambda: ahead.done
    while runs.step < plan.total and runs.live():
        batch = runs.take()
        is_new = runs.is_new(batch)
        if is_new:
            log.say(f"compiling the training step for {_shape_of(batch)}")
        # Nothing is lost before the first step, which compiles; of several processes all must stop.
        stops_at_once = runs.step == first and jax.process_count() == 1
        with signals.immediate() if stops_at_once else contextlib.nullcontext():
            measured = runs.take_step(batch)
        if is_new:  # it runs from now on, once those before it are done
            ahead.wait()
            pause = runs.step - 1, time.monotonic()
        ahead.add(runs.step, measured)
        due = plan.due(runs.step, runs.log_steps)
        if due.logs or due.evaluates or due.saves:
            (counts, metrics), now = ahead.read(measured), time.monotonic()
            if due.logs:
                runs.write(metrics, (runs.step - pause[0], now - pause[1]), now - clock)
                pause = runs.step, now
            runs.end_broken(counts, elapsed())
        log.progress(runs.step)
        improves = due.evaluates and runs.evaluate(elapsed())
        number = runs.stop_signal() if runs.live() else 0
        saves_here = due.saves or (due.evaluates and not (plan.save and runs.live()))
        if saves_here or improves or number:
            runs.save(elapsed(), state=bool(saves_here or number), best=improves)
        if due.evaluates or due.saves:  # a rate leaves out what these take
            pause = runs.step, time.monotonic()
        if number:
            runs.settle()
            saved = f"at step {runs.step}; saved, run the same command again to resume"
            log.say(signals.stop_message(number, saved))
            return None
    return elapsed()


def count_runs(count: int) -> str:
    """Formats a number of runs, e.g. "2 runs"."""
    return "1 run" if count == 1 else f"{count} runs"


def _shape_of(batch: StepBatch) -> str:
    *several, rows, width = batch.encoder.ids.shape
    runs = "".join(f"{count_runs(count)} x " for count in several)
    return f"{runs}{rows} sequences x {width} tokens"
