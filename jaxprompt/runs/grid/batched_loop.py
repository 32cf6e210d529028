"""Trains runs of one shape as one program, from their first step to their results."""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext

import jax
import numpy as np

from jaxprompt import signals, tree
from jaxprompt.config.documents import fields_to_plain
from jaxprompt.config.run import FREE
from jaxprompt.data.batches.stacking import stack
from jaxprompt.errors import InputError
from jaxprompt.files import write_atomic
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.group import Member, Shared, same_batches
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.log import RunLog
from jaxprompt.training.loop import LookAhead
from jaxprompt.training.progress import Evaluation, Metrics, Progress, write_step
from jaxprompt.training.run_folder import guard_workdir, lock, write_record, write_result
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import tell_broken
from jaxprompt.types import Batch

WORTH = 500  # steps of one run that must be saved for another compilation to pay


class BatchedRuns:
    """A chunk of runs that train as one program."""

    def __init__(
        self, shared: Shared, members: Sequence[Member], owns: Sequence[PerRun],
        programs: Programs, group: Checkpoints, log: RunLog,
    ):  # fmt: skip
        """Takes members of equal shapes and the programs they run in."""
        self.shared, self.members, self.programs = shared, members, programs
        self.group, self.log = group, log
        self.plan, self.settings = members[0].plan, shared.config.train
        self.scorer = shared.make_scorer(shared, members, programs)
        self.stands = [Progress() for _ in members]
        self.rows = list(range(len(members)))  # the member of each row of the state; some done
        self.owns = owns
        self.bests = [Checkpoints(member.run.folder) for member in members]
        self.step, self.seconds = 0, 0.0
        self.size = tree.count(programs.one_trainable())
        self.total = self.size + tree.count(programs.frozen) + tree.count(owns[0].frozen)

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, first: list[TrainState], resumed: bool, heard: Callable[[], int]) -> bool:
        """Trains from the states `first`, or the checkpoint, to the results.

        Returns False where a signal ended it early; it is saved then. `first` is emptied, so that
        its numbers are freed once they are joined.
        """
        with ExitStack() as open_now:
            self.feeds = [member.feed() for member in self.members]
            for feed in self.feeds:
                open_now.callback(feed.batches.close)
            if resumed:
                first.clear()
                self._restore()
            else:
                self.state = self.programs.stack(first)
                first.clear()
                # A copy: the state is donated to each step.
                self.best = jax.tree.map(lambda x: x.copy(), self.state.trainable)
            self.own = self.programs.put_own([self.owns[i] for i in self.rows])
            logs = []
            for member, best in zip(self.members, self.bests, strict=True):
                open_now.enter_context(lock(member.run.folder))
                guard_workdir(member.run.folder, member.run.config.to_dict(), FREE)
                write_record(member.run.folder, member.record)
                # Bests newer than the checkpoint are of steps that come once more.
                best.rewind(self.step if resumed else -1)
                logs.append(RunLog(member.run.folder, tracker=self.settings.tracker))
                open_now.enter_context(logs[-1])
                logs[-1].resume(self.step if resumed else -1)
            self.logs = logs
            with signals.held(), self.group.settling():
                if not self._loop(heard):
                    return False
            signals.check(heard())  # one that came during the last step
            self._finish()
        return True

    def _loop(self, heard: Callable[[], int]) -> bool:
        plan, began, ahead = self.plan, time.monotonic() - self.seconds, LookAhead()
        first, self.log.done = self.step, lambda: ahead.done
        self._pause()
        while self.step < plan.total and self._live():
            batch = self.programs.put_batch(self._take(), len(self.rows))
            if is_new := self.programs.is_new(batch):
                runs, rows, width = batch.encoder.ids.shape
                self.log.say(
                    f"compiling the step for {count_runs(runs)} x {rows} sequences x {width} tokens"
                )
            # Nothing is lost before the first step, which compiles.
            with signals.at_once() if self.step == first else nullcontext():
                self.state, measured = self.programs.train(self.state, batch, self.own)
            if is_new:  # it runs from now on, once those before it are done
                ahead.wait()
                self._pause()
            self.step += 1
            ahead.add(self.step, measured)
            self.seconds = time.monotonic() - began
            due = plan.due(self.step, self.settings.log_steps)
            if due.logs or due.evaluates or due.saves:
                # Before a regrouping, whose rows are others.
                read, found = ahead.read(measured)
                self.seconds = time.monotonic() - began
                if due.logs:
                    self._log(found)
                self._end_broken(read)
            self.log.progress(self.step)
            if due.evaluates:
                self._evaluate(due.last)
                self._regroup()
                if not plan.save or not self._live():
                    self._save()
                self._pause()
            if due.saves:
                self._save()
                self._pause()
            if (number := heard()) and self._live():
                self._save()
                self.group.settle()
                saved = f"at step {self.step}; saved, the same command resumes"
                self.log.say(signals.stopped(number, saved))
                return False
        return True

    def _live(self) -> list[int]:
        """Lists the rows whose run goes on."""
        return [row for row, i in enumerate(self.rows) if not self.stands[i].done]

    def _take(self) -> Batch:
        """Takes the next batch of every run. -> arrays [R, ...]; see `Programs.put_batch`"""
        batches, layout = [self.feeds[i].take() for i in self.rows], self.members[0].scorer.layout
        members = [self.members[i] for i in self.rows]
        if not (members[0].keeps and same_batches(members)):
            given = [m.give(batch) for m, batch in zip(members, batches, strict=True)]
            return stack(given, layout.pad_id, layout.side)
        # Read once, and once on the device: states are larger than all else in a batch.
        one = members[0].give(batches[0])
        plain = stack([one._replace(kept=None)] * len(batches), layout.pad_id, layout.side)
        return plain._replace(kept=one.kept)

    def _pause(self) -> None:
        """Notes from where a rate counts."""
        self.since = self.step, time.monotonic()

    def _log(self, values: Metrics) -> None:
        step, clock = self.since
        taken = self.step - step, time.monotonic() - clock
        for row in self._live():
            own, i = jax.tree.map(lambda x, row=row: x[row], values), self.rows[row]
            write_step(self.logs[i], self.step, own, self.feeds[i].describe, taken, self.seconds)
        live = self._live()
        self.log.show(lr=_span([rate for x in values["lr"].values() for rate in x[live].tolist()]))
        self._pause()

    def _end_broken(self, read: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Ends the runs that had too many steps in a row that were not finite; others go on.

        `read` has the step, the streaks [R] and the skipped steps [R] of all that were taken since.
        """
        for row in self._live():
            step, streak, skipped = max(
                ((step, int(streaks[row]), int(skipped[row])) for step, streaks, skipped in read),
                key=lambda one: one[1],
            )
            if streak >= self.settings.max_streak:
                name = self.members[self.rows[row]].run.name
                error = tell_broken(streak, step, skipped)
                self._end(row, error)
                self.log.say(f"{name}: {error}")

    def _end(self, row: int, error: str = "") -> None:
        stand = self.stands[self.rows[row]]
        stand.done, stand.error, stand.steps = True, error, self.step
        stand.skipped = int(self.state.skipped[row])
        if stand.best is not None:
            # On disk before the run leaves the state.
            numbers = self.programs.pick(self.best, row)
            best = self.bests[self.rows[row]]
            best.save_best(stand.best.step, numbers, fields_to_plain(stand.best))
            best.settle()

    def _evaluate(self, last: bool) -> None:
        live = self._live()
        found = self.scorer.score("dev", self.rows, self.state.trainable, self.own)
        better, values = np.zeros(len(self.rows), bool), []
        for row in live:
            stand, dev = self.stands[self.rows[row]], found[row]
            if isinstance(dev, InputError):
                self._end(row, str(dev))
                self.log.say(f"{self.members[self.rows[row]].run.name}: {dev}")
                continue
            self.logs[self.rows[row]].write(self.step, dev=dev, time={"seconds": self.seconds})
            value = self.scorer.value(dev)
            values.append(float(next(iter(dev.values()))))  # the metric of the task comes first
            # Finished rows go on training beside the others, so their best must not be renewed.
            better[row] = stand.note_dev(
                self.step, value, dev, last=last, patience=self.settings.patience
            )
        self.log.show(dev=_span(values))
        if better.any():
            self.best = self.programs.renew(self.best, self.state.trainable, better)
        # After the renewal: what a run that ends leaves on disk is the newest best.
        for row in live:
            stand = self.stands[self.rows[row]]
            if stand.done and not stand.error:
                self._end(row)

    def _regroup(self) -> None:
        """Leaves finished runs out once a smaller program holds the rest."""
        live, total = self._live(), len(self.members)
        # Runs that lie apart on the data axis stay so: else each step would send gradients over it.
        sizes = [n for n in halves(total) if self.programs.is_apart(n) >= self._is_apart()]
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
        self.own = self.programs.put_own([self.owns[i] for i in self.rows])
        self.log.say(f"{len(live)} of {total} runs go on, {size} at once")

    def _is_apart(self) -> bool:
        return self.programs.is_apart(len(self.rows))

    # -- what is on disk ---------------------------------------------------------------------------

    def _save(self) -> None:
        names = [member.run.name for member in self.members]
        position = {
            "runs": {n: stand.to_json() for n, stand in zip(names, self.stands, strict=True)},
            "rows": [names[i] for i in self.rows],
            "data": [self.feeds[i].batches.get_state() for i in self.rows],
            "seconds": self.seconds,
        }
        saved = f"with step {self.step} of {len(names)} runs saved; the same command resumes"
        on_complete = functools.partial(signals.note, saved)
        self.group.save(self.step, (self.state, self.best), position, on_complete)

    def _restore(self) -> None:
        position = self.group.position()
        names = [member.run.name for member in self.members]
        self.rows = [names.index(name) for name in position["rows"]]
        self.stands = [Progress.from_json(position["runs"][name]) for name in names]
        self.seconds = position["seconds"]
        template = self.programs.template(len(self.rows))
        (self.state, self.best), _ = self.group.restore(template)
        step = self.group.latest()
        assert step is not None  # that was restored
        self.step = step
        for i, data in zip(self.rows, position["data"], strict=True):
            self.feeds[i].batches.set_state(data)

    def _finish(self) -> None:
        """Tests every run with its best numbers, and writes the results."""
        done = [i for i, stand in enumerate(self.stands) if not stand.error]
        for i in set(range(len(self.members))) - set(done):
            self._tell_failed(i, self.stands[i].error)
        # Their room is needed to score with the best numbers of all runs.
        del self.state, self.best
        if not done:
            return
        template, bests = self.programs.one_trainable(), {i: _best_of(self.stands[i]) for i in done}
        tests: Sequence[dict[str, float] | InputError | None] = [None] * len(done)
        if self.settings.test and self.scorer.has("test"):
            best = [self.bests[i].restore_best(template, x.step)[0] for i, x in bests.items()]
            own = self.programs.put_own([self.owns[i] for i in done])
            tests = self.scorer.score(
                "test", done, self.programs.stack_trained(best), own,
                devs=[x.dev for x in bests.values()],
            )  # fmt: skip
        for i, test in zip(done, tests, strict=True):
            stand, member = self.stands[i], self.members[i]
            if isinstance(test, InputError):
                self._tell_failed(i, str(test))
                continue
            config = member.run.config
            share = self.seconds / len(self.members)  # a run's part of what all took together
            pretrains = self.shared.pretrains
            result = RunResult(
                task=config.ppt.task or None, method=config.prompt.name, seed=config.seed,
                trained=self.size, total=self.total, steps=stand.steps, skipped=stand.skipped,
                best_step=bests[i].step, dev=None if pretrains else bests[i].dev,
                held_out=bests[i].dev if pretrains else None, test=test,
                time={"seconds": share, "compilations": len(self.programs.compiled)},
            )  # fmt: skip
            write_result(member.run.folder, result)

    def _tell_failed(self, i: int, error: str) -> None:
        write_atomic(self.members[i].run.folder / "error.txt", error + "\n")


def _best_of(stand: Progress) -> Evaluation:
    assert stand.best is not None  # a run without an error ends at an evaluation
    return stand.best


def _span(values: Sequence[float]) -> str:
    """Writes the lowest and the highest of some numbers; "none" where all runs are over."""
    if not values:
        return "none"
    ends = dict.fromkeys(f"{end:.4g}" for end in (min(values), max(values)))
    return " to ".join(ends)


def count_runs(count: int) -> str:
    """Writes a number of runs, as in "2 runs"."""
    return "1 run" if count == 1 else f"{count} runs"


def halves(total: int) -> list[int]:
    """Lists the numbers of runs that programs are compiled for: all, half of them, ... 1."""
    sizes = [total]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes
