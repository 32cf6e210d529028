"""How well hidden states separate classes: a ratio of distances, and projections for plots."""

from typing import NamedTuple

import numpy as np

_DIMS = 50  # dimensions of PCA before t-SNE (van der Maaten and Hinton 2008, section 4)


class Separation(NamedTuple):
    """Mean distances of hidden states."""

    intra: float  # D_intra, within a class, a state and itself included
    inter: float  # D_inter, between two classes

    @property
    def ratio(self) -> float:
        """R_D = D_intra / D_inter; near 0 if classes are separated, NaN if all states are equal."""
        return self.intra / self.inter if self.inter else float("nan")


def class_separation(states: np.ndarray, labels: np.ndarray) -> Separation | None:
    """Computes D_intra and D_inter (Zhang et al. 2022, appendix A.6, eq. 11). [n, H], [n]

    Distances are Euclidean; every class has the same weight, whatever its size. Classes without a
    state are left out; returns None if fewer than two are left.
    """
    from scipy.spatial.distance import cdist

    classes = np.unique(labels)
    if len(classes) < 2:
        return None
    parts = [states[labels == one] for one in classes]
    means = np.array([[cdist(a, b).mean() for b in parts] for a in parts])  # [C, C]
    same_class = np.eye(len(parts), dtype=bool)
    return Separation(float(means[same_class].mean()), float(means[~same_class].mean()))


def pca_project(states: np.ndarray, dims: int) -> np.ndarray:
    """Projects states on their first principal components. [n, H] -> [n, dims]

    The sign of a component is such that its largest weight is positive: equal states give equal
    plots. Missing components are 0.
    """
    centred = states.astype(np.float64) - states.mean(0, dtype=np.float64)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:dims]
    largest = np.abs(axes).argmax(-1)
    axes = axes * np.sign(axes[np.arange(len(axes)), largest])[:, None]
    projected = centred @ axes.T
    return np.pad(projected, [(0, 0), (0, dims - projected.shape[1])])


def tsne_embed(states: np.ndarray, dims: int) -> np.ndarray:
    """Embeds states by t-SNE, deterministically. [n, H] -> [n, dims]; n is at least 4

    If all states are equal, all points are 0.
    """
    if (states == states[0]).all():
        # scikit-learn divides by their deviation, and crashes on NaN.
        return np.zeros((len(states), dims), np.float32)
    from sklearn.manifold import TSNE

    # scikit-learn needs a perplexity below the number of states.
    perplexity = min(30.0, (len(states) - 1) / 3)
    reduced = pca_project(states, min(_DIMS, *states.shape))
    # t-SNE does not depend on the scale, but squares of small numbers underflow in float32.
    reduced = (reduced / np.abs(reduced).max()).astype(np.float32)
    # With scikit-learn's default of at least 50, few points diverge.
    learning_rate = "auto" if dims < 3 else max(len(states) / 120, 1.0)
    tsne = TSNE(
        dims, perplexity=perplexity, learning_rate=learning_rate, init="pca", random_state=0
    )
    return tsne.fit_transform(reduced)


def count_confusion(right: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Counts predictions by right class and by predicted class. [n], [n] -> [C, C + 1]

    The last column counts predictions of no class, -1. Examples without a right class are ignored.
    """
    has_label = right >= 0
    counts = np.zeros((classes, classes + 1), np.int64)
    columns = np.where(predicted[has_label] < 0, classes, predicted[has_label])
    # Unlike +=, this counts repeated pairs.
    np.add.at(counts, (right[has_label], columns), 1)
    return counts
