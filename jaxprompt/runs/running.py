"""Common parts of all runs: workdir, other processes, result."""

import abc
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import optax

from jaxprompt import rng, signals
from jaxprompt.build.corpus import read_corpus
from jaxprompt.build.optimizer import build_optimizer
from jaxprompt.config.run import CHANGEABLE_FIELDS, RunConfig
from jaxprompt.convert.artifact import package_versions
from jaxprompt.corpus import Corpus
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, escape
from jaxprompt.parallel import processes
from jaxprompt.parallel.compilation import keep_programs
from jaxprompt.runs import record as records
from jaxprompt.training import one_run, pictures, run_folder
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.one_run import Ended, Job, Prepared
from jaxprompt.training.run_folder import Record
from jaxprompt.training.run_record import RunRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import TrainState, place_state
from jaxprompt.tree import Flat

# A host's own places, which may differ between the processes of a run.
_PLACES = ("backbone.path", "data.cache_dir", "data.source", "data.files")
# Data may be moved, because `carry_out` compares what it reads with the record, finished or not.
# Not so in a grid or a sweep, which take a finished run by its config alone.
_FREE = (*CHANGEABLE_FIELDS, "data.source", "data.files")


P = TypeVar("P", bound=Prepared)
J = TypeVar("J", bound=Job)


class Work(abc.ABC, Generic[Record, P, J]):
    """A kind of run: its stages, in the order in which `carry_out` calls them."""

    DONE: ClassVar[str]  # the participle of what it does: "trained"
    RECORD: type[Record]

    def __init__(self, config: RunConfig, workdir: str):
        self.config, self.workdir = config, str(workdir)

    @abc.abstractmethod
    def check(self) -> None:
        """Raises InputError for an invalid config, before data and backbone are read."""

    @abc.abstractmethod
    def prepare(self, saved: Record | None, started: int | None) -> P:
        """Loads data and backbone, and checks everything that depends on them.

        `saved` is the record of the workdir, `started` the step of its newest checkpoint; None if
        there is none.
        """

    @abc.abstractmethod
    def build(self, prepared: P) -> J:
        """Makes the job that trains."""

    @abc.abstractmethod
    def lines(self, prepared: P, job: J, where: str) -> Iterable[str]:
        """Returns log lines: what was read and what trains; `where` says from which step."""

    @abc.abstractmethod
    def finish(self, prepared: P, job: J, ended: Ended) -> RunResult:
        """Makes the result, and writes the other outputs of a run."""


def make_state(
    config: RunConfig, prepared: Prepared, trainable: Flat
) -> tuple[optax.GradientTransformation, TrainState]:
    """Returns the optimizer of a run and its initial state.

    The arrays of `trainable` are donated: afterwards only their shapes can be read.
    """
    tx = build_optimizer(config, trainable, prepared.milestones, prepared.steps_per_epoch)
    key = rng.key_for(config.seed, "dropout", config.rng)
    return tx, place_state(prepared.placement, trainable, tx, key, donate=True)


def open_corpus(
    config: RunConfig, tokenizer: Tokenizer, vocab: int, workdir: str, started: int | None
) -> Corpus:
    """Opens the indexed corpus of a config; indexes it if needed."""
    corpus = read_corpus(config, tokenizer, vocab, workdir)
    if started is None:
        signals.note("before the first step; the indexed corpus is kept")
    return corpus


def carry_out(work: Work[Record, P, J]) -> RunResult | None:
    """Starts or resumes a run in its workdir. Returns its result, None if a signal stopped it.

    A finished run returns its saved result. Raises InputError if the workdir belongs to another run
    or is in use, and if the run would train on different data than before.
    """
    config, workdir = work.config, work.workdir
    work.check()
    run_folder.check_workdir(workdir, config.to_dict(), _FREE)
    keep_programs(config.train.compilation_cache)
    with run_folder.lock(workdir):
        saved, finished = (
            run_folder.read_record(workdir, work.RECORD),
            run_folder.read_result(workdir),
        )
        started = Checkpoints(workdir).latest()
        signals.note(one_run.saved_at(started))
        # Before anything is read: processes that differ would wait for one another forever.
        processes.agree(facts(config) | {"result.json": str(bool(finished))})
        prepared = work.prepare(saved, started)
        # Each process reads for itself: of other text its share would be of another batch.
        agree_on(prepared.record)
        records.check_repeated(workdir, prepared.record)
        if finished is not None:
            line = f"already {work.DONE}, nothing to do: {workdir} (delete it to start again)"
            print(escape(line), file=sys.stderr)
            return finished
        job = work.build(prepared)
        prepared = prepared.without_weights()
        # Only now is the folder written: what is refused above leaves it as it was.
        run_folder.guard_workdir(workdir, config.to_dict(), _FREE)
        run_folder.write_record(workdir, prepared.record)
        where = "starting at step 0" if started is None else f"resumed at step {started}"
        ended = one_run.drive(prepared, job, workdir, started, work.lines(prepared, job, where))
        if ended is None:
            return None
        result = work.finish(prepared, job, ended)
        run_folder.write_result(workdir, result)
        if config.train.plot and processes.is_first() and pictures.can_draw():
            title = f"{work.DONE}: {Path(workdir).resolve().name}"
            try:
                pictures.draw_curves(workdir, title)
            except InputError as error:  # a full disk, say: the run is finished all the same
                print(escape(f"{pictures.CURVES} was not drawn: {error}"), file=sys.stderr)
        return result


def agree_on(record: RunRecord) -> None:
    """Raises the same InputError on every process if they have read different data."""
    digest = lambda x: hashlib.sha256(json.dumps(x, sort_keys=True).encode()).hexdigest()[:12]
    processes.agree({f"the {name}": digest(part) for name, part in record.to_json().items()})


def facts(config: RunConfig) -> dict[str, str]:
    """Returns what the processes of a run must agree on before they read anything."""
    shown = {
        name: str(value) for name, value in config.leaves().items() if not name.startswith(_PLACES)
    }
    return shown | {f"version of {name}": text for name, text in package_versions().items()}
