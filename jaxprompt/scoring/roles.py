"""Semantic roles scored like srl-eval.pl, the script of CoNLL-2005 (Carreras and Màrquez 2005).

An argument is a span with a role of a predicate. The role V, the predicate itself, does not count.
A C-X continues the X before it: an argument of several parts, right only if all of them are. A C-X
with no X before it is an X. R-X, a reference to an X, is a separate role.
"""

from collections.abc import Sequence

from jaxprompt.data.tasks.tags import lenient_entities
from jaxprompt.scoring import ratio

VERB = "V"
_CONTINUATION = "C-"


def find_arguments(tags: Sequence[str]) -> set[tuple[str, tuple[tuple[int, int], ...]]]:
    """Returns the arguments in a predicate's IOB2 tags: role, first and last words of its parts.

    A tag that begins with I- can start a part too, as in conlleval.
    """
    arguments: list[tuple[str, list[tuple[int, int]]]] = []
    latest: dict[str, list[tuple[int, int]]] = {}  # role -> the parts of its last argument
    for kind, start, end in lenient_entities(tags):
        role = kind.removeprefix(_CONTINUATION)
        if role != kind and role in latest:
            latest[role].append((start, end))
        else:
            latest[role] = [(start, end)]
            # Later parts of the argument extend this list.
            arguments.append((role, latest[role]))
    return {(role, tuple(parts)) for role, parts in arguments if role != VERB}


def score_roles(gold: Sequence[Sequence[str]], pred: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns F1, precision and recall of arguments over all predicates, and accuracy of tags.

    gold, pred: the IOB2 tags of each sentence for one predicate. Without arguments scores are 0.
    """
    num_right = num_predicted = num_gold = num_equal = num_words = 0
    for gold_tags, pred_tags in zip(gold, pred, strict=True):
        predicted, expected = find_arguments(pred_tags), find_arguments(gold_tags)
        num_right += len(predicted & expected)
        num_predicted += len(predicted)
        num_gold += len(expected)
        num_equal += sum(a == b for a, b in zip(gold_tags, pred_tags, strict=True))
        num_words += len(gold_tags)

    return {
        "role_f1": ratio(2 * num_right, num_predicted + num_gold),
        "precision": ratio(num_right, num_predicted),
        "recall": ratio(num_right, num_gold),
        "accuracy": ratio(num_equal, num_words),
    }
