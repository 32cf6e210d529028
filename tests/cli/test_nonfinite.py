"""Steps that are not finite: skipped and counted, and after several in a row the end of the run."""

import numpy as np
import pytest
from test_resume import arrays
from tiny_run import make_config

from jaxprompt.build import task
from jaxprompt.errors import InputError
from jaxprompt.runs import train
from jaxprompt.runs.train import train_prompt
from jaxprompt.training import loop
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.log import RunLog

STILL = {
    "backbone.dropout": 0, "head.dropout": 0, "prompt.dropout": 0, "train.log_steps": 1,
    "train.total_steps": 6, "train.eval_steps": 2,
}  # fmt: skip


@pytest.fixture
def spoil(monkeypatch):
    """Makes the batches of some steps NaN."""
    original = task.train_batches

    def call(*steps: int):
        def train_batches(*args):
            batches = original(*args)
            hand_out, given = type(batches).__next__, []

            class Spoilt(type(batches)):
                def __next__(self):
                    batch = hand_out(self)
                    given.append(batch)
                    nan = np.full_like(batch.weights, np.nan)
                    return batch._replace(weights=nan) if len(given) in steps else batch

            batches.__class__ = Spoilt
            return batches

        monkeypatch.setattr(train, "train_batches", train_batches)
        monkeypatch.setattr("jaxprompt.runs.grid.train.train_batches", train_batches)

    return call


STREAKS = {  # the steps that are spoilt -> the message, and what is saved: skipped steps, streak
    "over when it is seen": ((2, 3, 4), "3 steps in a row .*, up to step 4", (3, 0)),
    "longer by then": ((1, 3, 4, 5, 6, 7), "4 steps in a row .*, up to step 6", (5, 4)),
    "from the first": ((1, 2, 3, 4, 5, 6, 7), "the first 6 steps had a non-finite", (6, 6)),
}


@pytest.mark.default_cases("over when it is seen")
@pytest.mark.parametrize("case", STREAKS)
def test_a_streak_is_seen_where_the_loss_is_logged(spoil, backbone, data, tmp_path, case):
    spoilt, message, state = STREAKS[case]
    fields = {
        "train.max_nonfinite_steps": 3, "train.total_steps": 12, "train.log_steps": 6,
        "train.eval_steps": 12, "train.save_steps": 12,
    }  # fmt: skip
    spoil(*spoilt)
    with pytest.raises(InputError, match=message) as error:
        train_prompt(make_config(backbone, data, "prefix", **STILL | fields), str(tmp_path))
    # Where no step was finite, a lower learning rate would not help.
    assert ("optim.lr" in str(error.value)) == (case != "from the first")
    assert Checkpoints(tmp_path).latest() == 6
    saved, _ = arrays(tmp_path)
    assert (saved["step"], saved["skipped"], saved["streak"]) == (6, *state)
    assert all(np.isfinite(leaf).all() for leaf in saved.values())


def test_the_device_is_read_once_a_log_interval(backbone, data, tmp_path, monkeypatch):
    own = {"train.total_steps": 10, "train.log_steps": 4, "train.eval_steps": 6}
    c = make_config(backbone, data, "prefix", **STILL | own | {"train.save_steps": 5})
    seen, progress, device_get = [], RunLog.progress, loop.jax.device_get

    def note_step(self, step):
        seen.append(step)
        progress(self, step)

    def note_read(tree):
        # Of the steps alone: evaluation reads scores in its own way.
        seen.extend(["read"] if "'loss'" in str(loop.jax.tree.structure(tree)) else [])
        return device_get(tree)

    monkeypatch.setattr(RunLog, "progress", note_step)
    monkeypatch.setattr(loop.jax, "device_get", note_read)
    train_prompt(c, str(tmp_path))
    # It logs at 4, 8 and 10, saves at 5 and 10, evaluates at 6 and 10.
    read = "read"
    assert seen == [1, 2, 3, read, 4, read, 5, read, 6, 7, read, 8, 9, read, 10]
