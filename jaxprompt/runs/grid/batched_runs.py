"""Trains runs of equal shapes as one program, from their first step to their results."""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxprompt import signals, tree
from jaxprompt.config.run import CHANGEABLE_FIELDS
from jaxprompt.data.batches.stacking import stack_batches
from jaxprompt.errors import InputError
from jaxprompt.files import write_atomic
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.group import GroupInputs, Member, same_batches
from jaxprompt.training import loop
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_folders import checkpoint_folder, rewind
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.log import RunLog
from jaxprompt.training.loop import format_runs
from jaxprompt.training.one_run import Feed
from jaxprompt.training.progress import Evaluation, Metrics, Progress, log_step, score_key
from jaxprompt.training.run_folder import (
    FAILURE,
    bind_workdir,
    lock_workdir,
    write_record,
    write_result,
)
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import nonfinite_message
from jaxprompt.tree import Flat
from jaxprompt.types import Batch

MIN_STEPS_SAVED = 500  # steps of one run that must be saved for another compilation to pay


class Chunk(NamedTuple):
    """Runs of equal shapes, and the programs that they train in."""

    shared: GroupInputs
    members: Sequence[Member]
    programs: Programs
    per_run: Sequence[PerRun]  # by member, what differs between runs and does not train


class GroupStart(NamedTuple):
    """The state that a chunk starts or resumes from."""

    feeds: Sequence[Feed]  # by member
    state: TrainState  # leaves [R, ...]
    best: Flat  # the best parameters of each run [R, ...]
    rows: list[int]  # the member of each row of the state
    progress: list[Progress]  # by member
    step: int
    seconds: float  # training time up to there


def train_chunk(
    chunk: Chunk,
    workdir: str | os.PathLike,
    log: RunLog,
    init_states: list[TrainState] | None,
    seconds: float,
    stop_signal: Callable[[], int],
) -> bool:
    """Trains a chunk and writes its results.

    Args:
      chunk: the runs.
      workdir: directory of the grid, which has the checkpoints of one chunk.
      log: log of the whole grid.
      init_states: the initial states; the list is emptied, so that the arrays are freed once they
        are stacked. None to resume from the newest checkpoint.
      seconds: seconds that the chunk took so far, if it starts.
      stop_signal: returns the signal that requests a stop, 0 if there is none.

    Returns:
      Whether the chunk has finished. If a signal stopped it, it is saved.
    """
    members, programs = chunk.members, chunk.programs
    with ExitStack() as exits:
        feeds = [member.feed() for member in members]
        for feed in feeds:
            exits.callback(feed.batches.close)
        if init_states is None:
            start = _restore(chunk, Checkpoints(workdir), feeds)
        else:
            state = programs.stack(init_states)
            init_states.clear()
            # A copy: the state is donated to each step.
            best = jax.tree.map(lambda x: x.copy(), state.trainable)
            rows, progress = list(range(len(members))), [Progress() for _ in members]
            start = GroupStart(feeds, state, best, rows, progress, 0, seconds)
            del state, best
        last_step, logs = (-1 if init_states is not None else start.step), []
        for member in members:
            exits.enter_context(lock_workdir(member.run.folder))
            bind_workdir(member.run.folder, member.run.config.to_dict(), CHANGEABLE_FIELDS)
            write_record(member.run.folder, member.record)
            # Steps after the checkpoint are repeated, so their best parameters are removed.
            rewind(checkpoint_folder(member.run.folder), last_step, keep=1)
            tracker = chunk.shared.config.train.tracker
            logs.append(exits.enter_context(RunLog(member.run.folder, tracker=tracker)))
            logs[-1].resume(last_step)
        checkpoints = CheckpointWriter(workdir, last_step)
        runs = BatchedRuns(chunk, start, checkpoints, logs, log, stop_signal)
        seconds_before = start.seconds
        del start  # its arrays are donated or replaced
        with signals.deferred(), checkpoints:
            train_seconds = loop.train_loop(runs, log, seconds_before)
        if train_seconds is None:
            return False
        signals.stop_on_signal(stop_signal())  # a signal during the last step
        runs.end(train_seconds)
    return True


def _restore(chunk: Chunk, checkpoints: Checkpoints, feeds: Sequence[Feed]) -> GroupStart:
    """Restores the newest checkpoint of a chunk; its batches continue from there."""
    position, step = checkpoints.position(), checkpoints.latest()
    assert step is not None  # whose position that is
    names = [member.run.name for member in chunk.members]
    member_indices = [names.index(name) for name in position["rows"]]
    (state, best), _ = checkpoints.restore(chunk.programs.template(len(member_indices)))
    for index, batch_position in zip(member_indices, position["data"], strict=True):
        feeds[index].batches.set_state(batch_position)
    progress = [Progress.from_json(position["runs"][name]) for name in names]
    for member, run_progress in zip(chunk.members, progress, strict=True):
        if run_progress.done and not run_progress.error:
            _check_best(member.run.folder, _best_of(run_progress).step, checkpoints)
    return GroupStart(feeds, state, best, member_indices, progress, step, position["seconds"])


def _check_best(run: Path, step: int, checkpoints: Checkpoints) -> None:
    """Raises InputError if a run of the chunk has ended and its best parameters are lost."""
    try:
        Checkpoints(run).find_best(step)
    except InputError as error:
        raise InputError(
            f"{str(error).partition('; ')[0]}; delete {run} and {checkpoints.folder} to train the "
            "runs that are not finished from the start"
        ) from error


class BatchedRuns:
    """A chunk of runs being trained; `loop.train_loop` calls its methods.

    A row of the state is a run; finished runs train along without effect.
    """

    def __init__(
        self,
        chunk: Chunk,
        start: GroupStart,
        checkpoints: CheckpointWriter,
        logs: Sequence[RunLog],
        log: RunLog,
        stop_signal: Callable[[], int],
    ):
        """Starts the runs at `start`.

        `logs` are those of the members, `checkpoints` and `log` those of the grid; `stop_signal`
        returns the signal that requests a stop.
        """
        self.shared, self.members, self.programs, self.per_run = chunk
        self.settings = self.shared.config.train
        self.milestones, self.log_steps = self.members[0].plan, self.settings.log_steps
        self.feeds, self.state, self.best, self.rows = start[:4]
        self.progress, self.step = start.progress, start.step
        self.per_row = self.programs.put_per_run([self.per_run[i] for i in self.rows])
        self.scorer = self.shared.make_scorer(self.shared, self.members, self.programs)
        self.checkpoints, self.logs, self.log = checkpoints, logs, log
        self._stop_signal = stop_signal

    # -- the loop ----------------------------------------------------------------------------------

    def live(self) -> bool:
        """Returns whether any run continues."""
        return bool(self._live())

    def _live(self) -> list[int]:
        """Returns the rows whose run continues."""
        return [row for row, i in enumerate(self.rows) if not self.progress[i].done]

    def next_batch(self) -> Batch:
        """Returns the next batch of every run, arrays [R, ...]; see `Programs.put_batch`."""
        batches = [self.feeds[i].next_batch() for i in self.rows]
        layout = self.members[0].scorer.layout
        members = [self.members[i] for i in self.rows]
        if not (members[0].has_cache and same_batches(members)):
            batches = [m.add_cached(batch) for m, batch in zip(members, batches, strict=True)]
            return stack_batches(batches, layout.pad_id, layout.side)
        # Read and transferred only once, because states are larger than the rest of a batch.
        shared_batch = members[0].add_cached(batches[0])
        copies = [shared_batch._replace(cached=None)] * len(batches)
        stacked = stack_batches(copies, layout.pad_id, layout.side)
        return stacked._replace(cached=shared_batch.cached)

    def is_new(self, batch: Batch) -> bool:
        """Returns whether the step must still be compiled for the shapes of a batch."""
        return self.programs.is_new(batch)

    def take_step(self, batch: Batch) -> Metrics:
        """Takes a step of every run. Returns their metrics [R], which may not be computed yet."""
        sharded_batch = self.programs.put_batch(batch, len(self.rows))
        self.state, metrics = self.programs.train(self.state, sharded_batch, self.per_row)
        self.step += 1
        return metrics

    def write(self, metrics: Metrics, step_time: tuple[int, float], seconds: float) -> None:
        """Logs the newest step of the runs that continue."""
        live = self._live()
        for row in live:
            row_metrics = jax.tree.map(lambda values, row=row: values[row], metrics)
            log, feed = self.logs[self.rows[row]], self.feeds[self.rows[row]]
            log_step(log, self.step, row_metrics, feed.describe, step_time, seconds)

    def end_broken(
        self, counts: Sequence[tuple[int, np.ndarray, np.ndarray]], seconds: float
    ) -> None:
        """Ends runs with too many non-finite steps in a row; the others continue.

        `counts` has the step, the streaks [R] and the skipped steps [R] of all steps since the last
        call.
        """
        del seconds
        for row in self._live():
            step, streak, skipped = max(
                ((step, int(streaks[row]), int(skipped[row])) for step, streaks, skipped in counts),
                key=lambda count: count[1],
            )
            if streak >= self.settings.max_nonfinite_steps:
                name = self.members[self.rows[row]].run.name
                error = nonfinite_message(streak, step, skipped)
                self._end_run(row, error)
                self.log.info(f"{name}: {error}")

    def _end_run(self, row: int, error: str = "") -> None:
        progress = self.progress[self.rows[row]]
        progress.done, progress.error, progress.steps = True, error, self.step
        progress.skipped = int(self.state.skipped[row])
        if progress.best is not None:
            # Saved before the run is removed from the state.
            params = self.programs.select_run(self.best, row)
            step, folder = progress.best.step, self.members[self.rows[row]].run.folder
            # A run that ended before a kill ends and saves again after a resume.
            with CheckpointWriter(folder, step - 1) as checkpoints:
                checkpoints.save(step, progress.to_json(), best=params)

    def evaluate(self, metrics: Metrics, seconds: float) -> bool:
        """Evaluates every run on dev, and ends finished runs. Best parameters are in the state."""
        live = self._live()
        scores = self.scorer.score("dev", self.rows, self.state.trainable, self.per_row)
        is_better, values = np.zeros(len(self.rows), bool), {}  # value to maximise, by row
        for row in live:
            progress, dev = self.progress[self.rows[row]], scores[row]
            if isinstance(dev, InputError):
                self._end_run(row, str(dev))
                self.log.info(f"{self.members[self.rows[row]].run.name}: {dev}")
                continue
            self.logs[self.rows[row]].write(self.step, dev=dev, time={"seconds": seconds})
            values[row] = self.scorer.value(dev)
            # Finished rows train along with the others, so their best must not be replaced.
            is_better[row] = progress.note_dev(
                self.step,
                values[row],
                dev,
                last=self.step == self.milestones.total,
                patience=self.settings.patience,
            )
        if values:
            row = max(values, key=lambda row: score_key(values[row]))
            metric, name = self.scorer.metric, self.members[self.rows[row]].run.name
            remark = f"best of {len(values)} running: {name}"
            loss = float(metrics["loss"][row])
            self.log.evaluated(self.step, loss, metric, scores[row][metric], remark)
        if is_better.any():
            self.best = self.programs.update_best(self.best, self.state.trainable, is_better)
        # Only now, so that a run that ends saves its newest best parameters.
        for row in live:
            progress = self.progress[self.rows[row]]
            if progress.done and not progress.error:
                self._end_run(row)
        self._regroup()
        return False

    def _regroup(self) -> None:
        """Removes finished runs once a smaller program fits the rest."""
        live, total = self._live(), len(self.members)
        # Runs sharded over the data axis stay so; otherwise gradients would be sent over it.
        is_apart = self.programs.is_apart(len(self.rows))
        sizes = [size for size in program_sizes(total) if self.programs.is_apart(size) >= is_apart]
        size = min((size for size in sizes if size >= len(live)), default=len(self.rows))
        steps_saved = (len(self.rows) - size) * (self.milestones.total - self.step)
        # A smaller program must save more steps of single runs than its compilation costs.
        if not live or steps_saved <= 0 or steps_saved < MIN_STEPS_SAVED:
            return
        finished = [row for row in range(len(self.rows)) if row not in live]
        # If the program has more rows than runs continue, finished runs fill them.
        kept_rows = sorted(live + finished[: size - len(live)])
        self.state, self.best = self.programs.take(self.state, self.best, kept_rows)
        self.rows = [self.rows[row] for row in kept_rows]
        self.per_row = self.programs.put_per_run([self.per_run[i] for i in self.rows])
        self.log.info(f"{len(live)} of {total} runs continue, {size} at once")

    def save(self, seconds: float, *, state: bool, best: bool) -> None:
        """Saves the newest step of all runs and their best parameters in the background."""
        assert state and not best
        names = [member.run.name for member in self.members]
        position = {
            "runs": {
                name: progress.to_json()
                for name, progress in zip(names, self.progress, strict=True)
            },
            "rows": [names[i] for i in self.rows],
            "data": [self.feeds[i].batches.get_state() for i in self.rows],
            "seconds": seconds,
        }
        message = (
            f"with step {self.step} of {len(names)} runs saved; run the same command again to "
            "resume"
        )
        self.checkpoints.save(
            self.step,
            position,
            state=(self.state, self.best),
            on_complete=functools.partial(signals.note, message),
        )

    def wait_for_saves(self) -> None:
        """Waits until all saves are on disk."""
        self.checkpoints.wait_for_saves()

    def stop_signal(self) -> int:
        """Returns the signal that requests a stop, 0 if there is none."""
        return self._stop_signal()

    # -- the results -------------------------------------------------------------------------------

    def end(self, seconds: float) -> None:
        """Evaluates the best parameters of every run on test, and writes the results."""
        completed = [i for i, progress in enumerate(self.progress) if not progress.error]
        for i in set(range(len(self.members))) - set(completed):
            self._write_error(i, self.progress[i].error)
        # Their memory is needed to score the best parameters of all runs.
        del self.state, self.best
        if not completed:
            return
        template = self.programs.one_trainable()
        bests = {i: _best_of(self.progress[i]) for i in completed}
        tests: Sequence[dict[str, float] | InputError | None] = [None] * len(completed)
        if self.settings.test and self.scorer.has("test"):
            best_params = [
                Checkpoints(self.members[i].run.folder).restore_best(template, best.step)[0]
                for i, best in bests.items()
            ]
            with self.log.activity(f"evaluating {format_runs(len(completed))} on test"):
                tests = self.scorer.score(
                    "test",
                    completed,
                    self.programs.stack_trainable(best_params),
                    self.programs.put_per_run([self.per_run[i] for i in completed]),
                    devs=[best.dev for best in bests.values()],
                )
        share = seconds / len(self.members)  # one run's share of the total time
        for i, test in zip(completed, tests, strict=True):
            if isinstance(test, InputError):
                self._write_error(i, str(test))
            else:
                write_result(self.members[i].run.folder, self._result(i, bests[i], test, share))

    def _result(
        self, index: int, best: Evaluation, test: dict[str, float] | None, seconds: float
    ) -> RunResult:
        config, progress = self.members[index].run.config, self.progress[index]
        trained = tree.count(self.programs.one_trainable())
        frozen = tree.count(self.programs.frozen) + tree.count(self.per_run[0].frozen)
        pretrains = self.shared.pretrains
        return RunResult(
            task=config.ppt.task or None,
            method=config.prompt.name,
            seed=config.seed,
            trained=trained,
            total=trained + frozen,
            steps=progress.steps,
            skipped=progress.skipped,
            best_step=best.step,
            dev=None if pretrains else best.dev,
            held_out=best.dev if pretrains else None,
            test=test,
            time={"seconds": seconds, "step_programs": len(self.programs.compiled)},
        )

    def _write_error(self, index: int, error: str) -> None:
        write_atomic(self.members[index].run.folder / FAILURE, error + "\n")


def _best_of(progress: Progress) -> Evaluation:
    assert progress.best is not None  # a run without an error ends at an evaluation
    return progress.best


def program_sizes(total: int) -> list[int]:
    """Returns the numbers of runs that programs are compiled for: all, half of them, ... 1."""
    sizes = [total]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes
