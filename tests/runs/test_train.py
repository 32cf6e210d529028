"""How the runs of a grid are scored."""

from types import SimpleNamespace

import numpy as np
from tiny import make_batch

from jaxprompt.runs.train import SplitScorer


class Scorer(SimpleNamespace):
    """A scorer whose threshold is the one that its head was given; it measures one number."""

    threshold = 0.0

    def fitted(self, dev):
        return Scorer(**vars(self) | dev)

    def measure(self, part, scores):
        return {"above": int((scores[:, 0] > self.threshold).sum())}


def test_each_run_is_scored_with_the_threshold_that_it_chose_on_dev():
    """Two runs, 3 and 1 of whose 4 scores are above 0.25 and 0.75; of 0.5 they would be 2 and 3."""
    batch = make_batch(rows=4)
    part = SimpleNamespace(rows=[None] * 4, average=lambda scores: scores)
    scorer = Scorer(
        head=SimpleNamespace(WRITES=False, check_outputs=lambda outputs: None),
        task=SimpleNamespace(metric="above"), layout=SimpleNamespace(pad_id=0, side="right"),
        one_batch=lambda rows: None, generates=False,
    )  # fmt: skip
    cache = SimpleNamespace(batches=lambda split: [batch])
    members = [SimpleNamespace(scorer=scorer, eval_data={"test": part}, cache=cache)] * 2
    values = np.array([[0.1, 0.3, 0.6, 0.9], [0.2, 0.6, 0.7, 0.8]])[..., None]  # [R, B, C]
    programs = SimpleNamespace(
        fold=lambda example, trainable, per_run, runs: ({}, trainable),
        shared_prefix=lambda *arguments: None, scores=lambda *arguments, **how: values,
    )  # fmt: skip
    score = SplitScorer(None, members, programs).score
    devs = [{"threshold": 0.25}, {"threshold": 0.75}]
    assert score("test", [0, 1], {}, None, devs) == [{"above": 3}, {"above": 1}]
    assert score("test", [0, 1], {}, None, devs[::-1]) == [{"above": 1}, {"above": 3}]
    assert score("test", [0, 1], {}, None) == [{"above": 4}, {"above": 4}]
