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
from jaxprompt.data.batches.stacking import stack
from jaxprompt.errors import InputError
from jaxprompt.files import write_atomic
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.group import Member, Shared, same_batches
from jaxprompt.training import loop
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_folders import folder_of, rewind
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.log import RunLog
from jaxprompt.training.one_run import Feed
from jaxprompt.training.progress import Evaluation, Metrics, Progress, write_step
from jaxprompt.training.run_folder import guard_workdir, lock, write_record, write_result
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import tell_broken
from jaxprompt.tree import Flat
from jaxprompt.types import Batch

WORTH = 500  # steps of one run that must be saved for another compilation to pay


class Chunk(NamedTuple):
    """Runs of equal shapes, and the programs that they train in."""

    shared: Shared
    members: Sequence[Member]
    programs: Programs
    per_run: Sequence[PerRun]  # by member, what differs between runs and does not train


class GroupStart(NamedTuple):
    """The state that a chunk starts or resumes from."""

    feeds: Sequence[Feed]  # by member
    state: TrainState  # leaves [R, ...]
    best: Flat  # what each run trained, at its best [R, ...]
    rows: list[int]  # the member of each row of the state
    progress: list[Progress]  # by member
    step: int
    seconds: float  # that it took up to there


def train(
    chunk: Chunk, workdir: str | os.PathLike, log: RunLog, first: list[TrainState] | None,
    seconds: float, stop_signal: Callable[[], int],
) -> bool:  # fmt: skip
    """Trains a chunk and writes its results.

    Args:
      chunk: the runs.
      workdir: directory of the grid, which has the checkpoints of one chunk.
      log: log of the whole grid.
      first: the initial states; the list is emptied, so that the arrays are freed once they are
        stacked. None to resume from the newest checkpoint.
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
        if first is None:
            start = _restore(chunk, Checkpoints(workdir), feeds)
        else:
            state = programs.stack(first)
            first.clear()
            # A copy: the state is donated to each step.
            best = jax.tree.map(lambda x: x.copy(), state.trainable)
            rows, progress = list(range(len(members))), [Progress() for _ in members]
            start = GroupStart(feeds, state, best, rows, progress, 0, seconds)
            del state, best
        step, logs = (-1 if first is not None else start.step), []
        for member in members:
            exits.enter_context(lock(member.run.folder))
            guard_workdir(member.run.folder, member.run.config.to_dict(), CHANGEABLE_FIELDS)
            write_record(member.run.folder, member.record)
            # Bests newer than the checkpoint are of steps that come once more.
            rewind(folder_of(member.run.folder), step, keep=1)
            logs.append(RunLog(member.run.folder, tracker=chunk.shared.config.train.tracker))
            exits.enter_context(logs[-1])
            logs[-1].resume(step)
        checkpoints = CheckpointWriter(workdir, step)
        runs = BatchedRuns(chunk, start, checkpoints, logs, log, stop_signal)
        before = start.seconds
        del start  # its numbers are donated, or replaced
        with signals.held(), checkpoints:
            taken = loop.train(runs, log, before)
        if taken is None:
            return False
        signals.check(stop_signal())  # one that came during the last step
        runs.end(taken)
    return True


def _restore(chunk: Chunk, checkpoints: Checkpoints, feeds: Sequence[Feed]) -> GroupStart:
    """Restores the newest checkpoint of a chunk; its batches continue from there."""
    position, step = checkpoints.position(), checkpoints.latest()
    assert step is not None  # whose position that is
    names = [member.run.name for member in chunk.members]
    rows = [names.index(name) for name in position["rows"]]
    (state, best), _ = checkpoints.restore(chunk.programs.template(len(rows)))
    for i, data in zip(rows, position["data"], strict=True):
        feeds[i].batches.set_state(data)
    progress = [Progress.from_json(position["runs"][name]) for name in names]
    for member, one in zip(chunk.members, progress, strict=True):
        if one.done and not one.error:
            _check_best(member.run.folder, _best_of(one).step, checkpoints)
    return GroupStart(feeds, state, best, rows, progress, step, position["seconds"])


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
    """A chunk of runs being trained; `loop.train` calls its methods.

    A row of the state is a run; finished runs train along without effect.
    """

    def __init__(
        self, chunk: Chunk, start: GroupStart, checkpoints: CheckpointWriter,
        logs: Sequence[RunLog], log: RunLog, stop_signal: Callable[[], int],
    ):  # fmt: skip
        """Starts the runs at `start`.

        `logs` are those of the members, `checkpoints` and `log` those of the grid; `stop_signal`
        returns the signal that requests a stop.
        """
        self.shared, self.members, self.programs, self.per_run = chunk
        self.settings = self.shared.config.train
        self.plan, self.log_steps = self.members[0].plan, self.settings.log_steps
        self.feeds, self.state, self.best, self.rows = start[:4]
        self.progress, self.step = start.progress, start.step
        self.per_row = self.programs.put_own([self.per_run[i] for i in self.rows])
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

    def take(self) -> Batch:
        """Returns the next batch of every run, arrays [R, ...]; see `Programs.put_batch`."""
        batches, layout = [self.feeds[i].take() for i in self.rows], self.members[0].scorer.layout
        members = [self.members[i] for i in self.rows]
        if not (members[0].keeps and same_batches(members)):
            batches = [m.give(batch) for m, batch in zip(members, batches, strict=True)]
            return stack(batches, layout.pad_id, layout.side)
        # Read once, and once on the device: states are larger than all else in a batch.
        one = members[0].give(batches[0])
        plain = stack([one._replace(cached=None)] * len(batches), layout.pad_id, layout.side)
        return plain._replace(cached=one.cached)

    def is_new(self, batch: Batch) -> bool:
        """Returns whether the step must still be compiled for the shapes of a batch."""
        return self.programs.is_new(batch)

    def take_step(self, batch: Batch) -> Metrics:
        """Takes a step of every run. Returns their metrics [R], which may not be computed yet."""
        placed = self.programs.put_batch(batch, len(self.rows))
        self.state, measured = self.programs.train(self.state, placed, self.per_row)
        self.step += 1
        return measured

    def write(self, metrics: Metrics, taken: tuple[int, float], seconds: float) -> None:
        """Logs the newest step of the runs that continue."""
        live = self._live()
        for row in live:
            row_metrics, i = jax.tree.map(lambda x, row=row: x[row], metrics), self.rows[row]
            write_step(self.logs[i], self.step, row_metrics, self.feeds[i].describe, taken, seconds)
        self.log.show(lr=_span([rate for x in metrics["lr"].values() for rate in x[live].tolist()]))

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
                key=lambda one: one[1],
            )
            if streak >= self.settings.max_nonfinite_steps:
                name = self.members[self.rows[row]].run.name
                error = tell_broken(streak, step, skipped)
                self._end_run(row, error)
                self.log.say(f"{name}: {error}")

    def _end_run(self, row: int, error: str = "") -> None:
        progress = self.progress[self.rows[row]]
        progress.done, progress.error, progress.steps = True, error, self.step
        progress.skipped = int(self.state.skipped[row])
        if progress.best is not None:
            # On disk before the run leaves the state.
            numbers = self.programs.pick(self.best, row)
            step, folder = progress.best.step, self.members[self.rows[row]].run.folder
            # A run that ended before a kill, and again from the checkpoint, writes it again.
            with CheckpointWriter(folder, step - 1) as checkpoints:
                checkpoints.save(step, progress.to_json(), best=numbers)

    def evaluate(self, seconds: float) -> bool:
        """Evaluates every run on dev, and ends finished runs. Best parameters are in the state."""
        live = self._live()
        scores = self.scorer.score("dev", self.rows, self.state.trainable, self.per_row)
        better, values = np.zeros(len(self.rows), bool), []
        for row in live:
            progress, dev = self.progress[self.rows[row]], scores[row]
            if isinstance(dev, InputError):
                self._end_run(row, str(dev))
                self.log.say(f"{self.members[self.rows[row]].run.name}: {dev}")
                continue
            self.logs[self.rows[row]].write(self.step, dev=dev, time={"seconds": seconds})
            values.append(float(next(iter(dev.values()))))  # the metric of the task comes first
            # Finished rows go on training beside the others, so their best must not be renewed.
            better[row] = progress.note_dev(
                self.step, self.scorer.value(dev), dev, last=self.step == self.plan.total,
                patience=self.settings.patience,
            )  # fmt: skip
        self.log.show(dev=_span(values))
        if better.any():
            self.best = self.programs.renew(self.best, self.state.trainable, better)
        # After the renewal: what a run that ends leaves on disk is the newest best.
        for row in live:
            progress = self.progress[self.rows[row]]
            if progress.done and not progress.error:
                self._end_run(row)
        self._regroup()
        return False

    def _regroup(self) -> None:
        """Removes finished runs once a smaller program fits the rest."""
        live, total = self._live(), len(self.members)
        # Runs that lie apart on the data axis stay so: else each step would send gradients over it.
        is_apart = self.programs.is_apart(len(self.rows))
        sizes = [n for n in halves(total) if self.programs.is_apart(n) >= is_apart]
        size = min((n for n in sizes if n >= len(live)), default=len(self.rows))
        saved = (len(self.rows) - size) * (self.plan.total - self.step)
        # Steps of single runs: a smaller program pays only if it spares more than it costs to
        # compile.
        if not live or saved <= 0 or saved < WORTH:
            return
        spare = [row for row in range(len(self.rows)) if row not in live]
        # A program may have more rows than runs go on: finished ones fill them up.
        keep = sorted(live + spare[: size - len(live)])
        self.state, self.best = self.programs.take(self.state, self.best, keep)
        self.rows = [self.rows[row] for row in keep]
        self.per_row = self.programs.put_own([self.per_run[i] for i in self.rows])
        self.log.say(f"{len(live)} of {total} runs continue, {size} at once")

    def save(self, seconds: float, *, state: bool, best: bool) -> None:
        """Saves the newest step of all runs and their best parameters in the background."""
        assert state and not best
        names = [member.run.name for member in self.members]
        position = {
            "runs": {n: each.to_json() for n, each in zip(names, self.progress, strict=True)},
            "rows": [names[i] for i in self.rows],
            "data": [self.feeds[i].batches.get_state() for i in self.rows],
            "seconds": seconds,
        }
        resumes = "run the same command again to resume"
        saved = f"with step {self.step} of {len(names)} runs saved; {resumes}"
        on_complete = functools.partial(signals.note, saved)
        whole = self.state, self.best
        self.checkpoints.save(self.step, position, state=whole, on_complete=on_complete)

    def settle(self) -> None:
        """Waits until all saves are on disk."""
        self.checkpoints.settle()

    def stop_signal(self) -> int:
        """Returns the signal that requests a stop, 0 if there is none."""
        return self._stop_signal()

    # -- the results -------------------------------------------------------------------------------

    def end(self, seconds: float) -> None:
        """Evaluates the best parameters of every run on test, and writes the results."""
        done = [i for i, progress in enumerate(self.progress) if not progress.error]
        for i in set(range(len(self.members))) - set(done):
            self._write_error(i, self.progress[i].error)
        # Their room is needed to score with the best numbers of all runs.
        del self.state, self.best
        if not done:
            return
        template = self.programs.one_trainable()
        bests = {i: _best_of(self.progress[i]) for i in done}
        tests: Sequence[dict[str, float] | InputError | None] = [None] * len(done)
        if self.settings.test and self.scorer.has("test"):
            best = [
                Checkpoints(self.members[i].run.folder).restore_best(template, x.step)[0]
                for i, x in bests.items()
            ]
            per_run = self.programs.put_own([self.per_run[i] for i in done])
            tests = self.scorer.score(
                "test", done, self.programs.stack_trained(best), per_run,
                devs=[x.dev for x in bests.values()],
            )  # fmt: skip
        share = seconds / len(self.members)  # a run's part of what all took together
        for i, test in zip(done, tests, strict=True):
            if isinstance(test, InputError):
                self._write_error(i, str(test))
            else:
                write_result(self.members[i].run.folder, self._result(i, bests[i], test, share))

    def _result(
        self, i: int, best: Evaluation, test: dict[str, float] | None, seconds: float
    ) -> RunResult:
        config, progress = self.members[i].run.config, self.progress[i]
        trained = tree.count(self.programs.one_trainable())
        frozen = tree.count(self.programs.frozen) + tree.count(self.per_run[0].frozen)
        pretrains = self.shared.pretrains
        return RunResult(
            task=config.ppt.task or None, method=config.prompt.name, seed=config.seed,
            trained=trained, total=trained + frozen, steps=progress.steps,
            skipped=progress.skipped, best_step=best.step, dev=None if pretrains else best.dev,
            held_out=best.dev if pretrains else None, test=test,
            time={"seconds": seconds, "compilations": len(self.programs.compiled)},
        )  # fmt: skip

    def _write_error(self, i: int, error: str) -> None:
        write_atomic(self.members[i].run.folder / "error.txt", error + "\n")


def _best_of(progress: Progress) -> Evaluation:
    assert progress.best is not None  # a run without an error ends at an evaluation
    return progress.best


def _span(values: Sequence[float]) -> str:
    """Formats the range of some numbers; "none" if all runs have finished."""
    if not values:
        return "none"
    ends = dict.fromkeys(f"{end:.4g}" for end in (min(values), max(values)))
    return " to ".join(ends)


def halves(total: int) -> list[int]:
    """Returns the numbers of runs that programs are compiled for: all, half of them, ... 1."""
    sizes = [total]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes
