"""The best tag sequence of a text among those that IOB2 allows."""

from collections.abc import Sequence

import numpy as np

from jaxprompt.data.tasks.tags import split_tag


def best_tags(chances: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Returns the valid tags with the highest sum of log-probabilities. [words, C] -> int [words]

    I-X may only follow B-X or I-X. All other tags may follow any tag, so a step searches for the
    best previous tag once, and among two for each I-X: time is words x C, and the result exact. Of
    equal sums the tag with the lower number wins.
    """
    words, classes = chances.shape
    place = {name: number for number, name in enumerate(names)}
    inside = np.array([n for n, name in enumerate(names) if split_tag(name)[0] == "I"], np.int64)
    # Where the tags have no B-X, I-X follows itself alone.
    begins = np.array([place.get(f"B-{split_tag(names[n])[1]}", n) for n in inside], np.int64)
    first, second = np.minimum(begins, inside), np.maximum(begins, inside)
    sums = chances.astype(np.float64)  # [words, C], of the best legal tags up to each word
    before = np.zeros((words, classes), np.int64)  # the tag before it there
    # No text begins inside of an entity; `:1` also serves a text without words.
    sums[:1, inside] = -np.inf
    for word in range(1, words):
        old = sums[word - 1]
        before[word] = old.argmax()
        before[word, inside] = np.where(old[first] >= old[second], first, second)
        sums[word] += old[before[word]]
    best = np.zeros(words, np.int64)
    for word in range(words - 1, -1, -1):
        best[word] = sums[word].argmax() if word + 1 == words else before[word + 1, best[word + 1]]
    return best
