"""Semantic roles scored like srl-eval.pl, the script of CoNLL-2005 (Carreras and Màrquez 2005).

An argument is a span with a role of a predicate. The role V, the predicate itself, does not count.
A C-X continues the X before it: an argument of several parts, right only if all of them are. A C-X
with no X before it is an X. R-X, a reference to an X, is a separate role.
"""

from collections.abc import Sequence

from jaxprompt.data.tasks.tags import lenient_entities

VERB = "V"
_GOES_ON = "C-"


def find_arguments(tags: Sequence[str]) -> set[tuple[str, tuple[tuple[int, int], ...]]]:
    """Returns the arguments in a predicate's IOB2 tags: role, first and last words of its parts.

    A tag that begins with I- can start a part too, as in conlleval.
    """
    found: list[tuple[str, list[tuple[int, int]]]] = []
    latest: dict[str, list[tuple[int, int]]] = {}  # role -> the parts of its last argument
    for kind, start, end in lenient_entities(tags):
        role = kind.removeprefix(_GOES_ON)
        if role != kind and role in latest:
            latest[role].append((start, end))
        else:
            latest[role] = [(start, end)]
            # The list itself, which later parts of the argument extend.
            found.append((role, latest[role]))
    return {(role, tuple(parts)) for role, parts in found if role != VERB}


def score_roles(gold: Sequence[Sequence[str]], pred: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns F1, precision and recall of arguments over all predicates, and accuracy of tags.

    gold, pred: the IOB2 tags of each sentence for one predicate. Without arguments scores are 0.
    """
    right = given = known = same = words = 0
    for own, found in zip(gold, pred, strict=True):
        ours, theirs = find_arguments(found), find_arguments(own)
        right, given, known = right + len(ours & theirs), given + len(ours), known + len(theirs)
        same += sum(a == b for a, b in zip(own, found, strict=True))
        words += len(own)
    share = lambda part, whole: part / whole if whole else 0.0
    return {
        "role_f1": share(2 * right, given + known),
        "precision": share(right, given),
        "recall": share(right, known),
        "accuracy": share(same, words),
    }
