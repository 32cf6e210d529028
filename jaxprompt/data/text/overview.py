"""What a run says of its examples at its start: labels, their counts, and texts that are cut."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jaxprompt.data.text.encoded import Encoded, count_cut

MANY = 100  # classes; of more than these some are named


def tell_labels(names: Sequence[str], labels: Mapping[str, np.ndarray]) -> list[str]:
    """Says which index is which label, how often train has it, and what may be a mistake.

    `labels` are the class indices of each split, -1 = unknown. A class without an example in dev is
    told, and so are names that differ in case or spaces only, which are classes of their own. Of
    more than MANY classes the most frequent ones are told.
    """
    counts = {split: Counter(map(int, own)) for split, own in labels.items()}
    if len(names) > MANY:
        first = [f"{_shown(names[i])} ({n})" for i, n in counts["train"].most_common(10)]
        return [
            f"labels in train: {len(counts['train'])} of {len(names)} classes, most frequent: "
            f"{', '.join(first)}"
        ]
    train = [counts["train"][index] for index in range(len(names))]
    named = list(enumerate(map(_shown, names)))
    lines = [f"labels in train: {', '.join(f'{i} = {name} ({train[i]})' for i, name in named)}"]
    if "dev" in counts:
        lines += [
            f"no dev example of {name}, which has {train[i]} in train"
            for i, name in named
            if train[i] and not counts["dev"][i]
        ]
    return lines + _alike(names, train)


def tell_words(names: Sequence[str], words: Sequence[Sequence[str]]) -> list[str]:
    """Says which words stand for which class; nothing where each is its own or there are MANY."""
    # A task of choices has words, and names its classes by letters.
    pairs = list(zip(names, words, strict=False))
    if len(pairs) > MANY or all((name,) == (*own,) for name, own in pairs):
        return []
    shown = (f"{_shown(name)} = {', '.join(map(repr, own))}" for name, own in pairs)
    return [f"label words: {'; '.join(shown)}"]


def tell_cut(max_len: int, splits: Mapping[str, Sequence[Sequence[Encoded]]]) -> str:
    """Says how many texts of each split are cut. `splits`: examples, K rows each."""
    shown = [f"{name} {count_cut(rows)} of {len(rows)}" for name, rows in splits.items()]
    return f"texts cut to {max_len} tokens: {', '.join(shown)}"


def tell_unmarked(splits: Mapping[str, tuple[int, int]]) -> list[str]:
    """Says how many examples have an entity that is not marked. `splits`: these, and all."""
    shown = [f"{name} {count} of {total}" for name, (count, total) in splits.items() if count]
    if not shown:
        return []
    return [
        "examples with an entity that is not a separate word of the text, and is not marked: "
        f"{', '.join(shown)}"
    ]


def _alike(names: Sequence[str], counts: Sequence[int]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, count in zip(names, counts, strict=True):
        groups.setdefault(name.strip().casefold(), []).append(f"{name!r} ({count})")
    return [
        f"warning: labels {' and '.join(group)} differ only in case or spaces and are "
        f"{len(group)} classes; spell them the same if they are one class"
        for group in groups.values()
        if len(group) > 1
    ]


def _shown(name: str) -> str:
    return name if name.isprintable() and name == name.strip() else repr(name)
