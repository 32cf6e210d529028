"""Pre-training of a prompt on running text (Gu et al. 2022, "PPT"): from a config to objects."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt import tree
from jaxprompt.build.backbone import load_weights
from jaxprompt.build.check import check_config
from jaxprompt.build.corpus import need_corpus
from jaxprompt.build.inheritance import tell_init
from jaxprompt.build.initial_params import Weights, start
from jaxprompt.build.method import head_of, method_of, starts_of
from jaxprompt.build.placement import build_placement
from jaxprompt.build.scorer import build_scorer
from jaxprompt.build.task import open_fitting
from jaxprompt.config.load import fields
from jaxprompt.config.schema import FIELDS
from jaxprompt.config.settings import FREE, FREE_TRAINED
from jaxprompt.convert.load import Report
from jaxprompt.corpus import Corpus, check_unchanged, divide
from jaxprompt.corpus.denoise.batches import Pass
from jaxprompt.corpus.ppt import (
    PUBLISHED,
    Annotations,
    Forms,
    Pattern,
    PptRows,
    cls,
    get_pattern,
    make_forms,
    nsp,
    numbers_of_options,
    selection,
)
from jaxprompt.corpus.ppt.patterns import fields as fields_of
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.identity import identity_of
from jaxprompt.data.text.overview import tell_words
from jaxprompt.data.text.tokenizer import segments
from jaxprompt.errors import InputError, brief, with_article
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.flops import count_flops
from jaxprompt.parallel.sharding import Placement, within
from jaxprompt.runs import record as records
from jaxprompt.runs.denoising import Sums, spelt_out
from jaxprompt.runs.restore import Trained
from jaxprompt.scoring import metrics
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.steps import make_train_step
from jaxprompt.types import Batch, Objective


class PptTask(NamedTuple):
    """A task laid out for a backbone, and what scores it."""

    backbone: Backbone
    scorer: Scorer  # of the most options
    forms: Forms


class Learner(NamedTuple):
    """What learns, and its numbers before the first step."""

    model: Model
    objectives: list[Objective]
    trainable: tree.Flat  # float32, the prompt
    frozen: tree.Flat
    report: Report


def check_ppt(c: Any) -> None:
    """Raises InputError where a config lacks, or has, what `pretrain` cannot go without, or with.

    Nothing is read but the annotations.
    """
    if not c.ppt.task:
        raise InputError("ppt.task is empty; give one of nsp, nss, unified, cls")
    need_corpus(c)
    if not c.corpus.held_out:
        raise InputError("corpus.held_out=0 leaves no document to score; give a share above 0")
    _check_idle(c)
    check_learner(c)
    open_annotations(c)


def _check_idle(c: Any) -> None:
    """Raises InputError for fields that say what a task is: here the pre-training task is that."""
    idle = {f"task.{name}": FIELDS["task"][name].default for name in c.task}
    named = ("source", "only", "protocol", "rows", "files.train", "files.dev", "files.test")
    idle |= {"ppt.hard": False} | {f"data.{name}": "" for name in named}
    given = fields(c)
    # Sorted, so that all processes name the same one.
    for field in sorted(idle.keys() - {"task.answer", "task.eos"}):
        value = given[field]
        if value != idle[field]:
            shown = brief(",".join(map(str, value)) if isinstance(value, tuple) else value)
            raise InputError(
                f"{field}={shown} does nothing in pretrain, whose examples and label "
                f"words are those of ppt.task={c.ppt.task}; leave it out"
            )


def tell_idle(c: Any) -> list[str]:
    """Names the fields of a block `ppt` that another of its tasks reads."""
    read = {
        "least": ("unified",), "most": ("unified",), "annotations": ("cls",),
        "thresholds": ("cls",), "matched": ("nsp", "nss", "unified"),
    }  # fmt: skip
    return [
        f"ppt.{name}={brief(c.ppt[name])} is not read: ppt.task is {c.ppt.task}"
        for name, tasks in read.items()
        if c.ppt.task not in tasks and c.ppt[name] != FIELDS["ppt"][name].default
    ]


def check_learner(c: Any) -> None:
    """Raises InputError where `pretrain` cannot learn what a config says, whatever the text."""
    if not method_of(c).LEARNS:
        raise InputError(f"prompt.name={c.prompt.name} has nothing to learn; take soft or prefix")
    # A made-up vocabulary tells whether the method would store the words of one.
    if method_of(c).with_vocabulary(np.zeros(1, int)).seen:
        raise InputError(
            "prompt.rows=seen stores the rows of words of training examples, and pretrain has "
            "none; set prompt.rows=all"
        )
    if "task" in starts_of(c):
        raise InputError(
            "prompt.start=task takes words of training examples, and pretrain has none; take "
            "normal, uniform, vocab, frequent, labels, text or file"
        )
    if c.trainable:
        raise InputError("trainable is not empty, but pretrain learns the prompt alone; empty it")
    if not head_of(c).READS_WORDS:
        raise InputError(f"head.name={c.head.name} reads no label words; set head.name=verbalizer")
    if c.cache.where:
        raise InputError(
            f"cache.where={c.cache.where} keeps states of rows that come again, here none "
            "does; set it to ''"
        )
    options_of(c)


def options_of(c: Any) -> tuple[int, ...]:
    """Lists the numbers of options that examples have, (0,) where they have none."""
    if c.ppt.task not in ("nss", "unified"):
        return (0,)
    return numbers_of_options(c.ppt.task, c.ppt.least, c.ppt.most)


def open_annotations(c: Any) -> Annotations | None:
    """Opens the labels that cls needs. Raises InputError where its words are of other classes."""
    if c.ppt.task != "cls":
        return None
    if not c.ppt.annotations:
        raise InputError("ppt.annotations is empty; cls needs the folder that `annotate` wrote")
    found = Annotations(c.ppt.annotations)
    found.check_classes(len(get_pattern(c.ppt.task, c.ppt.patterns).words))
    found.check_thresholds(thresholds_of(c))
    return found


def thresholds_of(c: Any) -> tuple[float, ...]:
    """Gives what the probability of a label must exceed, by class."""
    return tuple(c.ppt.thresholds) or PUBLISHED


# -- model ----------------------------------------------------------------------------------------


def open_asked(c: Any, placement: Placement, *, restored: bool = False) -> PptTask:
    """Opens the backbone and lays the task out; `restored` as in build.task.open_fitting."""
    backbone = open_fitting(c, placement, restored=restored)
    scorer = make_scorer(c, backbone, placement)
    method, cfg, style = scorer.model.prompt, backbone.module.cfg, backbone.module.STYLE
    forms = make_forms(
        c.ppt.task, _pattern(c), scorer.tokenizer, style, num_slots=method.num_slots(),
        max_len=c.data.max_len, options=options_of(c), start=getattr(cfg, "start", 0),
        decoder_slots=method.num_decoder_slots(), eos=c.task.eos, sentinel=c.backbone.sentinel,
        num_types=segments(scorer.tokenizer, cfg.types), whole=c.head.span == "target",
        answer=c.task.answer,
    )  # fmt: skip
    return PptTask(backbone, scorer, forms)


def _pattern(c: Any) -> Pattern:
    return get_pattern(c.ppt.task, c.ppt.patterns)


def make_scorer(c: Any, backbone: Backbone, placement: Placement) -> Scorer:
    """Lays the task out, with the most options, as a classification task is downstream."""
    pattern, most = _pattern(c), max(options_of(c))
    template, style = pattern.text(most), backbone.module.STYLE
    if style == "causal" and not template.endswith("[mask]"):
        raise InputError(
            f"ppt.task={c.ppt.task} with ppt.patterns={c.ppt.patterns} has text behind [mask], "
            f"where {with_article(backbone.family)} cannot read it; set ppt.patterns="
            f"{c.ppt.patterns.partition('_')[0]}_end, or take another backbone"
        )
    task = Task(
        c.ppt.task, fields_of(c.ppt.task, most), labels=pattern.words, template=template,
        words=tuple((word,) for word in pattern.words), spaced=pattern.space,
    )  # fmt: skip
    return build_scorer(
        backbone, task, prompt=c.prompt.to_dict(), head=c.head.to_dict(), template=template,
        form="cloze", answer=c.task.answer, eos=c.task.eos, max_len=c.data.max_len,
        max_target=c.data.max_target, multiple=c.data.multiple, side=c.data.side,
        batch=c.data.eval_batch, share=placement.share(),
    )  # fmt: skip


# -- text -----------------------------------------------------------------------------------------


class Text(NamedTuple):
    """The examples of a corpus, of the documents to learn from and of those held out."""

    tasks: tuple[Any, Any]
    rows: PptRows  # to learn from
    held: Pass
    facts: dict[str, Any]  # what they depend on besides the config, and what they are, as JSON
    classes: tuple[str, ...] = ()  # of the annotator, by the label words of cls


def read_text(c: Any, corpus: Corpus, asked: PptTask, share: tuple[int, int]) -> Text:
    """Makes the examples. Raises InputError where there are too few documents for them.

    `share` says which part of a held-out batch this process holds, of how many.
    """
    labels = open_annotations(c)
    parts = divide(len(corpus), c.corpus.held_out, c.data.seed)
    tasks = tuple(_make(c, corpus, part, asked.forms, labels) for part in parts)
    rows, held = (PptRows(task, asked.forms, asked.scorer.layout) for task in tasks)
    held = Pass(
        held, batch=c.data.eval_batch, seed=c.data.seed, limit=c.corpus.dev_rows, share=share
    )
    options = options_of(c)
    about = {
        "task": c.ppt.task,
        "patterns": c.ppt.patterns,
        **({"options": [min(options), max(options)]} if max(options) else {}),
        "corpus": c.corpus.path,
        "documents": len(corpus),
        "tokens": corpus.num_tokens,
    }
    used = None
    if labels is not None:
        digests = (task.digest for task in tasks)
        used = [labels.annotator, *tasks[0].counts.tolist(), *digests]
    facts = {"corpus": corpus.fingerprint, "store": corpus.checksums}
    facts |= {"labels": used, "about": about}
    classes = () if labels is None else labels.classes
    return Text(tasks, rows, held, facts | {"identity": identity_of(asked.scorer)}, classes)


def _make(c: Any, corpus: Corpus, documents: Any, forms: Forms, labels: Any) -> Any:
    if c.ppt.task == "cls":
        return cls.make(corpus, documents, forms, labels, thresholds_of(c))
    if c.ppt.task == "nsp":
        return nsp.make(corpus, documents, forms, matched=c.ppt.matched)
    return selection.make(c.ppt.task, corpus, documents, forms, matched=c.ppt.matched)


def told(c: Any, backbone: Backbone, report: Report, corpus: Corpus) -> list[str]:
    """Says what was read, whatever is asked of it."""
    lines = [f"backbone {c.backbone.path} ({backbone.family}), {report.fingerprint[:12]}"]
    lines += tell_init(c, backbone.module.dims)
    lines.append(f"corpus {c.corpus.path}: {len(corpus):,} documents, {corpus.num_tokens:,} tokens")
    return lines + corpus.notes() + tell_idle(c)


def told_task(asked: PptTask, text: Text) -> list[str]:
    """Says what is asked, what of the text is used for it, and what was left out."""
    words = asked.forms.verbalizer.words
    own = tell_words(text.classes, words) or ["words " + ", ".join(entry[0] for entry in words)]
    return [
        f"task {asked.scorer.task.name}, template {asked.scorer.template!r}",
        f"  {own[0]}",
        f"  to learn from {text.tasks[0].summary()}",
        f"  held out {text.tasks[1].summary()}; {text.held.size:,} of them scored",
    ]


def examples_key(c: Any) -> str:
    """Sums up all that examples of a run depend on and that may differ between runs."""
    return json.dumps([c.ppt.to_dict(), c.data.seed], sort_keys=True)


def about(c: Any) -> dict[str, Any]:
    """Tells what a result begins with."""
    return {"task": c.ppt.task}


def check_same(saved: Mapping[str, Any] | None, facts: Mapping[str, Any], c: Any) -> None:
    """Raises InputError where the text or its labels are others than a run's record says."""
    if saved is None:
        return
    check_unchanged(saved["corpus"], facts["corpus"])
    if saved["labels"] != facts["labels"]:
        raise InputError(
            f"ppt.annotations={c.ppt.annotations} has other labels than the saved run; restore "
            "them, or take another workdir"
        )


# -- numbers --------------------------------------------------------------------------------------


def load(
    c: Any, asked: PptTask, placement: Placement, counts: np.ndarray | None = None, *,
    restored: bool = False,
) -> tuple[PptTask, Learner]:  # fmt: skip
    """Reads the weights and initialises the prompt; `counts` and `restored` as in `start`.

    -> what is asked, its module fitted; what learns
    """
    backbone, loaded = load_weights(asked.backbone, placement)
    asked = asked._replace(backbone=backbone, scorer=asked.scorer.with_backbone(backbone))
    trainable, frozen, report = start(c, asked.scorer, loaded, counts, placement, restored=restored)
    model, objectives = make_objectives(c, asked.scorer.model)
    return asked, Learner(model, objectives, trainable, frozen, report)


def make_objectives(c: Any, model: Model) -> tuple[Model, list[Objective]]:
    """Makes the losses of downstream tuning, which count right answers besides. -> model, losses"""
    own = model.prompt.modules()
    heads = {name: head for name, head in model.heads.items() if name not in own}
    heads, objective = head_of(c).counted(heads, c.optim.smoothing)
    model = dataclasses.replace(model, heads=own | heads)
    return model, [objective, *model.prompt.objectives()]


def flops_of(
    learned: Learner, tx: Any, state: Any, like: Batch, rows: int, placement: Placement
) -> float:
    """Counts what the model asks for in a step of training on `rows` rows like those of a batch.

    No product of the backward pass is for a frozen weight.
    """
    shape = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    step = make_train_step(spelt_out(learned.model), tx, learned.objectives)
    return count_flops(within(placement, step), state, learned.frozen, jax.tree.map(shape, like))


def scoring(task: Any) -> Callable[[Sums], dict[str, float]]:
    """Makes sums of objectives -> the scores of a task's rows."""
    return lambda sums: metrics.score_classes(sums["main"], task.majority)


# -- what comes out -------------------------------------------------------------------------------


def restore(c: Any, workdir: str) -> Trained:
    """Reads the best prompt of a workdir, no text. Raises InputError as runs.restore.restore."""
    check_config(c)
    record, step = records.read_trained(workdir, c, (*FREE, *FREE_TRAINED))
    placement = build_placement(c)
    asked, learned = load(c, open_asked(c, placement, restored=True), placement, restored=True)
    records.check_backbone(record, learned.report.fingerprint, workdir, {})
    with records.beside_training(workdir):
        trainable, best = Checkpoints(workdir).restore_best(learned.trainable, step, or_newer=True)
    weights = Weights(trainable, learned.frozen, learned.report)
    return Trained(placement, asked.scorer, {}, weights, best, asked.backbone.family, record)


def read_about(trained: Trained) -> dict[str, Any]:
    """Tells what a prompt is pre-trained on, and how well it does."""
    best = trained.best
    return trained.record["about"] | {"steps": best["step"], "held_out": best["dev"]}
