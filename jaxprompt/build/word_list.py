"""Classes that are the words of a list, each one token: the objects of facts, as LAMA asks them.

Petroni et al. 2019 rank the words of a list that the vocabularies of all compared models share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxprompt.data.rows import Rows
from jaxprompt.data.tasks.cells import is_blank, spelling, unreadable
from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.tokenizer import Tokenizer, encode_texts
from jaxprompt.errors import InputError
from jaxprompt.files import user_path


class WordList(NamedTuple):
    """The classes that a list of words makes for a tokenizer."""

    labels: tuple[str, ...]  # the first word of each token
    values: tuple[str, ...]  # all words of each, "|" between them; () = one each
    words: int  # of the list
    several: int  # of them that are not one token

    def tell(self) -> str:
        """Says how many words are classes."""
        same = self.words - self.several - len(self.labels)
        return (
            f"task.vocabulary: {len(self.labels)} classes of {self.words} words; {self.several} "
            f"are not one token and left out, {same} are the token of an earlier word"
        )


def read_words(path: str | Path) -> list[str]:
    """Reads the words of a text file, one per line, each once. Raises InputError without any."""
    path = user_path(path, "task.vocabulary")
    cure = "give a text file of one word per line"
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"task.vocabulary={path}: {error.strerror}; {cure}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"task.vocabulary={path} is not UTF-8; {cure}") from error
    words = [*dict.fromkeys(word for line in lines if (word := line.strip()))]
    if not words:
        raise InputError(f"task.vocabulary={path} holds no word; {cure}")
    return words


def choose_classes(
    words: Sequence[str], tokenizer: Tokenizer, *, spaced: bool, path: str
) -> WordList:
    """Makes a class of each word that is one token; words of the same token are one class.

    `spaced` encodes them behind a space. Raises InputError where fewer than two are one token.
    """
    found: dict[int, list[str]] = {}
    several = 0
    encoded = encode_texts(tokenizer, [" " * spaced + word for word in words])
    for word, ids in zip(words, encoded, strict=True):
        # Raw labels of one class are written with | between them.
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id or "|" in word:
            several += 1
        else:
            found.setdefault(ids[0], []).append(word)
    if len(found) < 2:
        raise InputError(
            f"task.vocabulary={path}: {len(found)} of {len(words)} words, as {words[0]!r:.40}, are "
            f"one token of {tokenizer.name_or_path!r}; a task needs 2 or more: give another list"
        )
    labels = tuple(own[0] for own in found.values())
    values = tuple("|".join(own) for own in found.values())
    return WordList(labels, () if values == labels else values, len(words), several)


def with_words(task: Task, known: WordList) -> Task:
    """Takes the words of a list for the classes of a task."""
    return check_task(replace(task, labels=known.labels, values=known.values))


def keep_known(task: Task, rows: Rows) -> tuple[Rows, str]:
    """Leaves out the rows whose label is no word of the list. -> the others, and how many of all

    What is no label at all stays, for the reading of examples to refuse. Raises InputError where
    no row is left.
    """
    known = {*task.labels, *(word for value in task.values for word in value.split("|"))}

    def is_known(row: Mapping[str, object]) -> bool:
        value = row.get(task.label)
        return unreadable(value) != "" or is_blank(value) or spelling(value) in known

    kept = [number for number, row in enumerate(rows) if is_known(row)]
    if not kept:
        raise InputError(
            f"{rows.path}: {task.label} is no word of task.vocabulary in any of {len(rows)} "
            f"examples, as {spelling(rows[0][task.label])!r:.40}; give a list that holds them as "
            "one token each, or name another column by task.label"
        )
    return rows.take(kept), f"{len(rows) - len(kept)} of {len(rows)}"
