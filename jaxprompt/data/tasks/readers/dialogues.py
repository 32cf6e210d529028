"""Dialogues that are read turn by turn, for the conversational F1 of DialogRE."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxprompt.data.tasks.readers.entities import read_entities
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import InputError

TRIGGERS = "t"  # column of the words that express each relation, "" = none


def read_turns(
    task: Task, row: Mapping[str, Any], example: Example, where: str, pair: int
) -> Iterator[Example]:
    """Yields an example per turn by which both entities of a pair were named, and for the last.

    Each example contains the dialogue up to that turn and knows which relations are expressed by
    then: those whose trigger was said, and at the last turn all (Yu et al. 2020, section 4.2).
    """
    column = task.fields[0]
    turns = row[column]
    relations = example.references or ((task.labels[example.label],) if example.label >= 0 else ())
    triggers = row.get(TRIGGERS)
    if not isinstance(turns, (list, tuple)):
        raise InputError(
            f"{where}: task.metric=f1c reads turn by turn, but column {column!r} is not a list of "
            "turns; give a list, or use task.metric=micro_f1"
        )
    triggers = triggers if isinstance(triggers, (list, tuple)) else [""] * len(relations)
    if len(triggers) != len(relations):
        raise InputError(
            f"{where}: {len(triggers)} triggers in column {TRIGGERS!r} for {len(relations)} "
            'relations; give one per relation, "" for none'
        )
    names = [str(row[name]).lower().strip() for name in task.entities]
    dialogue = ""
    for number, turn in enumerate(turns, 1):
        dialogue += f"\n{str(turn).lower()}"
        last = number == len(turns)
        if not last and not all(_is_mentioned(name, dialogue) for name in names):
            continue
        expressed = tuple(
            name
            for name, trigger in zip(relations, triggers, strict=True)
            if last or _is_mentioned(str(trigger).lower().strip(), dialogue)
        )
        marked = read_entities(task, {**row, column: turns[:number]}, where)
        fields = example.fields | {column: marked.text} | marked.names()
        yield example._replace(fields=fields, entities=marked.spans, expressed=expressed, pair=pair)


def indices_of_last_turns(
    task: Task, examples: Iterable[tuple[str, Mapping[str, Any], Example]]
) -> list[int]:
    """Returns the indices of the examples of `read_turns` that contain a whole dialogue.

    `examples` are the place of each row, the row and its example, in order.
    """
    counts = (len(list(read_turns(task, row, example, at, 0))) for at, row, example in examples)
    return [end - 1 for end in itertools.accumulate(counts)]


def _is_mentioned(text: str, dialogue: str) -> bool:
    """Returns whether a text occurs within one of the turns."""
    return bool(text) and any(text in turn for turn in dialogue.split("\n"))
