"""From a config to objects: the only reader of ConfigDict and of names in it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxprompt import rng, tree
from jaxprompt.assembly.demonstrations import check_demos, demos_of, fingerprint_of, shows_demos
from jaxprompt.assembly.examples import (
    Examples,
    describe_examples,
    in_form,
    read_examples,
    read_task,
)
from jaxprompt.assembly.feature_cache import FeatureCache
from jaxprompt.assembly.inheritance import check_init
from jaxprompt.assembly.initial_params import Weights, start
from jaxprompt.assembly.method import method_of, seen_by, starts_of
from jaxprompt.assembly.pipeline import (
    NOTHING,
    Given,
    build_scorer,
    check_fit,
    check_template,
    choose_template,
    open_backbone,
)
from jaxprompt.assembly.records import (
    beside_training,
    check_backbone,
    check_origins,
    check_shown,
    check_start,
    make_record,
    other_splits,
    read_trained,
)
from jaxprompt.config.schema import FIELDS, check_fields
from jaxprompt.config.settings import FREE, FREE_TRAINED, OF_DATA
from jaxprompt.data.batches.batching import EvalBatches, TrainBatches
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.identity import identity_of
from jaxprompt.data.text.overview import tell_cut, tell_unmarked, tell_words
from jaxprompt.data.text.target import read_answer
from jaxprompt.data.text.words import FROM_TEXT
from jaxprompt.errors import InputError, at_least
from jaxprompt.heads import Kind, make_head
from jaxprompt.layers import kernels
from jaxprompt.models.folding import fold_flat
from jaxprompt.models.model import Model, backbone_shapes
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.sharding import Placement, check_divides, make_placement
from jaxprompt.training import optim
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.evaluation import make_answering
from jaxprompt.training.loop import Milestones
from jaxprompt.types import Batch, Objective

# -- the config itself ---------------------------------------------------------------------------


def check_config(c: Any) -> None:
    """Raises InputError for all that is wrong with a config whatever the data and the backbone."""
    check_fields(c.to_dict())
    check_totals(c.train)
    optim.check_warmup(c.optim.schedule, c.optim.warmup_steps, c.optim.warmup_ratio)
    if c.data.batch % c.optim.accumulate:
        raise InputError(
            f"data.batch={c.data.batch} must divide by optim.accumulate={c.optim.accumulate}"
        )
    for field in ("data", "model"):
        if c.mesh[field] != -1:
            at_least(f"mesh.{field}", c.mesh[field], 1)
    if c.cache.folder and c.cache.where != "disk":
        raise InputError(f"cache.folder={c.cache.folder!r} needs cache.where=disk")
    prompt, head = method_of(c), head_of(c)
    if "frequent" in starts_of(c) and not c.corpus.path:
        raise InputError(
            "prompt.start=frequent draws from the most frequent words of a corpus, and corpus.path "
            "is empty; give the text (PPT takes that of pre-training), or take start=task or vocab"
        )
    if c.ppt.task:  # its texts and words are those of a pattern
        return
    task = in_form(c, read_task(c.task))
    head.check_task(task)
    style = "causal" if task.causal and not task.template else "masked"  # not known yet
    text = choose_template(task, head, style, c.task.form, c.task.template)
    parsed = check_template(task, text, head, c.task.form, prompt.num_slots())
    check_demos(c, head, task, parsed)
    read_answer(c.task.answer or "{label}")
    head.objectives(c.optim.smoothing)


def head_of(c: Any) -> Kind:
    """Makes the kind of answer of a config."""
    return make_head(**c.head.to_dict())


def check_totals(train: Any) -> None:
    """Raises InputError where a run has no length or several, or never looks at dev."""
    totals = {name: train[name] for name in ("total_steps", "total_epochs", "total_examples")}
    if sum(value > 0 for value in totals.values()) != 1:
        shown = ", ".join(f"train.{name}={value}" for name, value in totals.items())
        cure = "set the others to 0" if any(totals.values()) else "set one above 0"
        raise InputError(f"exactly one total must be above 0, not {shown}; {cure}")
    if not (train.eval_steps or train.eval_epochs):
        raise InputError("train.eval_steps=0 and train.eval_epochs=0; set one above 0")


def build_placement(c: Any, devices: Sequence[Any] | None = None) -> Placement:
    """Makes the mesh of a config; its batches must divide over it."""
    placement = make_placement(**c.mesh.to_dict(), devices=devices)
    size = placement.mesh.shape["data"]
    share = c.data.batch // c.optim.accumulate
    if share % size:
        cut = f" / optim.accumulate={c.optim.accumulate}" * (c.optim.accumulate > 1)
        raise InputError(
            f"data.batch={c.data.batch}{cut} does not divide over mesh.data={size}; take a "
            f"multiple of {size * c.optim.accumulate}, or mesh.data={math.gcd(share, size)}"
        )
    if c.data.eval_batch % size:
        raise InputError(
            f"data.eval_batch={c.data.eval_batch} does not divide over mesh.data={size}; take a "
            f"multiple of {size}"
        )
    return placement


def open_fitting(c: Any, placement: Placement, *, restored: bool = False) -> Backbone:
    """Opens the backbone of a checked config; method, head, length and mesh must fit it.

    So must the prompt that it starts from, unless its numbers are `restored` from a checkpoint.
    """
    backbone = open_backbone(c.backbone.to_dict())
    check_fit(backbone, prompt=c.prompt.to_dict(), head=c.head.to_dict(), max_len=c.data.max_len)
    if not restored:
        check_init(c, backbone.module.dims)
    check_mesh(placement, backbone.module, quantize=backbone.block["quantize"])
    return backbone


def check_mesh(
    placement: Placement, module: Any, part: str = "backbone", quantize: str = "none"
) -> None:
    """Raises InputError where the parameters of a backbone do not divide over the mesh."""
    if placement.mesh.size > 1:
        rows = dataclasses.replace(module.cfg, rows=placement.padded(module.cfg.vocab))
        shapes = backbone_shapes(module.clone(cfg=rows), quantize)
        check_divides(placement, {f"{part}/{n.split('/', 1)[1]}": x for n, x in shapes.items()})


def tell_kernel(c: Any, placement: Placement, module: Any) -> list[str]:
    """Says that dropout keeps the devices' own attention kernel out of training, where it does."""
    rate = module.cfg.attention_dropout
    given = module.cfg, module.dims.head_dim, placement.target, c.data.max_len
    if not rate or not kernels.has_own(*given, drops=False):
        return []
    return [
        f"attention dropout {rate} keeps the devices' attention kernel out of training; "
        "--config.backbone.dropout=0 takes it"
    ]


# -- data --------------------------------------------------------------------------------------


def scorer_from_config(
    c: Any, backbone: Backbone, examples: Examples, placement: Placement
) -> Scorer:
    """Builds the scorer of a config."""
    head, form, choices = head_of(c), c.task.form, examples.choices
    task = head.fit_task(examples.task, choices)
    return build_scorer(
        backbone, task, prompt=c.prompt.to_dict(), head=c.head.to_dict(), choices=choices,
        template=choose_template(task, head, backbone.module.STYLE, form, c.task.template),
        form=form, answer=c.task.answer, eos=c.task.eos, chat=c.task.chat, side=c.data.side,
        max_len=c.data.max_len, max_target=c.data.max_target, multiple=c.data.multiple,
        batch=c.data.eval_batch, share=placement.share(), demos=demos_of(c, task, examples.splits),
    )  # fmt: skip


def describe_data(examples: Examples, scorer: Scorer) -> dict[str, Any]:
    """Says what a run learns from, for its record."""
    mark = fingerprint_of(scorer.demos)
    facts = describe_examples(examples) | ({"sentence_encoder": mark} if mark else {})
    return facts | seen_by(scorer.model.prompt) | {"identity": identity_of(scorer)}


def longest_batch(c: Any, scorer: Scorer, split: Split) -> Batch:
    """Lays out a training batch as long as any."""
    layout = dataclasses.replace(scorer.layout, batch=c.data.batch)
    return next(iter(EvalBatches(split.rows, split.labels, layout)))


def train_batches(c: Any, scorer: Scorer, split: Split) -> TrainBatches:
    """Makes the endless stream of training batches; whole where states are kept, see `give`."""
    layout = dataclasses.replace(scorer.layout, batch=c.data.batch)
    layout = layout.whole() if c.cache.where else layout
    return TrainBatches(split.rows, split.labels, layout, seed=c.seed, group=c.data.group)


def encode_splits(scorer: Scorer, examples: Examples) -> dict[str, Split]:
    """Encodes every split; train with the free texts that are to be learned."""
    parts = examples.splits.items()
    return {name: scorer.encode(part, targets=name == "train") for name, part in parts}


def tell_examples(
    scorer: Scorer, splits: Mapping[str, Split], notes: Sequence[str] = ()
) -> list[str]:
    """Says which label is which and how often, how many texts are cut, and entities not marked.

    `notes` are those of the reading of examples.
    """
    rows = {name: part.by_example() for name, part in splits.items()}
    single = {name: part.without_samples() for name, part in splits.items()}
    words = scorer.verbalizer.words if scorer.verbalizer else ()
    lines = [*tell_words(scorer.task.labels, words), tell_cut(scorer.layout.max_len, rows)]
    lines += [] if scorer.demos is None else [scorer.demos.tell()]
    unmarked = {n: (p.judged.unmarked, p.size) for n, p in splits.items() if p.judged}
    own = scorer.head.tell(scorer.task, scorer.classes, single)
    positive = [scorer.task.positive_message] if scorer.task.positive_message else []
    return [*notes, *own, *positive, *lines, *tell_unmarked(unmarked)]


def eval_batches(scorer: Scorer, split: Split) -> EvalBatches:
    """Makes one pass over a split."""
    return EvalBatches(split.rows, split.labels, scorer.layout)


def build_measure(
    c: Any, scorer: Scorer, placement: Placement, kept: FeatureCache | None = None
) -> Callable[..., dict[str, float]]:
    """Makes (split, trainable, frozen) -> the metrics of a split, compiled once a shape."""
    judge = build_judge(c, scorer, placement, kept)
    return lambda *given: judge(*given)[0]


def build_judge(
    c: Any, scorer: Scorer, placement: Placement, kept: FeatureCache | None = None
) -> Callable[..., tuple[dict[str, float], Any]]:
    """Makes (split, trainable, frozen) -> metrics, and what was found: scores [units, C] or texts.

    A prompt that is computed from other numbers is computed once a pass, not once a batch.
    """
    kept, steps = kept or FeatureCache(scorer), {}
    # On several hosts an array is not a single process's to look at.
    folds = scorer.model.prompt.folds() and jax.process_count() == 1
    writes = scorer.head.WRITES

    def judge(split: Split, trainable: tree.Flat, frozen: tree.Flat) -> tuple[dict, Any]:
        goes_on = not writes and kept.holds(split)
        model = kept.model if goes_on else scorer.model
        if folds:
            example = scorer.one_batch(split.rows[:1])
            model, trainable, frozen = fold_flat(model, trainable, frozen, example)
        if goes_on not in steps:  # of equal shapes in every pass
            steps[goes_on] = make_answering(
                scorer.head, placement, model, c.generate, scorer.tokenizer, scorer.layout
            )
        batches = kept.read(split) if goes_on else eval_batches(scorer, split)
        found = steps[goes_on](trainable, frozen, batches, len(split.rows))
        scorer.head.check_found(split.average(found))
        return scorer.measure(split, found), found

    return judge


# -- a trained run -------------------------------------------------------------------------------


class Trained(NamedTuple):
    """A run's best numbers, with all that scores with them."""

    placement: Placement
    scorer: Scorer
    splits: dict[str, Split]
    weights: Weights
    best: dict[str, Any]  # step, value, dev
    family: str
    record: dict[str, Any]  # what it learned from, see `make_record`
    others: tuple[str, ...] = ()  # says which splits are not those of the run


def is_zero_shot(c: Any) -> bool:
    """Tells whether a config has nothing to train."""
    return not method_of(c).LEARNS and not c.trainable and head_of(c).READS_WORDS


def restore(c: Any, workdir: str, wanted: Sequence[str] = (), given: Given = NOTHING) -> Trained:
    """Reads the best prompt of a workdir and the `wanted` splits.

    Where nothing trains (zero-shot) no checkpoint is read. Raises InputError for a workdir that is
    untrained or of another config, and for a backbone of other weights.
    """
    check_config(c)
    # A frozen prompt that started from text has its numbers from that text alone.
    from_text = bool(c.trainable) and not set(FROM_TEXT).isdisjoint(starts_of(c))
    record, best_step = None, None
    if not is_zero_shot(c):
        own = [f"head.{name}" for name in head_of(c).CHANGEABLE]
        free = [n for n in (*FREE_TRAINED, *own) if not (from_text and n in OF_DATA)]
        record, best_step = read_trained(workdir, c, (*FREE, *free))
    placement = build_placement(c)
    backbone = open_fitting(c, placement, restored=True)
    if from_text:
        wanted = (*wanted, "train")
    shown = ("train",) if shows_demos(c) else ()
    examples = read_examples(c, (*wanted, *shown), record, given.rows)
    scorer = scorer_from_config(c, backbone, examples, placement)
    if record is not None and "seen" in record:
        scorer = scorer.with_prompt(scorer.model.prompt.clone(seen=record["seen"]))
    known = describe_data(examples, scorer)
    if shown and record is not None:
        check_shown(record, known, workdir)
    if shown and "train" not in wanted:  # it is shown, and not scored
        del examples.splits["train"]
    splits = encode_splits(scorer, examples)
    backbone, loaded = given.load(backbone, placement)
    scorer = scorer.with_backbone(backbone)
    if record is None:
        params = scorer.model.init(rng.key_for(c.seed, "init"), loaded.params, placement=placement)
        weights = Weights({}, tree.flatten(params), loaded.report)
        record = make_record(c, known, scorer.template, backbone.family, loaded.report.fingerprint)
        return Trained(placement, scorer, splits, weights, {}, backbone.family, record)
    check_backbone(record, loaded.report.fingerprint, workdir, known["identity"])
    others = other_splits(record, known)
    counts = None
    if from_text:
        check_start(c, record, known, workdir)
        from jaxprompt.assembly import starting_text  # which imports this module

        counts = starting_text.count_tokens(
            c, splits["train"], lambda: starting_text.count_corpus(c, scorer, workdir)
        )
    weights = start(c, scorer, loaded, counts, placement, restored=True)
    if any(name.startswith("prompt/") for name in weights.frozen):  # made again, in no checkpoint
        check_origins(c, record, workdir)
    with beside_training(workdir):
        trainable, best = Checkpoints(workdir).restore_best(
            weights.trainable, best_step, or_newer=True
        )
    weights = weights._replace(trainable=trainable)
    scorer = scorer.fitted(best.get("dev") or {})
    return Trained(placement, scorer, splits, weights, best, backbone.family, record, others)


# -- optimization -------------------------------------------------------------------------------


def make_plan(train: Any, steps_per_epoch: int, batch: float) -> Milestones:
    """Turns the one total that is given into steps; `batch` is the mean number of examples."""
    steps = train.total_epochs * steps_per_epoch or train.total_examples / batch
    # Rounded, since 0.07 of 100 steps is a little above 7 in floating point.
    total = train.total_steps or max(1, math.ceil(round(steps, 6)))
    evaluate = train.eval_steps or max(1, round(train.eval_epochs * steps_per_epoch))
    return Milestones(total, evaluate, train.save_steps)


def plan_of(c: Any, steps_per_epoch: int, examples: int = 0) -> Milestones:
    """Turns the total of a config into steps; an epoch has `examples`, 0 = all batches are full."""
    return make_plan(c.train, steps_per_epoch, examples / steps_per_epoch or c.data.batch)


def counts_epochs(c: Any) -> bool:
    """Tells whether the optimizer depends on the length of an epoch."""
    return c.optim.schedule == "exponential"


def build_optimizer(c: Any, trainable: tree.Flat, plan: Milestones, steps_per_epoch: int) -> Any:
    """Makes the optax chain of a config."""
    o = c.optim
    # A share below 1 may round to all of a short run.
    share = min(round(o.warmup_ratio * plan.total), plan.total - 1)
    schedule = optim.make_schedule(
        o.schedule, total=plan.total, warmup=o.warmup_steps or share, gamma=o.gamma,
        epoch=steps_per_epoch,
    )  # fmt: skip
    parts = {name.split("/")[0] for name in trainable}
    rates = optim.rates_by_part(parts, o.lr, {"head": o.lr_head, "backbone": o.lr_backbone})
    if "head" in rates and c.shared.tasks:  # each counts its own steps
        heads = {"/".join(name.split("/")[:2]) for name in trainable if name.startswith("head/")}
        rates |= dict.fromkeys(sorted(heads), rates.pop("head"))
    optim.check_no_decay(o.no_decay, FIELDS["optim"]["no_decay"].default, trainable)
    return optim.make_optimizer(
        o.name, schedule, rates, weight_decay=o.weight_decay, no_decay=tuple(o.no_decay),
        clip=o.clip, b1=o.b1, b2=o.b2, eps=o.eps, decay_rate=o.decay_rate, scaled=o.scaled,
    )  # fmt: skip


def build_objectives(c: Any, model: Model) -> list[Objective]:
    """Makes the terms of the loss: the head's, and the method's own."""
    return head_of(c).objectives(c.optim.smoothing) + model.prompt.objectives()
