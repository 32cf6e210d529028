"""Common parts of all runs: workdir, other processes, result."""

import abc
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import optax

from jaxprompt import rng, signals, tree
from jaxprompt.build.check import check_packages
from jaxprompt.build.corpus import read_corpus
from jaxprompt.build.optimizer import build_optimizer, build_schedule
from jaxprompt.config.run import CHANGEABLE_FIELDS, RunConfig
from jaxprompt.convert.artifact import package_versions
from jaxprompt.convert.load import Loaded
from jaxprompt.corpus import Corpus
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, escape
from jaxprompt.parallel import processes
from jaxprompt.parallel.compilation import enable_compilation_cache
from jaxprompt.runs import record as records
from jaxprompt.training import one_run, pictures, run_folder
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.log import RunLog
from jaxprompt.training.one_run import Job, Prepared, TrainOutcome
from jaxprompt.training.run_folder import Record
from jaxprompt.training.run_record import RunRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import TrainState, place_state
from jaxprompt.tree import Flat

# Paths on a host, which may differ between the processes of a run.
_HOST_FIELDS = ("backbone.path", "data.cache_dir", "data.source", "data.files")
# Data may be moved, because `run_stages` compares it with the record, even of a finished run. In a
# grid or a sweep it may not: these accept a finished run by its config alone.
_FREE = (*CHANGEABLE_FIELDS, "data.source", "data.files")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedWithWeights(Prepared[Record]):
    """The inputs of a run whose parameters are initialised from those of a loaded backbone."""

    loaded: Loaded

    def without_weights(self) -> Self:
        """Returns a copy without the loaded weights of the backbone."""
        return dataclasses.replace(self, loaded=self.loaded._replace(params={}))


P = TypeVar("P", bound=Prepared)
J = TypeVar("J", bound=Job)


class RunStages(abc.ABC, Generic[Record, P, J]):
    """A kind of run: its stages, in the order in which `run_stages` calls them."""

    DONE: ClassVar[str]  # the participle of what it does: "trained"
    RECORD: type[Record]

    def __init__(self, config: RunConfig, workdir: str):
        self.config, self.workdir = config, str(workdir)

    @abc.abstractmethod
    def check(self) -> None:
        """Raises InputError for an invalid config, before data and backbone are read."""

    @abc.abstractmethod
    def prepare(self, saved: Record | None, resume_step: int | None) -> P:
        """Loads data and backbone, and checks everything that depends on them.

        `saved` is the record of the workdir, `resume_step` that of its newest checkpoint; None if
        there is none.
        """

    @abc.abstractmethod
    def build(self, prepared: P) -> J:
        """Makes the job that trains."""

    @abc.abstractmethod
    def lines(self, prepared: P, job: J, start_message: str) -> Iterable[str]:
        """Returns log lines: what was read, what trains, and `start_message`, the first step."""

    @abc.abstractmethod
    def finish(self, prepared: P, job: J, outcome: TrainOutcome) -> RunResult:
        """Makes the result, and writes the other outputs of a run."""


def init_train_state(
    config: RunConfig, prepared: Prepared, trainable: Flat
) -> tuple[optax.GradientTransformation, TrainState]:
    """Returns the optimizer of a run and its initial state.

    The arrays of `trainable` are donated: afterwards only their shapes can be read.
    """
    tx = build_optimizer(config, trainable, prepared.milestones, prepared.steps_per_epoch)
    key = rng.key_for(config.seed, "dropout", config.rng)
    return tx, place_state(prepared.placement, trainable, tx, key, donate=True)


def make_result(config: RunConfig, job: Job, outcome: TrainOutcome, **fields: Any) -> RunResult:
    """Returns the result of a run; `fields` are those of its kind, e.g. its scores."""
    trained = tree.count(job.state.trainable)
    return RunResult(
        seed=config.seed,
        trained=trained,
        total=trained + tree.count(job.frozen),
        steps=outcome.progress.steps,
        skipped=outcome.progress.skipped,
        best_step=outcome.best.step,
        time=outcome.time,
        **fields,
    )


def open_corpus(
    config: RunConfig, tokenizer: Tokenizer, vocab: int, workdir: str, resume_step: int | None
) -> Corpus:
    """Opens the indexed corpus of a config; indexes it if needed."""
    corpus = read_corpus(config, tokenizer, vocab, workdir)
    if resume_step is None:
        signals.note("before the first step; the indexed corpus is kept")
    return corpus


def run_stages(work: RunStages[Record, P, J]) -> RunResult | None:
    """Starts or resumes a run in its workdir. Returns its result, None if a signal stopped it.

    A finished run returns its saved result. Raises InputError if the workdir belongs to another run
    or is in use, and if the run would train on different data than before.
    """
    config, workdir = work.config, work.workdir
    work.check()
    run_folder.check_workdir(workdir, config.to_dict(), _FREE)
    enable_compilation_cache(config.train.compilation_cache)
    with run_folder.lock_workdir(workdir):
        record = run_folder.read_record(workdir, work.RECORD)
        result = run_folder.read_result(workdir)
        if result is None:
            check_packages(config)
        resume_step = Checkpoints(workdir).latest()
        signals.note(one_run.saved_message(resume_step))
        # Before anything is read, because processes that differ would wait for each other forever.
        processes.check_agreement(agreed_settings(config) | {"result.json": str(bool(result))})
        prepared = work.prepare(record, resume_step)
        # Each process reads the data itself; with other data its share would be of another batch.
        agree_on(prepared.record)
        records.check_same_data(workdir, prepared.record)
        if result is not None:
            message = f"already {work.DONE}, nothing to do: {workdir} (delete it to start again)"
            print(escape(message), file=sys.stderr)
            if not (Path(workdir) / pictures.CURVES).exists():  # a kill came before it
                _draw_curves(work)
            return result
        job = work.build(prepared)
        schedule = build_schedule(config, prepared.milestones, prepared.steps_per_epoch)
        prepared = dataclasses.replace(prepared.without_weights(), constants=schedule.constants)
        # Written only now, so that an error above leaves the folder unchanged.
        run_folder.bind_workdir(workdir, config.to_dict(), _FREE)
        run_folder.write_record(workdir, prepared.record)
        start_message = format_start(resume_step)
        with RunLog(
            workdir,
            tracker=config.train.tracker,
            enabled=processes.is_first(),
            total=prepared.milestones.total,
            steps_per_epoch=prepared.steps_per_epoch,
        ) as log:
            lines = work.lines(prepared, job, start_message)
            outcome = one_run.train_job(prepared, job, log, workdir, resume_step, lines)
            if outcome is None:
                return None
            with log.activity(f"finishing with step {outcome.best.step}, the best one"):
                result = work.finish(prepared, job, outcome)
        run_folder.write_result(workdir, result)
        _draw_curves(work)
        return result


def _draw_curves(work: RunStages[Record, P, J]) -> None:
    """Draws the curves of a finished run, if its config says so."""
    if work.config.train.plot and processes.is_first() and pictures.has_matplotlib():
        title = f"{work.DONE}: {Path(work.workdir).resolve().name}"
        try:
            pictures.draw_curves(work.workdir, title)
        except InputError as error:  # e.g. a full disk; the run is finished anyway
            print(escape(f"{pictures.CURVES} was not drawn: {error}"), file=sys.stderr)


def format_start(resume_step: int | None) -> str:
    """Returns where a run starts, for its log."""
    return "starting at step 0" if resume_step is None else f"resumed at step {resume_step}"


def agree_on(record: RunRecord) -> None:
    """Raises the same InputError on every process if they have read different data."""

    def digest(x):
        return hashlib.sha256(json.dumps(x, sort_keys=True).encode()).hexdigest()[:12]

    processes.check_agreement(
        {f"the {name}": digest(value) for name, value in record.to_json().items()}
    )


def agreed_settings(config: RunConfig) -> dict[str, str]:
    """Returns the fields and versions that must be equal in all processes of a run."""
    fields = {
        name: str(value)
        for name, value in config.leaves().items()
        if not name.startswith(_HOST_FIELDS)
    }
    return fields | {f"version of {name}": version for name, version in package_versions().items()}
