"""Replaced tokens: what the generator is asked, and the labels of what it draws."""

import numpy as np

from jaxprompt.corpus.denoise.rtd import make, replace_masks
from jaxprompt.corpus.denoise.samples import sample_rng


def test_every_chosen_token_becomes_the_mask(bert):
    objective = make(bert, 128, rate=0.25)
    ids = np.random.RandomState(0).randint(2000, 29000, 126)
    sample = objective([ids], sample_rng(0, 0))
    assert len(sample.label_pos) == objective.max_targets == round(126 * 0.25)
    assert (sample.encoder.ids[sample.label_pos] == bert.mask_token_id).all()
    np.testing.assert_array_equal(sample.targets, ids[sample.label_pos - 1])


def test_labels_equal_a_loop_over_a_padded_batch():
    draw = np.random.RandomState(0)
    original = draw.randint(10, 14, (6, 20))
    label_pos, targets = np.zeros((6, 5), int), np.full((6, 5), -1)
    masked = original.copy()
    for row in range(6):
        at = np.sort(draw.permutation(20)[:row])  # 0 to 5 predictions; the rest pads
        label_pos[row, :row], targets[row, :row] = at, original[row, at]
        masked[row, at] = 3
    sampled = draw.randint(10, 14, (6, 5))
    shown, labels = replace_masks(masked, label_pos, targets, sampled)
    expected = original.copy()
    for row in range(6):
        for column in range(row):
            expected[row, label_pos[row, column]] = sampled[row, column]
    np.testing.assert_array_equal(shown, expected)
    np.testing.assert_array_equal(labels, expected != original)
    assert labels.any() and not labels.all()
