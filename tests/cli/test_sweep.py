"""A sweep prints commands that work, runs what has no result, and tabulates over seeds."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_run import METHOD_CONFIG, flags, jaxprompt, succeed, tiny_fields

from jaxprompt.cli.sweep import list_runs, load_run_config
from jaxprompt.errors import InputError

SWEEP = """
def sweep():
    for method in ("prefix", "head_only"):
        for seed in (0, 1):
            yield {"config": method, "seed": seed, "optim.lr": 0.01}
"""


def rewrite(folder, sweep):
    """Writes the config of a sweep. Returns the file."""
    file = folder / "grid.py"
    file.write_text(METHOD_CONFIG + sweep)
    return file


@pytest.fixture
def sweep_flags(tmp_path, backbone, data):
    """The flags of a sweep, of whose file `rewrite` writes another."""
    file = rewrite(tmp_path, SWEEP)
    fields = tiny_fields(backbone, data)
    del fields["prompt.length"]
    return [f"--config={file}", f"--workdir={tmp_path / 'runs'}", *flags(fields)]


@pytest.mark.long
def test_a_sweep_runs_once_and_tabulates_mean_and_deviation(sweep_flags, capsys, tmp_path, refused):
    code, out, _ = jaxprompt(capsys, "sweep", *sweep_flags)
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 4)
    words = shlex.split(lines[1])
    assert words[:4] == ["python", "-m", "jaxprompt", "train"]
    assert f"--config={tmp_path / 'grid.py'}:prefix" in words and "--config.seed=1" in words
    out, _ = succeed(capsys, *words[3:])
    assert json.loads(out)["seed"] == 1
    out, _ = succeed(capsys, "sweep", *sweep_flags, "--run")
    results = {p.parent.name: p for p in (tmp_path / "runs").glob("*/result.json")}
    assert sorted(results) == [
        f"{method}-seed={seed}-optim.lr=0.01"
        for method in ("head_only", "prefix")
        for seed in (0, 1)
    ]
    rows = [line for line in out.splitlines() if line.startswith("| prefix")]
    values = [
        json.loads(path.read_text())["test"]["accuracy"]
        for name, path in results.items()
        if name.startswith("prefix")
    ]
    expected = f"{np.mean(values):.3f} ± {np.std(values):.3f}"
    assert len(rows) == 1
    assert expected in rows[0]
    times = {name: path.stat().st_mtime_ns for name, path in results.items()}
    # How many train at once is no part of a run.
    code, again, err = jaxprompt(capsys, "sweep", *sweep_flags, "--run", "--config.runs.size=2")
    assert (code, again) == (0, out)
    assert "-- " not in err
    assert times == {name: path.stat().st_mtime_ns for name, path in results.items()}
    chart = tmp_path / "chart.png"
    assert jaxprompt(capsys, "sweep", *sweep_flags, "--table", f"--plot={chart}")[1] == out
    assert chart.read_bytes()[:4] == b"\x89PNG"
    # Results of another config are none of the sweep that is asked for.
    other = (*sweep_flags, "--config.optim.b1=0.5")
    line = refused("sweep", *other)
    assert "run with a different config: optim.b1 (saved 0.9, now 0.5)" in line
    assert "optim.b1 (saved 0.9, now 0.5)" in refused("sweep", *other, "--table")


def test_a_table_without_results_is_refused(sweep_flags, refused):
    line = refused("sweep", *sweep_flags, "--table", started=True)
    assert "none of the 4 runs in" in line and "--run" in line


def test_a_run_is_that_of_the_command_which_is_printed(sweep_flags, tmp_path):
    """A total of sweep() does not replace one that set before: both are used."""
    file = rewrite(tmp_path, SWEEP.replace('"optim.lr": 0.01', '"train.total_epochs": 2'))
    run, *_ = list_runs(str(file), tmp_path / "runs")
    totals = lambda c: (c.train.total_steps, c.train.total_epochs)
    assert totals(load_run_config(run, [])) == (0, 2.0)
    assert totals(load_run_config(run, [("train.total_steps", "3")])) == (3, 2.0)


def test_what_train_refuses_no_run_of_a_sweep_is(sweep_flags, capsys, tmp_path):
    words = ["--config.optim.schedule=linear", "--config.optim.schedule.warmup_ratio=0.5"]
    code, _, err = jaxprompt(capsys, "sweep", *sweep_flags, *words, "--run")
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("jaxprompt sweep: prefix-seed=0-optim.lr=0.01: ")
    assert "is only valid with optim.schedule.name=warmup_linear" in err
    assert not list(tmp_path.glob("runs/*/config.json"))


def test_a_field_that_the_sweep_sets_is_not_given_besides(sweep_flags, refused):
    """It would be lost: what sweep() yields comes behind what is given."""
    line = refused("sweep", *sweep_flags, "--config.optim.lr=0.5", started=True)
    assert "sweep() sets optim.lr of each run; remove --config.optim.lr" in line


@pytest.mark.long
def test_a_run_that_cannot_start_does_not_stop_the_others(sweep_flags, capsys, tmp_path):
    """Of its program, and of others; nothing is compiled for it."""
    points = ""
    for name, width in (("right", 32), ("wrong", 16)):
        file = tmp_path / f"{name}.npy"
        np.save(file, np.zeros((4, width), np.float32))
        point = {"config": "soft", "prompt.length": 4, "prompt.start": "file"}
        points += f"    yield {point | {'prompt.file': str(file)}}\n"
    rewrite(tmp_path, f"def sweep():\n{points}    yield {{'config': 'head_only', 'seed': 1}}\n")
    code, out, err = jaxprompt(capsys, "sweep", *sweep_flags, "--run")
    assert code == 2 and "wrong.npy has shape [4, 16]; use [length, 32]" in err
    assert "1 of 3 runs failed: soft-" in err.splitlines()[-1]
    assert "  dev accuracy " in err and re.search(r"\| head_only +\| 1 +\|", out)
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 2
    assert not list((tmp_path / "runs").glob("*wrong*"))


def test_a_group_that_cannot_be_read_does_not_stop_a_run_beside_it(
    sweep_flags, backbone, capsys, tmp_path
):
    """Two seeds on a backbone that is not there are one group, the only one that trains at once."""
    gone = {"config": "prefix", "backbone.path": str(tmp_path / "gone")}
    points = [gone | {"seed": 0}, gone | {"seed": 1}]
    points.append({"config": "head_only", "backbone.path": str(backbone)})
    rewrite(tmp_path, f"def sweep():\n    yield from {points}\n")
    words = [word for word in sweep_flags if not word.startswith("--config.backbone.path=")]
    code, out, err = jaxprompt(capsys, "sweep", *words, "--run")
    assert code == 2 and "2 of 3 runs failed: prefix-" in err.splitlines()[-1], err
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 1 and "| head_only" in out


@pytest.mark.long
def test_a_finished_run_of_other_data_does_not_stop_the_others(sweep_flags, data, capsys, tmp_path):
    data_copy = shutil.copytree(data, tmp_path / "own")
    words = [*sweep_flags, f"--config.data.source={data_copy}"]
    rewrite(tmp_path, "def sweep():\n    yield {'config': 'head_only'}\n")
    assert jaxprompt(capsys, "sweep", *words, "--run")[0] == 0
    rows = (data_copy / "dev.jsonl").read_text().splitlines(keepends=True)
    (data_copy / "dev.jsonl").write_text("".join([*rows, rows[0]]))
    points = [{"config": "head_only"}, {"config": "prefix"}]
    rewrite(tmp_path, f"def sweep():\n    yield from {points}\n")
    code, out, err = jaxprompt(capsys, "sweep", *words, "--run")
    assert code == 2 and "1 of 2 runs failed: head_only" in err.splitlines()[-1], err
    assert "was trained on different data" in err
    assert (tmp_path / "runs/prefix/result.json").exists() and "| prefix" in out


@pytest.mark.parametrize("word", ["--run", "--config.seed=1"])
def test_the_table_of_a_folder_takes_nothing_of_a_sweep(sweep_flags, tmp_path, word, refused):
    line = refused("sweep", word, f"--table={tmp_path}")
    name = word.partition("=")[0]
    assert f"--table={tmp_path} shows the runs of that folder and does not use {name}; " in line
    assert "does not use --config; " in refused("sweep", *sweep_flags[:1], f"--table={tmp_path}")


def test_the_name_of_a_folder_is_not_too_long(tmp_path):
    points = [
        {"seed": 1, "prompt.start": "text", "prompt.text": "cat " * 80 + last} for last in "ab"
    ]
    file = rewrite(tmp_path, f"def sweep():\n    yield from {points}\n")
    first, second = (run.workdir.name for run in list_runs(str(file), tmp_path / "runs"))
    assert first != second and max(map(len, (first, second))) < 120
    assert first.startswith("seed=1-prompt.start=text-prompt.text=catcat")


@pytest.mark.parametrize(
    "body, message",
    [
        ("yield {'seed': 1}\n    raise ValueError('x')", ": ValueError: x"),
        ("yield 3", "sweep() yields 3; yield a dict of fields for each run"),
        ("return {'seed': 1}", "sweep() returns {'seed': 1}; yield a dict of fields"),
        ("return ()", "sweep() yields nothing"),
        ("yield {'optim.lt': 1}", "unknown config field 'optim.lt'; nearest: optim.lr"),
        (
            "yield {'seed': 1, 'optim.lr': 0.1}\n    yield {'optim.lr': '0.1', 'seed': 1}",
            "yields {'seed': 1, 'optim.lr': 0.1} and {'optim.lr': '0.1', 'seed': 1}, which are the "
            "same run",
        ),
        (
            "yield {'data.source': 'a/b'}\n    yield {'data.source': 'a_b'}",
            "yields {'data.source': 'a/b'} and {'data.source': 'a_b'}, which share the folder "
            "data.source=a_b",
        ),
    ],
)
def test_points_that_are_wrong_are_refused_before_anything_runs(body, message, tmp_path, refused):
    file = rewrite(tmp_path, f"def sweep():\n    {body}\n")
    assert message in refused(
        "sweep", f"--config={file}", f"--workdir={tmp_path / 'runs'}", "--run"
    )
    assert not (tmp_path / "runs").exists()


def test_without_a_sweep_the_command_for_several_seeds_is_named(tmp_path):
    advice = r"`train --config\.runs\.seeds=0,1`"
    with pytest.raises(InputError, match=rf"^base does not define sweep\(\).*{advice}"):
        list_runs("base", tmp_path)
    (run,) = list_runs(str(rewrite(tmp_path, "def sweep():\n    yield {'seed': 1}\n")), tmp_path)
    with pytest.raises(InputError, match=advice):
        load_run_config(run, [("runs.seeds", "0,1")])


def test_an_argument_of_a_point_may_be_a_number(tmp_path):
    file = tmp_path / "grid.py"
    text = METHOD_CONFIG.replace("getattr(methods, method)(c)", "c.seed = int(method)")
    file.write_text(text + "def sweep():\n    yield {'config': 3}\n")
    assert [run.workdir for run in list_runs(str(file), "runs")] == [Path("runs/3")]
