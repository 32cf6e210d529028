"""Fields of a config reach the batches and the loss of a run."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxprompt.build.task import build_objectives, train_batches
from jaxprompt.config.load import load_config
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.types import Role

CONFIG = load_config("base", [("data.batch", "4"), ("data.multiple", "1")])


def row(length):
    ids, ones = np.arange(length, dtype=np.int32), np.ones(length, np.int32)
    roles = np.full(length, Role.TEXT, np.int8)
    return Encoded(ids, -ones, ones, roles, ids, np.array([0], np.int32))


def test_batches_of_a_group_have_examples_of_like_length():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 33))
    split = SimpleNamespace(rows=[[row(length)] for length in lengths], labels=np.zeros(32, int))
    scorer = SimpleNamespace(layout=Layout(1, 64, 0, multiple=1))

    def count_padding(group: int) -> int:
        stream = train_batches(CONFIG.replace({"data.group": group}), scorer, split)
        batches = [next(stream) for _ in range(8)]
        assert all(len(batch.index) == 4 for batch in batches)
        return sum(int((~batch.encoder.mask).sum()) for batch in batches)

    assert count_padding(8) == 8 * (1 + 2 + 3) < count_padding(1)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_labels_are_smoothed(smoothing):
    config = CONFIG.replace({"optim.label_smoothing": smoothing})
    model = SimpleNamespace(prompt=SimpleNamespace(objectives=list))
    (objective,) = build_objectives(config, model)
    log_probs = np.log(np.array([[0.7, 0.2, 0.1]], np.float32))
    total, count = objective.loss(log_probs, np.array([0]), np.ones(1, np.float32))
    target = (1 - smoothing) * np.eye(3)[0] + smoothing / 3
    assert float(total / count) == pytest.approx(-(target * log_probs[0]).sum(), rel=1e-5)
