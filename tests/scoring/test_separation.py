"""Distances of classes by the sums of the paper, and projections that keep what they claim to."""

import math

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from jaxprompt.scoring.separation import class_separation, count_confusion, pca_project, tsne_embed


def clouds(seed=0, sizes=(5, 9, 2), width=7, apart=0.0):
    rng = np.random.default_rng(seed)
    states = [rng.normal(size=(n, width)) + apart * i for i, n in enumerate(sizes)]
    return np.concatenate(states).astype(np.float32), np.repeat(range(len(sizes)), sizes)


def by_the_sums(states, labels):
    """Equation 11 in plain Python."""
    classes = sorted(set(labels.tolist()))
    by_class = {
        c: [s.tolist() for s, label in zip(states, labels, strict=True) if label == c]
        for c in classes
    }
    intra = sum(
        sum(math.dist(x, y) for x in by_class[c] for y in by_class[c]) / len(by_class[c]) ** 2
        for c in classes
    ) / len(classes)
    inter = sum(
        sum(math.dist(x, y) for x in by_class[a] for y in by_class[b])
        / (len(by_class[a]) * len(by_class[b]))
        for a in classes
        for b in classes
        if a != b
    ) / (len(classes) * (len(classes) - 1))
    return intra, inter, intra / inter


@pytest.mark.parametrize("apart", [0.0, 3.0])
def test_the_ratio_is_the_papers(apart):
    states, labels = clouds(apart=apart)
    actual = class_separation(states, labels)
    np.testing.assert_allclose((*actual, actual.ratio), by_the_sums(states, labels), rtol=1e-6)


def test_equal_states_of_a_class_have_no_distance_and_one_class_no_ratio():
    states = np.repeat(np.eye(2, 5, dtype=np.float32) * 1e3, 4, axis=0)
    labels = np.repeat([0, 3], 4)  # the classes between have no state
    assert class_separation(states, labels).ratio == 0
    assert class_separation(states, 0 * labels) is None
    assert math.isnan(class_separation(0 * states, labels).ratio)


def test_pca_gives_the_directions_of_most_variance():
    states, _ = clouds(sizes=(40,))
    states = states * np.array([9, 1, 5, 1, 1, 1, 1], np.float32)
    actual = pca_project(states, 2)
    values = np.linalg.eigvalsh(np.cov(states.T.astype(np.float64)))[::-1]
    np.testing.assert_allclose(actual.var(0, ddof=1), values[:2], rtol=1e-6)
    np.testing.assert_allclose(pdist(pca_project(states, 7)), pdist(states), rtol=1e-5)
    np.testing.assert_array_equal(pca_project(states, 2), actual)
    assert np.abs(pca_project(states[:2], 3)[:, 1:]).max() < 1e-5  # two states lie on a line


@pytest.mark.parametrize("dims", [2, 3])
def test_tsne_keeps_clouds_together_and_is_the_same_again(dims):
    states, labels = clouds(sizes=(12, 12), apart=8.0)
    points = tsne_embed(states, dims)
    assert points.shape == (24, dims) and class_separation(points, labels).ratio < 0.5
    np.testing.assert_array_equal(tsne_embed(states, dims), points)
    assert tsne_embed(states[:4], dims).shape == (4, dims)


@pytest.mark.parametrize("dims", [2, 3])
def test_tsne_of_equal_states_is_one_point(dims):
    """scikit-learn's own native code ends the process there."""
    equal = np.repeat(np.float32([[0.1, -3.7, 1e4]]), 6, axis=0)
    np.testing.assert_array_equal(tsne_embed(equal, dims), np.zeros((6, dims)))


def test_tsne_is_the_same_at_any_scale():
    states, _ = clouds(sizes=(12, 12), apart=8.0)
    points = tsne_embed(states, 2)
    assert (
        class_separation(tsne_embed(states * np.float32(1e-30), 2), np.repeat([0, 1], 12)).ratio
        < 0.5
    )
    np.testing.assert_allclose(tsne_embed(states * np.float32(2.0**-40), 2), points, rtol=1e-4)


def test_confusion_counts_every_known_example_once():
    right, said = np.array([0, 0, 1, 2, -1, 1]), np.array([0, 1, 1, -1, 0, 1])
    assert count_confusion(right, said, 3).tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 1]]
