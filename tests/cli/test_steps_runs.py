"""What a run logs, traces and holds in memory, and steps that are not finite."""

import contextlib
import gc
import json
import re
import struct

import jax
import numpy as np
import pytest
from test_resume import arrays
from tiny_run import flags, make_config, read_lines, succeed, tiny_fields

from jaxprompt.build import task
from jaxprompt.errors import InputError
from jaxprompt.runs import train
from jaxprompt.runs import train as tune
from jaxprompt.runs.train import train_prompt
from jaxprompt.training import loop
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.log import RunLog
from jaxprompt.training.one_run import OneRun
from jaxprompt.training.profiling import operation_kind

STILL = dict(
    backbone__dropout=0, head__dropout=0, prompt__dropout=0, train__eval_steps=3, optim__lr=1e-2,
    data__multiple=8,
)  # fmt: skip


def events(folder) -> dict[tuple[int, str], float]:
    """Reads the scalars of event files, TFRecords of protocol buffers. -> {(step, name): value}"""
    from tensorboardX.proto.event_pb2 import Event

    results = {}
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            for value in event.summary.value:
                results[event.step, value.tag] = value.simple_value
    return results


def test_tensorboard_and_metrics_agree(backbone, data, tmp_path):
    fields = STILL | dict(train__total_steps=5, train__eval_steps=2, train__log_steps=2)
    config = make_config(backbone, data, "prefix", **fields, train__tracker="tensorboard")
    result = train_prompt(config, str(tmp_path)).to_json()
    lines, shown = read_lines(tmp_path / "metrics.jsonl"), events(tmp_path / "tensorboard")
    assert [r["step"] for r in lines if "loss" in r] == [2, 4, 5]
    assert [r["step"] for r in lines if "dev" in r] == [2, 4, 5]
    written = {}
    for record in lines:
        assert list(record["time"]) == ["seconds"]
        for name in ("loss", "grad_norm", "skipped", "streak", "lr"):
            if name in record:
                written[record["step"], name] = record[name]
        for name, value in record.get("dev", {}).items():
            written[record["step"], f"dev/{name}"] = value
    assert {(step, name) for step, name in shown if "time" not in name} == set(written)
    for key, value in written.items():
        assert shown[key] == pytest.approx(value, rel=1e-6, abs=1e-12), key
    best = max((r["dev"]["accuracy"], -r["step"]) for r in lines if "dev" in r)
    assert (result["dev"]["accuracy"], -result["best_step"]) == best
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_a_picture_that_cannot_be_drawn_fails_no_run(backbone, data, tmp_path, monkeypatch, capsys):
    """The same command draws it later, once."""
    pytest.importorskip("matplotlib")

    def full(*_, **__):
        raise InputError("no space left")

    config = make_config(backbone, data, "prefix", train__plot=True, train__total_steps=1)
    picture = tmp_path / "run/curves.png"
    with monkeypatch.context() as patch:
        patch.setattr("jaxprompt.training.pictures.draw_curves", full)
        result = train_prompt(config, str(tmp_path / "run"))
    assert "curves.png was not drawn: no space left" in capsys.readouterr().err
    assert train_prompt(config, str(tmp_path / "run")) == result and picture.exists()
    picture.write_text("mine")
    assert train_prompt(config, str(tmp_path / "run")) == result and picture.read_text() == "mine"


# -- profile -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kind",
    [
        ("dot_add_fusion.12", "dot_add_fusion"),
        ("%fusion.3.clone.1 = f32[8]{0} fusion(%p)", "fusion"),
        ("copy", "copy"),
    ],
)
def test_operations_are_named_by_kind(name, kind):
    assert operation_kind(name) == kind


@pytest.mark.long
def test_a_run_writes_a_trace_and_tells_its_table(backbone, data, tmp_path, capsys, refused):
    fields = tiny_fields(backbone, data) | {"train.total_epochs": 0, "train.total_steps": 6}
    place = ("--config=base:soft", f"--workdir={tmp_path / 'run'}", *flags(fields))
    _, err = succeed(capsys, "train", *place, "--profile=2")
    assert "trace of 2 steps in" in err
    rows = re.findall(r"^  (\S+) +([\d.,]+) +([\d.,]+) +([\d.]+)%$", err, re.M)
    assert 1 < len(rows) <= 10 and not {"while", "call"} & {row[0] for row in rows}
    shares = [float(row[3]) for row in rows]
    assert shares == sorted(shares, reverse=True) and 20 < sum(shares) < 101
    assert list((tmp_path / "run/profile").glob("plugins/profile/*/*.xplane.pb"))
    assert json.loads((tmp_path / "run/config.json").read_text())["train"]["profile"] == 2
    _, err = succeed(
        capsys, "train", *place, "--config.train.total_steps=2", f"--workdir={tmp_path / 'short'}",
        "--profile=2",
    )  # fmt: skip
    assert "no trace: tracing starts after 2 steps, and this run took 2" in err
    assert not (tmp_path / "short/profile").exists()
    # Of a grid there is no one run to trace.
    others = (place[0], f"--workdir={tmp_path / 'others'}", *place[2:])
    line = refused("train", *others, "--profile=2", "--config.runs.lr=(0.1, 0.2)", started=True)
    assert "train.profile=2 traces one run" in line


# -- memory --------------------------------------------------------------------------------------

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


@pytest.mark.long
def test_a_run_holds_its_state_alone(backbone, data, tmp_path, monkeypatch):
    evaluate, restore, counts = OneRun.evaluate, Checkpoints.restore, []
    count = counter(table_of(backbone))

    def evaluated(self, *args):
        counts.append(count())
        return evaluate(self, *args)

    monkeypatch.setattr(OneRun, "evaluate", evaluated)
    config = make_config(backbone, data, "full", **SHORT)
    save = CheckpointWriter.save
    workdir = str(tmp_path / "run")

    def cut(self, step, *rest, **named):
        save(self, step, *rest, **named)
        self.wait_for_saves()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "save", cut)
        with contextlib.suppress(KeyboardInterrupt):  # which lets go of the frames
            tune.train_prompt(config, workdir)
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
    assert tune.train_prompt(config, workdir).steps == 4
    assert counts_before == [0] and set(counts) == {3}


# -- steps that are not finite --------------------------------------------------------------------

PLAIN = {
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
            hand_out, batches_used = type(batches).__next__, []

            class Spoilt(type(batches)):
                def __next__(self):
                    batch = hand_out(self)
                    batches_used.append(batch)
                    nan = np.full_like(batch.weights, np.nan)
                    return batch._replace(weights=nan) if len(batches_used) in steps else batch

            batches.__class__ = Spoilt
            return batches

        monkeypatch.setattr(train, "train_batches", train_batches)

    return call


@pytest.mark.long
def test_a_step_is_skipped_and_counted(spoil, backbone, data, tmp_path):
    config = make_config(
        backbone, data, "prefix", **STILL | {"train.total_steps": 6, "train.log_steps": 1}
    )
    spoil(2, 3, 5)
    result = train_prompt(config, str(tmp_path)).to_json()
    lines = [r for r in read_lines(tmp_path / "metrics.jsonl") if "loss" in r]
    assert [r["skipped"] for r in lines] == [0, 1, 2, 2, 3, 3]
    assert [r["streak"] for r in lines] == [0, 1, 2, 0, 1, 0]
    assert [r["loss"] == "NaN" for r in lines] == [False, True, True, False, True, False]
    assert result["skipped"] == 3 and result["steps"] == 6


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
        train_prompt(make_config(backbone, data, "prefix", **PLAIN | fields), str(tmp_path))
    # Where no step was finite, a lower learning rate would not help.
    assert ("optim.lr" in str(error.value)) == (case != "from the first")
    assert Checkpoints(tmp_path).latest() == 6
    saved, _ = arrays(tmp_path)
    assert (saved["step"], saved["skipped"], saved["streak"]) == (6, *state)
    assert all(np.isfinite(leaf).all() for leaf in saved.values())


def test_the_device_is_read_once_a_log_interval(backbone, data, tmp_path, monkeypatch, capsys):
    fields = {"train.total_steps": 10, "train.log_steps": 4, "train.eval_steps": 6}
    config = make_config(backbone, data, "prefix", **PLAIN | fields | {"train.save_steps": 5})
    reads, losses, progress, device_get = [], [], RunLog.progress, loop.jax.device_get

    def note_step(self, step):
        reads.append(step)
        progress(self, step)

    def note_read(tree):
        # Of the steps alone: evaluation reads scores in its own way.
        values = device_get(tree)
        if "'loss'" in str(loop.jax.tree.structure(tree)):
            reads.append("read")
            losses.append(values[1]["loss"])
        return values

    monkeypatch.setattr(RunLog, "progress", note_step)
    monkeypatch.setattr(loop.jax, "device_get", note_read)
    train_prompt(config, str(tmp_path))
    # It logs at 4, 8 and 10, saves at 5 and 10, evaluates at 6 and 10.
    read = "read"
    assert reads == [1, 2, 3, read, 4, read, 5, read, 6, 7, read, 8, 9, read, 10]
    # The line of an evaluation has the loss of its step.
    devs = [x["dev"]["accuracy"] for x in read_lines(tmp_path / "metrics.jsonl") if "dev" in x]
    marks = ["  best", "  best" if devs[1] > devs[0] else ""]
    err = capsys.readouterr().err
    assert err.replace("\n", "").isprintable()  # no codes of a terminal
    lines = [x for x in err.split("\n") if x.startswith("step ")]
    shown = [(line[:10], line[line.index("  loss") :]) for line in lines]
    assert shown == [
        (f"step {step:2}/10", f"  loss {loss:.4f}  dev accuracy {dev:.4f}{mark}")
        for step, loss, dev, mark in zip((6, 10), losses[2::2], devs, marks, strict=True)
    ]
