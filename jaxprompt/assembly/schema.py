"""Every field of a config: its kind, and its range or the words that it may hold."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxprompt.backbones import families
from jaxprompt.corpus.ppt import PATTERNS, TASKS
from jaxprompt.corpus.read import DOCUMENTS, ON_ERROR
from jaxprompt.corpus.split import PARAGRAPHS, UNITS
from jaxprompt.data.fewshot import PROTOCOLS
from jaxprompt.data.tags import SCHEMES
from jaxprompt.errors import InputError, brief, check_kind, choose, nearest
from jaxprompt.files import user_path
from jaxprompt.layers.kernels import KERNELS
from jaxprompt.layers.stack import REMATS, STACKS
from jaxprompt.scoring.metrics import OF
from jaxprompt.training.optim import OPTIMIZERS, SCHEDULES

OPEN = ("prompt", "head")  # blocks whose fields are those of what they name
DTYPES = ("float32", "bfloat16")
OBJECTIVES = ("mlm", "rtd", "clm", "prefix_lm", "span_corruption")
FORMS = ("cloze", "text", *TASKS)
_METRICS = tuple(dict.fromkeys(name for names in OF.values() for name in names))
_RANGES = {
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 2**32)": lambda x: 0 <= x < 2**32,
}


class Field(NamedTuple):
    """What a field may hold."""

    kind: type
    limit: str | Sequence[str] = ""  # a key of _RANGES, or the known words
    optional: bool = False  # None, of a number; "", of a word
    many: bool = False  # a tuple of such values
    is_path: bool = False  # or what may stand in its place: hub:..., pkg:..., a pattern


_TEXT, _TEXTS, _FLAG = Field(str), Field(tuple), Field(bool)
_PATH = Field(str, is_path=True)
_COUNT, _SIZE, _SEED = (Field(int, x) for x in ("at least 0", "at least 1", "in [0, 2**32)"))
_AMOUNT, _POSITIVE, _SHARE = (Field(float, x) for x in ("at least 0", "above 0", "in [0, 1)"))
# The own fields of methods and heads are checked where these are made.
FIELDS = {
    "seed": _SEED,
    "trainable": _TEXTS,
    "backbone": dict(
        path=_PATH, revision=_TEXT, init=_PATH, family=Field(str, families(), True),
        dtype=Field(str, DTYPES), stack=Field(str, STACKS), remat=Field(str, REMATS),
        attention=Field(str, KERNELS), dropout=_SHARE._replace(optional=True), sentinel=_TEXT,
        rescale=_POSITIVE,
    ),
    "mesh": dict(data=Field(int), model=Field(int), fsdp=_FLAG, slices=_SIZE),
    "task": dict(
        name=_TEXT, template=_TEXT, words=_TEXTS, fields=_TEXTS, label=_TEXT, labels=_TEXTS,
        choices=_TEXTS, metric=Field(str, _METRICS, True), target=_TEXT, tags=_TEXT, answers=_TEXT,
        scheme=Field(str, SCHEMES, True), form=Field(str, FORMS), answer=_TEXT, eos=_FLAG,
        option=_TEXT, spaced=Field(str, ("true", "false"), True),
    ),
    "data": dict(
        source=_PATH, files=dict(train=_PATH, dev=_PATH, test=_PATH), cache_dir=_PATH,
        protocol=Field(str, tuple(PROTOCOLS), True), seed=_SEED, k=_COUNT, dev_k=_COUNT, n=_SIZE,
        ratio=_POSITIVE, holdout=_SHARE, folds=_SIZE, fold=_COUNT, size=_SIZE, rows=_PATH,
        batch=_SIZE, eval_batch=_SIZE, max_len=_SIZE, max_target=_SIZE, multiple=_SIZE, group=_SIZE,
        side=Field(str, ("right", "left")),
    ),
    "corpus": dict(
        path=_PATH, field=_TEXT, split=_TEXT, documents=Field(str, DOCUMENTS),
        paragraphs=Field(str, PARAGRAPHS), units=Field(str, UNITS), language=_TEXT,
        max_document=_SIZE, on_error=Field(str, ON_ERROR), store=_PATH, processes=_COUNT,
        held_out=_SHARE, dev_rows=_SIZE,
    ),
    "objective": dict(
        name=Field(str, OBJECTIVES, True), packed=_FLAG, apart=_FLAG, rate=_SHARE,
        whole_words=_FLAG, span=_POSITIVE, share=_SHARE, weight=_AMOUNT, generator=_POSITIVE,
        generator_layers=_POSITIVE, generator_path=_PATH, examples=_COUNT,
    ),
    "ppt": dict(
        task=Field(str, TASKS, True), patterns=Field(str, tuple(PATTERNS)), least=_SIZE, most=_SIZE,
        hard=_FLAG, matched=_FLAG, annotations=_PATH, thresholds=_SHARE._replace(many=True),
    ),
    "optim": dict(
        name=Field(str, OPTIMIZERS), lr=_AMOUNT, lr_head=_AMOUNT._replace(optional=True),
        lr_backbone=_AMOUNT._replace(optional=True), schedule=Field(str, SCHEDULES),
        warmup_steps=_COUNT, gamma=_POSITIVE, weight_decay=_AMOUNT, no_decay=_TEXTS, clip=_AMOUNT,
        b1=_SHARE, b2=_SHARE, eps=_POSITIVE, decay_rate=_SHARE, scaled=_FLAG, accumulate=_SIZE,
        smoothing=_SHARE,
    ),
    "cache": dict(
        where=Field(str, ("host", "disk"), True), folder=_PATH, dtype=Field(str, DTYPES),
        limit=_POSITIVE,
    ),
    "generate": dict(
        max_new=_SIZE, beams=_SIZE, length_penalty=Field(float),
        early_stopping=Field(str, ("true", "false", "never")),
    ),
    "runs": dict(
        tasks=Field(str, TASKS, many=True),
        seeds=_SEED._replace(many=True), data_seeds=_SEED._replace(many=True),
        lr=_AMOUNT._replace(many=True), weight_decay=_AMOUNT._replace(many=True),
        starts=_TEXTS, texts=_TEXTS, words=_TEXTS, size=_COUNT,
    ),
    "train": dict(
        total_steps=_COUNT, total_epochs=_AMOUNT, total_examples=_COUNT, eval_steps=_COUNT,
        eval_epochs=_AMOUNT, patience=_COUNT, save_steps=_COUNT, log_steps=_SIZE,
        max_streak=_SIZE, test=_FLAG, tensorboard=_FLAG, compilation_cache=_TEXT,
    ),
}  # fmt: skip

# What other tools call a field; the last part of a name counts.
SYNONYMS = {
    **dict.fromkeys(("learning_rate", "learningrate", "base_lr"), "optim.lr"),
    **dict.fromkeys(("optimizer", "optimiser"), "optim.name"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), "optim.schedule"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "optim.warmup_steps"),
    **dict.fromkeys(("wd", "decay"), "optim.weight_decay"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_norm"), "optim.clip"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "optim.accumulate"),
    **dict.fromkeys(("label_smoothing",), "optim.smoothing"),
    **dict.fromkeys(("adam_beta1", "beta1"), "optim.b1"),
    **dict.fromkeys(("adam_beta2", "beta2"), "optim.b2"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
                    "train.total_epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_steps", "train_steps"), "train.total_steps"),
    **dict.fromkeys(("eval_every", "eval_interval", "evaluation_steps"), "train.eval_steps"),
    **dict.fromkeys(("save_every", "save_interval", "checkpoint_every"), "train.save_steps"),
    **dict.fromkeys(("logging_steps", "log_every"), "train.log_steps"),
    **dict.fromkeys(("early_stopping_patience",), "train.patience"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size", "bs"),
                    "data.batch"),
    **dict.fromkeys(("eval_batch_size", "per_device_eval_batch_size"), "data.eval_batch"),
    **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "seq_len", "max_tokens"),
                    "data.max_len"),
    **dict.fromkeys(("max_target_length", "target_length"), "data.max_target"),
    **dict.fromkeys(("shots", "num_shots", "k_shot"), "data.k"),
    **dict.fromkeys(("data_seed", "split_seed"), "data.seed"),
    **dict.fromkeys(("random_seed", "train_seed", "rng_seed", "manual_seed"), "seed"),
    **dict.fromkeys(("seeds",), "runs.seeds"),
    **dict.fromkeys(("model", "model_name", "model_name_or_path", "model_path", "pretrained"),
                    "backbone.path"),
    **dict.fromkeys(("precision",), "backbone.dtype"),
    **dict.fromkeys(("gradient_checkpointing",), "backbone.remat"),
    **dict.fromkeys(("method", "peft_type"), "prompt.name"),
    **dict.fromkeys(("num_virtual_tokens", "prompt_length", "num_tokens", "prefix_length"),
                    "prompt.length"),
    **dict.fromkeys(("dataset", "dataset_name", "task_name"), "task.name"),
    **dict.fromkeys(("verbalizer", "label_words"), "task.words"),
    **dict.fromkeys(("num_beams", "beam_size"), "generate.beams"),
    **dict.fromkeys(("max_new_tokens",), "generate.max_new"),
}  # fmt: skip


def check_fields(given: Mapping[str, Any], block: str = "") -> None:
    """Checks a config, or a `block` of it: no field unknown or missing, each of its kind and range.

    Raises InputError for the first that is not.
    """
    known = FIELDS[block] if block else FIELDS | dict.fromkeys(OPEN)
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
        raise InputError(f"config field {prefix}{name} is missing; configs/base.py has them all")


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


def check_value(name: str, field: Field, value: Any) -> None:
    """Raises InputError where the value of a field, by its dotted name, is not what it may be."""
    if field.optional and value in (None, ""):
        return
    if field.many:
        if not isinstance(value, tuple | list):
            raise InputError(f"config field {name}={brief(value)} must be a list")
        for part in value:
            check_value(name, field._replace(many=False), part)
        return
    check_kind(name, value, field.kind)
    if field.is_path:
        user_path(value, f"config field {name}:")
    if field.kind is int and field.limit != _SEED.limit and abs(value) >= 2**31:
        raise InputError(f"{name}={brief(value)} must be below 2**31")
    if isinstance(field.limit, str):
        if field.limit and not _RANGES[field.limit](value):
            raise InputError(f"{name}={brief(value)} must be {field.limit}")
    else:
        choose(name, value, field.limit)
    if name in ("trainable", "optim.no_decay"):
        for pattern in value:
            try:
                re.compile(pattern)
            # Python's own parser has the second for a repetition of more than 2**32.
            except (re.error, OverflowError, RecursionError) as error:
                raise InputError(
                    f"{name}: {brief(pattern)} is no regular expression ({error})"
                ) from error
