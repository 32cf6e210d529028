"""From scores of classes to decisions, on the host."""

import numpy as np


def decide(scores: np.ndarray, classes: int) -> np.ndarray:
    """Returns each row's best class; -1 if a subword outside the label words is better. -> [B]"""
    best = scores[:, :classes].argmax(-1)
    if scores.shape[1] > classes:
        best = np.where(scores[:, classes] > scores[:, :classes].max(-1), -1, best)
    return best


def probabilities(scores: np.ndarray, classes: int) -> np.ndarray:
    """Returns the probabilities of the classes from scores. [B, C or C + 1] -> [B, C]"""
    # The maximum is subtracted because exponentials would overflow.
    scores = scores[:, :classes] - scores[:, :classes].max(-1, keepdims=True)
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)


def drop_absent(scores: np.ndarray, counts: np.ndarray, classes: int) -> np.ndarray:
    """Masks the classes that an example does not have. [B, C or C + 1], [B] -> the same"""
    column = np.arange(scores.shape[1])
    # The column after the classes means no class, which every example has.
    return np.where((column >= counts[:, None]) & (column < classes), -np.inf, scores)
