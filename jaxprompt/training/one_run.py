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
from jaxprompt.training.checkpoint import Checkpoints, abstract_leaf
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.log import RunLog
from jaxprompt.training.loop import Milestones, StepBatch
from jaxprompt.training.optim import Constants
from jaxprompt.training.profiling import Profiler
from jaxprompt.training.progress import DescribeStep, Evaluation, Metrics, Progress, log_step
from jaxprompt.training.run_folder import Record
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import nonfinite_message, with_flags
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
    next_batch: Callable[[], Any]  # returns a StepBatch on the host
    describe: DescribeStep = lambda metrics, *_: metrics


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prepared(Generic[Record]):
    """The loaded and checked inputs of a run. Its directory is not changed yet."""

    placement: Placement
    steps_per_epoch: int
    milestones: Milestones
    settings: TrainConfig
    record: Record
    constants: Constants = dataclasses.field(default_factory=dict)  # of the schedule

    def without_weights(self) -> Self:
        """Returns a copy without the weights that its job has copied, to free memory."""
        return self


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What a run trains, and how it is evaluated."""

    # (state, frozen, batch, constants of the schedule) -> (state, metrics)
    step: Callable[..., tuple[TrainState, Metrics]]
    state: TrainState  # before the first step
    frozen: Flat
    feed: Callable[[], Feed]
    measure: Callable[[Flat], dict[str, float]]  # trainable parameters -> dev scores
    metric: str  # the dev score that selects the best step
    value: Callable[[dict[str, float]], float]  # dev scores -> the value to maximise
    has_dropout: bool = True
    # Fills the feature cache after the first log lines; takes a function that logs a line.
    fill_cache: Callable[[Callable[[str], None]], None] = lambda log: None


class TrainOutcome(NamedTuple):
    """The outcome of a run."""

    progress: Progress
    best: Evaluation
    trainable: Flat  # at the best evaluation
    time: dict[str, float]


class RunState(NamedTuple):
    """The state that a run starts or resumes from."""

    feed: Feed
    state: TrainState
    progress: Progress
    step: int
    seconds: float  # of training so far


class OneRun:
    """A run that trains; `loop.train_loop` calls its methods."""

    def __init__(
        self,
        prepared: Prepared,
        job: Job,
        run_state: RunState,
        checkpoints: CheckpointWriter,
        log: RunLog,
        profiler: Profiler,
        stop_signal: Callable[[], int],
    ):
        """Starts at `run_state`; `stop_signal` returns the signal that requests a stop."""
        self.milestones, self.log_steps = prepared.milestones, prepared.settings.log_steps
        self._feed, self.state, self.progress, self.step, _ = run_state
        self._job, self._checkpoints, self._log, self._profiler = job, checkpoints, log, profiler
        self._stop_signal = stop_signal
        self._placement = prepared.placement
        self._patience = prepared.settings.patience
        self._max_nonfinite_steps = prepared.settings.max_nonfinite_steps
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        self._train_step = jit(
            sharding.with_placement(self._placement, with_flags(job.step)),
            donate_argnums=0,
            has_dropout=job.has_dropout,
            # The sharding of the state stays the same, so that the step is compiled only once.
            out_shardings=(shardings, self._placement.replicated, self._placement.replicated),
        )
        self._shapes: set[tuple] = set()  # of the batches so far
        self._is_single_process = jax.process_count() == 1
        replicated = dict.fromkeys(prepared.constants, self._placement.replicated)
        self._constants = sharding.put_global(prepared.constants, replicated)
        self._flags = sharding.put_flag(self._placement, 0)
        self._newest_signal: jax.Array | None = None  # of all processes, from the newest step
        self._signal = 0  # of all processes, from the step before it
        self._last_counts: list[tuple[int, int, int]] = []  # of the last steps, not yet checked

    def live(self) -> bool:
        """Returns whether the run continues."""
        return not self.progress.done

    def next_batch(self) -> StepBatch:
        """Returns the next batch, on the host."""
        return self._feed.next_batch()

    def is_new(self, batch: StepBatch) -> bool:
        """Returns whether this is the first batch with these shapes and this task."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = (structure, *map(np.shape, leaves))
        is_new = shapes not in self._shapes
        self._shapes.add(shapes)
        return is_new

    def take_step(self, batch: StepBatch) -> dict[str, Any]:
        """Takes a step. Returns its metrics, which may not be computed yet."""
        job = self._job
        if not self._is_single_process:
            # The step returns the maximum of the signals that the processes have received.
            self._flags = sharding.put_flag(self._placement, self._stop_signal())
        self._profiler.before(self.step)
        self.state, metrics, signal = self._train_step(
            self.state,
            job.frozen,
            sharding.put_batch(self._placement, batch),
            self._flags,
            self._constants,
        )
        self.step += 1
        is_last = self.step == self.milestones.total
        for line in self._profiler.after(self.step, self.state, last=is_last):
            self._log.info(line)
        if self.step == 1:
            signals.note("before the first checkpoint; nothing was saved")
        if not self._is_single_process:
            # A preemption leaves seconds, so the signal is read in every step, not with the log:
            # one step late, while the next one runs. All processes stop at the same step.
            self._signal = 0 if self._newest_signal is None else int(self._newest_signal)
            self._newest_signal = signal
        return metrics

    def write(self, metrics: Metrics, taken: tuple[int, float], seconds: float) -> None:
        """Logs the newest step."""
        log_step(self._log, self.step, metrics, self._feed.describe, taken, seconds)

    def end_broken(self, counts: list[tuple[int, int, int]], seconds: float) -> None:
        """Saves and raises InputError after too many non-finite steps in a row.

        After the last step dev is evaluated first, so that the same command completes the run.
        """
        if self.step == self.milestones.total:
            self._last_counts = counts
        elif self._is_broken(counts):
            self.save(seconds, state=True, best=False)
            self.wait_for_saves()
            self._raise_broken(counts)

    def evaluate(self, metrics: Metrics, seconds: float) -> bool:
        """Evaluates on dev. Returns whether the result is better than before."""
        job, step = self._job, self.step
        dev = job.measure(self.state.trainable)
        self._log.write(step, dev=dev, time={"seconds": seconds})
        improves = self.progress.note_dev(
            step, job.value(dev), dev, last=step == self.milestones.total, patience=self._patience
        )
        remark = "best" if improves else ""
        self._log.evaluated(step, float(metrics["loss"]), job.metric, dev[job.metric], remark)
        return improves

    def save(self, seconds: float, *, state: bool, best: bool) -> None:
        """Saves the newest step in the background: its state, its parameters as the best ones."""
        position = self.progress.to_json() | {
            "data": self._feed.batches.get_state(),
            "seconds": seconds,
        }
        # The message after a signal names this step once its save is complete.
        on_complete = functools.partial(signals.note, saved_message(self.step))
        self._checkpoints.save(
            self.step,
            position,
            state=self.state if state else None,
            best=self.state.trainable if best else None,
            on_complete=on_complete,
        )

    def wait_for_saves(self) -> None:
        """Waits until all saves are on disk."""
        self._checkpoints.wait_for_saves()

    def stop_signal(self) -> int:
        """Returns the signal that requests a stop, 0 if there is none."""
        return self._stop_signal() if self._is_single_process else self._signal

    def end(self, seconds: float) -> TrainOutcome:
        """Restores the best parameters. Raises InputError as `end_broken` does."""
        self.wait_for_saves()
        if self._is_broken(self._last_counts):
            self._raise_broken(self._last_counts)
        progress = self.progress
        progress.steps, progress.skipped = self.step, int(self.state.skipped)
        assert progress.best is not None  # dev is evaluated after the last step
        # From disk: memory has the parameters of the last step.
        saved = self._checkpoints.saved
        trainable, best = saved.restore_best(self.state.trainable, progress.best.step)
        time = {"seconds": seconds, "step_programs": len(self._shapes)}
        return TrainOutcome(progress, Evaluation(**best), trainable, time)

    def _is_broken(self, counts: list[tuple[int, int, int]]) -> bool:
        return max((streak for _, streak, _ in counts), default=0) >= self._max_nonfinite_steps

    def _raise_broken(self, counts: list[tuple[int, int, int]]) -> None:
        step, streak, skipped = max(counts, key=lambda count: count[1])
        message = nonfinite_message(int(streak), step, int(skipped))
        raise InputError(f"{message}. The last finite state is saved")


def train_job(
    prepared: Prepared,
    job: Job,
    log: RunLog,
    workdir: str,
    checkpoint_step: int | None,
    lines: Iterable[str],
) -> TrainOutcome | None:
    """Trains a job from its newest checkpoint to its end. Returns None if a signal stopped it.

    `checkpoint_step` is None without a checkpoint; `lines` are logged at the start.
    """
    settings, feed = prepared.settings, job.feed()
    run_state = restore_run_state(job.state, feed, workdir)
    checkpoints = CheckpointWriter(
        workdir, -1 if checkpoint_step is None else checkpoint_step, settings.keep
    )
    log.resume(-1 if checkpoint_step is None else checkpoint_step)
    for line in lines:
        log.info(line)
    job.fill_cache(log.info)
    trace_steps = settings.profile if processes.is_first() else 0
    with (
        signals.deferred() as stop_signal,
        contextlib.closing(Profiler(workdir, trace_steps, run_state.step)) as profiler,
        contextlib.closing(feed.batches),
        checkpoints,
    ):
        run = OneRun(prepared, job, run_state, checkpoints, log, profiler, stop_signal)
        seconds = loop.train_loop(run, log, run_state.seconds)
        outcome = None if seconds is None else run.end(seconds)
    if outcome is not None:
        signals.note("after the last step; saved, run the same command again to finish")
        # A signal during the last step, on any process.
        signals.stop_on_signal(max(map(int, processes.gather_texts(str(stop_signal())))))
    return outcome


def restore_run_state(state: TrainState, feed: Feed, workdir: str) -> RunState:
    """Restores the newest checkpoint of a run; without one the run starts from `state`.

    Raises InputError for a checkpoint that is damaged or of another model.
    """
    checkpoints = Checkpoints(workdir)
    progress, seconds = Progress(), 0.0
    checkpoint_step = checkpoints.latest()
    if checkpoint_step is not None:
        # Only the shapes are kept: the initial state would stay in memory beside the restored one.
        shapes = jax.tree.map(abstract_leaf, state)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        state, position = checkpoints.restore(shapes)
        progress, seconds = Progress.from_json(position), position.get("seconds", 0.0)
        if progress.best is not None:
            # Checked at the start, not when the run is done and needs it.
            checkpoints.find_best(progress.best.step)
        feed.batches.set_state(position["data"])
    return RunState(feed, state, progress, checkpoint_step or 0, seconds)


def saved_message(step: int | None) -> str:
    """Returns what a stopped run has saved, for the log; None = it has no checkpoint."""
    if step is None:
        return "before the first step; nothing was saved"
    return f"with step {step} saved; run the same command again to resume"
