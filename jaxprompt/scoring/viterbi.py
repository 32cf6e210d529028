"""The best tag sequence of a text among those that IOB2 allows."""

from collections.abc import Sequence

import numpy as np

from jaxprompt.data.tasks.tags import split_tag


def best_tags(logp: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Returns the valid tags with the highest sum of log-probabilities. [words, C] -> int [words]

    I-X may only follow B-X or I-X. All other tags may follow any tag, so a step searches for the
    best previous tag once, and among two for each I-X: time is words x C, and the result exact. Of
    equal sums the tag with the lower number wins.
    """
    words, classes = logp.shape
    index = {name: number for number, name in enumerate(names)}
    inside = np.array([n for n, name in enumerate(names) if split_tag(name)[0] == "I"], np.int64)
    # Without a tag B-X, I-X may only follow itself.
    begin_tags = np.array([index.get(f"B-{split_tag(names[n])[1]}", n) for n in inside], np.int64)
    first, second = np.minimum(begin_tags, inside), np.maximum(begin_tags, inside)
    sums = logp.astype(np.float64)  # [words, C], of the best valid tags up to each word
    previous_tags = np.zeros((words, classes), np.int64)  # the tag before it there
    # A text cannot begin inside an entity; `:1` also works for a text without words.
    sums[:1, inside] = -np.inf
    for word in range(1, words):
        previous_sums = sums[word - 1]
        previous_tags[word] = previous_sums.argmax()
        previous_tags[word, inside] = np.where(
            previous_sums[first] >= previous_sums[second], first, second
        )
        sums[word] += previous_sums[previous_tags[word]]
    best = np.zeros(words, np.int64)
    for word in range(words - 1, -1, -1):
        best[word] = (
            sums[word].argmax() if word + 1 == words else previous_tags[word + 1, best[word + 1]]
        )
    return best
