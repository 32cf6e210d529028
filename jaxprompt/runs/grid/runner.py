"""Several runs as one program: a grid of seeds, learning rates and inits over a frozen backbone.

<workdir>/checkpoints/<step>/   the state of the runs that currently train, to resume
<workdir>/chunks.json           which runs train together
<run's folder>/                 all files of a single run, or error.txt
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxprompt import signals, tree
from jaxprompt.build.examples import check_prompt_tuning
from jaxprompt.config.documents import Document
from jaxprompt.config.run import CHANGEABLE_FIELDS, RunConfig
from jaxprompt.errors import InputError
from jaxprompt.files import read_json, write_atomic
from jaxprompt.parallel.compilation import enable_compilation_cache
from jaxprompt.parallel.sharding import Placement
from jaxprompt.runs import ppt
from jaxprompt.runs import train as tune
from jaxprompt.runs.grid import batched_runs
from jaxprompt.runs.grid.batched_runs import Chunk
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.expand import (
    GridRun,
    group_by_config,
    is_grid,
    list_runs,
    select_best_runs,
)
from jaxprompt.runs.grid.group import (
    GroupInputs,
    LabelWordArrays,
    Member,
    check_init,
    group_by_shape,
    init_run,
    longest_group_batch,
    same_batches,
    split_by_batches,
    varying_label_words,
)
from jaxprompt.runs.grid.memory import free_bytes, max_runs_in_memory
from jaxprompt.runs.running import format_start
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_folders import checkpoint_folder, rewind
from jaxprompt.training.log import RunLog
from jaxprompt.training.loop import format_runs
from jaxprompt.training.run_folder import (
    FAILURE,
    RESULT,
    bind_workdir,
    check_workdir,
    lock_workdir,
    read_failure,
    read_result,
    require_record,
)
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import TrainState

__all__ = [
    "KINDS",
    "GridRun",
    "Outcome",
    "group_by_config",
    "is_grid",
    "list_runs",
    "select_best_runs",
    "train_runs",
]


class RunKind(NamedTuple):
    """A kind of runs."""

    check: Callable[[RunConfig], None]
    # (runs, workdir, mark_failed) -> inputs of all runs, and the runs
    prepare: Callable[..., tuple[GroupInputs | None, list[Member]]]


KINDS = {  # by command
    "train": RunKind(check_prompt_tuning, tune.prepare_task_group),
    "pretrain": RunKind(ppt.check_ppt, ppt.prepare_corpus_group),
}


@dataclasses.dataclass(frozen=True)
class _Chunks(Document):
    """Which runs train together: chunks.json."""

    FIX = "restore it, or delete it and run the same command again"

    size: int  # config.runs.size
    chunks: tuple[tuple[str, ...], ...]  # names of runs


class Outcome(NamedTuple):
    """The outcome of a grid."""

    results: dict[str, RunResult]  # of the runs that have one, by name
    failed: dict[str, str]  # name -> the error's line


def train_runs(
    runs: Sequence[GridRun],
    workdir: str,
    *,
    command: str = "train",
    size: int = 0,
    stop_signal: Callable[[], int],
    ready: Callable[[], None] = lambda: None,
    others: bool = False,
) -> Outcome | None:
    """Trains runs as few programs, at most `size` at once (0: all that fit).

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
    with lock_workdir(workdir):
        work = _Work(runs, workdir, size, stop_signal)
        work.note()
        return work.outcome() if _train(work, command, ready, others) else None


def train_grid(
    config: RunConfig, workdir: str, command: str = "train", *, stop_signal: Callable[[], int]
) -> tuple[list[GridRun], Outcome | None]:
    """Trains the runs of `config.runs` as a command does. Returns the runs and their outcome."""
    free = (*CHANGEABLE_FIELDS, "runs.size")
    check_workdir(workdir, config.to_dict(), free)
    grid = list_runs(config, workdir)
    for run in grid:
        KINDS[command].check(run.config)
    enable_compilation_cache(config.train.compilation_cache)
    return grid, train_runs(
        grid,
        workdir,
        command=command,
        size=config.runs.size,
        stop_signal=stop_signal,
        ready=partial(bind_workdir, workdir, config.to_dict(), free),
    )


def find_changed_runs(
    runs: Sequence[GridRun], workdir: str, command: str = "train"
) -> dict[str, str]:
    """Returns the runs that were trained on different data than they would be now: name, why."""
    errors: dict[str, str] = {}

    def note(run: GridRun, error: Exception) -> None:
        errors[run.name] = str(error)

    for group in group_by_config(runs):
        try:
            KINDS[command].prepare(group, Path(workdir), note)
        except InputError as error:
            for run in group:
                note(run, error)
    return errors


def _train(work: "_Work", command: str, ready: Callable[[], None], others: bool) -> bool:
    """Trains the remaining runs. Returns False if a signal stopped them."""
    # The runs of the checkpoint go first, because the next ones replace it.
    groups = sorted(group_by_config(work.known()), key=lambda runs: not work.is_started(runs))
    for group in groups:
        try:
            shared, members = KINDS[command].prepare(group, work.workdir, work.fail)
        except InputError as error:
            # With only one config there is no other run that could continue.
            if len(groups) == 1 and not others:
                raise
            for run in group:
                work.fail(run, error)
            continue
        if shared is None:  # no run can be prepared
            continue
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
        self.started: tuple[str, ...] = ()  # the runs of the checkpoint
        if self.checkpoints.latest() is not None:
            self.started = tuple(self.checkpoints.position()["runs"])
        by_name = {run.name: run for run in runs}
        foreign = [name for name in self.started if name not in by_name]
        if foreign:
            raise InputError(
                f"{workdir} holds a checkpoint of the run {foreign[0]}, which is not one of "
                "these runs; use another workdir, or delete its checkpoints"
            )
        for name in self.started:
            require_record(by_name[name].folder, workdir)
        # A kill after the last result leaves a checkpoint that is no longer needed.
        if self.started and all(_is_finished(by_name[name]) for name in self.started):
            self._clear()

    def known(self) -> list[GridRun]:
        """Returns the runs whose folder is missing or belongs to them, and marks the others."""
        accepted_runs = []
        for run in self.runs:
            try:
                check_workdir(run.folder, run.config.to_dict(), CHANGEABLE_FIELDS)
                accepted_runs.append(run)
            except InputError as error:
                self.fail(run, error)
        return accepted_runs

    def startable(self, shared: GroupInputs, members: Sequence[Member]) -> list[Member]:
        """Returns the members that have not finished and can start; marks others as failed.

        Raises InputError if a failed one is in the checkpoint, whose runs must all resume.
        """
        valid: list[Member] = []
        shapes: dict[int, tree.Params] = {}
        for member in members:
            is_started = member.run.name in self.started
            if _is_finished(member.run) and not is_started:
                continue
            try:
                check_init(shared, member, shapes)
                valid.append(member)
            except InputError as error:
                if is_started:
                    raise InputError(f"{member.run.name}: {error}") from error
                self.fail(member.run, error)
        return valid

    def train(self, shared: GroupInputs, members: Sequence[Member]) -> bool:
        """Trains runs of one backbone. Returns False if a signal stopped them."""
        groups = group_by_shape(members)
        with RunLog(self.workdir, tracker="none") as log:
            for line in shared.log_lines:
                log.info(line)
            shared.fill(members, log.info)
            if len(groups) > 1:
                sizes = " + ".join(str(len(group)) for group in groups)
                log.info(
                    f"runs with different shapes or lengths train one after another: {sizes} runs"
                )
        groups.sort(key=lambda group: not self.is_started([member.run for member in group]))
        return all(self._train_alike(shared, group) for group in groups)

    def note(self) -> None:
        """Sets the line that a signal prints about what is saved."""
        num_finished = sum(map(_is_finished, self.runs))
        saved = f", {len(self.started)} runs saved at step {self.checkpoints.latest()}"
        signals.note(
            f"with {num_finished} of {len(self.runs)} runs finished"
            f"{saved if self.started else ''}; run the same command again to continue"
        )

    def is_started(self, runs: Sequence[GridRun]) -> bool:
        """Returns whether the checkpoint has any of these runs."""
        return any(run.name in self.started for run in runs)

    def _train_alike(self, shared: GroupInputs, members: Sequence[Member]) -> bool:
        """Trains runs of one program, in as many chunks as needed."""
        total, start_time = members[0].plan.total, time.monotonic()
        first_init, frozen = init_run(shared, members[0])
        # Only shapes are read, so the arrays are freed.
        first_init = first_init._replace(state=jax.eval_shape(lambda x: x, first_init.state))
        programs_by_words: dict[str, Programs] = {}

        def make_programs(chunk: Sequence[Member]) -> tuple[Programs, dict[str, LabelWordArrays]]:
            """Returns the programs of some runs, and their label words if they are arguments."""
            words = varying_label_words(chunk)
            word_shapes = jax.tree.map(np.shape, words[chunk[0].run.name])
            # Words that are equal in all runs are constants of the program, others are arguments.
            key = str(word_shapes or jax.tree.map(np.ndarray.tolist, chunk[0].words))
            if key not in programs_by_words:
                programs_by_words[key] = Programs(
                    shared.placement,
                    chunk[0].model,
                    first_init.tx,
                    shared.objectives,
                    frozen,
                    first_init.state,
                    accumulate=shared.config.optim.accumulate,
                    tail_model=chunk[0].tail_model,
                )
            return programs_by_words[key], words

        epoch = members[0].steps_per_epoch
        with RunLog(self.workdir, tracker="none", total=total, steps_per_epoch=epoch) as log:
            log.info(tree.parameter_table(first_init.state.trainable, frozen | first_init.frozen))

            def max_runs(chunk: Sequence[Member], waiting: Sequence[Member]) -> int:
                with log.activity(f"compiling the training step for {format_runs(len(chunk))}"):
                    programs, words = make_programs(chunk)
                    return max_runs_in_memory(
                        programs,
                        len(chunk),
                        longest_group_batch(waiting),
                        PerRun(words[chunk[0].run.name], first_init.frozen),
                        free_bytes(shared.placement.mesh),
                        shares_states=same_batches(chunk),
                    )

            for chunk in self._chunks(members, shared.placement, max_runs, log):
                if not self._train_chunk(shared, chunk, *make_programs(chunk), log, start_time):
                    return False
                start_time = time.monotonic()
        return True

    def _train_chunk(
        self,
        shared: GroupInputs,
        chunk: Sequence[Member],
        programs: Programs,
        words: dict[str, LabelWordArrays],
        log: RunLog,
        start_time: float,
    ) -> bool:
        """Trains runs at once. Returns False if a signal stopped them."""
        # The checkpoint is of exactly one chunk.
        resumed = {member.run.name for member in chunk} == set(self.started)
        start_message = format_start(self.checkpoints.latest() if resumed else None)
        log.info(f"{format_runs(len(chunk))} at once, {chunk[0].plan.total} steps, {start_message}")
        states: list[TrainState] = []
        per_run = []
        for member in chunk:
            initial = init_run(shared, member)[0]
            if not resumed:
                states.append(initial.state)
            per_run.append(PerRun(words[member.run.name], initial.frozen))
        del initial
        init_states, seconds = None if resumed else states, time.monotonic() - start_time
        runs = Chunk(shared, chunk, programs, per_run)
        if not batched_runs.train_chunk(
            runs, self.workdir, log, init_states, seconds, self.stop_signal
        ):
            return False
        self._clear()
        self.note()
        return True

    def _chunks(
        self,
        members: Sequence[Member],
        placement: Placement,
        max_runs: Callable[[Sequence[Member], Sequence[Member]], int],
        log: RunLog,
    ) -> list[list[Member]]:
        """Splits members into chunks that train at once; a resumed grid keeps its chunks."""
        path, names = self.workdir / "chunks.json", {m.run.name: m for m in members}
        saved = _Chunks(self.size, ())
        if path.exists():
            expected = "the file that this grid wrote, or delete it and run the same command again"
            saved = _Chunks.from_json(read_json(path, expected), path)
        # With another size only the runs of the checkpoint have to stay together.
        saved_chunks = saved.chunks if saved.size == self.size else (self.started,)
        chunks = [chunk for chunk in saved_chunks if chunk and set(chunk) <= set(names)]
        chunks.sort(key=lambda chunk: chunk != self.started)
        waiting = [m for name, m in names.items() if not any(name in chunk for chunk in chunks)]
        if waiting:
            groups = [waiting] if self.size else split_by_batches(waiting, placement)
            size = self.size or max_runs(max(groups, key=len), waiting)
            new_chunks = [
                group[i : i + size] for group in groups for i in range(0, len(group), size)
            ]
            counts = f"{len(waiting)} runs in {len(new_chunks)} chunks"
            if len(new_chunks) > len(groups):
                limit = f"config.runs.size={self.size}" if self.size else "memory"
                log.info(f"{counts}: {limit} allows {size} at once")
            elif len(new_chunks) > 1:
                log.info(
                    f"{counts}: on a CPU only runs with the same batches train at once, other "
                    "batches would need more padding; raise config.runs.size to train more at once"
                )
            chunks += [tuple(member.run.name for member in chunk) for chunk in new_chunks]
            others = [chunk for chunk in saved.chunks if not set(chunk) & set(names)]
            document = _Chunks(self.size, (*others, *chunks))
            write_atomic(path, json.dumps(document.to_json(), indent=2) + "\n")
        return [[names[name] for name in chunk] for chunk in chunks]

    def fail(self, run: GridRun, error: Exception) -> None:
        """Marks a run as failed."""
        self.failed[run.name] = str(error)

    def _clear(self) -> None:
        rewind(checkpoint_folder(self.workdir), -1, keep=1)
        self.started = ()

    def outcome(self) -> Outcome:
        """Returns the results and errors of the runs."""
        results = {}
        for run in self.runs:
            result, failure = read_result(run.folder), read_failure(run.folder)
            if result is not None:
                results[run.name] = result
            elif failure is not None:
                self.failed[run.name] = failure
        return Outcome(results, self.failed)


def _is_finished(run: GridRun) -> bool:
    return any((run.folder / name).exists() for name in (RESULT, FAILURE))
