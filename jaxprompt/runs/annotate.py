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
from jaxprompt.build.corpus import log_to_stderr, read_corpus, require_corpus
from jaxprompt.build.examples import check_prompt_tuning, read_task
from jaxprompt.config.run import CHANGEABLE_AFTER_TRAINING, CHANGEABLE_FIELDS, RunConfig
from jaxprompt.corpus import Corpus
from jaxprompt.corpus.ppt import (
    AnnotationWriter,
    UnitEncoder,
    check_classes,
    check_thresholds,
    check_unfinished,
    get_pattern,
)
from jaxprompt.corpus.ppt.reading import MAX_TOKENS
from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.text.demos import COUNTS
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.files import make_folder
from jaxprompt.parallel import processes
from jaxprompt.parallel.compilation import enable_compilation_cache
from jaxprompt.runs import train as tune
from jaxprompt.runs.grid.expand import is_grid
from jaxprompt.runs.ppt import thresholds_of
from jaxprompt.runs.restore import RestoredRun, is_zero_shot, restore_run
from jaxprompt.runs.running import agreed_settings
from jaxprompt.scoring.decisions import probabilities
from jaxprompt.training.evaluation import predict_scores, scoring_step
from jaxprompt.training.pace import ProgressReporter
from jaxprompt.training.run_folder import check_workdir, lock_workdir, read_result

_BATCHES = 16  # batches of a part: its units are sorted by length, labelled and written together
_AHEAD = 2  # parts that are encoded at a time, including the one in use

_T = TypeVar("_T")


class Annotator(NamedTuple):
    """A trained classifier that labels units."""

    trained: RestoredRun
    classes: tuple[str, ...]  # from worst to best
    max_len: int
    description: str  # identifies it: task, weights and parameters


def check_annotator(config: RunConfig) -> None:
    """Raises InputError if a config's classifier cannot label units of text, or has no corpus.

    Reads neither data nor a backbone.
    """
    check_config(config)
    check_prompt_tuning(config)
    require_corpus(config)
    task = read_task(config.task)
    template = parse(config.task.template or task.template)
    modified = [
        f"{{{part.text}}}" for part in template.parts if part.kind == "field" and part.modifiers
    ]
    text_fields = template.fields if config.task.template else task.fields
    counts = [f"demos.{name}=0" for name in COUNTS if getattr(config.demos, name)]
    if is_grid(config):
        raise InputError(
            "config.runs defines a grid, but annotate trains a single run; empty config.runs"
        )
    if counts:
        raise InputError(f"annotate does not support demonstrations; set {', '.join(counts)}")
    if task.is_text:
        raise InputError(
            f"task {task.name} writes texts, but annotate needs classes; use a task with classes, "
            "from the worst to the best"
        )
    if task.choices:
        raise InputError(
            f"task {task.name} has choices, but annotate needs classes; use a task with classes, "
            "from the worst to the best"
        )
    if modified:
        raise InputError(
            f"{', '.join(modified)} has a modifier in the template, but annotate inserts the text "
            "unchanged; write the field alone"
        )
    if len(text_fields) != 1:
        raise InputError(
            f"task {task.name} has {len(text_fields)} texts, {', '.join(text_fields)}, but a unit "
            "of a corpus is one text; use a task of single texts"
        )
    if not task.labels:
        raise InputError(
            f"task {task.name} does not say which of its classes is the worst; give task.labels, "
            "from the worst to the best"
        )
    check_thresholds(task.labels, thresholds_of(config))
    check_classes(task.labels, len(get_pattern("cls", config.ppt.patterns).words))


def open_annotator(classifier: RunConfig, config: RunConfig, workdir: str) -> Annotator:
    """Restores the best parameters of a classifier from its workdir.

    Raises InputError if its classes do not match the thresholds of `config`.
    """
    trained = restore_run(classifier, workdir)
    scorer = trained.scorer
    check_thresholds(scorer.task.labels, thresholds_of(config))
    max_len = min(scorer.layout.max_len, MAX_TOKENS + scorer.model.prompt.num_slots())
    description = (
        f"{scorer.task.name} by a {trained.family} {trained.weights.report.fingerprint[:12]}, "
        f"classifier {_digest(trained)[:12]}, {max_len} tokens, {classifier.backbone.dtype}"
    )
    return Annotator(trained, scorer.task.labels, max_len, description)


def _digest(trained: RestoredRun) -> str:
    """Returns a digest of a classifier: its parameters, its labels and its template.

    Checkpoint files are not hashed: they depend on times and on the order of threads.
    """
    scorer = trained.scorer
    task = scorer.task
    digest = hashlib.sha256(json.dumps([task.labels, task.words, scorer.template]).encode())
    # Sorted, so that equal parameters give equal digests.
    for name, leaf in sorted(trained.weights.trainable.items()):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        # A trained leaf may be sharded over several hosts.
        digest.update(process_allgather(leaf, tiled=True).tobytes())
    return digest.hexdigest()


def make_labeller(annotator: Annotator, corpus: Corpus) -> Callable[[int], Iterator[np.ndarray]]:
    """Returns (first unit) -> class probabilities in parts, from that unit on.

    Each part is float32 [units, C]; a row of zeros is a unit that is left out. The parts do not
    depend on the first unit, so that a unit is always in the same batch.
    """
    trained = annotator.trained
    scorer, (trainable, frozen, _) = trained.scorer, trained.weights
    reader = UnitEncoder(
        corpus, scorer.tokenizer, scorer.encoder, parse(scorer.template), annotator.max_len
    )
    step = scoring_step(trained.placement, scorer.model)
    part_size, num_classes = _BATCHES * scorer.layout.batch, len(annotator.classes)

    def encode_part(start: int) -> tuple[range, list[int], list[list[Encoded]]]:
        units = range(start, min(start + part_size, corpus.num_units))
        return units, *reader.rows(units)

    def label(first: int) -> Iterator[np.ndarray]:
        start = first // part_size * part_size if first < corpus.num_units else first
        starts = range(start, corpus.num_units, part_size)
        for units, encoded, rows in _ahead(encode_part, starts):
            probs = np.zeros((len(units), num_classes), np.float32)
            if rows:
                batches = EvalBatches(rows, [-1] * len(rows), scorer.layout)
                scores = predict_scores(step, trainable, frozen, batches, len(rows))
                probs[encoded] = probabilities(scores, num_classes)
            # The first part is computed completely, and what is already saved is left out.
            yield probs[max(first - units.start, 0) :]

    return label


def _ahead(function: Callable[[int], _T], values: Sequence[int]) -> Iterator[_T]:
    """Calls a function on values in a thread, ahead of their use."""
    with ThreadPoolExecutor(1) as pool:
        futures: deque[Future[_T]] = deque()
        for value in values:
            futures.append(pool.submit(function, value))
            if len(futures) == _AHEAD:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


# -- run --------------------------------------------------------------------------------------


def _prepare(
    config: RunConfig, classifier: RunConfig, workdir: str, output: str
) -> tuple[Annotator, Corpus] | None:
    """Trains the classifier, and opens it and the corpus; None if a signal stopped the training."""
    check_annotator(config)
    enable_compilation_cache(config.train.compilation_cache)
    trained = is_zero_shot(classifier) or read_result(workdir) is not None
    if not trained:  # whether they belong to this classifier is only known after its training
        check_unfinished(output)
    free = (*CHANGEABLE_FIELDS, *CHANGEABLE_AFTER_TRAINING) if trained else CHANGEABLE_FIELDS
    check_workdir(workdir, classifier.to_dict(), free)
    processes.check_agreement(
        agreed_settings(config) | {"--output": output, "result.json": str(trained)}
    )
    make_folder(workdir)
    backbone = open_backbone(config.backbone)
    tokenizer = load_tokenizer(backbone.folder)
    corpus = read_corpus(config, tokenizer, backbone.module.cfg.vocab, workdir)
    processes.check_agreement({"the indexed text": corpus.folder.name})
    if not trained and tune.train_prompt(classifier, workdir) is None:
        return None
    signals.note("with the classifier trained; run the same command again to continue")
    return open_annotator(classifier, config, workdir), corpus


def annotate_corpus(
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
    with lock_workdir(output), contextlib.ExitStack() as stack:
        writer = processes.run_on_first(
            lambda: AnnotationWriter(output, corpus, annotator.classes, annotator.description)
        )
        if writer:
            stack.callback(writer.close)
        log = log_to_stderr if writer else lambda line: None
        # Only the first process has opened the file, and tells the others where to continue.
        num_saved = done = int(processes.gather_texts(str(writer.done if writer else ""))[0])
        signals.note(_kept(done, total))
        log(f"annotator {annotator.description}")
        log(
            f"corpus {config.corpus.path}: {len(corpus):,} documents, {total:,} units, {done:,} "
            "done"
        )

        def append(probs: np.ndarray) -> None:
            assert writer is not None  # on the first process
            writer.append(probs)

        start, pace = time.monotonic(), ProgressReporter(log, "labelled", total, "units", done)
        for probs in label(done):
            processes.run_on_first(partial(append, probs))
            done += len(probs)
            signals.note(_kept(done, total))
            pace.add(len(probs))
        seconds = time.monotonic() - start
        annotations = processes.run_on_first(lambda: writer.seal() if writer else None)
    if annotations is None:
        return None
    labelled, confident = annotations.counts([0] * len(thresholds)), annotations.counts(thresholds)

    def by_class(values):
        return dict(zip(annotations.classes, values, strict=True))

    return {
        "annotator": annotator.description,
        "corpus": config.corpus.path,
        "units": total,
        "left_out": total - int(labelled.sum()),
        "labels": by_class(labelled.tolist()),
        "thresholds": by_class(thresholds),
        "kept": by_class(confident.tolist()),
        "kept_share": float(confident.sum() / total),
        "output": output,
        "time": {"seconds": seconds, "units_per_second": (total - num_saved) / seconds},
    }


def _kept(done: int, total: int) -> str:
    return (
        f"with {done:,} of {total:,} units annotated and saved; run the same command again to "
        "continue"
    )
