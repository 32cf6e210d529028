"""The loop of a run: it trains, looks at dev, keeps the best, saves, and resumes after a cut."""

import abc
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxprompt import signals
from jaxprompt.config.documents import fields_to_plain
from jaxprompt.config.run import TrainConfig
from jaxprompt.errors import InputError
from jaxprompt.parallel import processes, sharding
from jaxprompt.parallel.compilation import jit
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.checkpoint import Checkpoints, abstract
from jaxprompt.training.log import RunLog
from jaxprompt.training.profiling import Profiler, profiled
from jaxprompt.training.progress import Evaluation, Metrics, Progress, write_step
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import tell_broken, with_flags
from jaxprompt.tree import Flat
from jaxprompt.types import Tokens

# Steps that the host may be ahead of the device. Their batches wait in its memory, and a signal
# waits for all of them.
_AHEAD = 8


class Due(NamedTuple):
    """What follows a step."""

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
        """Tells what follows a step; the last one is logged and evaluated in any case."""
        last = step == self.total
        evaluates = step % self.evaluate == 0 or last
        saves = self.save > 0 and step % self.save == 0
        return Due(last, step % log_steps == 0 or last, evaluates, saves)


class LookAhead:
    """What the device has counted of its steps, read where a step is logged, scored or saved.

    Nothing else is read of the device, so that the host makes what the next steps need while these
    run.
    """

    def __init__(self) -> None:
        """Begins without a step."""
        self._unread: list[tuple[int, Any, Any]] = []  # step, its streak, skipped steps
        self.done: int | None = None  # the newest step that the device is known to have ended

    def add(self, step: int, measured: dict[str, Any]) -> None:
        """Takes a step that the device was given; waits for the one _AHEAD before it."""
        self._unread.append((step, measured["streak"], measured["skipped"]))
        jax.block_until_ready(self._unread[-_AHEAD - 1 : -_AHEAD])
        newest = self._unread[-_AHEAD - 1 :]
        self.done = max((number for number, x, _ in newest if x.is_ready()), default=self.done)

    def wait(self) -> None:
        """Waits for all steps taken."""
        jax.block_until_ready(self._unread)

    def read(self, measured: dict[str, Any]) -> tuple[list[tuple[int, Any, Any]], dict[str, Any]]:
        """Waits for the newest step. -> the counts of all since the last call, its metrics"""
        read, found = jax.device_get((self._unread, measured))
        self.done, self._unread = read[-1][0], []
        return read, found


class StepBatch(Protocol):
    """What a step takes: a tree of arrays with the input of its rows."""

    @property
    def encoder(self) -> Tokens:
        """The input."""


class Job(abc.ABC):
    """What a run does. Its attributes are there once it is built and checked."""

    placement: Placement
    # (state, frozen, a batch that `take` gave) -> (state, metrics)
    step: Callable[..., tuple[TrainState, dict[str, Any]]]
    state: TrainState  # before the first step
    frozen: Flat
    batches: Any  # what `take` draws from: get_state, set_state, close
    milestones: Milestones
    settings: TrainConfig
    drops = True  # its model has dropout

    @abc.abstractmethod
    def take(self) -> StepBatch:
        """Gives the next batch, on the host."""

    @abc.abstractmethod
    def measure(self, trainable: Flat) -> dict[str, float]:
        """Scores dev with the numbers that train."""

    @abc.abstractmethod
    def value(self, dev: dict[str, float]) -> float:
        """Picks the number of dev that is to be high."""

    def describe(self, found: Metrics, steps: int, seconds: float) -> Metrics:
        """Makes what is written of a step, see `progress.Describe`."""
        del steps, seconds
        return found


class Ended(NamedTuple):
    """How a run ended."""

    progress: Progress
    best: Evaluation  # that was chosen
    numbers: Flat  # of it
    time: dict[str, float]


class RunState(NamedTuple):
    """Where a run stands."""

    checkpoints: Checkpoints
    state: TrainState
    progress: Progress
    step: int
    seconds: float  # that it took up to there


def drive(
    job: Job, workdir: str, started: int | None, tell: Callable[[RunLog], None]
) -> Ended | None:
    """Takes a job up and follows it to its end. -> how it ended, None where a signal cut it

    `started` is the checkpoint's step, None = from the start; `tell` says to the log what begins.
    """
    stand = take_up(job, workdir)
    with RunLog(
        workdir, tracker=job.settings.tracker, total=job.milestones.total,
        enabled=processes.is_first(),
    ) as log:  # fmt: skip
        log.resume(-1 if started is None else started)
        tell(log)
        steps = job.settings.profile if processes.is_first() else 0
        with (
            signals.held() as heard,
            profiled(workdir, steps, stand.step) as profiler,
            stand.checkpoints.settling(),
        ):
            ended = run(job, stand, log, heard, profiler)
    if ended is not None:
        signals.note("after the last step; it is saved, and the same command completes the run")
        # One that came during the last step, on any process.
        signals.check(max(map(int, processes.gather(str(heard())))))
    return ended


def take_up(job: Job, workdir: str) -> RunState:
    """Goes to the newest checkpoint of a run, or to its start.

    Raises InputError for a checkpoint that is damaged, or of another model.
    """
    checkpoints = Checkpoints(workdir, job.settings.keep)
    state, progress, seconds = job.state, Progress(), 0.0
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
            checkpoints.check_best(progress.best.step)
        job.batches.set_state(position["data"])
    checkpoints.rewind(-1 if started is None else started)
    return RunState(checkpoints, state, progress, started or 0, seconds)


def run(
    job: Job, stand: RunState, log: RunLog, heard: Callable[[], int], profiler: Profiler
) -> Ended | None:
    """Trains from where a run stands to the end.

    `heard` gives the signal that asks for a stop, 0 where none does. Returns None where one ended
    it early; it is saved then. Raises InputError after too many steps in a row that were not
    finite.
    """
    alone, place, plan = jax.process_count() == 1, job.placement, job.milestones
    checkpoints, state, progress, step, seconds = stand
    train_step = jit(
        sharding.within(place, with_flags(job.step)), donate_argnums=0, dropped=job.drops,
        # The state comes back to where it was: else the next step would be another program.
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), *[place.replicated] * 2),
    )  # fmt: skip

    def save() -> None:
        spent = {"seconds": time.monotonic() - clock}
        position = progress.to_json() | {"data": job.batches.get_state()} | spent
        # A signal's line names the step once it is complete, which is some steps later.
        on_complete = functools.partial(signals.note, saved_at(step))
        checkpoints.save(step, state, position, on_complete)

    def save_now() -> None:
        save()
        checkpoints.settle()

    clock, seen = time.monotonic() - seconds, set()  # with the time of the processes before
    since = step, time.monotonic()  # what a rate counts from
    ahead = LookAhead()
    read: list[tuple[int, int, int]] = []  # step, its streak, skipped steps
    log.done = lambda: ahead.done
    stop, before, flags = 0, None, sharding.put_flag(place, 0)
    while step < plan.total and not progress.done:
        batch = job.take()
        leaves, form = jax.tree.flatten(batch)
        shapes = (form, *map(np.shape, leaves))
        # jit compiles one program per shape, and per task where there are several.
        if is_new := shapes not in seen:
            seen.add(shapes)
            shape = batch.encoder.ids.shape
            log.say(f"compiling the step for {shape[0]} sequences x {shape[1]} tokens")
        if not alone:
            # Each process gives what it heard, and the step itself takes the highest of all.
            flags = sharding.put_flag(place, heard())
        profiler.before(step)
        batch = sharding.put_batch(place, batch)
        # Nothing is lost before the first step, which compiles; of several processes all must stop.
        with signals.at_once() if alone and step == stand.step else contextlib.nullcontext():
            state, measured, raised = train_step(state, job.frozen, batch, flags)
        step += 1
        for line in profiler.after(step, state, last=step == plan.total):
            log.say(line)
        if step == 1:
            signals.note("before the first checkpoint; nothing was saved")
        if is_new:  # it runs from now on, once those before it are done
            ahead.wait()
            since = step - 1, time.monotonic()
        if not alone:
            # A preemption leaves seconds, so this cannot wait for the log. One step late, while the
            # next one runs; on every process the flags of one step, so that all stop at one step.
            stop, before = 0 if before is None else int(before), raised
        ahead.add(step, measured)
        due = plan.due(step, job.settings.log_steps)
        if due.logs or due.evaluates or due.saves:
            (read, found), now = ahead.read(measured), time.monotonic()
            if due.logs:
                taken = step - since[0], now - since[1]
                write_step(log, step, found, job.describe, taken, now - clock)
                since = step, now
            # Of the last step dev is scored first: the same command then completes the run.
            if not due.last:
                _stop_if_broken(read, job.settings.max_streak, save_now)
        log.progress(step)
        if due.evaluates:
            dev = job.measure(state.trainable)
            log.write(step, dev=dev, time={"seconds": time.monotonic() - clock})
            value = job.value(dev)
            if progress.note_dev(step, value, dev, last=due.last, patience=job.settings.patience):
                # Before any state of this step is saved, so that each has the best of its time.
                assert progress.best is not None
                checkpoints.save_best(step, state.trainable, fields_to_plain(progress.best))
            if progress.done or not plan.save:
                save()
            # A rate leaves out what evaluating and saving take.
            since = step, time.monotonic()
        if due.saves:
            save()
            since = step, time.monotonic()
        number = heard() if alone else stop
        if number and not progress.done:
            save_now()
            log.say(signals.stopped(number, f"at step {step}; saved, the same command resumes"))
            return None
    _stop_if_broken(read, job.settings.max_streak, save_now)
    job.batches.close()
    checkpoints.settle()
    progress.steps, progress.skipped = step, int(state.skipped)
    # From disk: what is in memory is of the last step.
    if progress.best is None:
        raise RuntimeError("the run ended before its first evaluation")
    numbers, saved = checkpoints.restore_best(state.trainable, progress.best.step)
    best = Evaluation(**saved)
    spent = {"seconds": time.monotonic() - clock, "compilations": len(seen)}
    return Ended(progress, best, numbers, spent)


def saved_at(step: int | None) -> str:
    """Says of a run that a signal ends what it saved; None where it has no checkpoint."""
    if step is None:
        return "before the first step; nothing was saved"
    return f"with step {step} saved; the same command resumes"


def _stop_if_broken(
    read: list[tuple[int, int, int]], limit: int, save_now: Callable[[], None]
) -> None:
    """Stops where a streak of steps that were not finite reached the limit, also one that ended."""
    step, streak, skipped = max(read, key=lambda one: one[1], default=(0, 0, 0))
    if streak < limit:
        return
    save_now()
    said = tell_broken(int(streak), step, int(skipped))
    raise InputError(f"{said}. The last good state is saved")
