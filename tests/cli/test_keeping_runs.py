"""Grids that cache the states of frozen layers, once for all runs of the same rows."""

import os
import signal

import numpy as np
import pytest
from test_runs import SAME, losses, results, rows_file
from tiny_run import METHOD_CONFIG, flags, jaxprompt, make_backbone, make_config, tiny_fields

from jaxprompt.cli.results import train_grid
from jaxprompt.runs.grid.batched_runs import BatchedRuns
from jaxprompt.training.features import cache as feature_cache

COMMON = dict(
    backbone__dropout=0, prompt__dropout=0, head__dropout=0, train__total_steps=4,
    train__eval_steps=2, train__log_steps=1, data__multiple=4, optim__name="adafactor",
    runs__size=0,
)  # fmt: skip
UPPER = dict(prompt__layers="2-2")
HOST, DISK = dict(cache__location="host"), dict(cache__location="disk")
MLM = {"head.name": "verbalizer", "task.template": "{text} about [mask] ."}
MLM |= {"runs.words": "('beast,food,tool', 'cat,bread,saw')", "trainable": "backbone/mlm/.*"}
MLM |= {"optim.lr": 1e-3}  # of all of a head: larger ones magnify rounding within four steps
CASES = {  # family, method, fields
    "together": (
        "bert", "prefix", UPPER | dict(runs__seeds="1,2", runs__lr="1e-2,2e-2", runs__size=4),
    ),
    "left": ("gpt2", "prefix", UPPER | dict(runs__lr="1e-2,2e-2", data__padding_side="left")),
    "head": ("bert", "head_only", dict(runs__seeds="1,2", runs__lr="1e-2,2e-2")),
    "words": ("bert", "head_only", MLM),
    "t5_decoder": (
        "t5", "prefix", dict(prompt__length=0, prompt__decoder=2, runs__seeds="1,2", runs__size=2),
    ),
    "apart": (
        "bert", "prefix", UPPER | dict(runs__seeds="1,2", runs__lr="1e-2,2e-2", mesh__data=4),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(dropping, tmp_path_factory):
    made = {x: make_backbone(tmp_path_factory.mktemp(x) / x, x) for x in ("t5", "gpt2")}
    return made | {"bert": dropping}


def grid_of(folder, *args, **fields):
    """Trains a grid. Returns its folder."""
    assert train_grid(make_config(*args, **COMMON | fields), str(folder)) == 0
    return folder


def same_ends(folder, expected, rtol=1e-6):
    """Compares results and losses of all runs of two grids, in float32."""
    mine, others = results(folder), results(expected)
    assert mine.keys() == others.keys() and mine
    for name in mine:
        assert {n: mine[name][n] for n in SAME} == {n: others[name][n] for n in SAME}
        np.testing.assert_allclose(losses(folder / name), losses(expected / name), rtol=rtol)


def count_cached_splits(err):
    """Returns the number of splits in the line about cached states."""
    (line,) = [line for line in err.splitlines() if line.startswith("cached ")]
    return int(line.partition(" of ")[2].split(" splits")[0].rpartition(" ")[2])


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_grid_that_keeps_is_the_same_grid(case, folders, data, tmp_path, capsys, monkeypatch):
    family, method, fields = CASES[case]
    args = (folders[family], data, method)
    expected = grid_of(tmp_path / "off", *args, **fields)
    capsys.readouterr()
    computed, compute = [], feature_cache._compute
    monkeypatch.setattr(
        feature_cache, "_compute", lambda *a: computed.append(a[2].name) or compute(*a)
    )
    folder = grid_of(tmp_path / "on", *args, **fields | HOST)
    assert count_cached_splits(capsys.readouterr().err) == 3
    assert sorted(computed) == ["dev", "test", "train"], "once for all runs"
    same_ends(folder, expected)


# -- runs of other rows ---------------------------------------------------------------------------

SEEDS = dict(data__protocol="listed", runs__lr="1e-2,2e-2", runs__size=4, data__eval_batch=2)


@pytest.mark.long
def test_other_rows_are_kept_by_themselves(folders, data, tmp_path, capsys):
    """Two data seeds of unlike dev splits, all runs at once: batches of other lengths."""
    rows = rows_file(tmp_path, [(30, 7), (32, 3)])
    fields = SEEDS | UPPER | dict(data__protocol__rows=rows, runs__data_seeds="0,1")
    args = (folders["bert"], data, "prefix")
    expected = grid_of(tmp_path / "off", *args, **fields)
    capsys.readouterr()
    folder = grid_of(tmp_path / "host", *args, **fields | HOST)
    err = capsys.readouterr().err
    # Both have one test split.
    assert count_cached_splits(err) == 5 and "4 runs at once" in err
    same_ends(folder, expected)


@pytest.mark.long
def test_each_split_has_a_folder_and_all_serve_a_restart(
    folders, data, tmp_path, capsys, monkeypatch
):
    fields = SEEDS | UPPER | dict(runs__data_seeds="0,1", runs__lr="1e-2")
    fields |= dict(data__protocol__rows=rows_file(tmp_path, [(16, 6), (16, 6)]), runs__size=2)
    args, stop_signal = (folders["bert"], data, "prefix"), BatchedRuns.stop_signal
    whole = grid_of(tmp_path / "whole", *args, **fields)

    def signal_once(self):
        if self.step == 3 and not hasattr(self, "asked"):
            self.asked = os.kill(os.getpid(), signal.SIGTERM)
        return stop_signal(self)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(BatchedRuns, "stop_signal", signal_once)
        folder = grid_of(tmp_path / "grid", *args, **fields | DISK)
    err = capsys.readouterr().err
    assert "stopped by SIGTERM" in err and not results(folder) and "earlier" not in err
    kept = sorted(path.relative_to(folder / "kept") for path in folder.glob("kept/*/*.states"))
    # Rows 0 to 15 are the train split of both, with rows 40 to 45 as dev, and both have one test.
    assert sorted(path.name for path in kept) == ["dev.states", "test.states", "train.states"]
    times = [(folder / "kept" / path).stat().st_mtime_ns for path in kept]
    grid_of(folder, *args, **fields | DISK)
    err = capsys.readouterr().err
    assert "resumed at step" in err and "(reused from an earlier run: 3 splits)" in err
    assert times == [(folder / "kept" / path).stat().st_mtime_ns for path in kept]
    same_ends(folder, whole)
    assert not (folder / "kept" / "train.states").exists()


def test_the_limit_counts_all_that_is_kept_at_once(folders, data, refused, tmp_path):
    """What one data seed takes would be allowed."""
    rows = rows_file(tmp_path, [(30, 7), (32, 3)])
    fields = COMMON | SEEDS | UPPER | HOST | dict(data__protocol__rows=rows, runs__data_seeds="0,1")

    def line(**changes):
        path = tmp_path / "c.json"
        c = make_config(folders["bert"], data, "prefix", **fields | changes)
        path.write_text(c.to_json())
        return refused("train", f"--config={path}", f"--workdir={tmp_path / 'grid'}")

    message = line(cache__limit=1e-9)
    assert message.startswith("caching what layers 1-1 give for every token of 5 splits takes ")
    assert message.endswith(
        "cache.limit=1e-09; raise the limit, set cache.dtype=bfloat16, or set cache.location=''"
    )
    room = float(message.split(" takes ")[1].split()[0])
    assert "of 5 splits" in line(cache__limit=0.9 * room)
    assert not list((tmp_path / "grid").glob("*/metrics.jsonl"))
    alone = dict(runs__data_seeds="0", cache__limit=0.9 * room, train__total_steps=1)
    c = make_config(folders["bert"], data, "prefix", **fields | alone)
    assert train_grid(c, str(tmp_path / "one")) == 0


def test_a_grid_that_can_keep_nothing_says_why(folders, data, refused, tmp_path):
    fields = COMMON | HOST | dict(runs__lr="1e-2,2e-2")
    path = tmp_path / "c.json"
    path.write_text(make_config(folders["bert"], data, "soft", **fields).to_json())
    line = refused("train", f"--config={path}", f"--workdir={tmp_path / 'grid'}")
    assert "the prompt is in the input or in layer 1" in line
    assert not list((tmp_path / "grid").glob("*/metrics.jsonl"))


SWEEP = """
def sweep():
    for method in ("prefix", "head_only"):
        for lr in (0.01, 0.02):
            layers = {"prompt.layers": "2-2"} if method == "prefix" else {}
            yield {"config": method, "optim.lr": lr} | layers
"""


@pytest.mark.long
def test_a_sweep_keeps_what_each_program_can(folders, data, tmp_path, capsys):
    """Prefixes and heads alone: of the same rows, and yet other states."""
    file = tmp_path / "grid.py"
    file.write_text(METHOD_CONFIG + SWEEP)
    fields = tiny_fields(folders["bert"], data) | {
        "train.total_steps": 4, "train.eval_steps": 2, "train.log_steps": 1, "data.multiple": 4,
        "head.dropout": 0, "backbone.dropout": 0,
    }  # fmt: skip
    del fields["prompt.length"]
    for name, cache in (("off", {}), ("on", {"cache.location": "disk"})):
        words = (f"--config={file}", f"--workdir={tmp_path / name}", "--run")
        code, _, err = jaxprompt(capsys, "sweep", *words, *flags(fields | cache))
        assert code == 0, err
    cached = [line.partition(":")[0] for line in err.splitlines() if line.startswith("cached ")]
    assert cached == [
        "cached what layers 1-1 give for every token of 3 splits",
        "cached the backbone's output at the positions that the head reads of 3 splits",
    ]
    assert len(list((tmp_path / "on").glob("kept/*/train.states"))) == 2
    assert err.count("2 runs at once") == 2 and len(results(tmp_path / "on")) == 4
    same_ends(tmp_path / "on", tmp_path / "off")
