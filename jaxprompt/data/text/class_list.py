"""The classes that a template's [classes] lists: in one list, in groups, or along a hierarchy."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxprompt.errors import InputError
from jaxprompt.types import Role


class Entry(NamedTuple):
    """One class, or one parent of classes, in a list."""

    ids: tuple[int, ...]  # its subwords
    number: int  # a class, or behind these a parent
    row: int = -1  # of the method's rows, the first in the place of its subwords; -1 = words


class ClassList(NamedTuple):
    """Entries in the order in which they are written."""

    entries: tuple[Entry, ...]
    between: tuple[int, ...] = ()  # tokens between two of them

    @property
    def order(self) -> np.ndarray:
        """Positions of the entries in the order of their numbers, int [entries]."""
        return np.argsort([entry.number for entry in self.entries])

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        words = sum(len(entry.ids) for entry in self.entries)
        return words + len(self.between) * (len(self.entries) - 1)

    def pieces(self) -> Iterator[tuple[tuple[int, ...], Role, int]]:
        """Yields tokens, their role, and the prompt row that the first of them takes, -1 = none.

        Each entry is read at its first subword, whose role is LABEL.
        """
        for place, (ids, _, row) in enumerate(self.entries):
            if place and self.between:
                yield self.between, Role.HARD, -1
            yield ids[:1], Role.LABEL, row
            if len(ids) > 1:
                yield ids[1:], Role.HARD, row + 1 if row >= 0 else -1


class ClassTree(NamedTuple):
    """Which classes are listed together. Members are numbers: classes, followed by parents."""

    names: tuple[str, ...]  # of the classes, then of the parents
    parents: tuple[int, ...]  # of each list the parent of its members, -1 = the root
    lists: tuple[tuple[int, ...], ...]  # the members of each, in the order of the list
    paths: tuple[tuple[int, ...], ...]  # of each class, from the top down to itself

    @property
    def listed(self) -> frozenset[int]:
        """The numbers that occur in a list; an only child is in none."""
        return frozenset(number for members in self.lists for number in members)

    @property
    def is_flat(self) -> bool:
        """Whether one list holds all classes, each by itself, and not their parents."""
        return len(self.lists) == 1 and self.listed == frozenset(range(len(self.paths)))

    @property
    def depth(self) -> int:
        """The largest number of lists on the path to a class."""
        return max(len(self.on_path(number)) for number in range(len(self.paths)))

    def on_path(self, label: int) -> list[int]:
        """Returns the lists that train a class: those of the root and of its parents."""
        path = {-1, *self.paths[label]}
        return [number for number, parent in enumerate(self.parents) if parent in path]


def make_tree(
    labels: Sequence[str], order: Sequence[int], hierarchy: Sequence[str] = (), group: int = 0
) -> ClassTree:
    """Divides classes into lists of up to `group`, 0 = any number.

    Args:
      labels: the class names.
      order: order of the classes in the lists.
      hierarchy: the parents of each class, top first, with "/" between levels; a list then holds
        the
        children of one parent.
      group: maximum size of a list.
    """
    names = list(labels)
    inner: dict[tuple[str, ...], int] = {(): -1}  # numbers of parents, by their path
    children: dict[int, list[int]] = {-1: []}
    paths: list[tuple[int, ...]] = [()] * len(labels)
    for label in order:
        levels = tuple(part.strip() for part in hierarchy[label].split("/")) if hierarchy else ()
        path, above = [], -1
        for depth in range(1, len(levels) + 1):
            if levels[:depth] not in inner:
                inner[levels[:depth]] = len(names)
                children[above].append(len(names))
                children[len(names)] = []
                names.append(levels[depth - 1])
            above = inner[levels[:depth]]
            path.append(above)
        children[above].append(label)
        paths[label] = (*path, label)
    parents, lists = [], []
    for parent, members in children.items():
        # A list of one leaves nothing to decide.
        if len(members) < 2:
            continue
        count = -(-len(members) // (group or len(members)))
        # Of nearly equal sizes, not full lists and a short rest.
        for part in np.array_split(np.array(members), count):
            parents.append(parent)
            lists.append(tuple(map(int, part)))
    return ClassTree(tuple(names), tuple(parents), tuple(lists), tuple(paths))


def check_lists(tree: ClassTree, ids: Sequence[Sequence[int]]) -> None:
    """Raises InputError if two members of a list have the same tokens; `ids` are by number."""
    for members in tree.lists:
        owner: dict[tuple[int, ...], int] = {}
        for number in members:
            other = owner.setdefault(tuple(ids[number]), number)
            if other != number:
                raise InputError(
                    f"head.hierarchy: {tree.names[other]!r} and {tree.names[number]!r} in the same "
                    "list have the same tokens; rename one of them"
                )


def check_hierarchy(labels: Sequence[str], hierarchy: Sequence[str]) -> None:
    """Raises InputError if a hierarchy does not give the parents of every class."""
    if hierarchy and len(hierarchy) != len(labels):
        raise InputError(
            f"head.hierarchy has {len(hierarchy)} entries for {len(labels)} classes; give the "
            f"parents of each, in the order {', '.join(labels[:12])}"
            f"{', ...' * (len(labels) > 12)}"
        )
    for label, entry in zip(labels, hierarchy, strict=False):
        if not all(part.strip() for part in entry.split("/")):
            raise InputError(
                f"head.hierarchy: the parents of {label!r} are {entry!r}; give one or more, e.g. "
                "'animal' or 'animal/bird'"
            )
