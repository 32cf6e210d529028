"""A run that labels a corpus with a trained classifier: the pseudo-labels of PPT."""

import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxprompt import signals
from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.check import check_config
from jaxprompt.build.corpus import need_corpus, read_corpus, tell
from jaxprompt.build.demonstrations import shows_demos
from jaxprompt.build.examples import check_tunes, read_task
from jaxprompt.config.run import CHANGEABLE_AFTER_TRAINING, CHANGEABLE_FIELDS, RunConfig
from jaxprompt.corpus import Corpus
from jaxprompt.corpus.ppt import (
    AnnotationWriter,
    Reader,
    check_classes,
    check_thresholds,
    check_unfinished,
    get_pattern,
)
from jaxprompt.corpus.ppt.reading import CUT
from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.text.demos import COUNTS
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.files import make_folder
from jaxprompt.parallel import processes
from jaxprompt.parallel.compilation import keep_programs
from jaxprompt.runs import train as tune
from jaxprompt.runs.grid.expand import is_grid
from jaxprompt.runs.ppt import thresholds_of
from jaxprompt.runs.restore import Trained, is_zero_shot, restore
from jaxprompt.runs.running import facts
from jaxprompt.scoring.decisions import probabilities
from jaxprompt.training.evaluation import predict_scores, scoring_step
from jaxprompt.training.pace import Pace
from jaxprompt.training.run_folder import check_workdir, lock, read_result

_BATCHES = 16  # whose units are sorted by length together, labelled and written: a part
_AHEAD = 2  # such parts are held, the one in use among them

_T = TypeVar("_T")


class Annotator(NamedTuple):
    """A trained classifier that labels units."""

    trained: Trained
    classes: tuple[str, ...]  # from worst to best
    max_len: int
    mark: str  # tells it from others


def check_annotator(config: RunConfig) -> None:
    """Raises InputError if a config's classifier cannot label units of text, or has no corpus.

    Reads neither data nor a backbone.
    """
    check_config(config)
    check_tunes(config)
    if is_grid(config):
        raise InputError("config.runs defines several runs, but annotate takes one; empty it")
    need_corpus(config)
    if shows_demos(config):
        field = next(f"demos.{name}" for name in COUNTS if getattr(config.demos, name))
        raise InputError(f"annotate does not support demonstrations; set {field}=0")
    task = read_task(config.task)
    if task.is_text or task.choices:
        what = "writes texts" if task.is_text else "has choices"
        raise InputError(
            f"task {task.name} {what}, but annotate needs classes; use a task with classes, from "
            "the worst to the best"
        )
    template = parse(config.task.template or task.template)
    if odd := [part.text for part in template.parts if part.kind == "field" and part.modifiers]:
        raise InputError(
            f"{{{odd[0]}}} has a modifier in the template, but annotate inserts the text "
            f"unchanged; write {{{odd[0]}}} alone"
        )
    names = template.fields if config.task.template else task.fields
    if len(names) != 1:
        raise InputError(
            f"task {task.name} has {len(names)} texts, {', '.join(names)}, but a unit of a corpus "
            "is one text; use a task of single texts"
        )
    if not task.labels:
        raise InputError(
            f"task {task.name} does not say which of its classes is the worst; give task.labels, "
            "from the worst to the best"
        )
    check_thresholds(task.labels, thresholds_of(config))
    check_classes(task.labels, len(get_pattern("cls", config.ppt.patterns).words))


def check_saved(classifier: RunConfig, workdir: str, finished: bool) -> None:
    """Raises InputError if a workdir belongs to another classifier."""
    free = CHANGEABLE_FIELDS + CHANGEABLE_AFTER_TRAINING * finished
    check_workdir(workdir, classifier.to_dict(), free)


def read_units(config: RunConfig, workdir: str) -> Corpus:
    """Opens the corpus of a config, indexed with the tokenizer of the classifier."""
    backbone = open_backbone(config.backbone)
    tokenizer = load_tokenizer(backbone.folder)
    return read_corpus(config, tokenizer, backbone.module.cfg.vocab, workdir)


def open_annotator(classifier: RunConfig, config: RunConfig, workdir: str) -> Annotator:
    """Restores the best parameters of a classifier from its workdir.

    Raises InputError if its classes do not match the thresholds of `config`.
    """
    trained = restore(classifier, workdir)
    scorer = trained.scorer
    check_thresholds(scorer.task.labels, thresholds_of(config))
    mark = f"{scorer.task.name} by a {trained.family} {trained.weights.report.fingerprint[:12]}"
    mark += f", classifier {_digest(trained)[:12]}"
    max_len = min(scorer.layout.max_len, CUT + scorer.model.prompt.num_slots())
    mark += f", {max_len} tokens, {classifier.backbone.dtype}"
    return Annotator(trained, scorer.task.labels, max_len, mark)


def _digest(trained: Trained) -> str:
    """Returns a digest of a classifier: its parameters, its labels and its template.

    Checkpoint files are not hashed: they depend on times and on the order of threads.
    """
    scorer = trained.scorer
    read_as = [scorer.task.labels, scorer.task.words, scorer.template]
    digest = hashlib.sha256(json.dumps(read_as).encode())
    # Sorted, so that equal numbers give equal digests.
    for name, leaf in sorted(trained.weights.trainable.items()):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        # A trained leaf may lie on the devices of several hosts.
        digest.update(process_allgather(leaf, tiled=True).tobytes())
    return digest.hexdigest()


def make_labeller(annotator: Annotator, corpus: Corpus) -> Callable[[int], Iterator[np.ndarray]]:
    """Returns (unit) -> class probabilities in parts, from that unit on.

    Each part is float32 [units, C]; a row of zeros is a unit that is left out. The parts do not
    depend on the first unit, so that a unit is always in the same batch.
    """
    trained = annotator.trained
    scorer, (trainable, frozen, _) = trained.scorer, trained.weights
    reader = Reader(
        corpus, scorer.tokenizer, scorer.encoder, parse(scorer.template), annotator.max_len
    )
    step = scoring_step(trained.placement, scorer.model)
    size, classes = _BATCHES * scorer.layout.batch, len(annotator.classes)

    def lay_out(start: int) -> tuple[range, list[int], list[list[Encoded]]]:
        units = range(start, min(start + size, corpus.num_units))
        return units, *reader.rows(units)

    def label(first: int) -> Iterator[np.ndarray]:
        begin = first // size * size if first < corpus.num_units else first
        starts = range(begin, corpus.num_units, size)
        for units, chosen, rows in _ahead(lay_out, starts):
            found = np.zeros((len(units), classes), np.float32)
            if rows:
                batches = EvalBatches(rows, [-1] * len(rows), scorer.layout)
                scores = predict_scores(step, trainable, frozen, batches, len(rows))
                found[chosen] = probabilities(scores, classes)
            # The first part is computed whole, and what is written already is left out of it.
            yield found[max(first - units.start, 0) :]

    return label


def _ahead(make: Callable[[int], _T], given: Sequence[int]) -> Iterator[_T]:
    """Calls `make` for each value ahead of time, in a thread."""
    with ThreadPoolExecutor(1) as pool:
        waiting: deque[Future[_T]] = deque()
        for one in given:
            waiting.append(pool.submit(make, one))
            if len(waiting) == _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# -- the run


def _prepare(
    config: RunConfig, classifier: RunConfig, workdir: str, output: str
) -> tuple[Annotator, Corpus] | None:
    """Trains the classifier, and opens it and the corpus; None if a signal stopped the training."""
    check_annotator(config)
    keep_programs(config.train.compilation_cache)
    trained = is_zero_shot(classifier) or read_result(workdir) is not None
    if not trained:  # whether these are its own annotations could be told after the training only
        check_unfinished(output)
    check_saved(classifier, workdir, trained)
    processes.agree(facts(config) | {"--output": output, "result.json": str(trained)})
    make_folder(workdir)
    corpus = read_units(config, workdir)
    processes.agree({"the indexed text": corpus.folder.name})
    if not trained and tune.run(classifier, workdir) is None:
        return None
    signals.note("with the classifier trained; run the same command again to continue")
    return open_annotator(classifier, config, workdir), corpus


def run(
    config: RunConfig, classifier: RunConfig, workdir: str, output: str
) -> dict[str, object] | None:
    """Labels the corpus of a config. Returns the counts.

    Returns None if a signal stopped the training, and on all processes but the first.
    """
    prepared = _prepare(config, classifier, workdir, output)
    if prepared is None:
        return None
    annotator, corpus = prepared
    label = make_labeller(annotator, corpus)
    total, thresholds = corpus.num_units, thresholds_of(config)
    with lock(output), contextlib.ExitStack() as stack:
        writer = processes.on_first(
            lambda: AnnotationWriter(output, corpus, annotator.classes, annotator.mark)
        )
        if writer:
            stack.callback(writer.close)
        say = tell if writer else lambda line: None
        # Only the first process has opened the file: the others learn from it where to go on.
        first = done = int(processes.gather(str(writer.done if writer else ""))[0])
        signals.note(_kept(done, total))
        say(f"annotator {annotator.mark}")
        say(
            f"corpus {config.corpus.path}: {len(corpus):,} documents, {total:,} units, {done:,} "
            "done"
        )

        def append(part: np.ndarray) -> None:
            assert writer is not None  # on the first process
            writer.append(part)

        start, pace = time.monotonic(), Pace(say, "labelled", total, "units", done)
        for part in label(done):
            processes.on_first(partial(append, part))
            done += len(part)
            signals.note(_kept(done, total))
            pace.add(len(part))
        seconds = time.monotonic() - start
        found = processes.on_first(lambda: writer.seal() if writer else None)
    if found is None:
        return None
    labelled, kept = found.counts([0] * len(thresholds)), found.counts(thresholds)
    named = lambda values: dict(zip(found.classes, values, strict=True))
    return {
        "annotator": annotator.mark,
        "corpus": config.corpus.path,
        "units": total,
        "left_out": total - int(labelled.sum()),
        "labels": named(labelled.tolist()),
        "thresholds": named(thresholds),
        "kept": named(kept.tolist()),
        "kept_share": float(kept.sum() / total),
        "output": output,
        "time": {"seconds": seconds, "units_per_second": (total - first) / seconds},
    }


def _kept(done: int, total: int) -> str:
    return (
        f"with {done:,} of {total:,} units annotated and saved; run the same command again to "
        "continue"
    )
