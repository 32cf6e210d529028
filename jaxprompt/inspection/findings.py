"""Inspects what a run learned: trained vectors and words near them, states, answers, attention."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import tree
from jaxprompt.build.evaluation import make_evaluate_fn
from jaxprompt.build.examples import SPLITS, read_split_rows
from jaxprompt.build.method import prompt_starts
from jaxprompt.build.task import eval_batches
from jaxprompt.config.run import RunConfig
from jaxprompt.data.tasks.task import KINDS
from jaxprompt.data.text.encoded import Split
from jaxprompt.errors import InputError, at_least, check_known
from jaxprompt.files import dumps
from jaxprompt.inspection.instances import Instances, find_instances
from jaxprompt.inspection.learned_rows import (
    LABEL,
    LearnedRow,
    Word,
    find_rows,
    recompute_init_params,
)
from jaxprompt.models.prompt_attention import STREAMS, attend_prompt
from jaxprompt.models.scorer import Scorer
from jaxprompt.runs.restore import RestoredRun, restore_run
from jaxprompt.scoring.metrics import right_classes
from jaxprompt.scoring.separation import Separation, class_separation, count_confusion
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.evaluation import compile_step, predict_scores
from jaxprompt.types import Batch

PLOTTED_STEPS = 4  # number of steps whose states are plotted by default
START = 0  # the initialisation
_TEXT_LENGTH = 120  # characters of a misclassified text


class InspectOptions(NamedTuple):
    """Options of an inspection."""

    split: str = "dev"
    steps: tuple[int, ...] = ()  # whose states are plotted; () = PICTURED of the saved steps
    top: int = 5  # nearest words per vector
    examples: int = 1000  # maximum number of examples for states and attention
    instances: int = 5  # texts to show with their words, if the prompt depends on the text
    errors: int = 10  # misclassified examples to show


class States(NamedTuple):
    """The hidden states that the head reads."""

    names: tuple[str, ...]  # of the classes
    labels: np.ndarray  # int32 [n]
    separations: dict[int, Separation]  # by step, of all saved steps
    pictured: dict[int, np.ndarray]  # by step, float32 [n, H]


class Confusion(NamedTuple):
    """The confusion matrix."""

    names: tuple[str, ...]
    counts: np.ndarray  # int64 [C, C + 1], the last column: no class


class Misclassified(NamedTuple):
    """An example with a wrong prediction."""

    origin: str  # "file:line"
    text: str  # shortened
    label: str  # the right class
    prediction: str
    score: float  # of the prediction


class AttentionShare(NamedTuple):
    """Mean share of the attention weights that the prompt receives, in one kind of attention."""

    tokens: np.ndarray  # float32 [L, N], see models.prompt_attention
    read: np.ndarray  # float32 [L, N], NaN if the head does not read this stream
    even: float


@dataclasses.dataclass
class Findings:
    """Results of an inspection. For each part without results `notes` gives the reason."""

    about: dict[str, str]
    step: int  # of the parameters for rows, answers and attention
    rows: list[LearnedRow] = dataclasses.field(default_factory=list)
    states: States | None = None
    confusion: Confusion | None = None
    errors: list[Misclassified] = dataclasses.field(default_factory=list)  # highest scores first
    attention: dict[str, AttentionShare] = dataclasses.field(default_factory=dict)
    instances: Instances | None = None  # for methods with soft tokens, or that read the text
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    remarks: list[str] = dataclasses.field(default_factory=list)  # about the results

    @property
    def label_rows(self) -> list[LearnedRow]:
        """The label rows."""
        return [row for row in self.rows if row.kind == LABEL]

    def to_json(self) -> str:
        """Returns everything except the vectors as JSON."""
        separations = self.states.separations if self.states else {}
        values: dict[str, Any] = {
            "about": self.about,
            "step": self.step,
            "rows": [_row_to_json(row) for row in self.rows],
            "separation": [
                {"step": step, "intra": x.intra, "inter": x.inter, "ratio": x.ratio}
                for step, x in separations.items()
            ],
        }
        if self.confusion:
            values["confusion"] = self.confusion._asdict()
            values["errors"] = [example._asdict() for example in self.errors]
        if self.instances:
            values["instances"] = [case._asdict() for case in self.instances.shown]
        values["attention"] = {name: x._asdict() for name, x in self.attention.items()}
        return dumps(values | {"notes": self.notes, "remarks": self.remarks}, indent=2) + "\n"


def inspect_run(
    config: RunConfig, workdir: str, options: InspectOptions, report: Callable[[str], None]
) -> Findings:
    """Inspects the best parameters of a run, and its hidden states during training.

    Args:
      config: config of the run.
      workdir: its run directory.
      options: what to inspect.
      report: is called with progress messages.

    Raises:
      InputError: for a workdir without a run or a checkpoint, and for unavailable options.
    """
    check_known("--split", options.split, SPLITS)
    at_least("--top", options.top, 1)
    at_least("--examples", options.examples, 4)
    at_least("--instances", options.instances, 0)
    at_least("--errors", options.errors, 0)
    trained = _restore(config, workdir, options.split)
    scorer, split = trained.scorer, trained.splits[options.split]
    init_params, reason = recompute_init_params(config, trained)
    best = START if trained.best is None else trained.best.step
    steps = [] if init_params is None else [START]
    if trained.weights.trainable:
        steps += Checkpoints(workdir).steps()
    plotted = _choose_steps(options.steps, steps, best, workdir)
    findings = Findings(_run_summary(config, trained, options.split), best)
    findings.remarks += trained.changed_splits
    if init_params is None:
        findings.remarks.append(f"the initial parameters are not known: {reason}")

    frozen = trained.weights.frozen
    params = tree.merge(trained.weights.trainable, frozen)
    initial = None if init_params is None else tree.merge(init_params, frozen)
    batch = scorer.one_batch(split.rows[:1])
    findings.rows = find_rows(scorer, params, initial, batch, options.top)
    _add_row_notes(findings, scorer)

    unsampled = split.without_samples()
    sample = _sample_rows(unsampled, options.examples)
    if split.samples > 1:
        findings.remarks.append(
            "hidden states and attention are those with the first demonstrations of each example"
        )
    if len(sample.rows) < len(unsampled.rows):
        findings.remarks.append(
            f"hidden states and attention are those of {len(sample.rows)} of the "
            f"{len(unsampled.rows)} inputs of {options.split}, sampled at random"
        )
    _add_states(findings, trained, workdir, sample, steps, plotted, init_params, report)
    if findings.states is not None:
        _add_instances(findings, trained, sample, options, report)
    report(f"predictions for {unsampled.size} examples of {options.split}")
    _add_predictions(findings, config, trained, options)
    report("attention on the prompt")
    _add_attention(findings, trained, sample, params)
    return findings


def _restore(config: RunConfig, workdir: str, split: str) -> RestoredRun:
    """Restores a run; with the training examples if its prompt was initialised from them."""
    trained = None
    if "task" in prompt_starts(config):
        with contextlib.suppress(InputError):  # they may not exist any more
            trained = restore_run(config, workdir, [split, "train"])
    trained = trained or restore_run(config, workdir, [split])
    if split not in trained.splits:
        raise InputError(
            f"task {trained.scorer.task.name} has no {split} split here; give data.files.{split}"
        )
    return trained


def _choose_steps(
    requested: Sequence[int], steps: Sequence[int], best: int, workdir: str
) -> tuple[int, ...]:
    """Returns the steps whose states are plotted: those requested, or a few and the best."""
    for step in requested:
        if step not in steps:
            available = ", ".join(map(str, steps)) or "none"
            raise InputError(
                f"--steps={step}: {workdir} has no checkpoint of this step, only of steps "
                f"{available} (0 = initialisation); raise train.keep to keep more"
            )
    if requested:
        return tuple(sorted(set(requested)))
    positions = np.linspace(0, len(steps) - 1, min(PLOTTED_STEPS, len(steps))).round().astype(int)
    return tuple(sorted({steps[place] for place in positions} | ({best} & {*steps})))


def _run_summary(config: RunConfig, trained: RestoredRun, split: str) -> dict[str, str]:
    task, trainable = trained.scorer.task, trained.weights.trainable
    rows = {
        "task": f"{task.name} ({KINDS[task.kind].name})",
        "template": trained.scorer.template,
        "method": config.prompt.name,
        "head": config.head.name,
        "backbone": f"{config.backbone.path} ({trained.family})",
        "trained parameters": f"{tree.count(trainable):,}",
        "inspected": f"{split}, {trained.splits[split].size} examples",
    }
    if trained.best:
        rows["best step"] = f"{trained.best.step} (dev {_format_scores(trained.best.dev)})"
    return rows


def _format_scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


def _add_row_notes(findings: Findings, scorer: Scorer) -> None:
    """Adds notes if there are no rows, and a remark if the rows depend on the text."""
    if not findings.rows:
        findings.notes["rows"] = (
            "This method trains no vectors at the level of word embeddings, so there are no "
            "nearest words."
        )
    elif scorer.model.prompt.reads:
        findings.remarks.append(
            "the method computes its vectors from each text; those of one text are shown"
        )
    if not findings.label_rows:
        findings.notes["labels"] = "This run trains no label rows, so there is no figure of them."


def _sample_rows(split: Split, limit: int) -> Split:
    """Samples units of a split, the same ones each time, in their order."""
    if len(split.rows) <= limit:
        return split
    # A fixed seed, so that every inspection of a run shows the same examples.
    indices = np.sort(np.random.default_rng(0).permutation(len(split.rows))[:limit])
    rows = [split.rows[number] for number in indices]
    return split._replace(rows=rows, labels=split.labels[indices], counts=split.counts[indices])


# -- states ---------------------------------------------------------------------------------------


def _add_states(
    findings: Findings,
    trained: RestoredRun,
    workdir: str,
    sample: Split,
    steps: Sequence[int],
    plotted: Sequence[int],
    init_params: tree.Flat | None,
    report: Callable[[str], None],
) -> None:
    scorer = trained.scorer
    if scorer.head.OF != "classes":
        findings.notes["states"] = _not_classes(scorer)
        return
    if sample.labels.ndim > 1:
        findings.notes["states"] = (
            "An example is read in several inputs, each with a list of classes, so there is no "
            "single state per example."
        )
        return
    names, labels, is_known = _row_classes(scorer, sample)
    if len(np.unique(labels[is_known])) < 2:
        findings.notes["states"] = "The examples have fewer than two known classes."
        return
    choices = scorer.layout.num_rows
    module = scorer.model.heads["main"]

    def state(trainable: tree.Flat, frozen: tree.Flat, batch: Batch):
        hidden = scorer.model.hidden(tree.merge(trainable, frozen), batch)
        read = module.state(hidden, batch).astype(jnp.float32)  # [B*K, H]
        return read.reshape(-1, choices, read.shape[-1])

    compute_states = compile_step(trained.placement, state)
    separations: dict[int, Separation] = {}
    plotted_states: dict[int, np.ndarray] = {}
    for step in steps:
        report(f"hidden states at step {step}")
        trainable = init_params if step == START else _step_params(trained, workdir, step)
        if trainable is None:
            continue
        batches = eval_batches(scorer, sample)
        states = predict_scores(
            compute_states, trainable, trained.weights.frozen, batches, len(sample.rows)
        )
        states = states.reshape(-1, states.shape[-1])[is_known]
        # In the full width, because projections change distances.
        if (separation := class_separation(states, labels[is_known])) is not None:
            separations[step] = separation
        if step in plotted:
            plotted_states[step] = states
    findings.states = States(names, labels[is_known], separations, plotted_states)


def _not_classes(scorer: Scorer) -> str:
    return f"The answers of this {KINDS[scorer.head.OF].name} task are not classes of examples."


def _step_params(trained: RestoredRun, workdir: str, step: int) -> tree.Flat | None:
    """Returns the trained parameters of a step; the best ones are loaded already.

    Returns None if a run that is still training has removed the step.
    """
    if trained.best is not None and step == trained.best.step:
        return trained.weights.trainable
    checkpoints = Checkpoints(workdir)
    try:
        return checkpoints.restore_trainable(trained.weights.trainable, step)
    except (InputError, OSError, ValueError):
        if step in checkpoints.steps():
            raise
        return None


def _row_classes(scorer: Scorer, part: Split) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Returns the class names, the labels [rows], and whether each row exists and is known [rows].

    With one row per choice, the two classes of rows are the right choice and other choices.
    """
    choices = scorer.layout.num_rows
    if choices == 1:
        names = scorer.task.labels or tuple(f"choice {n + 1}" for n in range(scorer.classes))
        return names, part.labels, part.labels >= 0
    choice_index = np.arange(choices)
    labels = (part.labels[:, None] == choice_index).astype(np.int32)
    is_known = (choice_index < part.counts[:, None]) & (part.labels[:, None] >= 0)
    return ("other choice", "right choice"), labels.reshape(-1), is_known.reshape(-1)


def _add_instances(
    findings: Findings,
    trained: RestoredRun,
    sample: Split,
    options: InspectOptions,
    report: Callable[[str], None],
) -> None:
    prompt = trained.scorer.model.prompt
    reads_text = "encoder" in prompt.reads
    if reads_text and prompt.components():
        findings.remarks.append(
            "the method combines several prompts, so prompts of texts are not shown separately"
        )
    elif reads_text or (prompt.num_slots() and not prompt.components()):
        report("prompts of texts")
        names, labels, is_known = _row_classes(trained.scorer, sample)
        labels = np.where(is_known, labels, -1)
        findings.instances = find_instances(
            trained, sample, labels, names, shown=options.instances, top=options.top
        )


# -- answers --------------------------------------------------------------------------------------


def _add_predictions(
    findings: Findings, config: RunConfig, trained: RestoredRun, options: InspectOptions
) -> None:
    """Adds the confusion matrix and the misclassified examples."""
    scorer, names = trained.scorer, trained.scorer.task.labels
    split = trained.splits[options.split]
    if scorer.head.OF != "classes":
        findings.notes["confusion"] = _not_classes(scorer)
        return
    if not names:
        findings.notes["confusion"] = (
            "Each example has its own choices, so the classes have no names."
        )
        return
    evaluate = make_evaluate_fn(config, scorer, trained.placement)
    weights = trained.weights
    try:
        metrics, scores = evaluate(split, weights.trainable, weights.frozen)
    except InputError as error:  # the lists of a hierarchy are those of the right classes in train
        findings.notes["confusion"] = f"There is no confusion matrix: {error}."
        return
    scores, split = split.average(scores), split.without_samples()
    predicted = scorer.head.predicted_classes(split, scores, scorer.classes)
    assert predicted is not None  # a head of classes
    true_labels = right_classes(scorer.head.gold_labels(split), predicted, split.metric_data)
    counts = count_confusion(true_labels, predicted, len(names))
    findings.confusion = Confusion(tuple(names), counts)
    findings.about["scores"] = _format_scores(metrics)
    rows = read_split_rows(config, scorer.task, options.split)
    if len(rows) != split.size:
        findings.notes["errors"] = "An input is one turn of a dialogue, so no texts are listed."
        return
    shown = scorer.head.shown_scores(
        scorer.head.class_scores(split, scores, scorer.classes)[:, : scorer.classes]
    )
    best_scores = shown[np.arange(len(shown)), predicted]
    wrong = np.flatnonzero((true_labels != predicted) & (true_labels >= 0))
    most_confident = wrong[np.argsort(-best_scores[wrong], kind="stable")][: options.errors]
    for i in map(int, most_confident):
        origin, _, example = rows[i]
        text = " | ".join(example.fields.values())
        label, prediction = names[true_labels[i]], names[predicted[i]]
        findings.errors.append(
            Misclassified(origin, _shorten(text), label, prediction, float(best_scores[i]))
        )


def _shorten(text: str) -> str:
    """Returns a text as one line of at most `_TEXT_LENGTH` characters."""
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_LENGTH else f"{line[: _TEXT_LENGTH - 3]}..."


# -- attention ------------------------------------------------------------------------------------


def _add_attention(
    findings: Findings, trained: RestoredRun, sample: Split, params: Mapping[str, Any]
) -> None:
    scorer = trained.scorer
    model, choices = scorer.model, scorer.layout.num_rows
    batches = list(eval_batches(scorer, sample))
    shapes = jax.eval_shape(lambda p, b: attend_prompt(model, p, b), params, batches[0])
    if not shapes:
        findings.notes["attention"] = (
            "This method adds nothing that the model can attend to, so there is no attention on it."
        )
        return
    streams = [name for name in STREAMS if name in shapes]

    def mean_attention(trainable: tree.Flat, frozen: tree.Flat, batch: Batch):
        attention = attend_prompt(model, tree.merge(trainable, frozen), batch)
        parts = [
            jnp.stack(
                [x.tokens, x.read, jnp.broadcast_to(x.uniform[:, None, None], x.read.shape)], -1
            )
            for x in (attention[name] for name in streams)
        ]
        stacked = jnp.concatenate(parts, 1)  # [B*K, layers of all streams, N, 3]
        is_real = batch.read.mask.any(-1)[:, None, None, None]  # an example may have fewer choices

        def by_example(x: jax.Array) -> jax.Array:
            return x.reshape(-1, choices, *x.shape[1:])

        return by_example(jnp.where(is_real, stacked, 0)).sum(1) / jnp.maximum(
            by_example(is_real).sum(1), 1
        )

    # Layers with gathered weights are rematerialised, which hides their intermediate values.
    placement = dataclasses.replace(trained.placement, fsdp=False)
    step, (trainable, frozen, _) = compile_step(placement, mean_attention), trained.weights
    values = predict_scores(step, trainable, frozen, batches, len(sample.rows)).mean(0)
    offset = 0
    for name in streams:
        layers = shapes[name].tokens.shape[1]
        tokens, read, even = np.moveaxis(values[offset : offset + layers], -1, 0)
        findings.attention[name] = AttentionShare(tokens, read, float(even[0, 0]))
        offset += layers


def _word_to_json(word: Word) -> dict[str, Any]:
    return {"token": word.token, "id": word.id, "cosine": round(word.cosine, 4)}


def _row_to_json(row: LearnedRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "name": row.name,
        "nearest": list(map(_word_to_json, row.nearest)),
        "start": _word_to_json(row.start_nearest) if row.start_nearest else None,
        "cosine_with_start": None if row.cosine is None else round(row.cosine, 4),
    }
