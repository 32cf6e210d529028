"""Log lines about a run's config and examples: fields without effect, and suspicious data."""

from collections.abc import Callable, Hashable, Mapping, Sequence

from jaxprompt.build.demonstrations import has_demos
from jaxprompt.build.method import get_head, get_method, prompt_starts
from jaxprompt.config.kinds import Value
from jaxprompt.config.run import DataConfig, RunConfig, TaskConfig
from jaxprompt.data.rows import Rows
from jaxprompt.data.tasks.cells import spelling
from jaxprompt.data.tasks.readers.reading import custom_fields
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import brief
from jaxprompt.heads import Kind
from jaxprompt.prompts import Method, idle_fields


def effective_fields(config: RunConfig) -> dict[str, Value]:
    """Returns the fields of a run by dotted name, without those that it did not read."""
    unread = {"task.name"} if config.shared.tasks else set()
    return {name: value for name, value in config.leaves().items() if name not in unread}


def ineffective_field_notes(config: RunConfig) -> list[str]:
    """Lists the fields of a config that have no effect: of method, head, words and protocol."""
    default, data, head = DataConfig(), config.data, get_head(config)
    lines = _idle_field_notes(config, head)
    if config.task.words and not (head.READS_WORDS or "labels" in prompt_starts(config)):
        lines.append(
            f"task.words={brief(','.join(config.task.words))} has no effect: "
            f"head.name is {config.head.name}; use head.name=verbalizer to score label words"
        )
    if data.test_split != default.test_split and data.files.paths():
        lines.append(
            f"data.test_split={data.test_split} has no effect: data.files names each split"
        )
    if data.seed != default.seed and not data.protocol.name and not has_demos(config):
        lines.append(f"data.seed={data.seed} has no effect: data.protocol is empty")
    return lines


def _idle_field_notes(config: RunConfig, head: Kind) -> list[str]:
    """Lists fields of the method, its parts and the head that another field makes ineffective.

    A field that another method of a grid of starts uses is not listed.
    """
    method = get_method(config)
    parts = [part.method for part in method.components()] or [method]
    idle: list[tuple[str, Method | Kind, str, str]] = [
        ("prompt", owner, *names)
        for owner in parts
        for names in idle_fields(owner)
        if not (config.runs.prompt_starts and names[-1] == "start")
    ]
    idle += [("head", head, *names) for names in idle_fields(head)]
    return [
        f"{block}.{name}={brief(getattr(owner, name))} has no effect: {block}.{other} is "
        f"{'empty' if getattr(owner, other) == '' else getattr(owner, other)}"
        for block, owner, name, other in idle
    ]


def odd_example_notes(
    splits: Mapping[str, Sequence[Example]], origins: Mapping[str, Callable[[int], str]]
) -> list[str]:
    """Returns log lines: which examples have no text, and which repeat another one.

    An example repeats another if the model reads the same; their labels may differ.

    Args:
      splits: the examples of each split.
      origins: for each split, returns where example i was read from.
    """
    empty: list[str] = []
    repeated: list[str] = []
    inputs: dict[str, dict[Hashable, int]] = {}  # of each split -> the first example with them
    for name, examples in splits.items():
        first: dict[Hashable, int] = {}
        keys = [
            (*example.fields.values(), example.choices, example.entities, example.pair)
            if any(map(str.strip, example.fields.values()))
            else None
            for example in examples
        ]
        for i, key in enumerate(keys):
            first.setdefault(key, i)
        counts = [
            (empty, "", [i for i, key in enumerate(keys) if key is None]),
            (repeated, "", [i for i, key in enumerate(keys) if key and first[key] < i]),
        ]
        for other, others in inputs.items():
            both = [i for i, key in enumerate(keys) if key and key in others]
            counts.append((repeated, f" also in {other}", both))
        for lines, remark, indices in counts:
            if indices:
                count = f"{name} {len(indices)} of {len(examples)}{remark}"
                lines.append(f"{count} (the first at {origins[name](indices[0])})")
        inputs[name] = first
    notes = {"examples with empty texts": empty, "repeated examples": repeated}
    return [f"{kind}: {', '.join(lines)}" for kind, lines in notes.items() if lines]


def numbered_label_notes(config: RunConfig, task: Task, rows: Rows) -> list[str]:
    """Warns that the numbers in a file are read as labels of the default task."""
    is_default = task.name == TaskConfig().name and config.data.files.train
    if not is_default or any(spelling(row[task.label]) in task.labels for row in rows):
        return []
    names = ", ".join(f"{i} = {name}" for i, name in enumerate(task.labels))
    return [
        f"{rows.path} is read as task {task.name}: {names}; for other labels set "
        f"{custom_fields(task)}"
    ]


def minus_one_notes(task: Task, examples: Sequence[Example]) -> list[str]:
    """Warns that -1 was read as a class, although it may mean a missing label.

    Where the only other label is 1, -1 is a class.
    """
    if "-1" not in task.labels or {*task.labels} <= {"-1", "1"}:
        return []
    minus_one = task.labels.index("-1")
    count = sum(example.label == minus_one for example in examples)
    return [
        f"{task.label} -1 is read as a class ({count} of {len(examples)} training examples); data "
        "sets of the Hub use -1 for a missing label: remove these examples if they have no label"
    ]


def moved_answer_notes(examples: Sequence[Example]) -> list[str]:
    """Returns a log line: how many training answers are not at their answer_start."""
    count = sum(example.is_moved for example in examples)
    line = (
        f"train: {count} of {len(examples)} questions have an answer that is not at its "
        "answer_start; the nearest occurrence in the text is used"
    )
    return [line] if count else []


def misplaced_answer_notes(split: str, examples: Sequence[Example]) -> list[str]:
    """Returns a log line: how many answers of a split are not at their answer_start."""
    count = sum(
        len(example.spans) < len(list(filter(None, example.references))) for example in examples
    )
    line = (
        f"{split}: {count} of {len(examples)} questions have an answer that is not at its "
        "answer_start; only its words are compared"
    )
    return [line] if count else []
