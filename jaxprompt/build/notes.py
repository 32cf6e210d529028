"""What a run says of its examples while they are read: what nothing reads, and what looks wrong."""

import itertools
from collections.abc import Mapping, Sequence

from jaxprompt.build.demonstrations import shows_demos
from jaxprompt.build.method import head_of, method_of, starts_of
from jaxprompt.config.kinds import Value
from jaxprompt.config.run import DataConfig, RunConfig
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import brief
from jaxprompt.heads import Kind
from jaxprompt.prompts import Method, idle_fields


def fields_read(config: RunConfig) -> dict[str, Value]:
    """Lists the fields of a run by dotted name, but for those that it did not read."""
    unread = {"task.name"} if config.shared.tasks else set()
    return {name: value for name, value in config.leaves().items() if name not in unread}


def tell_unread(config: RunConfig) -> list[str]:
    """Names what a config gives that nothing reads: of its method, head, words and protocol."""
    default, data, head = DataConfig(), config.data, head_of(config)
    lines = _tell_idle(config, head)
    if config.task.words and not (head.READS_WORDS or "labels" in starts_of(config)):
        lines.append(
            f"task.words={brief(','.join(config.task.words))} is not read: head.name is "
            f"{config.head.name}; take head.name=verbalizer for label words"
        )
    if data.test_split != default.test_split and data.files.paths():
        lines.append(f"data.test_split={data.test_split} is not read: data.files names each split")
    if data.seed != default.seed and not data.protocol.name and not shows_demos(config):
        lines.append(f"data.seed={data.seed} is not read: data.protocol is empty")
    return lines


def _tell_idle(config: RunConfig, head: Kind) -> list[str]:
    """Names fields of the method, its parts and the head that another of their fields makes idle.

    One that another method of a grid of starts reads is not idle.
    """
    method = method_of(config)
    parts = [part.method for part in method.components()] or [method]
    idle: list[tuple[str, Method | Kind, str, str]] = [
        ("prompt", own, *names)
        for own in parts
        for names in idle_fields(own)
        if not (config.runs.starts and names[-1] == "start")
    ]
    idle += [("head", head, *names) for names in idle_fields(head)]
    shown = lambda value: "empty" if value == "" else value
    return [
        f"{block}.{name}={brief(getattr(own, name))} is not read: {block}.{other} is "
        f"{shown(getattr(own, other))}"
        for block, own, name, other in idle
    ]


def tell_odd(splits: Mapping[str, Sequence[Example]]) -> list[str]:
    """Says how many examples have no text, and where one split is another."""
    is_empty = lambda example: not any(map(str.strip, example.fields.values()))
    counts = {name: sum(map(is_empty, part)) for name, part in splits.items()}
    shown = ", ".join(f"{name} {n} of {len(splits[name])}" for name, n in counts.items() if n)
    pairs = itertools.combinations(splits, 2)
    same = [f"{b} has the same examples as {a}" for a, b in pairs if splits[a] == splits[b]]
    return [f"examples whose texts are empty: {shown}"] * bool(shown) + same


def tell_minus_one(task: Task, examples: Sequence[Example]) -> list[str]:
    """Says that -1 was read as a class, where it may stand for a missing label.

    Beside 1 alone it is the other of two signs.
    """
    if "-1" not in task.labels or {*task.labels} <= {"-1", "1"}:
        return []
    minus_one = task.labels.index("-1")
    count = sum(example.label == minus_one for example in examples)
    return [
        f"{task.label} -1 is read as a class ({count} of {len(examples)} training examples); data "
        "sets of the hub write -1 for a missing label: remove these rows if that is meant"
    ]


def tell_moved(examples: Sequence[Example]) -> list[str]:
    """Says how many questions of train have an answer elsewhere than its place says."""
    count = sum(own.is_moved for own in examples)
    line = (
        f"train: {count} of {len(examples)} questions have an answer that does not stand where its "
        "answer_start says; it is taken from the nearest place in the text"
    )
    return [line] * (count > 0)


def tell_misplaced(split: str, examples: Sequence[Example]) -> list[str]:
    """Says how many questions have an answer that is not where its place says."""
    count = sum(len(own.spans) < len(list(filter(None, own.references))) for own in examples)
    line = (
        f"{split}: {count} of {len(examples)} questions have an answer that does not stand where "
        "its answer_start says; it is compared by its words alone"
    )
    return [line] * (count > 0)
