"""One training run, from its newest checkpoint to its best parameters."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, Self

import jax
import numpy as np

from jaxprompt import signals
from jaxprompt.config.run import TrainConfig
from jaxprompt.errors import InputError
from jaxprompt.parallel import processes, sharding
from jaxprompt.parallel.compilation import jit
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training import loop
from jaxprompt.training.checkpoint import Checkpoints, abstract
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.log import RunLog
from jaxprompt.training.loop import Milestones, StepBatch
from jaxprompt.training.profiling import Profiler, profiled
from jaxprompt.training.progress import Describe, Evaluation, Metrics, Progress, write_step
from jaxprompt.training.run_folder import Record
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import tell_broken, with_flags
from jaxprompt.tree import Flat


class Batches(Protocol):
    """Batches that can continue from a saved position."""

    def get_state(self) -> Mapping[str, object]:
        """Returns the position, to be saved as JSON."""

    def set_state(self, state: Mapping[str, object]) -> None:
        """Restores a saved position."""

    def close(self) -> None:
        """Stops prefetching."""


class Feed(NamedTuple):
    """The training batches of a run, and how to describe its steps in the log."""

    batches: Batches
    take: Callable[[], Any]  # returns the next of them, a StepBatch on the host
    describe: Describe = lambda metrics, *_: metrics


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prepared(Generic[Record]):
    """The loaded and checked inputs of a run. Its directory is not changed yet."""

    placement: Placement
    steps_per_epoch: int
    milestones: Milestones
    settings: TrainConfig
    record: Record

    def without_weights(self) -> Self:
        """Returns a copy without the weights that its job has copied, to free memory."""
        return self


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What a run trains, and how it is evaluated."""

    step: Callable[..., tuple[TrainState, Metrics]]  # (state, frozen, batch) -> (state, metrics)
    state: TrainState  # before the first step
    frozen: Flat
    feed: Callable[[], Feed]
    measure: Callable[[Flat], dict[str, float]]  # what trains -> the scores of dev
    value: Callable[[dict[str, float]], float]  # scores of dev -> the one that is to be high
    drops: bool = True  # the model has dropout
    # Computes, behind the lines of the start, what does not change while the run trains.
    fill: Callable[[Callable[[str], None]], None] = lambda say: None


class Ended(NamedTuple):
    """The outcome of a run."""

    progress: Progress
    best: Evaluation  # that was chosen
    numbers: Flat  # of it
    time: dict[str, float]


class Start(NamedTuple):
    """The state that a run starts or resumes from."""

    feed: Feed
    state: TrainState
    progress: Progress
    step: int
    seconds: float  # that it took up to there


class OneRun:
    """A run that trains; `loop.train` calls its methods."""

    def __init__(
        self, prepared: Prepared, job: Job, start: Start, checkpoints: CheckpointWriter,
        log: RunLog, profiler: Profiler, stop_signal: Callable[[], int],
    ):  # fmt: skip
        """Starts at `start`; `stop_signal` returns the signal that requests a stop."""
        self.plan, self.log_steps = prepared.milestones, prepared.settings.log_steps
        self._feed, self.state, self.progress, self.step, _ = start
        self._job, self._checkpoints, self._log, self._profiler = job, checkpoints, log, profiler
        self._stop_signal = stop_signal
        self._place = prepared.placement
        self._patience, self._max_nonfinite_steps = (
            prepared.settings.patience,
            prepared.settings.max_nonfinite_steps,
        )
        where = jax.tree.map(lambda x: x.sharding, self.state)
        self._train_step = jit(
            sharding.within(self._place, with_flags(job.step)),
            donate_argnums=0,
            dropped=job.drops,
            # The state comes back to where it was: else the next step would be another program.
            out_shardings=(where, self._place.replicated, self._place.replicated),
        )
        self._shapes: set[tuple] = set()  # of the batches so far
        self._is_alone = jax.process_count() == 1
        self._flags = sharding.put_flag(self._place, 0)
        self._raised: jax.Array | None = None  # the signal that the newest step says
        self._stop = 0  # the signal that the step before says
        self._unchecked: list[tuple[int, int, int]] = []  # counts of the last steps

    def live(self) -> bool:
        """Returns whether the run continues."""
        return not self.progress.done

    def take(self) -> StepBatch:
        """Returns the next batch, on the host."""
        return self._feed.take()

    def is_new(self, batch: StepBatch) -> bool:
        """Returns whether this is the first batch with these shapes and this task."""
        leaves, form = jax.tree.flatten(batch)
        shapes = (form, *map(np.shape, leaves))
        is_new = shapes not in self._shapes
        self._shapes.add(shapes)
        return is_new

    def take_step(self, batch: StepBatch) -> dict[str, Any]:
        """Takes a step. Returns its metrics, which may not be computed yet."""
        job = self._job
        if not self._is_alone:
            # Each process gives the signal that it received, and the step takes the highest of all.
            self._flags = sharding.put_flag(self._place, self._stop_signal())
        self._profiler.before(self.step)
        placed = sharding.put_batch(self._place, batch)
        self.state, measured, raised = self._train_step(self.state, job.frozen, placed, self._flags)
        self.step += 1
        is_last = self.step == self.plan.total
        for line in self._profiler.after(self.step, self.state, last=is_last):
            self._log.say(line)
        if self.step == 1:
            signals.note("before the first checkpoint; nothing was saved")
        if not self._is_alone:
            # A preemption leaves seconds, so this cannot wait for the log. One step late, while the
            # next one runs; on every process the flags of one step, so that all stop at one step.
            self._stop = 0 if self._raised is None else int(self._raised)
            self._raised = raised
        return measured

    def write(self, metrics: Metrics, taken: tuple[int, float], seconds: float) -> None:
        """Logs the newest step."""
        write_step(self._log, self.step, metrics, self._feed.describe, taken, seconds)

    def end_broken(self, counts: list[tuple[int, int, int]], seconds: float) -> None:
        """Saves and raises InputError after too many non-finite steps in a row.

        After the last step dev is evaluated first, so that the same command completes the run.
        """
        if self.step == self.plan.total:
            self._unchecked = counts
        elif self._is_broken(counts):
            self.save(seconds, state=True, best=False)
            self.settle()
            self._raise_broken(counts)

    def evaluate(self, seconds: float) -> bool:
        """Evaluates on dev. Returns whether the result is better than before."""
        job, step = self._job, self.step
        dev = job.measure(self.state.trainable)
        self._log.write(step, dev=dev, time={"seconds": seconds})
        return self.progress.note_dev(
            step, job.value(dev), dev, last=step == self.plan.total, patience=self._patience
        )

    def save(self, seconds: float, *, state: bool, best: bool) -> None:
        """Saves the newest step in the background: its state, its parameters as the best ones."""
        position = self.progress.to_json() | {
            "data": self._feed.batches.get_state(),
            "seconds": seconds,
        }
        # A signal's line names the step once it is complete, which is some steps later.
        on_complete = functools.partial(signals.note, saved_at(self.step))
        self._checkpoints.save(
            self.step, position, state=self.state if state else None,
            best=self.state.trainable if best else None, on_complete=on_complete,
        )  # fmt: skip

    def settle(self) -> None:
        """Waits until all saves are on disk."""
        self._checkpoints.settle()

    def stop_signal(self) -> int:
        """Returns the signal that requests a stop, 0 if there is none."""
        return self._stop_signal() if self._is_alone else self._stop

    def end(self, seconds: float) -> Ended:
        """Restores the best parameters. Raises InputError as `end_broken` does."""
        self.settle()
        if self._is_broken(self._unchecked):
            self._raise_broken(self._unchecked)
        progress = self.progress
        progress.steps, progress.skipped = self.step, int(self.state.skipped)
        if progress.best is None:
            raise RuntimeError("the run ended before its first evaluation")
        # From disk: what is in memory is of the last step.
        saved = self._checkpoints.saved
        numbers, best = saved.restore_best(self.state.trainable, progress.best.step)
        time = {"seconds": seconds, "compilations": len(self._shapes)}
        return Ended(progress, Evaluation(**best), numbers, time)

    def _is_broken(self, counts: list[tuple[int, int, int]]) -> bool:
        return max((streak for _, streak, _ in counts), default=0) >= self._max_nonfinite_steps

    def _raise_broken(self, counts: list[tuple[int, int, int]]) -> None:
        step, streak, skipped = max(counts, key=lambda one: one[1])
        message = tell_broken(int(streak), step, int(skipped))
        raise InputError(f"{message}. The last finite state is saved")


def drive(
    prepared: Prepared, job: Job, workdir: str, started: int | None, lines: Iterable[str]
) -> Ended | None:
    """Trains a job from its newest checkpoint to its end. Returns None if a signal stopped it.

    `started` is the step of the checkpoint, None without one; `lines` are logged at the start.
    """
    settings, feed = prepared.settings, job.feed()
    start = take_up(job.state, feed, workdir)
    checkpoints = CheckpointWriter(workdir, -1 if started is None else started, settings.keep)
    with RunLog(
        workdir, tracker=settings.tracker, total=prepared.milestones.total,
        enabled=processes.is_first(),
    ) as log:  # fmt: skip
        log.resume(-1 if started is None else started)
        for line in lines:
            log.say(line)
        job.fill(log.say)
        traced = settings.profile if processes.is_first() else 0
        with (
            signals.deferred() as stop_signal,
            profiled(workdir, traced, start.step) as profiler,
            contextlib.closing(feed.batches),
            checkpoints,
        ):
            run = OneRun(prepared, job, start, checkpoints, log, profiler, stop_signal)
            seconds = loop.train(run, log, start.seconds)
            ended = None if seconds is None else run.end(seconds)
    if ended is not None:
        signals.note("after the last step; saved, run the same command again to finish")
        # One that came during the last step, on any process.
        signals.stop_on_signal(max(map(int, processes.gather(str(stop_signal())))))
    return ended


def take_up(state: TrainState, feed: Feed, workdir: str) -> Start:
    """Restores the newest checkpoint of a run; without one the run starts from `state`.

    Raises InputError for a checkpoint that is damaged or of another model.
    """
    checkpoints = Checkpoints(workdir)
    progress, seconds = Progress(), 0.0
    started = checkpoints.latest()
    if started is not None:
        # By its shapes: the initial state would stay in memory beside what is read.
        shapes = jax.tree.map(abstract, state)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        state, position = checkpoints.restore(shapes)
        progress, seconds = Progress.from_json(position), position.get("seconds", 0.0)
        if progress.best is not None:
            # Checked at the start: at the end it would be too late to say that the best is lost.
            checkpoints.find_best(progress.best.step, state=started)
        feed.batches.set_state(position["data"])
    return Start(feed, state, progress, started or 0, seconds)


def saved_at(step: int | None) -> str:
    """Returns what a stopped run has saved, for the log; None = it has no checkpoint."""
    if step is None:
        return "before the first step; nothing was saved"
    return f"with step {step} saved; run the same command again to resume"
