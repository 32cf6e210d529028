"""Classes that are the words of a list, each a single token: the objects of facts, as in LAMA.

Petroni et al. 2019 rank the words of a list that the vocabularies of all compared models share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxprompt.data.rows import Rows
from jaxprompt.data.tasks.cells import describe_non_text, is_blank, spelling
from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.tokenizer import Tokenizer, encode_texts
from jaxprompt.errors import InputError, first_line
from jaxprompt.files import read_bytes, user_path


class WordList(NamedTuple):
    """The classes that a word list gives with a tokenizer."""

    labels: tuple[str, ...]  # the first word of each token
    values: tuple[str, ...]  # all words of each, "|" between them; () = one each
    words: int  # in the list
    rejected: int  # of them, because they are not one token

    def message(self) -> str:
        """Returns a log line: how many words are classes."""
        repeated = self.words - self.rejected - len(self.labels)
        return (
            f"task.vocabulary: {len(self.labels)} classes of {self.words} words; {self.rejected} "
            f"are not one token and left out, {repeated} are the token of an earlier word"
        )


def read_words(path: str | Path) -> list[str]:
    """Reads the distinct words of a text file, one per line. Raises InputError if it has none."""
    path = user_path(path, "task.vocabulary")
    advice = "use a text file with one word per line"
    try:
        lines = read_bytes(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"task.vocabulary={path}: {first_line(error)}; {advice}") from error
    words = [*dict.fromkeys(word for line in lines if (word := line.strip()))]
    if not words:
        raise InputError(f"task.vocabulary={path} is empty; {advice}")
    return words


def choose_classes(
    words: Sequence[str], tokenizer: Tokenizer, *, spaced: bool, path: str
) -> WordList:
    """Returns a class for each word that is one token; words with the same token are one class.

    `spaced` encodes words after a space.

    Raises:
      InputError: if fewer than two words are one token.
    """
    words_by_token: dict[int, list[str]] = {}
    rejected = 0
    texts = [f" {word}" if spaced else word for word in words]
    for word, ids in zip(words, encode_texts(tokenizer, texts), strict=True):
        # Raw labels of one class are written with | between them.
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id or "|" in word:
            rejected += 1
        else:
            words_by_token.setdefault(ids[0], []).append(word)
    if len(words_by_token) < 2:
        raise InputError(
            f"task.vocabulary={path}: {len(words_by_token)} of {len(words)} words, e.g. "
            f"{words[0]!r:.40}, are a single token of {tokenizer.name_or_path!r}; a task needs at "
            "least 2: use another list"
        )
    labels = tuple(synonyms[0] for synonyms in words_by_token.values())
    values = tuple("|".join(synonyms) for synonyms in words_by_token.values())
    return WordList(labels, () if values == labels else values, len(words), rejected)


def use_word_list(task: Task, word_list: WordList) -> Task:
    """Uses the words of a list as the classes of a task."""
    return check_task(replace(task, labels=word_list.labels, values=word_list.values))


def drop_unlisted(task: Task, rows: Rows) -> tuple[Rows, str]:
    """Removes the rows whose label is not in the list; returns the others, and "N of M" removed.

    Invalid labels stay, and reading the examples rejects them.

    Raises:
      InputError: if no row is left.
    """
    listed = {*task.labels, *(word for value in task.values for word in value.split("|"))}

    def is_listed(row: Mapping[str, object]) -> bool:
        value = row.get(task.label)
        return describe_non_text(value) != "" or is_blank(value) or spelling(value) in listed

    indices = [number for number, row in enumerate(rows) if is_listed(row)]
    if not indices:
        raise InputError(
            f"{rows.path}: {task.label} is not in task.vocabulary in any of {len(rows)} "
            f"examples, e.g. {spelling(rows[0][task.label])!r:.40}; use a list that contains them "
            "as single tokens, or set task.label to another column"
        )
    return rows.select(indices), f"{len(rows) - len(indices)} of {len(rows)}"
