"""The classes that a template's [classes] lists: in one list, in groups, or along a hierarchy."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxprompt.errors import InputError
from jaxprompt.types import Role


class ListEntry(NamedTuple):
    """One class, or one parent of classes, in a list."""

    ids: tuple[int, ...]  # its subwords
    node: int  # index of a class, or after the classes of a parent
    row: int = -1  # first prompt row that replaces its subwords, -1 = none


class ClassList(NamedTuple):
    """Entries in the order in which they are written."""

    entries: tuple[ListEntry, ...]
    separator: tuple[int, ...] = ()  # tokens between two entries

    @property
    def order(self) -> np.ndarray:
        """Positions of the entries in the order of their nodes, int [entries]."""
        return np.argsort([entry.node for entry in self.entries])

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        words = sum(len(entry.ids) for entry in self.entries)
        return words + len(self.separator) * (len(self.entries) - 1)

    def runs(self) -> Iterator[tuple[tuple[int, ...], Role, int]]:
        """Yields consecutive tokens, their role, and the prompt row of the first, -1 = none.

        The first subword of each entry has the role LABEL, because its class is scored there.
        """
        for i, (ids, _, row) in enumerate(self.entries):
            if i and self.separator:
                yield self.separator, Role.HARD, -1
            yield ids[:1], Role.LABEL, row
            if len(ids) > 1:
                yield ids[1:], Role.HARD, row + 1 if row >= 0 else -1


class ClassTree(NamedTuple):
    """Which classes are listed together. Nodes are numbered: the classes, then the parents."""

    names: tuple[str, ...]  # of each node
    parents: tuple[int, ...]  # of each list, the parent of its members, -1 = the root
    lists: tuple[tuple[int, ...], ...]  # of each list, its nodes in order
    paths: tuple[tuple[int, ...], ...]  # of each class, its nodes from the top down to itself

    @property
    def listed(self) -> frozenset[int]:
        """The nodes that occur in a list; an only child is in none."""
        return frozenset(node for members in self.lists for node in members)

    @property
    def is_flat(self) -> bool:
        """Whether one list holds all classes, each by itself, and not their parents."""
        return len(self.lists) == 1 and self.listed == frozenset(range(len(self.paths)))

    @property
    def depth(self) -> int:
        """The largest number of lists on the path to a class."""
        return max(len(self.lists_of(label)) for label in range(len(self.paths)))

    def lists_of(self, label: int) -> list[int]:
        """Returns the indices of the lists that train a class: of the root and of its parents."""
        path = {-1, *self.paths[label]}
        return [i for i, parent in enumerate(self.parents) if parent in path]


def make_tree(
    labels: Sequence[str], order: Sequence[int], hierarchy: Sequence[str] = (), group: int = 0
) -> ClassTree:
    """Divides classes into lists of up to `group`, 0 = any number.

    Args:
      labels: the class names.
      order: order of the classes in the lists.
      hierarchy: the parents of each class, top first, with "/" between levels; a list then has the
        children of one parent.
      group: maximum size of a list.
    """
    names = list(labels)
    node_by_path: dict[tuple[str, ...], int] = {(): -1}  # nodes of parents, by their path
    children: dict[int, list[int]] = {-1: []}
    paths: list[tuple[int, ...]] = [()] * len(labels)
    for label in order:
        levels = tuple(level.strip() for level in hierarchy[label].split("/")) if hierarchy else ()
        path, parent = [], -1
        for depth in range(1, len(levels) + 1):
            if levels[:depth] not in node_by_path:
                node_by_path[levels[:depth]] = len(names)
                children[parent].append(len(names))
                children[len(names)] = []
                names.append(levels[depth - 1])
            parent = node_by_path[levels[:depth]]
            path.append(parent)
        children[parent].append(label)
        paths[label] = (*path, label)
    parents, lists = [], []
    for parent, members in children.items():
        # With one member there is nothing to predict.
        if len(members) < 2:
            continue
        count = -(-len(members) // (group or len(members)))
        # Lists of nearly equal sizes, not full ones and a short rest.
        for level in np.array_split(np.array(members), count):
            parents.append(parent)
            lists.append(tuple(map(int, level)))
    return ClassTree(tuple(names), tuple(parents), tuple(lists), tuple(paths))


def check_lists(tree: ClassTree, ids: Sequence[Sequence[int]]) -> None:
    """Raises InputError if two nodes of a list have the same tokens, `ids[node]`."""
    for members in tree.lists:
        first_with: dict[tuple[int, ...], int] = {}
        for node in members:
            other = first_with.setdefault(tuple(ids[node]), node)
            if other != node:
                raise InputError(
                    f"head.hierarchy: {tree.names[other]!r} and {tree.names[node]!r} in the same "
                    "list have the same tokens; rename one of them"
                )


def check_hierarchy(labels: Sequence[str], hierarchy: Sequence[str]) -> None:
    """Raises InputError if a hierarchy lacks the parents of a class."""
    if hierarchy and len(hierarchy) != len(labels):
        raise InputError(
            f"head.hierarchy has {len(hierarchy)} entries for {len(labels)} classes; give the "
            f"parents of each, in the order {', '.join(labels[:12])}"
            f"{', ...' if len(labels) > 12 else ''}"
        )
    for label, parents in zip(labels, hierarchy, strict=False):
        if not all(part.strip() for part in parents.split("/")):
            raise InputError(
                f"head.hierarchy: the parents of {label!r} are {parents!r}; give one or more, e.g. "
                "'animal' or 'animal/bird'"
            )
