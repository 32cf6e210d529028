"""Messages about a run's examples: labels, their counts, and truncated texts."""

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jaxprompt.data.text.encoded import Encoded, count_cut

_SIMILARITY = 0.85  # of labels that may be one, e.g. 0.93 for "postive" and "positive"
_DIGITS = re.compile(r"[\d.,+-]")
MANY = 100  # classes; of more than these some are named


def label_messages(names: Sequence[str], labels: Mapping[str, np.ndarray]) -> list[str]:
    """Returns messages with the label of each index, its count in train, and possible mistakes.

    `labels` are the class indices of each split, -1 = unknown. Possible mistakes are classes
    without an example in dev, names that differ only in case or spaces, which are separate classes,
    and a name that occurs once and resembles a frequent one. With more than MANY classes only the
    most frequent ones are listed.
    """
    counts = {split: Counter(map(int, indices)) for split, indices in labels.items()}
    if len(names) > MANY:
        frequent = [f"{_quoted(names[i])} ({n})" for i, n in counts["train"].most_common(10)]
        return [
            f"labels in train: {len(counts['train'])} of {len(names)} classes, most frequent: "
            f"{', '.join(frequent)}"
        ]
    train = [counts["train"][index] for index in range(len(names))]
    named = list(enumerate(map(_quoted, names)))
    lines = [f"labels in train: {', '.join(f'{i} = {name} ({train[i]})' for i, name in named)}"]
    if "dev" in counts:
        lines += [
            f"class {name} has no examples in dev ({train[i]} in train)"
            for i, name in named
            if train[i] and not counts["dev"][i]
        ]
    return lines + _similar_name_warnings(names, train) + _rare_name_warnings(names, train)


def label_word_messages(names: Sequence[str], words: Sequence[Sequence[str]]) -> list[str]:
    """Returns a message with the words of each class; none if equal to the names or too many."""
    # A task of choices has words, and names its classes by letters.
    pairs = list(zip(names, words, strict=False))
    if len(pairs) > MANY or all((name,) == (*class_words,) for name, class_words in pairs):
        return []
    descriptions = (
        f"{_quoted(name)} = {', '.join(map(repr, class_words))}" for name, class_words in pairs
    )
    return [f"label words: {'; '.join(descriptions)}"]


def truncation_message(max_len: int, splits: Mapping[str, Sequence[Sequence[Encoded]]]) -> str:
    """Returns a message with the number of truncated texts. `splits`: examples, K rows each."""
    counts = [f"{name} {count_cut(rows)} of {len(rows)}" for name, rows in splits.items()]
    return f"texts cut to {max_len} tokens: {', '.join(counts)}"


def length_message(splits: Mapping[str, Sequence[Sequence[Encoded]]]) -> str:
    """Returns a message with the tokens of the examples before truncation, each its longest row."""
    parts = []
    for name, examples in splits.items():
        lengths = [max(len(row.ids) + row.cut for row in example) for example in examples]
        median, most = np.percentile(lengths, (50, 95), method="higher")
        parts.append(f"{name} median {median}, 95% up to {most}, all up to {max(lengths)}")
    return f"tokens of an example: {'; '.join(parts)}"


def unlearned_messages(max_len: int, train: Sequence[Sequence[Encoded]]) -> list[str]:
    """Returns a message with the number of training examples without a token to learn, if any."""
    rows = [row for row, *_ in train]
    count = sum(row.is_unlearned for row in rows)
    if not count:
        return []
    return [
        f"examples with nothing to learn in their first {max_len} tokens: train {count} of "
        f"{len(rows)}; raise data.max_len"
    ]


def unmarked_messages(splits: Mapping[str, tuple[int, int]]) -> list[str]:
    """Returns a message with the number of examples with an unmarked entity, and of all."""
    counts = [f"{name} {count} of {total}" for name, (count, total) in splits.items() if count]
    if not counts:
        return []
    return [f"entities not found as whole words in the text, and not marked: {', '.join(counts)}"]


def _similar_name_warnings(names: Sequence[str], counts: Sequence[int]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, count in zip(names, counts, strict=True):
        groups.setdefault(_spelling(name), []).append(f"{name!r} ({count})")
    return [
        f"warning: labels {' and '.join(group)} differ only in case or spaces and are "
        f"{len(group)} classes; spell them the same if they are one"
        for group in groups.values()
        if len(group) > 1
    ]


def _rare_name_warnings(names: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Warns of each name that occurs once and is nearly another one; numbers may differ."""
    spellings = {_spelling(name): i for i, name in enumerate(names) if counts[i] > 1}
    lines = []
    for name in (name for name, count in zip(names, counts, strict=True) if count == 1):
        spelling = _spelling(name)
        for other in difflib.get_close_matches(spelling, spellings, n=1, cutoff=_SIMILARITY):
            i = spellings[other]
            if spelling != other and _DIGITS.sub("", spelling) != _DIGITS.sub("", other):
                lines.append(
                    f"warning: label {name!r} (1) resembles {names[i]!r} ({counts[i]}); if it is "
                    "misspelt, correct it"
                )
    return lines


def _spelling(name: str) -> str:
    return name.strip().casefold()


def _quoted(name: str) -> str:
    return name if name.isprintable() and name == name.strip() else repr(name)
