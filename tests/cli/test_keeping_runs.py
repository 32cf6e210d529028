"""Grids that keep what frozen layers give, once for all runs of the same rows: the same numbers."""

import os
import signal

import numpy as np
import pytest
from test_runs import SAME, losses, results, rows_file
from tiny_run import METHOD_CONFIG, flags, jaxprompt, make_backbone, make_config, timeless

from jaxprompt.cli.grid import train_grid
from jaxprompt.runs.grid.batched_runs import BatchedRuns
from jaxprompt.runs.grid.expand import list_runs
from jaxprompt.runs.train import train_prompt
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
    "seeds_and_rates": ("bert", "prefix", UPPER | dict(runs__seeds="1,2", runs__lr="1e-2,2e-2")),
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
    "divided": ("bert", "prefix", UPPER | dict(runs__lr="1e-2,2e-2,3e-2", mesh__data=4)),
    "apart_rates": ("bert", "prefix", UPPER | dict(runs__lr="1e-2,2e-2", mesh__data=2)),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(dropping, tmp_path_factory):
    made = {x: make_backbone(tmp_path_factory.mktemp(x) / x, x) for x in ("t5", "gpt2")}
    return made | {"bert": dropping}


def grid_of(folder, *args, **fields):
    """Trains a grid. -> its folder"""
    assert train_grid(make_config(*args, **COMMON | fields), str(folder)) == 0
    return folder


def same_ends(found, expected, rtol=1e-6):
    """Compares results and losses of all runs of two grids, in float32."""
    own, right = results(found), results(expected)
    assert own.keys() == right.keys() and own
    for name in own:
        assert {n: own[name][n] for n in SAME} == {n: right[name][n] for n in SAME}
        np.testing.assert_allclose(losses(found / name), losses(expected / name), rtol=rtol)


def told(err):
    """Finds the line of what is kept. -> of how many splits"""
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
    found = grid_of(tmp_path / "on", *args, **fields | HOST)
    assert told(capsys.readouterr().err) == 3
    assert sorted(computed) == ["dev", "test", "train"], "once for all runs"
    same_ends(found, expected)


@pytest.mark.long
def test_runs_are_those_of_single_runs_that_keep(folders, data, tmp_path):
    fields = COMMON | UPPER | HOST | dict(runs__seeds="1,2", runs__lr="1e-2,2e-2", runs__size=4)
    c = make_config(folders["bert"], data, "prefix", **fields)
    assert train_grid(c, str(tmp_path / "grid")) == 0
    for own in list_runs(c, str(tmp_path / "alone")):
        expected = train_prompt(own.config, str(own.folder)).to_json()
        found = results(tmp_path / "grid")[own.name]
        assert {n: found[n] for n in SAME} == {n: expected[n] for n in SAME}
        np.testing.assert_allclose(
            losses(tmp_path / "grid" / own.name), losses(own.folder), rtol=1e-6
        )


# -- runs of other rows ---------------------------------------------------------------------------

SEEDS = dict(data__protocol="listed", runs__lr="1e-2,2e-2", runs__size=4, data__eval_batch=2)


@pytest.mark.long
def test_other_rows_are_kept_by_themselves(folders, data, tmp_path, capsys):
    """Two data seeds of unlike dev splits, all runs at once: batches of other lengths."""
    rows = rows_file(tmp_path, [(30, 7), (32, 3)])
    own = SEEDS | UPPER | dict(data__protocol__rows=rows, runs__data_seeds="0,1")
    args = (folders["bert"], data, "prefix")
    expected = grid_of(tmp_path / "off", *args, **own)
    capsys.readouterr()
    found = grid_of(tmp_path / "host", *args, **own | HOST)
    err = capsys.readouterr().err
    # Both have one test split.
    assert told(err) == 5 and "4 runs at once" in err
    same_ends(found, expected)
    # Of the positions that are read alone.
    expected = grid_of(tmp_path / "head_off", folders["bert"], data, "head_only", **SEEDS | dict(
        data__protocol__rows=rows, runs__data_seeds="0,1"))  # fmt: skip
    found = grid_of(tmp_path / "head", folders["bert"], data, "head_only", **SEEDS | HOST | dict(
        data__protocol__rows=rows, runs__data_seeds="0,1"))  # fmt: skip
    assert "sequences x 1 tokens" in capsys.readouterr().err
    same_ends(found, expected)


def test_each_split_has_a_folder_and_all_serve_a_restart(
    folders, data, tmp_path, capsys, monkeypatch
):
    own = SEEDS | UPPER | dict(runs__data_seeds="0,1", runs__lr="1e-2")
    own |= dict(data__protocol__rows=rows_file(tmp_path, [(16, 6), (16, 6)]), runs__size=2)
    args, stop_signal = (folders["bert"], data, "prefix"), BatchedRuns.stop_signal
    whole = grid_of(tmp_path / "whole", *args, **own)

    def signal_once(self):
        if self.step == 3 and not hasattr(self, "asked"):
            self.asked = os.kill(os.getpid(), signal.SIGTERM)
        return stop_signal(self)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(BatchedRuns, "stop_signal", signal_once)
        folder = grid_of(tmp_path / "grid", *args, **own | DISK)
    err = capsys.readouterr().err
    assert "stopped by SIGTERM" in err and not results(folder) and "earlier" not in err
    kept = sorted(path.relative_to(folder / "kept") for path in folder.glob("kept/*/*.states"))
    # Rows 0 to 15 are the train split of both, with rows 40 to 45 as dev, and both have one test.
    assert sorted(path.name for path in kept) == ["dev.states", "test.states", "train.states"]
    times = [(folder / "kept" / path).stat().st_mtime_ns for path in kept]
    grid_of(folder, *args, **own | DISK)
    err = capsys.readouterr().err
    assert "resumed at step" in err and "(reused from an earlier run: 3 splits)" in err
    assert times == [(folder / "kept" / path).stat().st_mtime_ns for path in kept]
    same_ends(folder, whole)
    assert not (folder / "kept" / "train.states").exists()


def test_the_limit_counts_all_that_is_kept_at_once(folders, data, refused, tmp_path):
    """What one data seed takes would be allowed."""
    rows = rows_file(tmp_path, [(30, 7), (32, 3)])
    own = COMMON | SEEDS | UPPER | HOST | dict(data__protocol__rows=rows, runs__data_seeds="0,1")

    def line(**changes):
        path = tmp_path / "c.json"
        c = make_config(folders["bert"], data, "prefix", **own | changes)
        path.write_text(c.to_json())
        return refused("train", f"--config={path}", f"--workdir={tmp_path / 'grid'}")

    said = line(cache__limit=1e-9)
    assert said.startswith("caching what layers 1-1 give for every token of 5 splits takes ")
    assert said.endswith(
        "cache.limit=1e-09; raise the limit, set cache.dtype=bfloat16, or set cache.location=''"
    )
    room = float(said.split(" takes ")[1].split()[0])
    assert "of 5 splits" in line(cache__limit=0.9 * room)
    assert not list((tmp_path / "grid").glob("*/metrics.jsonl"))
    alone = dict(runs__data_seeds="0", cache__limit=0.9 * room, train__total_steps=1)
    c = make_config(folders["bert"], data, "prefix", **own | alone)
    assert train_grid(c, str(tmp_path / "one")) == 0


@pytest.mark.parametrize(
    "method, changes, said",
    [
        ("soft", {}, "the prompt is in the input or in layer 1"),
        ("prefix", UPPER | dict(backbone__dropout=0.1), "the backbone has dropout"),
    ],
)
def test_a_grid_that_can_keep_nothing_says_why(
    method, changes, said, folders, data, refused, tmp_path
):
    fields = COMMON | HOST | dict(runs__lr="1e-2,2e-2") | changes
    path = tmp_path / "c.json"
    c = make_config(folders["bert"], data, method, **fields)
    path.write_text(c.to_json())
    assert said in refused("train", f"--config={path}", f"--workdir={tmp_path / 'grid'}")
    assert not list((tmp_path / "grid").glob("*/metrics.jsonl"))


SWEEP = (
    METHOD_CONFIG
    + """
def sweep():
    for rate in (0.01, 0.02):
        yield {"config": "prefix", "optim.lr": rate, "prompt.layers": "2-2"}
    for rate in (0.01, 0.02):
        yield {"config": "head_only", "optim.lr": rate}
"""
)


@pytest.mark.long
def test_a_sweep_keeps_what_each_program_can(folders, data, tmp_path, capsys):
    """Prefixes and heads alone: of the same rows, and yet other states."""
    file = tmp_path / "grid.py"
    file.write_text(SWEEP)
    given = make_config(folders["bert"], data, "head_only", **COMMON).to_dict()
    fields = {f"train.{n}": given["train"][n] for n in ("total_epochs", "total_steps")}
    fields |= {f"train.{n}": given["train"][n] for n in ("eval_steps", "log_steps", "tracker")}
    fields |= {f"data.{n}": given["data"][n] for n in ("source", "max_len", "multiple", "batch")}
    fields |= {"task.name": "custom", "task.fields": "text", "mesh.data": 1, "head.dropout": 0}
    fields |= {"backbone.path": given["backbone"]["path"], "backbone.dropout": 0}
    outs = []
    for name, more in (("off", {}), ("on", {"cache.location": "disk"})):
        words = (f"--config={file}", f"--workdir={tmp_path / name}", "--run")
        code, out, err = jaxprompt(capsys, "sweep", *words, *flags(fields | more))
        assert code == 0, err
        outs.append(timeless(results(tmp_path / name)))
    said = [line.partition(":")[0] for line in err.splitlines() if line.startswith("cached ")]
    assert said == [
        "cached what layers 1-1 give for every token of 3 splits",
        "cached the backbone's output at the positions that the head reads of 3 splits",
    ]
    assert len(list((tmp_path / "on").glob("kept/*/train.states"))) == 2
    assert err.count("2 runs at once") == 2 and len(outs[1]) == 4
    for name, own in outs[1].items():
        assert {n: own[n] for n in SAME} == {n: outs[0][name][n] for n in SAME}
        mine, right = (losses(tmp_path / part / name) for part in ("on", "off"))
        np.testing.assert_allclose(mine, right, rtol=1e-6)
