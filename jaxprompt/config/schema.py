"""Every field of a config, once: defaults, checks, --help and docs/config.md come from it."""

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxprompt.config.fields import (
    SEED,
    Block,
    Field,
    Words,
    check_value,
    count,
    flag,
    number,
    path,
    several,
    share,
    size,
    text,
    texts,
    whole,
    word,
)
from jaxprompt.config.task_fields import TASK
from jaxprompt.errors import InputError, brief, check_kind, nearest

OPEN = ("prompt", "head")  # blocks whose fields are those of what they name
_DTYPES = ("float32", "bfloat16")
_OBJECTIVES = ("mlm", "rtd", "clm", "prefix_lm", "span_corruption")
_TASKS = Words("corpus.ppt", "TASKS")
FIELDS = Block(
    "",
    seed=whole(0, "train seed: initial values, order of examples, dropout", SEED),
    rng=word(
        "threefry", Words("rng", "GENERATORS"),
        "random number generator of dropout. threefry: the same masks on every mesh and device; "
        "rbg: the device's own, whose masks may change with mesh, device and compiler version",
    ),
    backbone=Block(
        "the frozen model",
        path=path("", "folder of save_pretrained, .gguf file, hub id, or pkg:PACKAGE/FOLDER"),
        revision=text("", "of a hub id"),
        init=path("", "adapt: a config.json, randomly initialised; `path` gives the tokenizer"),
        family=word("", Words("backbones", "families"), 'empty = model_type of config.json'),
        dtype=word("float32", _DTYPES, "of the frozen weights and the activations"),
        quantize=word(
            "none", ("none", "int8", "int4"),
            "codes that the frozen matrices are kept in, a scale and a minimum for 32 of them",
        ),
        stack=word(
            "scan", Words("layers.stack", "STACKS"),
            "scan: compile one layer; unroll: compile them all",
        ),
        remat=word(
            "none", Words("layers.stack", "REMATS"), "what the backward pass computes again"
        ),
        attention=word(
            "auto", Words("layers.kernels", "KERNELS"),
            "auto: the device's own kernel where it has one for these inputs; fused: also for "
            "short texts on TPUs, elsewhere scores are computed again in the backward pass; "
            "einsum: two products",
        ),
        reads=word(
            "asked", Words("models.model", "READS"),
            "asked: the last layer runs at the positions that the head reads; all: at all of them",
        ),
        once=flag(
            True,
            "GPT-2, Llama: what all rows begin with, as soft tokens, runs once per step and not "
            "for each row, with one dropout mask",
        ),
        dropout=share(None, "None = as in config.json; 0 also ends the attention's"),
        sentinel=text("<extra_id_{}>", "T5: how the vocabulary writes the n-th sentinel"),
        rescale=number(
            1.0, "T5: what the residual stream is divided by, for 16-bit floats", "above 0"
        ),
    ),
    trainable=texts((), "patterns of parameter names; () = the method's own", is_pattern=True),
    mesh=Block(
        "how devices are laid out; -1 = the rest of them",
        data=whole(-1, "parts of a batch"),
        model=whole(1, "parts of heads, feed-forward widths and vocabulary"),
        fsdp=flag(False, "frozen weights are sharded over `data` too"),
        slices=size(
            1, "slices of TPUs, or hosts of GPUs, between which only `data` may cross"
        ),
    ),
    task=TASK,
    data=Block(
        "which examples, and how they are laid into batches",
        source=path(
            "", "folder, hub, hub:owner/name[:subset], tfds:name, package; empty = the task's own"
        ),
        files=Block(
            "files, before `source`",
            train=path("", "of the training examples"),
            dev=path("", "of the examples that choose the best prompt"),
            test=path("", "of the examples that are scored once"),
        ),
        test_split=word(
            "test", ("test", "dev"),
            "split of the data set that is scored as test; dev only where data.protocol samples "
            "dev from train",
        ),
        only=text("", "COLUMN=VALUE: examples with another value are left out, of every split"),
        cache_dir=path("", "of hub and TFDS downloads"),
        protocol=word("", Words("data.sampling.fewshot", "PROTOCOLS"), "empty = all examples"),
        seed=whole(0, "data seed: which examples the protocol samples", SEED),
        k=count(16, "kshot: examples per class for train; kfold: per class in all, 0 = all"),
        dev_k=count(0, "kshot: examples per class for dev; 0 = k"),
        scarce=word(
            "raise", Words("data.sampling.fewshot", "SCARCE"),
            "of a class with too few examples: an error, or kshot gives train what there is, dev "
            "the rest, and kfold divides what there is",
        ),
        n=size(32, "balanced: examples in all for train, and as many for dev"),
        ratio=number(
            0.1, "fraction: share of each class, or from 2 on examples per class", "above 0"
        ),
        holdout=share(
            0.0, "fraction: share of each class that becomes dev; 0 = the task's own dev"
        ),
        folds=size(4, "kfold: number of parts"),
        fold=count(0, "kfold: the part that is dev"),
        size=size(500, "holdout: training examples that become dev, of each class its share"),
        rows=path("", "listed: JSONL file with the numbers of each seed's examples"),
        batch=size(32, "examples per step, over all hosts"),
        eval_batch=size(64, "examples per batch in evaluation"),
        max_len=size(128, "tokens of an example, soft tokens included"),
        max_target=size(64, "tokens of a free text, its end included"),
        multiple=size(8, "batches are padded to multiples of this length"),
        group=size(
            1, "sorts the examples of so many batches by length, which saves padding; 1 = off"
        ),
        side=word("right", ("right", "left"), "where padding stands"),
    ),
    demos=Block(
        "demonstrations: training examples that are shown with their labels beside each example",
        per_class=count(0, "of each class, behind the example (GPT-2: in front); 0 = none"),
        total=count(0, "or of all classes in random order, in front, as many as fit; 0 = none"),
        exact=count(0, "or exactly so many of these, none of them cut; 0 = none"),
        samples=size(
            1, "sets for each example; each is trained on as one, evaluation averages scores"
        ),
        similar=number(1.0, "share of a class, the most similar, to sample from", "in (0, 1]"),
        encoder=path("", "similar below 1: a BERT whose mean-pooled states are compared"),
        limit=count(0, "tokens of each of their texts, at most; 0 = what fits"),
        own_limit=count(0, "tokens of each text of the example itself, at most; 0 = what fits"),
    ),
    corpus=Block(
        "running text, for `adapt`, `annotate` and `pretrain`",
        path=path(
            "", "folder, file or glob of .txt, JSONL or Parquet; hub:owner/name, tfds:name"
        ),
        field=text("text", "JSONL, Parquet, hub, TFDS: where a document stands"),
        split=text("train", "hub, TFDS"),
        documents=word(
            "file", Words("corpus.read", "DOCUMENTS"),
            ".txt: a document is a file, a line, or what blank lines divide",
        ),
        paragraphs=word(
            "line", Words("corpus.split", "PARAGRAPHS"), "a paragraph ends with a line, or at a "
            "blank one",
        ),
        units=word("paragraph", Words("corpus.split", "UNITS"), "what a text is divided into"),
        language=text("en", "of sentences"),
        max_document=size(2**24, "bytes; a longer one is an error"),
        on_error=word(
            "raise", Words("corpus.read", "ON_ERROR"),
            "what to do with a document that cannot be read",
        ),
        store=path("", "folder where the indexed text is kept; empty = in the workdir"),
        processes=count(0, "processes that index the text; 0 = one per core, at most 6"),
        held_out=share(0.01, "share of the documents that is dev, sampled by data.seed"),
        dev_rows=size(512, "rows of them that are scored, at most"),
    ),
    objective=Block(
        "what a backbone is pre-trained by, in rows of data.max_len tokens",
        name=word("", _OBJECTIVES, "of `adapt`"),
        packed=flag(True, "rows are filled with several documents"),
        apart=flag(False, "packed: attention stays inside a document"),
        rate=share(0.15, "mlm, rtd, span_corruption: share of the tokens"),
        whole_words=flag(False, "mlm, rtd: all subwords of a word or none"),
        span=number(3.0, "span_corruption: mean length", "above 0"),
        share=share(0.0, "prefix_lm: of a row that is read, in (0, 1); 0 = random for each row"),
        weight=number(50.0, "rtd: of the discriminator's loss"),
        generator=number(0.25, "rtd: the generator's width, of the discriminator's", "above 0"),
        generator_layers=number(1.0, "and its layers", "above 0"),
        generator_path=path("", "rtd: a masked LM to begin with; empty = a fresh one of that size"),
        examples=count(10, "held-out rows that are written out as the model fills them"),
    ),
    ppt=Block(
        "what `pretrain` learns a prompt by; head, task.answer and .eos say how",
        task=word("", _TASKS, "of `pretrain`"),
        patterns=word(
            "en", Words("corpus.ppt", "PATTERNS"),
            "en: as released; en_paper: as published; zh: Chinese; en_end, zh_end: [mask] comes "
            "last; of task.form too",
        ),
        hard=flag(False, "task.form=nsp, nss, cls: a hard prompt stands beside the soft one"),
        least=size(2, "unified: options of an example, at least"),
        most=size(16, "and at most"),
        matched=flag(
            True, "nsp, nss, unified: negatives are as long as the neighbour of a text"
        ),
        annotations=path("", "cls: folder with the label of each unit of the text"),
        thresholds=several(
            share(0.0, "cls: what a label's probability exceeds, by class; () = as released")
        ),
    ),
    optim=Block(
        "how numbers are learned",
        name=word("adamw", Words("training.optim", "OPTIMIZERS"), "the optimizer"),
        lr=number(1e-2, "learning rate"),
        lr_head=number(None, "learning rate of the head; None = lr"),
        lr_backbone=number(None, "learning rate of the backbone; None = lr"),
        schedule=word(
            "linear", Words("training.optim", "SCHEDULES"), "of the learning rate, as a factor"
        ),
        warmup_steps=count(
            0, "warmup_linear, cosine; inverse_sqrt: steps at 1 / sqrt(warmup_steps)"
        ),
        warmup_ratio=share(0.0, "the same as a share of the run's steps, where warmup_steps is 0"),
        gamma=number(0.95, "exponential: factor per epoch", "above 0"),
        weight_decay=number(
            0.0, "of a step: adamw multiplies it by the learning rate, adafactor does not"
        ),
        no_decay=texts(
            (r".*/bias\d*", r".*norm/scale"), "patterns spared by weight decay", is_pattern=True
        ),
        clip=number(1.0, "gradients are clipped to this global norm; 0 = off"),
        b1=share(0.9, "Adam's beta_1"),
        b2=share(0.999, "Adam's beta_2"),
        eps=number(1e-8, "Adam's epsilon", "above 0"),
        decay_rate=share(0.8, "adafactor"),
        scaled=flag(
            False, "adafactor: as T5 was trained, lr relative to a matrix's size; factored"
        ),
        accumulate=size(1, "parts that a batch is cut into"),
        smoothing=share(0.0, "label smoothing"),
    ),
    cache=Block(
        "states of the frozen layers below all that trains, computed once and kept",
        where=word("", ("host", "disk"), "host: in memory; empty = computed in every step"),
        folder=path("", "disk: where; empty = in the workdir, or that of a grid"),
        dtype=word("float32", _DTYPES, "of what is kept"),
        limit=number(
            8.0, "GiB on each process, for all runs of a grid; what needs more is refused",
            "above 0",
        ),
    ),
    generate=Block(
        "how a free text is written",
        max_new=size(64, "tokens"),
        beams=size(1, "1 = greedy"),
        length_penalty=number(
            1.0, "beams are ranked by log-probability / length ** this", ""
        ),
        early_stopping=word(
            "false", ("true", "false", "never"), "true: stop at `beams` ended texts"
        ),
    ),
    runs=Block(
        "a grid of runs that train as one program, each in a folder of its own; of a list that is "
        "empty the config's own value is taken",
        tasks=several(word("", _TASKS, "ppt.task, of `pretrain`")),
        seeds=several(whole(0, "seed", SEED)),
        data_seeds=several(whole(0, "data.seed", SEED)),
        folds=several(count(0, "data.fold, of data.protocol=kfold")),
        lr=several(number(0.0, "optim.lr")),
        weight_decay=several(number(0.0, "optim.weight_decay")),
        starts=texts((), "prompt.start"),
        texts=texts((), "prompt.text"),
        words=texts((), "task.words of each run, as in bad,good"),
        size=count(
            0, "runs at once; 0 = all that memory holds, on a CPU those with the same batches"
        ),
    ),
    shared=Block(
        "several tasks that train one prompt, each with a head of its own",
        tasks=texts(
            (), "JSON files, one per task: fields of task, data and head that differ from the "
            "config's own; a task is called by its file"
        ),
        temperature=number(
            1.0, "a task's share of the steps is its number of examples to the power of 1 / this",
            "above 0",
        ),
    ),
    train=Block(
        "how long, and when it is scored and saved; a total that is given replaces the config's",
        total_steps=count(0, "steps"),
        total_epochs=number(10.0, "passes over the training examples"),
        total_examples=count(0, "examples"),
        eval_steps=count(0, "evaluate on dev every n steps; 0 = by epochs"),
        eval_epochs=number(1.0, "and every n epochs"),
        patience=count(0, "evaluations without gain before the run stops; 0 = off"),
        save_steps=count(0, "save every n steps; 0 = at every evaluation"),
        keep=size(2, "newest saved steps that stay in the workdir; `inspect` reads all of them"),
        plot=flag(True, "draw curves.png at the end, where matplotlib is installed"),
        log_steps=size(10, "metrics of every n-th step are written"),
        max_streak=size(10, "steps in a row that are not finite before the run stops"),
        test=flag(True, "score the test split with the best prompt at the end"),
        profile=count(
            0, "steps of one run that are traced into its folder, behind the first two; also "
            "--profile=STEPS"
        ),
        init_head=flag(False, "the head starts from the export that prompt.init names, too"),
        tracker=word(
            "tensorboard", Words("training.trackers", "TRACKERS"),
            "tensorboard: event files in the workdir; wandb, trackio: a run there, named after the "
            "workdir; none: metrics.jsonl alone",
        ),
        compilation_cache=text(
            "", "folder of compiled programs; empty = ~/.cache/jaxprompt/compiled, none = not kept"
        ),
    ),
)  # fmt: skip


def forms() -> tuple[str, ...]:
    """Lists the forms of a task."""
    return "cloze", "text", *_TASKS.read()


def make_defaults() -> ConfigDict:
    """Makes a config of all fields at their defaults; the open blocks are missing."""
    return _defaults(FIELDS)


def _defaults(block: Block) -> ConfigDict:
    made = ConfigDict()
    for name, field in block.items():
        if isinstance(field, Block):
            made[name] = _defaults(field)
        else:
            made[name] = placeholder(field.kind) if field.default is None else field.default
    return made


def check_fields(given: Mapping[str, Any], block: str = "") -> None:
    """Checks a config, or a `block` of it: no field unknown or missing, each of its kind and range.

    Raises InputError for the first that is not.
    """
    known = FIELDS[block] if block else {**FIELDS, **dict.fromkeys(OPEN)}
    _check_names(given, known, f"{block}." if block else "")
    for name, field, value in _leaves(given, known, f"{block}." if block else ""):
        check_value(name, field, value)
    if not block:
        for part in OPEN:
            check_kind(f"{part}.name", given[part].get("name"), str)


def _check_names(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> None:
    for name in sorted(set(given) - set(known)):
        raise InputError(f"unknown config field {brief(prefix + name)}; {nearest(name, known)}")
    for name in sorted(set(known) - set(given)):
        raise InputError(f"config field {prefix}{name} is missing; `train --help` lists them all")


def _leaves(
    given: Mapping[str, Any], known: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Field, Any]]:
    for name, field in known.items():
        value = given[name]
        if isinstance(field, Field):
            yield prefix + name, field, value
        elif not isinstance(value, Mapping):
            raise InputError(
                f"config field {prefix}{name}={brief(value)} must be a block of fields"
            )
        elif field is not None:
            _check_names(value, field, f"{prefix}{name}.")
            yield from _leaves(value, field, f"{prefix}{name}.")
