"""The task and the examples of a config."""

import dataclasses
import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxprompt.build.method import head_of
from jaxprompt.build.notes import tell_minus_one, tell_misplaced, tell_moved, tell_odd, tell_unread
from jaxprompt.build.word_list import WordList, choose_classes, keep_known, read_words, with_words
from jaxprompt.config.run import DataConfig, Fraction, KFold, RunConfig, TaskConfig
from jaxprompt.convert import folder
from jaxprompt.corpus.ppt import TASKS, get_pattern, to_pretraining_form
from jaxprompt.data.rows import Rows
from jaxprompt.data.sampling import fewshot
from jaxprompt.data.sources import splits as sources
from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.readers.dialogues import turns_of
from jaxprompt.data.tasks.readers.reading import has_label, read_all, read_example, with_labels
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError, brief
from jaxprompt.scoring.questions import METRICS as QUESTION_METRICS
from jaxprompt.training.run_record import TaskData

SPLITS = ("train", "dev", "test")
_NO_VOCABULARY = ("labels", "words", "choices", "target", "tags", "answers", "entities", "number")
_OF_CUSTOM = (
    "label", "labels", "choices", "target", "answers", "number", "limits", "tags", "scheme",
    "predicate", "entities", "offsets", "negative", "question", "candidate", "candidates",
    "placeholder",
)  # fmt: skip
_ANY_ROWS = ("holdout", "fraction")  # protocols that need no classes


def read_task(config: TaskConfig) -> Task:
    """Returns the task of a config block; words and metric of the config replace the task's.

    Raises:
      InputError: if the fields of the task contradict each other.
    """
    label_words = tuple(tuple(part.strip() for part in entry.split("|")) for entry in config.words)
    _check_vocabulary(config)
    if config.name == "custom":
        names = (*_OF_CUSTOM, "markers", "metric", "option", "positive")
        columns = {name: getattr(config, name) for name in names}
        spaced = config.spaced != "false"
        return custom_task(fields=config.fields, words=label_words, spaced=spaced, **columns)
    task = get_task(config.name)
    _check_known(config, task)
    if label_words and len(label_words) != len(task.labels):
        raise InputError(
            f"task.words has {len(label_words)} entries for {len(task.labels)} classes of "
            f"{task.name}; give one per class, in the order {', '.join(task.labels)}"
        )
    if config.positive not in ("", task.positive) and task.positive:
        raise InputError(
            f"task.positive={brief(config.positive)}, but the positive class of {task.name} is "
            f"{task.positive!r}, as in its benchmark; leave task.positive out"
        )
    task = dataclasses.replace(
        task,
        metric=config.metric or task.metric,
        positive=config.positive or task.positive,
        markers=config.markers or task.markers,
        labels=config.labels if task.kind == "tags" and config.labels else task.labels,
    )
    task = _as_written(check_task(task), config)
    if not label_words:
        return task
    first = tuple(entry[0] for entry in label_words)
    # Words that are given serve every kind of backbone: the task's own for causal ones go.
    return dataclasses.replace(task, words=label_words, causal_words=(), targets=first)


def _check_vocabulary(config: TaskConfig) -> None:
    """Raises InputError if the classes of a task are given in two ways."""
    others = [name for name in _NO_VOCABULARY if getattr(config, name)]
    if config.vocabulary and (others or config.name != "custom"):
        field = others[0] if others else "name"
        raise InputError(
            f"task.vocabulary lists the classes of task.name=custom, but task.{field}="
            f"{brief(getattr(config, field))} defines others; leave one of the two out"
        )


def _check_known(config: TaskConfig, task: Task) -> None:
    """Raises InputError for a field that only a custom task uses."""
    read = ("fields",) * (config.form in TASKS) + ("labels",) * (task.kind == "tags")
    for name in ("fields", *_OF_CUSTOM):
        value = getattr(config, name)
        if name not in read and value not in (getattr(TaskConfig(), name), getattr(task, name)):
            raise InputError(
                f"task.{name}={brief(value)} is only valid with task.name=custom, but "
                f"task.name={task.name}; leave it out, or set task.name=custom with the columns of "
                "your file"
            )


def asked_task(config: RunConfig) -> Task:
    """Returns the task of a config, see `read_task`."""
    return read_task(config.task)


def in_form(config: RunConfig, task: Task) -> Task:
    """Formats the task as a pre-training task if task.form names one.

    Raises:
      InputError: if that is not possible.
    """
    block = config.task
    if block.form not in TASKS:
        if config.ppt.hard:
            raise InputError(
                f"ppt.hard=True adds the hard prompt of a pre-training task, but task.form="
                f"{block.form} has none; set task.form to nsp, nss or cls, or ppt.hard=False"
            )
        return task
    if not head_of(config).READS_WORDS:
        raise InputError(
            f"task.form={block.form} answers with label words, which head.name={config.head.name} "
            "does not use; set head.name=verbalizer"
        )
    if task.choices and block.words:
        raise InputError(
            f"task.words names the choices, but task.form={block.form} takes their names from "
            "ppt.patterns; leave task.words out, or use task.form=cloze"
        )
    pattern = get_pattern(block.form, config.ppt.patterns, hard=config.ppt.hard)
    texts = () if block.name == "custom" else block.fields
    made = to_pretraining_form(task, block.form, pattern, texts=texts, query=block.template)
    return _as_written(made, block)


def _as_written(task: Task, config: TaskConfig) -> Task:
    """Applies how a config writes options and label words."""
    spaced = task.spaced if config.spaced == "" else config.spaced == "true"
    return dataclasses.replace(task, option=config.option or task.option, spaced=spaced)


def check_tunes(config: RunConfig) -> None:
    """Raises InputError if a config is for pre-training, or for several tasks."""
    if config.objective.name:
        raise InputError(
            f"objective.name={config.objective.name} pre-trains a backbone, which only the command "
            "adapt does; use another config, or set objective.name=''"
        )
    if config.ppt.task:
        raise InputError(
            f"ppt.task={config.ppt.task} pre-trains a prompt, which is only valid with the "
            "commands pretrain, plan and export; use another config, or set ppt.task=''"
        )
    if config.shared.tasks:
        raise InputError(
            "shared.tasks is only valid with the command train, which exports each task's prompt "
            "to WORKDIR/export/NAME; give that with --prompt, or leave shared.tasks empty"
        )


class Examples(NamedTuple):
    """The splits of a run, read and divided, not yet encoded."""

    task: Task  # with its labels found
    choices: int  # the most that an example has, 1 where the task has none
    splits: dict[str, list[Example]]
    notes: tuple[str, ...] = ()  # what was left out


class _DataSet:
    """The data set of a config, and what was left out of the splits that were read."""

    def __init__(self, config: RunConfig, in_memory: Mapping[str, Rows] | None):
        self.config, self.in_memory = config, in_memory
        self.files, self.cache_dir = config.data.files.paths(), config.data.cache_dir or None
        self.left_out: list[str] = []

    def has(self, task: Task, split: str) -> bool:
        """Returns whether it has a split of the run."""
        is_other = source_split(self.config, split, self.in_memory) != split
        return is_other or sources.has_split(
            task, split, source=self.config.data.source, files=self.files,
            cache_dir=self.cache_dir, given=self.in_memory,
        )  # fmt: skip

    def read(self, task: Task, split: str) -> Rows:
        """Reads the rows of a split of the run whose labels are classes."""
        config, name = self.config, source_split(self.config, split, self.in_memory)
        rows = sources.read_split(
            task, name, source=config.data.source, files=self.files, cache_dir=self.cache_dir,
            given=self.in_memory, only=config.data.only,
        )  # fmt: skip
        if rows.left_out:
            self.left_out.append(f"{split} {rows.left_out} of {len(rows) + rows.left_out}")
        if config.task.vocabulary:
            rows, count = keep_known(task, rows)
            self.left_out.append(f"{split} {count}")
        return rows


def read_examples(
    config: RunConfig, wanted: Sequence[str] = SPLITS, record: TaskData | None = None,
    given: Mapping[str, Rows] | None = None,
) -> Examples:  # fmt: skip
    """Reads the available splits, and samples train and dev by the protocol.

    Args:
      config: the config of a run.
      wanted: the splits to read.
      record: the data record of a run; if given, the task is that of the run, and labels are not
        inferred from the training data.
      given: rows by split, in place of the files in the config.

    Raises:
      InputError: if dev is wanted and there is none.
    """
    check_tunes(config)
    data, data_set = config.data, _DataSet(config, given)
    if makes_dev(data) and data.files.dev and "dev" in wanted:
        raise InputError(
            f"data.protocol={data.protocol.name} splits dev off the training examples, so "
            f"data.files.dev={data.files.dev} would not be read; set one of them to ''"
        )
    task = read_task(config.task) if record is None else record.task
    splits: dict[str, list[Example]] = {}
    notes = tell_unread(config)
    if config.task.vocabulary and record is None:
        vocabulary = _read_vocabulary(config, task)
        task, notes = with_words(task, vocabulary), [*notes, vocabulary.tell()]
    drawn = data.protocol.name and {"train", "dev"} & set(wanted)
    rows, has_labels = None, record is not None or task.kind in ("texts", "spans", "numbers")
    if task.kind == "classes":
        has_labels = has_labels or bool(task.labels or task.choices)
    if drawn or "train" in wanted or not has_labels:
        # Dev and test are read by the labels of train.
        rows = data_set.read(task, "train")
        task = with_labels(task, rows, rows.origin, rows.classes)
    task = in_form(config, task) if record is None else task
    if config.task.positive and not task.positive_message:
        notes.append(
            f"task.positive={brief(config.task.positive)} has no effect: task.metric is "
            f"{task.metric}"
        )
    if rows is not None:
        splits, more = _train_splits(config, task, rows)
        notes += more
    for name in wanted:
        if name not in splits and data_set.has(task, name):
            rows = data_set.read(task, name)
            # Benchmarks hide the labels of their test files, which `predict --format` is for.
            if name == "test" and {"train", "dev"} <= set(wanted) and not _told(task, rows):
                read_example(task, rows[0], rows.origin(0), need_label=False)  # has it the columns?
                notes.append(f"test is not scored: no row of {rows.path} states a label")
                continue
            # Answers to what is only scored are compared by their words.
            examples = read_all(task, rows, rows.origin, need_place=name == "train")
            notes += tell_misplaced(name, examples) if task.kind == "spans" else []
            splits[name] = scored_examples(task, rows, examples)
    if "dev" in wanted and not splits.get("dev"):
        raise InputError(_no_dev_message(config, task, len(splits.get("train", ())), given))
    splits = {name: splits[name] for name in SPLITS if splits.get(name)}
    notes += tell_odd(splits)
    choices = max((len(e.choices) for part in splits.values() for e in part), default=1) or 1
    if data_set.left_out:
        left_out = ", ".join(data_set.left_out)
        notes.append(f"examples left out, whose {task.label} is no class: {left_out}")
    return Examples(task, choices if record is None else record.choices, splits, tuple(notes))


def _train_splits(
    config: RunConfig, task: Task, rows: Rows
) -> tuple[dict[str, list[Example]], list[str]]:  # fmt: skip
    """Divides training rows by the protocol. Returns train, and dev if it is made, and notes."""
    examples = read_all(task, rows, rows.origin)
    notes = tell_moved(examples)
    if not (config.task.labels or task.hub):
        notes += tell_minus_one(task, examples)
    split = _draw(config.data, task, examples, rows)
    if split is None:
        return {"train": examples}, notes
    splits = {"train": [examples[i] for i in split.train]}
    if split.dev is not None:
        dev = [examples[i] for i in split.dev]
        splits["dev"] = scored_examples(task, rows.take(split.dev.tolist()), dev)
    return splits, notes


def _no_dev_message(
    config: RunConfig, task: Task, train: int, in_memory: Mapping[str, Rows] | None
) -> str:  # fmt: skip
    """Returns why a run has no dev examples; `train` is the number of training examples."""
    if makes_dev(config.data):
        protocol = config.data.protocol
        options = [f"data.protocol.{name}" for name in protocol.declared()]
        return (
            f"data.protocol={protocol.name} uses all {train} examples for train and leaves "
            f"none for dev; reduce the training share: {', '.join(options)}"
        )
    source = "data.files.dev" if in_memory is None else "dev rows"
    return (
        f"task {task.name} has no dev split here; give {source}, or split one off train: "
        "data.protocol=holdout and data.protocol.size=N"
    )


def _told(task: Task, rows: Rows) -> bool:
    return any(has_label(task, row) for row in rows)


def _read_vocabulary(config: RunConfig, task: Task) -> WordList:
    """Reads the list of words of a config by the tokenizer of its backbone."""
    words = read_words(config.task.vocabulary)
    tokenizer = load_tokenizer(
        folder.resolve(config.backbone.path, config.backbone.revision or None)
    )
    return choose_classes(words, tokenizer, spaced=task.spaced, path=config.task.vocabulary)


def scored_examples(task: Task, rows: Rows, examples: list[Example]) -> list[Example]:
    """Returns the examples that a split is scored by: for f1c, one per turn of a dialogue."""
    if task.metric != "f1c":
        return examples
    made: list[Example] = []
    for pair, example in enumerate(examples):
        made += turns_of(task, rows[pair], example, rows.origin(pair), pair)
    return made


def examples_key(config: RunConfig) -> str:
    """Returns a hash of everything that the examples of a run depend on."""
    return json.dumps(
        [block.to_dict() for block in (config.data, config.task, config.demos)], sort_keys=True
    )


def source_split(config: RunConfig, split: str, given: Mapping[str, Rows] | None = None) -> str:
    """Returns the split of the data set that a split of the run is read from.

    Files and `given` rows already have the names of the run's splits.

    Raises:
      InputError: if the same examples would both select the prompt and be reported as test.
    """
    data = config.data
    is_named = given is not None or any(data.files.paths())
    if split != "test" or is_named or data.test_split == "test":
        return split
    if not makes_dev(data):
        raise InputError(
            f"data.test_split={data.test_split} would report the examples that select the best "
            "prompt; sample dev from train with data.protocol (for fraction: with "
            "data.protocol.holdout), or set data.test_split=test"
        )
    return data.test_split


def makes_dev(data: DataConfig) -> bool:
    """Returns whether the protocol takes dev from the training examples."""
    if isinstance(data.protocol, Fraction):
        return data.protocol.holdout > 0
    return data.protocol.name != ""


def data_files(config: RunConfig) -> dict[str, Path]:
    """Returns the user's files that a config reads, see `sources.local_files`."""
    return sources.local_files(config.data.source, config.data.files.paths())


def read_rows(
    config: RunConfig, task: Task, split: str
) -> list[tuple[str, dict[str, object], Example]]:
    """Reads one split in the order of `read_examples`, with the rows as they are in the source.

    `task` has its labels. Returns the place of each row, the row, and its example.
    """
    data_set = _DataSet(config, None)
    if config.data.protocol.name and split != "test":
        rows = data_set.read(task, "train")
        read = _read_each(task, rows, "train")
        sampled = _draw(config.data, task, [example for _, _, example in read], rows)
        numbers = getattr(sampled, split)
        if numbers is not None:
            return [read[number] for number in numbers]
    return _read_each(task, data_set.read(task, split), split)


def _read_each(task: Task, rows: Rows, split: str) -> list[tuple[str, dict[str, object], Example]]:
    """Reads each row of a split. Returns where it stands, the row, its example."""
    places = [(rows.origin(number), dict(row)) for number, row in enumerate(rows)]
    return [
        (where, row, read_example(task, row, where, need_place=split == "train"))
        for where, row in places
    ]


def _draw(
    data: DataConfig, task: Task, examples: Sequence[Example], rows: Rows
) -> fewshot.SplitRows | None:
    protocol = data.protocol.name
    if not protocol:
        return None
    if task.kind != "classes" and protocol not in _ANY_ROWS:
        raise InputError(
            f"data.protocol={protocol} samples by class, but task {task.name} has {task.kind}; "
            "use holdout, fraction or none"
        )
    labels = [example.label for example in examples]
    if task.kind != "classes" or (protocol == "holdout" and task.choices):
        labels = [0] * len(labels)  # the place of the right choice is no class
    groups: list[Hashable] | None = None
    keeps = fewshot.keeps_groups(data.protocol)
    if task.question and (keeps or task.metric in QUESTION_METRICS):
        if isinstance(data.protocol, KFold) and not keeps:
            raise InputError(
                f"data.protocol=kfold with data.protocol.k={data.protocol.k} samples single "
                f"candidates, but {task.metric} needs whole questions; use data.protocol.k=0, or "
                "task.metric=accuracy"
            )
        groups = [example.question for example in examples]
    elif task.predicate and keeps:  # a sentence is an example for each
        groups = [example.words for example in examples]
    return fewshot.split(
        data.protocol, labels, data.seed, names=task.labels, groups=groups,
        rows=([rows.number(i) for i in range(len(rows))], rows.total),
    )  # fmt: skip
