"""Fields of a config reach the batches and the loss of a run."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from jaxprompt.build.scorer import placed_layout
from jaxprompt.build.task import build_objectives, train_batches
from jaxprompt.config.load import load_config
from jaxprompt.config.run import RunConfig
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.parallel.sharding import Target, make_placement
from jaxprompt.types import Role

CONFIG = load_config("base", [("data.batch", "4"), ("data.multiple", "1")])


def row(length):
    ids, ones = np.arange(length, dtype=np.int32), np.ones(length, np.int32)
    roles = np.full(length, Role.TEXT, np.int8)
    return Encoded(ids, -ones, ones, roles, ids, np.array([0], np.int32))


def test_batches_of_a_group_have_examples_of_like_length():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 129))
    split = SimpleNamespace(rows=[[row(length)] for length in lengths], labels=np.zeros(128, int))
    scorer = SimpleNamespace(layout=Layout(1, 128, 0, multiple=1))

    def count_padding(config: RunConfig) -> int:
        stream = train_batches(config, scorer, split)
        batches = [next(stream) for _ in range(32)]
        assert all(len(batch.index) == 4 for batch in batches)
        return sum(int((~batch.encoder.mask).sum()) for batch in batches)

    # Of 32 examples in order the longest of 4 is on average 6 above the others, not half of 128.
    random = CONFIG.replace({"data.group": 1})
    assert CONFIG.data.group == 8 and count_padding(CONFIG) < 0.2 * count_padding(random)


@pytest.mark.parametrize(
    "platform, multiple, length",
    [("cpu", 0, 104), ("gpu", 0, 128), ("tpu", 0, 128), ("gpu", 8, 104)],
)
def test_lengths_of_batches_are_few_on_accelerators(platform, multiple, length):
    placement = dataclasses.replace(make_placement(1, 1), compiled_for=Target(platform))
    cpu_layout = Layout(1, 512, 0)
    assert placed_layout(cpu_layout, multiple, placement).length(100) == length


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_labels_are_smoothed(smoothing):
    config = CONFIG.replace({"optim.label_smoothing": smoothing})
    model = SimpleNamespace(prompt=SimpleNamespace(objectives=list))
    (objective,) = build_objectives(config, model)
    log_probs = np.log(np.array([[0.7, 0.2, 0.1]], np.float32))
    total, count = objective.loss(log_probs, np.array([0]), np.ones(1, np.float32))
    target = (1 - smoothing) * np.eye(3)[0] + smoothing / 3
    assert float(total / count) == pytest.approx(-(target * log_probs[0]).sum(), rel=1e-5)
