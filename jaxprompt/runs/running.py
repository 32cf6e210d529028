"""What every run does around its training: its folder, its other processes, its result."""

import abc
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Generic

from jaxprompt import rng, signals
from jaxprompt.build.corpus import read_corpus
from jaxprompt.build.optimizer import build_optimizer
from jaxprompt.config.run import FREE, RunConfig
from jaxprompt.convert.artifact import package_versions
from jaxprompt.corpus import Corpus
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, escape
from jaxprompt.parallel import processes
from jaxprompt.parallel.compilation import keep_programs
from jaxprompt.parallel.sharding import Placement
from jaxprompt.runs import record as records
from jaxprompt.training import one_run, pictures, run_folder
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.log import RunLog
from jaxprompt.training.one_run import Ended, Job
from jaxprompt.training.progress import Metrics
from jaxprompt.training.run_folder import Record
from jaxprompt.training.run_record import RunRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import place_state
from jaxprompt.training.steps import StepModel, make_train_step
from jaxprompt.training.throughput import Meter
from jaxprompt.tree import Flat
from jaxprompt.types import Batch, Objective

# A host's own places, which may differ between the processes of a run.
_PLACES = ("backbone.path", "data.cache_dir", "data.source", "data.files")
# Data may be moved, because `carry_out` compares what it reads with the record, finished or not.
# Not so in a grid or a sweep, which take a finished run by its config alone.
_FREE = (*FREE, "data.source", "data.files")


class Work(Job, Generic[Record]):
    """One run of a config in a workdir. `carry_out` calls the methods in their order here."""

    DONE: ClassVar[str]  # the participle of what it does: "trained"
    RECORD: type[Record]
    record: Record  # what it learns from

    def __init__(self, config: RunConfig, workdir: str):
        self.config, self.workdir = config, str(workdir)
        self.settings = config.train

    @abc.abstractmethod
    def check(self) -> None:
        """Raises InputError for all that is wrong whatever the data and the backbone."""

    @abc.abstractmethod
    def prepare(self, saved: Record | None, started: int | None) -> None:
        """Reads data and backbone: everything that a config can get wrong.

        Sets `record`, `batches` and `milestones`. `saved` is the record of the folder, `started`
        the step of its newest checkpoint; None where there is none.
        """

    @abc.abstractmethod
    def build(self) -> None:
        """Makes what trains, by `set_training`. Nothing of the folder is changed before."""

    @abc.abstractmethod
    def tell(self, log: RunLog, where: str) -> None:
        """Says what was read and what trains; `where` from which step."""

    @abc.abstractmethod
    def finish(self, ended: Ended) -> RunResult:
        """Makes the result, and what else a run leaves."""

    def set_training(
        self, placement: Placement, model: StepModel, objectives: Sequence[Objective],
        trainable: Flat, frozen: Flat,
    ) -> None:  # fmt: skip
        """Makes the step and its state."""
        self.set_state(placement, trainable, frozen)
        accumulate = self.config.optim.accumulate
        self.step = make_train_step(model, self.tx, objectives, accumulate=accumulate)

    def set_state(self, placement: Placement, trainable: Flat, frozen: Flat) -> None:
        """Makes what a step starts from, for a kind of run that makes its own; `tx` optimizes."""
        config = self.config
        self.tx = build_optimizer(config, trainable, self.milestones, self.batches.steps_per_epoch)
        key = rng.key_for(config.seed, "dropout", config.rng)
        self.state = place_state(placement, trainable, self.tx, key, donate=True)
        self.placement, self.frozen = placement, frozen


class CorpusWork(Work[Record]):
    """A run on running text: it chooses by the loss of held-out documents.

    `build` sets its attributes.
    """

    meter: Meter  # counts the rows
    score_held: Callable[[Flat], dict[str, float]]  # trainable -> the scores of held-out rows

    def read_corpus(self, tokenizer: Tokenizer, vocab: int, started: int | None) -> Corpus:
        """Opens the indexed text of the config; indexes it where that was not done yet."""
        corpus = read_corpus(self.config, tokenizer, vocab, self.workdir)
        if started is None:
            signals.note("before the first step; the indexed corpus is kept")
        return corpus

    def take(self) -> Batch:
        """Gives the next batch."""
        return self.meter.take()

    def measure(self, trainable: Flat) -> dict[str, float]:
        """Scores what is held out."""
        return self.score_held(trainable)

    def value(self, dev: dict[str, float]) -> float:
        """Picks the loss, which is to be low."""
        return -dev["loss"]

    def describe(self, found: Metrics, steps: int, seconds: float) -> Metrics:
        """Adds scores of the step's rows, and how fast they come."""
        return self.meter.describe(found, steps, seconds)


def carry_out(work: Work) -> RunResult | None:
    """Runs a config in its workdir, from where it stands. -> its result, None where a signal cut it

    A finished run gives the result that it has. Raises InputError where the folder is another
    run's, or in use, and where the run would learn from anything else than it did.
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
        work.prepare(saved, started)
        # Each process reads for itself: of other text its share would be of another batch.
        agree_on(work.record)
        records.check_repeated(workdir, work.record)
        if finished is not None:
            work.batches.close()
            line = f"already {work.DONE}, nothing to do: {workdir} (delete it to start again)"
            print(escape(line), file=sys.stderr)
            return finished
        work.build()
        # Only now is the folder written: what is refused above leaves it as it was.
        run_folder.guard_workdir(workdir, config.to_dict(), _FREE)
        run_folder.write_record(workdir, work.record)
        where = "from the start" if started is None else f"resumed at step {started}"
        ended = one_run.drive(work, workdir, started, lambda log: work.tell(log, where))
        if ended is None:
            return None
        result = work.finish(ended)
        run_folder.write_result(workdir, result)
        if config.train.plot and processes.is_first() and pictures.can_draw():
            title = f"{work.DONE}: {Path(workdir).resolve().name}"
            try:
                pictures.draw_curves(workdir, title)
            except InputError as error:  # a full disk, say: the run is finished all the same
                print(escape(f"{pictures.CURVES} is not drawn: {error}"), file=sys.stderr)
        return result


def agree_on(record: RunRecord) -> None:
    """Raises InputError, the same on every process, where they read different things."""
    digest = lambda x: hashlib.sha256(json.dumps(x, sort_keys=True).encode()).hexdigest()[:12]
    processes.agree({f"the {name}": digest(part) for name, part in record.to_json().items()})


def facts(config: RunConfig) -> dict[str, str]:
    """Lists what the processes of a run must have in common before they read anything."""
    shown = {
        name: str(value) for name, value in config.leaves().items() if not name.startswith(_PLACES)
    }
    return shown | {f"version of {name}": text for name, text in package_versions().items()}
