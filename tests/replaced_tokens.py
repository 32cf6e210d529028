"""The discriminator's input and labels, in plain numpy (Clark et al. 2020, section 2)."""

import numpy as np


def replace_masks(ids, label_pos, targets, sampled):
    """Fills the masks with what the generator sampled. -> ids, whether each differs from before

    Targets of -1 pad.
    """
    is_target = targets >= 0
    rows, _ = np.nonzero(is_target)
    places = rows, label_pos[is_target]
    replaced, labels = ids.copy(), np.zeros(ids.shape, bool)
    replaced[places] = sampled[is_target]
    labels[places] = sampled[is_target] != targets[is_target]
    return replaced, labels
