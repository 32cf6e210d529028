"""What a run learned, looked at: rows and words near them, states, answers, attention."""

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
from jaxprompt.scoring.separation import Separation, count_confusion, separate
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.evaluation import place_step, predict_scores
from jaxprompt.types import Batch

PICTURED = 4  # steps whose states are drawn where none are asked for
START = 0  # the step before the first


class InspectOptions(NamedTuple):
    """What is to be looked at."""

    split: str = "dev"
    steps: tuple[int, ...] = ()  # whose states are drawn; () = PICTURED of those that are there
    top: int = 5  # nearest words of a row
    examples: int = 1000  # whose states and attention are looked at
    instances: int = 5  # whose words are shown, where a prompt depends on the text


class States(NamedTuple):
    """The hidden states that examples are judged by."""

    names: tuple[str, ...]  # of the classes
    labels: np.ndarray  # int32 [n]
    separations: dict[int, Separation]  # by step, of all steps that are there
    pictured: dict[int, np.ndarray]  # by step, float32 [n, H]


class Confusion(NamedTuple):
    """The confusion matrix."""

    names: tuple[str, ...]
    counts: np.ndarray  # int64 [C, C + 1], the last column: no class at all


class Attended(NamedTuple):
    """Mean shares of one attention that fall on the prompt."""

    tokens: np.ndarray  # float32 [L, N], see models.prompt_attention
    read: np.ndarray  # float32 [L, N], NaN where the head reads nothing of this stream
    even: float


@dataclasses.dataclass
class Findings:
    """What was found. `notes` says of each part that has nothing to show why that is."""

    about: dict[str, str]
    step: int  # of the numbers that rows, answers and attention are of
    rows: list[LearnedRow] = dataclasses.field(default_factory=list)
    states: States | None = None
    confusion: Confusion | None = None
    attention: dict[str, Attended] = dataclasses.field(default_factory=dict)
    instances: Instances | None = None  # of a method with soft tokens, or one that reads the text
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    remarks: list[str] = dataclasses.field(default_factory=list)  # on what is shown

    @property
    def label_rows(self) -> list[LearnedRow]:
        """The rows of classes."""
        return [row for row in self.rows if row.kind == LABEL]

    def to_json(self) -> str:
        """Writes all but the vectors."""
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
    """Looks at a run of a config with its best numbers, and at its states over training.

    `tell` is told what is computed. Raises InputError for a workdir without a run or without a
    checkpoint, and for what is asked of it that is not there.
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
        findings.remarks.append(f"the numbers before the first step are not known: {unknown}")

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
            "hidden states and attention are of each example with its first demonstrations"
        )
    if len(part.rows) < len(single.rows):
        findings.remarks.append(
            f"hidden states and attention are of {len(part.rows)} of the {len(single.rows)} "
            f"inputs of {options.split}, sampled at random"
        )
    _find_states(findings, trained, workdir, part, steps, pictured, first, tell)
    prompt = scorer.model.prompt
    if "encoder" in prompt.reads and prompt.components():
        findings.remarks.append(
            "of several prompts side by side those of texts are not shown apart"
        )
    elif findings.states is not None and ("encoder" in prompt.reads or _has_soft_tokens(prompt)):
        tell("the prompts of texts")
        names, labels, there = _classes_of_rows(scorer, part)
        findings.instances = find_instances(
            trained, part, np.where(there, labels, -1), names,
            shown=options.instances, top=options.top,
        )  # fmt: skip
    tell(f"answers to {single.size} examples of {options.split}")
    _find_confusion(findings, config, trained, split)
    tell("attention on the prompt")
    _find_attention(findings, trained, part, whole)
    return findings


def _has_soft_tokens(prompt: Method) -> bool:
    return bool(prompt.num_slots()) and not prompt.components()


def _restore(config: RunConfig, workdir: str, split: str) -> Trained:
    """Restores a run; with the training examples where its prompt started from them."""
    trained = None
    if "task" in starts_of(config):
        with contextlib.suppress(InputError):  # they need not be there any more
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
    """Picks the steps whose states are drawn: those asked for, else a few with the best."""
    for step in requested:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise InputError(
                f"--steps={step}: {workdir} holds no numbers of that step; there are those of "
                f"{there} (0 = before the first); a run keeps more with train.keep"
            )
    if requested:
        return tuple(sorted(set(requested)))
    # Evenly over the run; then the nearest of them gives way to the best step.
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
        "trained numbers": f"{tree.count(trainable):,}",
        "looked at": f"{split}, {trained.splits[split].size} examples",
    }
    if trained.best:
        scores = trained.best.dev.items()
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores)
        rows["best step"] = f"{trained.best.step} (dev {shown})"
    return rows


def _note_rows(findings: Findings, scorer: Scorer) -> None:
    """Says what has no rows, and of rows that depend on the text which are shown."""
    if not findings.rows:
        findings.notes["rows"] = (
            "This method trains no rows among the word embeddings, so no words are near them."
        )
    elif scorer.model.prompt.reads:
        findings.remarks.append(
            "the method computes its rows from each text; those of one are shown"
        )
    if not findings.label_rows:
        findings.notes["labels"] = "This run trains no label rows, so there is no picture of them."


def _some(split: Split, limit: int) -> Split:
    """Draws units of a split at random, the same ones each time, in their order."""
    if len(split.rows) <= limit:
        return split
    # A fixed seed, so that a run that is looked at twice shows the same examples.
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
            f"The answers of this {kind} task are no classes of examples, so no one state of an "
            "example has a class; R_D and the projections are of classification."
        )
        return
    if part.labels.ndim > 1:
        findings.notes["states"] = (
            "An example is read in several inputs, each with a list of classes, so no one state is "
            "that of the example."
        )
        return
    names, labels, there = _classes_of_rows(scorer, part)
    if len(np.unique(labels[there])) < 2:
        findings.notes["states"] = "The examples have fewer than two known classes to tell apart."
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
        batches = eval_batches(scorer, part)
        states = predict_scores(step_of, numbers, trained.weights.frozen, batches, len(part.rows))
        states = states.reshape(-1, states.shape[-1])[there]
        # In the full width: distances of the projections would not be those of the states.
        if (separation := separate(states, labels[there])) is not None:
            separations[step] = separation
        if step in pictured:
            kept[step] = states
    findings.states = States(names, labels[there], separations, kept)


def _numbers(trained: Trained, workdir: str, step: int) -> tree.Flat:
    """Reads the trained numbers of a step; the best ones are there already."""
    trainable = trained.weights.trainable
    if trained.best is not None and step == trained.best.step:
        return trainable
    return Checkpoints(workdir).restore_trainable(trainable, step)


def _classes_of_rows(scorer: Scorer, part: Split) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Names the classes of rows. -> names, labels [rows], bool [rows]: there and known

    With a row for each choice a row is the right choice or another.
    """
    choices = scorer.layout.num_rows
    if choices == 1:
        names = scorer.task.labels or tuple(f"choice {n + 1}" for n in range(scorer.classes))
        return names, part.labels, part.labels >= 0
    number = np.arange(choices)
    labels = (part.labels[:, None] == number).astype(np.int32)
    there = (number < part.counts[:, None]) & (part.labels[:, None] >= 0)
    return ("another choice", "the right choice"), labels.reshape(-1), there.reshape(-1)


# -- answers --------------------------------------------------------------------------------------


def _find_confusion(findings: Findings, config: RunConfig, trained: Trained, split: Split) -> None:
    scorer, names = trained.scorer, trained.scorer.task.labels
    if scorer.head.OF != "classes":
        kind = KINDS[scorer.head.OF].name
        findings.notes["confusion"] = (
            f"The answers of this {kind} task are no classes, so none is confused with another."
        )
        return
    if not names:
        findings.notes["confusion"] = (
            "The classes are choices of each example's own, without names."
        )
        return
    judge = build_judge(config, scorer, trained.placement)
    weights = trained.weights
    try:
        measured, scores = judge(split, weights.trainable, weights.frozen)
    except InputError as error:  # the lists of a hierarchy are those of the right classes in train
        findings.notes["confusion"] = f"There is none: {error}."
        return
    scores, split = split.average(scores), split.without_samples()
    answered = scorer.head.classes_of(split, scores, scorer.classes)
    if answered is None:
        raise TypeError(f"{type(scorer.head).__module__} answers by classes and gives none")
    right = right_classes(scorer.head.labels_of(split), answered, split.judged)
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
            "Nothing of this method stands where the model attends, so no attention falls on it."
        )
        return
    streams = [name for name in STREAMS if name in shapes]

    def weigh(trainable: tree.Flat, frozen: tree.Flat, batch: Batch):
        own = attend_prompt(model, tree.merge(trainable, frozen), batch)
        parts = [
            jnp.stack([x.tokens, x.read, jnp.broadcast_to(x.even[:, None, None], x.read.shape)], -1)
            for x in (own[name] for name in streams)
        ]
        stacked = jnp.concatenate(parts, 1)  # [B*K, layers of all streams, N, 3]
        there = batch.read.mask.any(-1)[:, None, None, None]  # an example may have fewer choices
        split = lambda x: x.reshape(-1, choices, *x.shape[1:])
        return split(jnp.where(there, stacked, 0)).sum(1) / jnp.maximum(split(there).sum(1), 1)

    # Weights that are gathered layer by layer are recomputed too, which nothing may leave.
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
