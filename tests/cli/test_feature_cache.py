"""Runs, grids and processes that cache the states of frozen layers: the same results."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from processes import Processes
from spoil import edit
from test_runs import SAME, results, rows_file
from tiny_pretrain import stop
from tiny_run import losses, make_backbone, make_config, succeed, timeless, write_rows

from jaxprompt.__main__ import main
from jaxprompt.build.backbone import open_backbone
from jaxprompt.cli.results import train_grid
from jaxprompt.config.run import BackboneConfig
from jaxprompt.runs.grid.batched_runs import BatchedRuns
from jaxprompt.runs.train import train_prompt
from jaxprompt.training.features import cache as feature_cache
from jaxprompt.training.log import RunLog

# Dropout above what is kept stays.
COMMON = dict(
    backbone__dropout=0, train__total_steps=4, train__eval_steps=2, train__log_steps=1
)  # fmt: skip
LENGTHS = dict(data__multiple=4)  # batches of several lengths
UPPER = dict(prompt__layers="2-2", prompt__dropout=0.1)
MLM = {"head.name": "verbalizer", "task.words": "beast,food,tool", "trainable": "backbone/mlm/.*"}
MLM |= {"task.template": "{text} about [mask] ."}
DECODER = dict(prompt__length=0, prompt__decoder=2, prompt__cross=3, prompt__dropout=0.1)
LEFT = UPPER | LENGTHS | dict(data__padding_side="left")
CASES = {
    "bert_left": ("bert", "prefix", LEFT | dict(optim__accumulate=2)),
    "bert_head": ("bert", "head_only", {}),
    "bert_mlm": ("bert", "head_only", MLM),
    "bert_mesh": ("bert", "prefix", UPPER | dict(mesh__data=4, mesh__model=2, mesh__fsdp=True)),
    "t5_upper": ("t5", "prefix", UPPER | dict(prompt__decoder=2)),
    "t5_decoder": ("t5", "prefix", DECODER),
    "t5_head": ("t5", "head_only", LENGTHS),
    "gpt2_upper": ("gpt2", "prefix", UPPER | LENGTHS),
}
SPARED = {"bert_head", "bert_mlm", "t5_head"}  # of all tokens


@pytest.fixture(scope="module")
def folders(dropping, tmp_path_factory):
    backbones = {x: make_backbone(tmp_path_factory.mktemp(x) / x, x) for x in ("t5", "gpt2")}
    return backbones | {"bert": dropping}


def start(folder, *args, **fields):
    """Runs a config. Returns its result and its losses."""
    result = train_prompt(make_config(*args, **fields), str(folder)).to_json()
    return timeless(result), losses(folder)


def assert_same_run(folder, *args, **fields):
    """Runs a config with a cache and without: the results are equal. Returns the losses."""
    cache = {name: fields.pop(name) for name in list(fields) if name.startswith("cache__")}
    expected, exact = start(folder / "off", *args, **fields)
    result, cached = start(folder / "on", *args, **fields, **cache)
    np.testing.assert_allclose(cached, exact, rtol=1e-5)
    assert result == expected
    return exact


@pytest.mark.default_cases("bert_head")
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_keeps_is_the_same_run(case, folders, data, tmp_path, capsys, monkeypatch):
    activity, activities = RunLog.activity, []
    record = lambda log, text: activities.append(text) or activity(log, text)
    monkeypatch.setattr(RunLog, "activity", record)
    family, method, fields = CASES[case]
    fields = COMMON | fields | dict(cache__location="host")
    exact = assert_same_run(tmp_path, folders[family], data, method, **fields)
    assert len(exact) == 4 and exact[0] != exact[-1]
    assert "GiB in host memory" in capsys.readouterr().err
    assert any("sequences x 1 tokens" in text for text in activities) == (case in SPARED)


@pytest.mark.long
def test_choices_are_kept_row_by_row(folders, tmp_path):
    """Examples of two and three choices, each a row of its own length."""
    rng, words = np.random.default_rng(0), "cat dog bread rice hammer saw the a very old".split()
    draw = lambda most: " ".join(rng.choice(words, rng.integers(1, most)))
    for name, size in {"train": 20, "dev": 12, "test": 4}.items():
        rows = [
            {"text": draw(4), "options": [draw(6) for _ in range(2 + i % 2)], "label": i % 2}
            for i in range(size)
        ]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    fields = COMMON | UPPER | {
        "task.choices": "options", "task.template": "{text} [sep] {choice}", "data.batch": 4,
        "data.eval_batch": 5, "head.pooler": "cls", "cache.location": "host",
    }  # fmt: skip
    fields = {name.replace(".", "__"): value for name, value in fields.items()}
    assert_same_run(tmp_path, folders["bert"], tmp_path, "prefix", **fields)


# -- disk -----------------------------------------------------------------------------------------


@pytest.fixture
def config(folders, data, tmp_path):
    """Writes the config of a run that caches on disk. Returns its path."""

    def write(**changes):
        fields = COMMON | UPPER | dict(cache__location="disk", cache__folder=tmp_path / "kept")
        config = make_config(folders["bert"], data, "prefix", **fields | changes)
        path = tmp_path / "c.json"
        path.write_text(config.to_json())
        return path

    return write


@pytest.mark.long
def test_a_resumed_run_and_another_seed_read_what_is_there(config, tmp_path, capsys):
    def words(name, **changes):
        return ["train", f"--config={config(**changes)}", f"--workdir={tmp_path / name}"]

    def train(name, **changes):
        out, err = succeed(capsys, *words(name, **changes))
        return out, err

    whole = json.loads(train("off", cache__location="", cache__folder="")[0])
    code, out, err = stop(words("run"), 2, capsys)
    assert code == 0 and out == "" and "stopped by SIGTERM at step 2" in err
    assert "earlier" not in err
    before = (tmp_path / "kept/train.states").stat().st_mtime_ns
    out, err = train("run")
    assert "resumed at step 2" in err and "(2 reused from an earlier run)" in err
    assert timeless(json.loads(out)) == timeless(whole)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "off"), rtol=1e-5)
    assert "(2 reused from an earlier run)" in train("seed", seed=3)[1]
    assert (tmp_path / "kept/train.states").stat().st_mtime_ns == before


@pytest.mark.long
def test_a_folder_of_something_else_is_refused(config, refused, data, other_backbone, tmp_path):
    run_config = json.loads(config().read_text())
    assert main(["train", f"--config={config()}", f"--workdir={tmp_path / 'run'}"]) == 0

    def line(**changes):
        return refused("train", f"--config={config(**changes)}", f"--workdir={tmp_path / 'new'}")

    message = line(cache__dtype="bfloat16")
    assert message.startswith(f"{tmp_path / 'kept'} has states cached for a different setup: ")
    assert "cache.dtype (saved 'float32', now 'bfloat16'); use another cache.folder" in message
    assert "the backbone's weights (saved '" in line(backbone__path=other_backbone)
    assert "the first positions (saved '4 and 0', now '5 and 0')" in line(prompt__length=5)
    # The weights are the same: what config.json says of the layers is not.
    other = shutil.copytree(run_config["backbone"]["path"], tmp_path / "other")
    edit(other / "config.json", layer_norm_eps=1e-3)
    assert "the backbone's layers (saved '" in line(backbone__path=other)
    (tmp_path / "rows").mkdir()
    for name in ("train", "dev", "test"):
        text = (data / f"{name}.jsonl").read_text()
        (tmp_path / "rows" / f"{name}.jsonl").write_text(text.replace("very", "quite"))
    assert "the data (saved '48 examples, CRC " in line(data__source=tmp_path / "rows")
    changed = {"task.template": "{text} ."}
    assert "the template (saved '{text}', now '{text} .')" in line(**changed)
    states = tmp_path / "kept/dev.states"
    states.write_bytes(states.read_bytes()[:-4])
    assert "dev.states is damaged; delete" in line()
    assert not (tmp_path / "new/config.json").exists()


# -- grids, once for all runs of the same rows -----------------------------------------------------

GRID = dict(
    backbone__dropout=0, prompt__dropout=0, head__dropout=0, train__total_steps=4,
    train__eval_steps=2, train__log_steps=1, data__multiple=4, optim__name="adafactor",
    runs__size=0,
)  # fmt: skip
HOST, DISK = dict(cache__location="host"), dict(cache__location="disk")
LAYER_2 = dict(prompt__layers="2-2")
GRID_MLM = {"head.name": "verbalizer", "task.template": "{text} about [mask] ."}
GRID_MLM |= {"runs.words": "('beast,food,tool', 'cat,bread,saw')", "trainable": "backbone/mlm/.*"}
GRID_MLM |= {"optim.lr": 1e-3}  # of all of a head: larger ones magnify rounding within four steps
GRIDS = {  # family, method, fields
    "together": (
        "bert", "prefix", LAYER_2 | dict(runs__seeds="1,2", runs__lr="1e-2,2e-2", runs__size=4),
    ),
    "head": ("bert", "head_only", dict(runs__seeds="1,2", runs__lr="1e-2,2e-2")),
    "words": ("bert", "head_only", GRID_MLM),
    "t5_decoder": (
        "t5", "prefix", dict(prompt__length=0, prompt__decoder=2, runs__seeds="1,2", runs__size=2),
    ),
    "apart": (
        "bert", "prefix", LAYER_2 | dict(runs__seeds="1,2", runs__lr="1e-2,2e-2", mesh__data=4),
    ),
}  # fmt: skip


def grid_of(folder, *args, **fields):
    """Trains a grid. Returns its folder."""
    assert train_grid(make_config(*args, **GRID | fields), str(folder)) == 0
    return folder


def same_ends(folder, expected, rtol=1e-6):
    """Compares results and losses of all runs of two grids, in float32."""
    results_here, others = results(folder), results(expected)
    assert results_here.keys() == others.keys() and results_here
    for name in results_here:
        assert {n: results_here[name][n] for n in SAME} == {n: others[name][n] for n in SAME}
        np.testing.assert_allclose(losses(folder / name), losses(expected / name), rtol=rtol)


def count_cached_splits(err):
    """Returns the number of splits in the line about cached states."""
    (line,) = [line for line in err.splitlines() if line.startswith("cached ")]
    return int(line.partition(" of ")[2].split(" splits")[0].rpartition(" ")[2])


@pytest.mark.long
@pytest.mark.parametrize("case", GRIDS)
def test_a_grid_that_keeps_is_the_same_grid(case, folders, data, tmp_path, capsys, monkeypatch):
    family, method, fields = GRIDS[case]
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
def test_each_split_has_a_folder_and_all_serve_a_restart(
    folders, data, tmp_path, capsys, monkeypatch
):
    fields = SEEDS | LAYER_2 | dict(runs__data_seeds="0,1", runs__lr="1e-2")
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
    stores = sorted(path.relative_to(folder / "kept") for path in folder.glob("kept/*/*.states"))
    # Rows 0 to 15 are the train split of both, with rows 40 to 45 as dev, and both have one test.
    assert sorted(path.name for path in stores) == ["dev.states", "test.states", "train.states"]
    times = [(folder / "kept" / path).stat().st_mtime_ns for path in stores]
    grid_of(folder, *args, **fields | DISK)
    err = capsys.readouterr().err
    assert "resumed at step" in err and "(3 reused from an earlier run)" in err
    assert times == [(folder / "kept" / path).stat().st_mtime_ns for path in stores]
    same_ends(folder, whole)
    assert not (folder / "kept" / "train.states").exists()


@pytest.mark.long
def test_the_limit_counts_all_that_is_kept_at_once(folders, data, refused_config, tmp_path):
    """What one data seed takes would be allowed."""
    rows = rows_file(tmp_path, [(30, 7), (32, 3)])
    fields = GRID | SEEDS | LAYER_2 | HOST | dict(data__protocol__rows=rows, runs__data_seeds="0,1")

    def line(**changes):
        config = make_config(folders["bert"], data, "prefix", **fields | changes)
        return refused_config(config, "train")

    message = line(cache__limit=1e-9)
    assert message.startswith("caching what layers 1-1 give for every token of 5 splits takes ")
    assert message.endswith(
        "cache.limit=1e-09; raise the limit, set cache.dtype=bfloat16, or set cache.location=''"
    )
    room = float(message.split(" takes ")[1].split()[0])
    assert "of 5 splits" in line(cache__limit=0.9 * room)
    assert not list((tmp_path / "refused").glob("*/metrics.jsonl"))
    alone = dict(runs__data_seeds="0", cache__limit=0.9 * room, train__total_steps=1)
    config = make_config(folders["bert"], data, "prefix", **fields | alone)
    assert train_grid(config, str(tmp_path / "one")) == 0


# -- several processes, each of its rows ----------------------------------------------------------

STILL = COMMON | dict(
    prompt__dropout=0, head__dropout=0, data__multiple=4, data__batch=8, data__eval_batch=16,
    train__total_steps=8, train__eval_steps=4,
)  # fmt: skip
FLAT = UPPER | dict(prompt__dropout=0)
PROCESSES = {  # family, method, fields; processes, devices of each, data x model
    "data": ("bert", "prefix", FLAT | dict(cache__location="disk"), (2, 2, (2, 2))),
    "left": (
        "gpt2", "prefix", FLAT | dict(cache__location="host", data__padding_side="left"),
        (2, 1, (2, 1)),
    ),
    "four": (
        "bert", "prefix", FLAT | dict(cache__location="disk", cache__dtype="bfloat16"),
        (4, 1, (2, 2)),
    ),
}  # fmt: skip


def train_on(folder: Path, config, number: int, devices: int) -> tuple[dict, list[float], str]:
    """Trains on several processes. Returns the result, the losses and the log of process 0."""
    folder.mkdir(exist_ok=True)
    path = folder / "c.json"
    path.write_text(config.to_json())
    words = ["-m", "jaxprompt", "train", f"--config={path}", f"--workdir={folder / 'run'}"]
    with Processes(folder / "logs", devices=devices) as processes:
        processes.start_all(number, words) if number > 1 else processes.start(words)
        assert processes.wait(300) == [0] * number, processes.told()
        log = processes.err(0)
        assert all(processes.err(i) == "" for i in range(1, number))
    result = json.loads((folder / "run/result.json").read_text())
    return timeless(result), losses(folder / "run"), log


@pytest.mark.long
@pytest.mark.parametrize("case", PROCESSES)
def test_several_processes_keep_as_one(case, folders, data, tmp_path):
    family, method, fields, (number, devices, mesh) = PROCESSES[case]
    fields = STILL | fields | dict(mesh__data=mesh[0], mesh__model=mesh[1])
    args = (folders[family], data, method)
    result, cached, log = train_on(tmp_path / "all", make_config(*args, **fields), number, devices)
    expected, one = start(tmp_path / "one", *args, **fields)
    assert result == expected
    np.testing.assert_allclose(cached, one, rtol=1e-6)
    where = fields.pop("cache__location")
    if fields.pop("cache__dtype", "float32") == "float32":  # else digits are lost
        expected, off = start(tmp_path / "off", *args, **fields)
        assert result == expected
        np.testing.assert_allclose(cached, off, rtol=1e-6)
    assert len(cached) == 8 and cached[0] != cached[-1]
    assert f"GiB in {'host memory' if where == 'host' else tmp_path}" in log
    assert f"on each of {number} processes" in log
    if where != "disk":
        return
    # All states, once, about as many on each process.
    for name in ("train", "dev"):
        size_alone = (tmp_path / "one/kept" / f"{name}.states").stat().st_size
        files = sorted((tmp_path / "all/run/kept").glob(f"{name}-*.states"))
        sizes = [path.stat().st_size for path in files]
        assert [path.stem for path in files] == [f"{name}-{i}-of-{number}" for i in range(number)]
        assert sum(sizes) == size_alone and max(sizes) < 1.5 * size_alone / number


# -- what cannot be kept --------------------------------------------------------------------------

REFUSED = {
    "dropout": (
        "prefix", UPPER | dict(backbone__dropout=0.1),
        "the backbone has dropout (dropout 0.1, attention_dropout 0.1), so its states differ in "
        "every step; set backbone.dropout=0 and backbone.attention_dropout=0, "
        "or set cache.location=''",
    ),
    "config_dropout": (
        "prefix", UPPER | dict(backbone__dropout=None), "(dropout 0.1, attention_dropout 0.1)",
    ),
    "soft": ("soft", {}, "the prompt is in the input or in layer 1"),
    "from_the_first": ("prefix", {}, "use a prefix in upper layers only (prompt.layers)"),
    "bias": ("bias_only", {}, "backbone/embed/norm/bias trains, and the cached states"),
    "limit": (
        "prefix", UPPER | dict(cache__limit=1e-6),
        "cache.limit=1e-06; raise the limit, set cache.dtype=bfloat16, or set cache.location=''",
    ),
    "folder": ("prefix", UPPER | dict(cache__folder="x"), "needs cache.location=disk"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_one_line(case, folders, data, refused_config, tmp_path):
    method, fields, message = REFUSED[case]
    fields = COMMON | dict(cache__location="host") | fields
    assert message in refused_config(make_config(folders["bert"], data, method, **fields), "train")
    assert not (tmp_path / "refused/config.json").exists()


def test_dropout_zero_reaches_the_embeddings_of_gpt2(tmp_path, folders):
    """Else nothing of a published GPT-2 could be cached."""
    folder = shutil.copytree(folders["gpt2"], tmp_path / "gpt2")
    edit(folder / "config.json", embd_pdrop=0.1)
    opened = open_backbone(BackboneConfig(path=str(folder), dropout=0.0))
    assert opened.module.cfg == open_backbone(BackboneConfig(path=str(folders["gpt2"]))).module.cfg
