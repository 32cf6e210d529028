"""Inspects what a run learned: trained vectors and words near them, states, answers, attention."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import tree
from jaxprompt.build.evaluation import build_judge
from jaxprompt.build.examples import SPLITS
from jaxprompt.build.method import starts_of
from jaxprompt.build.task import eval_batches
from jaxprompt.config.run import RunConfig
from jaxprompt.data.tasks.task import KINDS
from jaxprompt.data.text.encoded import Split
from jaxprompt.errors import InputError, at_least, choose
from jaxprompt.files import dumps
from jaxprompt.inspection.instances import Instances, find_instances
from jaxprompt.inspection.learned_rows import LABEL, LearnedRow, find_rows, starting_numbers
from jaxprompt.models.prompt_attention import STREAMS, attend_prompt
from jaxprompt.models.scorer import Scorer
from jaxprompt.prompts import Method
from jaxprompt.runs.restore import Trained, restore
from jaxprompt.scoring.metrics import right_classes
from jaxprompt.scoring.separation import Separation, class_separation, count_confusion
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.evaluation import place_step, predict_scores
from jaxprompt.types import Batch

PICTURED = 4  # number of steps whose states are plotted by default
START = 0  # the initialisation


class InspectOptions(NamedTuple):
    """Options of an inspection."""

    split: str = "dev"
    steps: tuple[int, ...] = ()  # whose states are plotted; () = PICTURED of the saved steps
    top: int = 5  # nearest words per vector
    examples: int = 1000  # maximum number of examples for states and attention
    instances: int = 5  # texts to show with their words, if the prompt depends on the text


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


class Attended(NamedTuple):
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
    attention: dict[str, Attended] = dataclasses.field(default_factory=dict)
    instances: Instances | None = None  # for methods with soft tokens, or that read the text
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    remarks: list[str] = dataclasses.field(default_factory=list)  # about the results

    @property
    def label_rows(self) -> list[LearnedRow]:
        """The label rows."""
        return [row for row in self.rows if row.kind == LABEL]

    def to_json(self) -> str:
        """Returns everything except the vectors as JSON."""
        states = self.states
        values: dict[str, Any] = {"about": self.about, "step": self.step}
        values["rows"] = [_row_json(row) for row in self.rows]
        values["separation"] = [
            {"step": step, "intra": x.intra, "inter": x.inter, "ratio": x.ratio}
            for step, x in (states.separations if states else {}).items()
        ]
        if self.confusion:
            values["confusion"] = self.confusion._asdict()
        if self.instances:
            values["instances"] = [case._asdict() for case in self.instances.shown]
        values["attention"] = {name: x._asdict() for name, x in self.attention.items()}
        return dumps(values | {"notes": self.notes, "remarks": self.remarks}, indent=2) + "\n"


def inspect(
    config: RunConfig, workdir: str, options: InspectOptions, tell: Callable[[str], None]
) -> Findings:
    """Inspects the best parameters of a run, and its hidden states during training.

    Args:
      config: config of the run.
      workdir: its run directory.
      options: what to inspect.
      tell: is called with progress messages.

    Raises:
      InputError: for a workdir without a run or a checkpoint, and for unavailable options.
    """
    choose("--split", options.split, SPLITS)
    at_least("--top", options.top, 1)
    at_least("--examples", options.examples, 4)
    at_least("--instances", options.instances, 0)
    trained = _restore(config, workdir, options.split)
    scorer, split = trained.scorer, trained.splits[options.split]
    first, unknown = starting_numbers(config, trained)
    best = START if trained.best is None else trained.best.step
    steps = [] if first is None else [START]
    if trained.weights.trainable:
        steps += Checkpoints(workdir).steps()
    pictured = _choose_steps(options.steps, steps, best, workdir)
    findings = Findings(_about(config, trained, options.split), best)
    findings.remarks += trained.others
    if first is None:
        findings.remarks.append(f"the initial parameters are not known: {unknown}")

    frozen = trained.weights.frozen
    whole = tree.merge(trained.weights.trainable, frozen)
    begun = None if first is None else tree.merge(first, frozen)
    batch = scorer.one_batch(split.rows[:1])
    findings.rows = find_rows(scorer, whole, begun, batch, options.top)
    _note_rows(findings, scorer)

    single = split.without_samples()
    part = _some(single, options.examples)
    if split.samples > 1:
        findings.remarks.append(
            "hidden states and attention are those with the first demonstrations of each example"
        )
    if len(part.rows) < len(single.rows):
        findings.remarks.append(
            f"hidden states and attention are those of {len(part.rows)} of the "
            f"{len(single.rows)} inputs of {options.split}, sampled at random"
        )
    _find_states(findings, trained, workdir, part, steps, pictured, first, tell)
    prompt = scorer.model.prompt
    if "encoder" in prompt.reads and prompt.components():
        findings.remarks.append(
            "the method combines several prompts, so prompts of texts are not shown separately"
        )
    elif findings.states is not None and ("encoder" in prompt.reads or _has_soft_tokens(prompt)):
        tell("prompts of texts")
        names, labels, there = _classes_of_rows(scorer, part)
        findings.instances = find_instances(
            trained, part, np.where(there, labels, -1), names,
            shown=options.instances, top=options.top,
        )  # fmt: skip
    tell(f"predictions for {single.size} examples of {options.split}")
    _find_confusion(findings, config, trained, split)
    tell("attention on the prompt")
    _find_attention(findings, trained, part, whole)
    return findings


def _has_soft_tokens(prompt: Method) -> bool:
    return bool(prompt.num_slots()) and not prompt.components()


def _restore(config: RunConfig, workdir: str, split: str) -> Trained:
    """Restores a run; with the training examples if its prompt was initialised from them."""
    trained = None
    if "task" in starts_of(config):
        with contextlib.suppress(InputError):  # they may not exist any more
            trained = restore(config, workdir, [split, "train"])
    trained = trained or restore(config, workdir, [split])
    if split not in trained.splits:
        raise InputError(
            f"task {trained.scorer.task.name} has no {split} split here; give data.files.{split}"
        )
    return trained


def _choose_steps(
    requested: Sequence[int], steps: Sequence[int], best: int, workdir: str
) -> tuple[int, ...]:
    """Returns the steps whose states are plotted: the requested ones, or a few with the best."""
    for step in requested:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise InputError(
                f"--steps={step}: {workdir} has no checkpoint of this step, only of steps {there} "
                "(0 = initialisation); raise train.keep to keep more"
            )
    if requested:
        return tuple(sorted(set(requested)))
    # Evenly over the run; then the nearest of them is replaced by the best step.
    places = np.linspace(0, len(steps) - 1, min(PICTURED, len(steps))).round().astype(int)
    chosen = [steps[place] for place in dict.fromkeys(places.tolist())]
    if best in steps and best not in chosen:
        chosen[min(range(len(chosen)), key=lambda i: (abs(chosen[i] - best), i))] = best
    return tuple(sorted(chosen))


def _about(config: RunConfig, trained: Trained, split: str) -> dict[str, str]:
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
        scores = trained.best.dev.items()
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores)
        rows["best step"] = f"{trained.best.step} (dev {shown})"
    return rows


def _note_rows(findings: Findings, scorer: Scorer) -> None:
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


def _some(split: Split, limit: int) -> Split:
    """Samples units of a split, the same ones each time, in their order."""
    if len(split.rows) <= limit:
        return split
    # A fixed seed, so that a second inspection of a run shows the same examples.
    numbers = np.sort(np.random.default_rng(0).permutation(len(split.rows))[:limit])
    rows = [split.rows[number] for number in numbers]
    return split._replace(rows=rows, labels=split.labels[numbers], counts=split.counts[numbers])


# -- states ---------------------------------------------------------------------------------------


def _find_states(
    findings: Findings, trained: Trained, workdir: str, part: Split, steps: Sequence[int],
    pictured: Sequence[int], first: tree.Flat | None, tell: Callable[[str], None],
) -> None:  # fmt: skip
    scorer = trained.scorer
    if scorer.head.OF != "classes":
        kind = KINDS[scorer.head.OF].name
        findings.notes["states"] = (
            f"The answers of this {kind} task are not classes of examples, so hidden states have "
            "no class; R_D and the projections are only for classification."
        )
        return
    if part.labels.ndim > 1:
        findings.notes["states"] = (
            "An example is read in several inputs, each with a list of classes, so there is no "
            "single state per example."
        )
        return
    names, labels, there = _classes_of_rows(scorer, part)
    if len(np.unique(labels[there])) < 2:
        findings.notes["states"] = "The examples have fewer than two known classes."
        return
    choices = scorer.layout.num_rows
    module = scorer.model.heads["main"]

    def state(trainable: tree.Flat, frozen: tree.Flat, batch: Batch):
        hidden = scorer.model.hidden(tree.merge(trainable, frozen), batch)
        read = module.state(hidden, batch).astype(jnp.float32)  # [B*K, H]
        return read.reshape(-1, choices, read.shape[-1])

    step_of = place_step(trained.placement, state)
    separations: dict[int, Separation] = {}
    kept: dict[int, np.ndarray] = {}
    for step in steps:
        tell(f"hidden states at step {step}")
        at_start = first if step == START else None
        numbers = _numbers(trained, workdir, step) if at_start is None else at_start
        if numbers is None:
            continue
        batches = eval_batches(scorer, part)
        states = predict_scores(step_of, numbers, trained.weights.frozen, batches, len(part.rows))
        states = states.reshape(-1, states.shape[-1])[there]
        # In the full width: distances between projections would differ.
        if (separation := class_separation(states, labels[there])) is not None:
            separations[step] = separation
        if step in pictured:
            kept[step] = states
    findings.states = States(names, labels[there], separations, kept)


def _numbers(trained: Trained, workdir: str, step: int) -> tree.Flat | None:
    """Returns the trained parameters of a step; the best ones are loaded already.

    Returns None if a run that is still training has removed the step.
    """
    trainable, checkpoints = trained.weights.trainable, Checkpoints(workdir)
    if trained.best is not None and step == trained.best.step:
        return trainable
    try:
        return checkpoints.restore_trainable(trainable, step)
    except (InputError, OSError, ValueError):
        if step in checkpoints.steps():
            raise
        return None


def _classes_of_rows(scorer: Scorer, part: Split) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Returns the class names, the labels [rows], and whether each row exists and is known [rows].

    With one row per choice, the two classes of rows are the right choice and other choices.
    """
    choices = scorer.layout.num_rows
    if choices == 1:
        names = scorer.task.labels or tuple(f"choice {n + 1}" for n in range(scorer.classes))
        return names, part.labels, part.labels >= 0
    number = np.arange(choices)
    labels = (part.labels[:, None] == number).astype(np.int32)
    there = (number < part.counts[:, None]) & (part.labels[:, None] >= 0)
    return ("other choice", "right choice"), labels.reshape(-1), there.reshape(-1)


# -- answers --------------------------------------------------------------------------------------


def _find_confusion(findings: Findings, config: RunConfig, trained: Trained, split: Split) -> None:
    scorer, names = trained.scorer, trained.scorer.task.labels
    if scorer.head.OF != "classes":
        kind = KINDS[scorer.head.OF].name
        findings.notes["confusion"] = (
            f"The answers of this {kind} task are not classes, so there is no confusion matrix."
        )
        return
    if not names:
        findings.notes["confusion"] = (
            "Each example has its own choices, so the classes have no names."
        )
        return
    judge = build_judge(config, scorer, trained.placement)
    weights = trained.weights
    try:
        measured, scores = judge(split, weights.trainable, weights.frozen)
    except InputError as error:  # the lists of a hierarchy are those of the right classes in train
        findings.notes["confusion"] = f"There is no confusion matrix: {error}."
        return
    scores, split = split.average(scores), split.without_samples()
    answered = scorer.head.predicted_classes(split, scores, scorer.classes)
    if answered is None:
        raise TypeError(f"{type(scorer.head).__module__} answers by classes and gives none")
    right = right_classes(scorer.head.gold_labels(split), answered, split.judged)
    counts = count_confusion(right, answered, len(names))
    findings.confusion = Confusion(tuple(names), counts)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in measured.items())
    findings.about["scores"] = shown


# -- attention ------------------------------------------------------------------------------------


def _find_attention(
    findings: Findings, trained: Trained, part: Split, whole: Mapping[str, Any]
) -> None:
    scorer = trained.scorer
    model, choices = scorer.model, scorer.layout.num_rows
    batches = list(eval_batches(scorer, part))
    shapes = jax.eval_shape(lambda p, b: attend_prompt(model, p, b), whole, batches[0])
    if not shapes:
        findings.notes["attention"] = (
            "This method adds nothing that the model can attend to, so there is no attention on it."
        )
        return
    streams = [name for name in STREAMS if name in shapes]

    def weigh(trainable: tree.Flat, frozen: tree.Flat, batch: Batch):
        own = attend_prompt(model, tree.merge(trainable, frozen), batch)
        parts = [
            jnp.stack(
                [x.tokens, x.read, jnp.broadcast_to(x.uniform[:, None, None], x.read.shape)], -1
            )
            for x in (own[name] for name in streams)
        ]
        stacked = jnp.concatenate(parts, 1)  # [B*K, layers of all streams, N, 3]
        there = batch.read.mask.any(-1)[:, None, None, None]  # an example may have fewer choices
        split = lambda x: x.reshape(-1, choices, *x.shape[1:])
        return split(jnp.where(there, stacked, 0)).sum(1) / jnp.maximum(split(there).sum(1), 1)

    # Layers whose weights are gathered are rematerialised, and give no values but their output.
    placement = dataclasses.replace(trained.placement, fsdp=False)
    step, (trainable, frozen, _) = place_step(placement, weigh), trained.weights
    values = predict_scores(step, trainable, frozen, batches, len(part.rows)).mean(0)
    at = 0
    for name in streams:
        layers = shapes[name].tokens.shape[1]
        tokens, read, even = np.moveaxis(values[at : at + layers], -1, 0)
        findings.attention[name] = Attended(tokens, read, float(even[0, 0]))
        at += layers


def _row_json(row: LearnedRow) -> dict[str, Any]:
    word = lambda w: {"token": w.token, "id": w.id, "cosine": round(w.cosine, 4)}
    return {
        "kind": row.kind,
        "name": row.name,
        "nearest": [word(w) for w in row.nearest],
        "start": word(row.start_nearest) if row.start_nearest else None,
        "cosine_with_start": None if row.cosine is None else round(row.cosine, 4),
    }
