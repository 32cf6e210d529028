"""What trains is in memory as often as its step needs it: with a weight AdamW's two moments."""

import contextlib
import gc
import json

import jax
from tiny_run import make_config

from jaxprompt.runs import train as tune
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.one_run import OneRun

SHORT = dict(
    train__total_steps=4, train__eval_steps=2, train__save_steps=2, train__log_steps=1,
    optim__name="adamw", data__batch=8, trainable="backbone/embed/word/table",
)  # fmt: skip


def counter(shape):
    """Makes () -> how many arrays of a shape there are more than now."""

    def count():
        gc.collect()
        return sum(array.shape == shape for array in jax.live_arrays() if not array.is_deleted())

    before = count()
    return lambda: count() - before


def table_of(backbone):
    """Gives the shape of the word table, which nothing else has."""
    config = json.loads((backbone / "config.json").read_text())
    return config["vocab_size"], config["hidden_size"]


def test_a_run_holds_its_state_alone(backbone, data, tmp_path, monkeypatch):
    evaluate, restore, counts = OneRun.evaluate, Checkpoints.restore, []
    count = counter(table_of(backbone))

    def evaluated(self, seconds):
        counts.append(count())
        return evaluate(self, seconds)

    monkeypatch.setattr(OneRun, "evaluate", evaluated)
    c = make_config(backbone, data, "full", **SHORT)
    save = CheckpointWriter.save
    workdir = str(tmp_path / "run")

    def cut(self, step, *rest, **named):
        save(self, step, *rest, **named)
        self.wait_for_saves()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "save", cut)
        with contextlib.suppress(KeyboardInterrupt):  # which lets go of the frames
            tune.train_prompt(c, workdir)
    assert counts and set(counts) == {3}
    # A run that fills its device must be able to go on: it reads into what is free.
    count = counter(table_of(backbone))
    counts_before = []
    monkeypatch.setattr(
        Checkpoints,
        "restore",
        lambda *arguments: counts_before.append(count()) or restore(*arguments),
    )
    counts.clear()
    assert tune.train_prompt(c, workdir).steps == 4
    assert counts_before == [0] and set(counts) == {3}
