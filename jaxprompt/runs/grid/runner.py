"""Several runs as one program: a grid of seeds, learning rates and inits over a frozen backbone.

<workdir>/checkpoints/<step>/   the state of the runs that currently train, to resume
<workdir>/chunks.json           which runs train together
<run's folder>/                 all files of a single run, or error.txt
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxprompt import signals, tree
from jaxprompt.build.examples import check_tunes
from jaxprompt.config.run import CHANGEABLE_FIELDS, RunConfig
from jaxprompt.errors import InputError
from jaxprompt.files import make_folder, read_json, write_atomic
from jaxprompt.parallel.compilation import keep_programs
from jaxprompt.parallel.sharding import Placement
from jaxprompt.runs.grid import batched_runs, pretrain
from jaxprompt.runs.grid import train as tune
from jaxprompt.runs.grid.batched_runs import Chunk
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.expand import GridRun, by_config, is_grid, list_runs, select
from jaxprompt.runs.grid.group import (
    Member,
    Shared,
    Words,
    at_once,
    by_shape,
    check_start,
    longest,
    same_batches,
    start,
    varying_words,
)
from jaxprompt.runs.grid.memory import available, fitting
from jaxprompt.runs.ppt import check_ppt
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_folders import folder_of, rewind
from jaxprompt.training.log import RunLog
from jaxprompt.training.loop import count_runs
from jaxprompt.training.run_folder import (
    check_kept,
    check_workdir,
    guard_workdir,
    lock,
    read_result,
)
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import TrainState

__all__ = ["KINDS", "GridRun", "Outcome", "by_config", "is_grid", "list_runs", "select", "train"]


class RunKind(NamedTuple):
    """A kind of runs."""

    check: Callable[[RunConfig], None]
    prepare: Callable[..., tuple[Shared | None, list[Member]]]  # of runs, a workdir, and what fails


KINDS = {  # by command
    "train": RunKind(check_tunes, tune.prepare),
    "pretrain": RunKind(check_ppt, pretrain.prepare),
}


class _Chunks(NamedTuple):
    """Which runs train together, read from chunks.json."""

    size: int  # config.runs.size
    chunks: list[list[str]]  # names of runs


class Outcome(NamedTuple):
    """The outcome of a grid."""

    results: dict[str, RunResult]  # of the runs that have one, by name
    failed: dict[str, str]  # name -> the error's line


def train(
    runs: Sequence[GridRun], workdir: str, *, command: str = "train", size: int = 0,
    stop_signal: Callable[[], int], ready: Callable[[], None] = lambda: None, others: bool = False,
) -> Outcome | None:  # fmt: skip
    """Trains runs as few programs, at most `size` at once (0 = all that fit, see `at_once`).

    Runs with a result are skipped, but their data must be unchanged. A failed run does not stop the
    others; if all runs fail, this is an error only without `others` that the caller trains. `ready`
    is called once data and weights are loaded. `stop_signal` returns the signal that requests a
    stop, 0 if there is none. Returns None if a signal stopped the training.
    """
    if jax.process_count() > 1:
        raise InputError(
            f"a grid trains in one process, not in {jax.process_count()}; leave --processes "
            "out, config.mesh distributes the runs over the devices of one host"
        )
    with lock(workdir):
        work = _Work(runs, workdir, size, stop_signal)
        work.note()
        try:
            return work.outcome() if _train(work, command, ready, others) else None
        finally:
            work.tidy()


def train_grid(
    config: RunConfig, workdir: str, command: str = "train", *, stop_signal: Callable[[], int]
) -> tuple[list[GridRun], Outcome | None]:
    """Trains the runs of `config.runs` as a command does. Returns the runs and their outcome."""
    free = (*CHANGEABLE_FIELDS, "runs.size")
    check_workdir(workdir, config.to_dict(), free)
    grid = list_runs(config, workdir)
    for run in grid:
        KINDS[command].check(run.config)
    keep_programs(config.train.compilation_cache)
    bind = partial(guard_workdir, workdir, config.to_dict(), free)
    return grid, train(
        grid,
        workdir,
        command=command,
        size=config.runs.size,
        stop_signal=stop_signal,
        ready=bind,
    )


def verify(runs: Sequence[GridRun], workdir: str, command: str = "train") -> dict[str, str]:
    """Returns the runs that were trained on different data than they would be now: name, why."""
    found: dict[str, str] = {}

    def note(run: GridRun, error: Exception) -> None:
        found[run.name] = str(error)

    for group in by_config(runs):
        try:
            KINDS[command].prepare(group, Path(workdir), note)
        except InputError as error:
            for run in group:
                note(run, error)
    return found


def _train(work: "_Work", command: str, ready: Callable[[], None], others: bool) -> bool:
    """Trains the remaining runs. Returns False if a signal stopped them."""
    # What the checkpoint holds goes first: the next to train take its place on the disk.
    groups = sorted(by_config(work.known()), key=lambda runs: not work.is_started(runs))
    for group in groups:
        try:
            shared, members = KINDS[command].prepare(group, work.workdir, work.fail)
        except InputError as error:
            # With one config alone there is no other run that could go on.
            if len(groups) == 1 and not others:
                raise
            for run in group:
                work.fail(run, error)
            continue
        if shared is None:  # no run can be prepared
            continue
        members = [member for member in members if work.is_left(member.run)]
        members = work.startable(shared, members)
        if not members:
            continue
        ready()
        if not work.train(shared, members):
            return False
    return True


class _Work:
    """The remaining runs of a grid, and their state on disk."""

    def __init__(
        self, runs: Sequence[GridRun], workdir: str, size: int, stop_signal: Callable[[], int]
    ):
        self.runs, self.size, self.stop_signal = runs, size, stop_signal
        self.workdir = Path(workdir)
        self.checkpoints = Checkpoints(workdir)
        self.failed: dict[str, str] = {}
        self.made: list[Path] = []  # folders that were not there before
        self.started: list[str] = []  # the runs of the checkpoint that is there
        if self.checkpoints.latest() is not None:
            self.started = list(self.checkpoints.position()["runs"])
        by_name = {run.name: run for run in runs}
        foreign = [name for name in self.started if name not in by_name]
        if foreign:
            raise InputError(
                f"{workdir} holds a checkpoint of the run {foreign[0]}, which is not one of "
                "these runs; use another workdir, or delete its checkpoints"
            )
        for name in self.started:
            check_kept(by_name[name].folder, workdir)
        # A kill between the last result and its clearing leaves a checkpoint that nobody needs.
        if self.started and all(_is_over(by_name[name]) for name in self.started):
            self._clear()

    def known(self) -> list[GridRun]:
        """Returns the runs whose folder is missing or belongs to them."""
        accepted_runs = []
        for run in self.runs:
            try:
                check_workdir(run.folder, run.config.to_dict(), CHANGEABLE_FIELDS)
                is_new = not run.folder.exists()
                make_folder(run.folder)
                self.made += [run.folder] * is_new
                accepted_runs.append(run)
            except InputError as error:
                self.fail(run, error)
        return accepted_runs

    def tidy(self) -> None:
        """Removes empty folders of runs."""
        for folder in self.made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails where something lies there

    def is_left(self, run: GridRun) -> bool:
        """Returns whether a run has no result yet, or is part of the checkpoint."""
        return run.name in self.started or not _is_over(run)

    def startable(self, shared: Shared, members: Sequence[Member]) -> list[Member]:
        """Returns the members that can start, and marks the others as failed.

        Raises InputError if a failed one is in the checkpoint, whose runs must all resume.
        """
        found: list[Member] = []
        shapes: dict[int, tree.Params] = {}
        for member in members:
            try:
                check_start(shared, member, shapes)
                found.append(member)
            except InputError as error:
                if member.run.name in self.started:
                    raise InputError(f"{member.run.name}: {error}") from error
                self.fail(member.run, error)
        return found

    def train(self, shared: Shared, members: Sequence[Member]) -> bool:
        """Trains runs of one backbone. Returns False if a signal stopped them."""
        groups = by_shape(members)
        with RunLog(self.workdir, tracker="none") as log:
            for line in shared.says:
                log.say(line)
            shared.fill(members, log.say)
            if len(groups) > 1:
                sizes = " + ".join(str(len(group)) for group in groups)
                log.say(
                    f"runs with different shapes or lengths train one after another: {sizes} runs"
                )
        groups.sort(key=lambda group: not self.is_started([member.run for member in group]))
        return all(self._train_alike(shared, group) for group in groups)

    def note(self) -> None:
        """Sets what is saved, for the line that a signal prints."""
        over = sum(map(_is_over, self.runs))
        step = f", {len(self.started)} runs saved at step {self.checkpoints.latest()}"
        signals.note(
            f"with {over} of {len(self.runs)} runs finished{step if self.started else ''}; run "
            "the same command again to continue"
        )

    def is_started(self, runs: Sequence[GridRun]) -> bool:
        """Returns whether the checkpoint has any of these runs."""
        return any(run.name in self.started for run in runs)

    def _train_alike(self, shared: Shared, members: Sequence[Member]) -> bool:
        """Trains runs of one program, in as many chunks as needed."""
        total, began = members[0].plan.total, time.monotonic()
        own, frozen = start(shared, members[0])
        # Only shapes are read: the arrays would stay in memory beside those that train.
        own = own._replace(state=jax.eval_shape(lambda x: x, own.state))
        made: dict[str, Programs] = {}

        def program(some: Sequence[Member]) -> tuple[Programs, dict[str, Words]]:
            """Returns the programs of some runs, and their label words if they are arguments."""
            words = varying_words(some)
            # From the runs of a chunk alone: on a restart the others may be over.
            own_words = jax.tree.map(np.shape, words[some[0].run.name])
            # Words that are the same in all runs are part of the program, others by their shapes
            # alone.
            key = str(own_words or jax.tree.map(np.ndarray.tolist, some[0].words))
            if key not in made:
                made[key] = Programs(
                    shared.placement, some[0].model, own.tx, shared.objectives, frozen, own.state,
                    accumulate=shared.config.optim.accumulate, rest=some[0].rest,
                )  # fmt: skip
            return made[key], words

        with RunLog(self.workdir, tracker="none", total=total) as log:
            log.say(tree.parameter_table(own.state.trainable, frozen | own.own))

            def fit(some: Sequence[Member], rest: Sequence[Member]) -> int:
                log.say(f"compiling the training step for {count_runs(len(some))}")
                programs, words = program(some)
                first = PerRun(words[some[0].run.name], own.own)
                free = available(shared.placement.mesh)
                batch, shares = longest(rest), same_batches(some)
                return fitting(programs, len(some), batch, first, free, shares=shares)

            for chunk in self._chunks(members, shared.placement, fit, log):
                # The checkpoint is of exactly one chunk.
                resumed = {member.run.name for member in chunk} == set(self.started)
                newest = self.checkpoints.latest() if resumed else None
                where = "starting at step 0" if newest is None else f"resumed at step {newest}"
                log.say(f"{count_runs(len(chunk))} at once, {total} steps, {where}")
                programs, words = program(chunk)
                states: list[TrainState] = []
                per_run = []
                for member in chunk:
                    begun = start(shared, member)[0]
                    if not resumed:
                        states.append(begun.state)
                    per_run.append(PerRun(words[member.run.name], begun.own))
                del begun
                if not batched_runs.train(
                    Chunk(shared, chunk, programs, per_run), self.workdir, log,
                    None if resumed else states, time.monotonic() - began, self.stop_signal,
                ):  # fmt: skip
                    return False
                self._clear()
                self.note()
                began = time.monotonic()
        return True

    def _chunks(
        self, members: Sequence[Member], placement: Placement,
        fit: Callable[[Sequence[Member], Sequence[Member]], int], log: RunLog,
    ) -> list[list[Member]]:  # fmt: skip
        """Splits members into chunks that train at once; a resumed grid keeps its chunks."""
        path, names = self.workdir / "chunks.json", {m.run.name: m for m in members}
        saved = _read_chunks(path) if path.exists() else _Chunks(self.size, [])
        # With another size only the runs of the checkpoint have to stay together.
        known = saved.chunks if saved.size == self.size else [self.started]
        chunks = [chunk for chunk in known if chunk and set(chunk) <= set(names)]
        chunks.sort(key=lambda chunk: chunk != self.started)
        rest = [m for name, m in names.items() if not any(name in chunk for chunk in chunks)]
        if rest:
            sets = [rest] if self.size else at_once(rest, placement)
            size = self.size or fit(max(sets, key=len), rest)
            more = [part[i : i + size] for part in sets for i in range(0, len(part), size)]
            if len(more) > len(sets):
                limit = f"config.runs.size={self.size}" if self.size else "memory"
                log.say(f"{len(rest)} runs in {len(more)} chunks: {limit} allows {size} at once")
            elif len(more) > 1:
                log.say(
                    f"{len(rest)} runs in {len(more)} chunks: on a CPU only runs with the same "
                    "batches train at once, other batches would need more padding; raise "
                    "config.runs.size to train more at once"
                )
            chunks += [[member.run.name for member in chunk] for chunk in more]
            others = [chunk for chunk in saved.chunks if not set(chunk) & set(names)]
            text = json.dumps({"size": self.size, "chunks": others + chunks}, indent=2)
            write_atomic(path, text + "\n")
        return [[names[name] for name in chunk] for chunk in chunks]

    def fail(self, run: GridRun, error: Exception) -> None:
        """Marks a run as failed."""
        self.failed[run.name] = str(error)

    def _clear(self) -> None:
        rewind(folder_of(self.workdir), -1, keep=1)
        self.started = []

    def outcome(self) -> Outcome:
        """Returns the results and errors of the runs."""
        results = {}
        for run in self.runs:
            result, error = read_result(run.folder), run.folder / "error.txt"
            if result is not None:
                results[run.name] = result
            elif error.exists():
                self.failed[run.name] = error.read_text().strip()
        return Outcome(results, self.failed)


def _read_chunks(path: Path) -> _Chunks:
    expected = "the file that this grid wrote, or delete it and run the same command again"
    saved = read_json(path, expected)
    if not isinstance(saved.get("size"), int) or not isinstance(saved.get("chunks"), list):
        raise InputError(f"{path} has no size or no chunks; restore {expected}")
    return _Chunks(saved["size"], saved["chunks"])


def _is_over(run: GridRun) -> bool:
    return any((run.folder / name).exists() for name in ("result.json", "error.txt"))
