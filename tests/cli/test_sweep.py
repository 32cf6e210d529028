"""A sweep prints commands that work, runs what has no result, and tabulates over seeds."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_run import METHOD_CONFIG, ROOT, flags, jaxprompt, tiny_fields

from jaxprompt.cli.sweep import _folder_of, list_runs, load_run_config
from jaxprompt.errors import InputError

CONFIG = """
import sys
sys.path.insert(0, {root!r})
from configs.base import get_config as base
from configs.parts import methods


def get_config(method="prefix"):
    c = base()
    getattr(methods, method)(c)
    return c


def sweep():
    for method in ("prefix", "head_only"):
        for seed in (0, 1):
            yield {{"config": method, "seed": seed, "optim.lr": 0.01}}
"""


@pytest.fixture
def given(tmp_path, backbone, data):
    file = tmp_path / "grid.py"
    file.write_text(CONFIG.format(root=str(ROOT)))
    fields = tiny_fields(backbone, data)
    del fields["prompt.length"]
    return [f"--config={file}", f"--workdir={tmp_path / 'runs'}", *flags(fields)]


@pytest.mark.long
def test_a_sweep_runs_once_and_tabulates_mean_and_deviation(given, capsys, tmp_path, refused):
    code, out, _ = jaxprompt(capsys, "sweep", *given)
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 4)
    words = shlex.split(lines[1])
    assert words[:4] == ["python", "-m", "jaxprompt", "train"]
    assert f"--config={tmp_path / 'grid.py'}:prefix" in words and "--config.seed=1" in words
    code, out, _ = jaxprompt(capsys, *words[3:])
    assert code == 0 and json.loads(out)["seed"] == 1
    code, out, err = jaxprompt(capsys, "sweep", *given, "--run")
    assert code == 0
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
    code, again, err = jaxprompt(capsys, "sweep", *given, "--run", "--config.runs.size=2")
    assert (code, again) == (0, out)
    assert "-- " not in err
    assert times == {name: path.stat().st_mtime_ns for name, path in results.items()}
    chart = tmp_path / "chart.png"
    assert jaxprompt(capsys, "sweep", *given, "--table", f"--plot={chart}")[1] == out
    assert chart.read_bytes()[:4] == b"\x89PNG"
    # Results of another config are none of the sweep that is asked for.
    other = (*given, "--config.optim.b1=0.5")
    assert "run with a different config: optim.b1 (saved 0.9, now 0.5)" in refused("sweep", *other)
    assert "optim.b1 (saved 0.9, now 0.5)" in refused("sweep", *other, "--table")


def test_a_table_without_results_is_refused(given, capsys):
    code, out, err = jaxprompt(capsys, "sweep", *given, "--table")
    assert code == 2 and not out and "none of the 4 runs in" in err and "--run" in err


def test_a_run_is_that_of_the_command_which_is_printed(given, tmp_path):
    """A total of sweep() does not replace one that is given: two are two."""
    file = Path(given[0].partition("=")[2])
    file.write_text(file.read_text().replace('"optim.lr": 0.01', '"train.total_epochs": 2'))
    run, *_ = list_runs(str(file), tmp_path / "runs")
    totals = lambda c: (c.train.total_steps, c.train.total_epochs)
    assert totals(load_run_config(run, [])) == (0, 2.0)
    assert totals(load_run_config(run, [("train.total_steps", "3")])) == (3, 2.0)


def test_what_train_refuses_no_run_of_a_sweep_is(given, capsys, tmp_path):
    words = ["--config.optim.schedule=linear", "--config.optim.schedule.warmup_ratio=0.5"]
    code, _, err = jaxprompt(capsys, "sweep", *given, *words, "--run")
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("jaxprompt sweep: prefix-seed=0-optim.lr=0.01: ")
    assert "is only valid with optim.schedule.name=warmup_linear" in err
    assert not list(tmp_path.glob("runs/*/config.json"))


def test_a_field_that_the_sweep_sets_is_not_given_besides(given, capsys):
    """It would be lost: what sweep() yields comes behind what is given."""
    code, _, err = jaxprompt(capsys, "sweep", *given, "--config.optim.lr=0.5")
    assert code == 2 and "sweep() sets optim.lr of each run; remove --config.optim.lr" in err


@pytest.mark.long
def test_runs_whose_dropout_would_depend_on_others_train_alone(given, capsys, tmp_path):
    code, _, err = jaxprompt(capsys, "sweep", *given, "--config.rng=rbg", "--run")
    assert code == 0, err
    assert err.count("-- prefix-seed") == 2 and not (tmp_path / "runs" / "chunks.json").exists()
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 4


STARTS = """
def sweep():
    for file in (r"RIGHT", r"WRONG"):
        own = {"prompt.length": 4, "prompt.start": "file", "prompt.file": file}
        yield {"config": "soft", **own}
    yield {"config": "head_only", "seed": 1}
"""


@pytest.mark.long
def test_a_run_that_cannot_start_does_not_stop_the_others(given, capsys, tmp_path):
    """Of its program, and of others; nothing is compiled for it."""
    for name, width in (("RIGHT", 32), ("WRONG", 16)):
        np.save(tmp_path / name, np.zeros((4, width), np.float32))
    file = Path(given[0].partition("=")[2])
    points = STARTS.replace("RIGHT", f"{tmp_path}/RIGHT.npy").replace(
        "WRONG", f"{tmp_path}/WRONG.npy"
    )
    file.write_text(CONFIG.format(root=str(ROOT)).partition("def sweep")[0] + points)
    code, out, err = jaxprompt(capsys, "sweep", *given, "--run")
    assert code == 2 and "WRONG.npy has shape [4, 16]; use [length, 32]" in err
    assert (
        "1 of 3 runs failed: soft-" in err.splitlines()[-1] and "compiling the training step" in err
    )
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 2 and "| head_only | 1 |" in out
    assert not list((tmp_path / "runs").glob("*WRONG*"))


def test_a_group_that_cannot_be_read_does_not_stop_a_run_beside_it(given, capsys, tmp_path):
    """Two seeds on a backbone that is not there are one group, the only one that trains at once."""
    file, field = Path(given[0].partition("=")[2]), "--config.backbone.path="
    (place,) = (word.removeprefix(field) for word in given if word.startswith(field))
    points = f"""
def sweep():
    for seed in (0, 1):
        yield {{"config": "prefix", "backbone.path": {str(tmp_path / "gone")!r}, "seed": seed}}
    yield {{"config": "head_only", "backbone.path": {place!r}}}
"""
    file.write_text(CONFIG.format(root=str(ROOT)).partition("def sweep")[0] + points)
    words = [word for word in given if not word.startswith(field)]
    code, out, err = jaxprompt(capsys, "sweep", *words, "--run")
    assert code == 2 and "2 of 3 runs failed: prefix-" in err.splitlines()[-1], err
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 1 and "| head_only" in out


@pytest.mark.long
def test_a_finished_run_of_other_data_does_not_stop_the_others(given, data, capsys, tmp_path):
    file, own = Path(given[0].partition("=")[2]), shutil.copytree(data, tmp_path / "own")
    head = CONFIG.format(root=str(ROOT)).partition("def sweep")[0]
    point = lambda method: f"    yield {{'config': '{method}'}}\n"
    words = [*given, f"--config.data.source={own}"]
    file.write_text(head + "def sweep():\n" + point("head_only"))
    assert jaxprompt(capsys, "sweep", *words, "--run")[0] == 0
    rows = (own / "dev.jsonl").read_text().splitlines(keepends=True)
    (own / "dev.jsonl").write_text("".join([*rows, rows[0]]))
    file.write_text(head + "def sweep():\n" + point("head_only") + point("prefix"))
    code, out, err = jaxprompt(capsys, "sweep", *words, "--run")
    assert code == 2 and "1 of 2 runs failed: head_only" in err.splitlines()[-1], err
    assert "was trained on different data" in err
    assert (tmp_path / "runs/prefix/result.json").exists() and "| prefix" in out


@pytest.mark.parametrize("word", ["--run", "--config.seed=1"])
def test_the_table_of_a_folder_takes_nothing_of_a_sweep(given, capsys, tmp_path, word, refused):
    line = refused("sweep", word, f"--table={tmp_path}")
    name = word.partition("=")[0]
    assert f"--table={tmp_path} shows the runs of that folder and does not use {name}; " in line
    assert "does not use --config; " in refused("sweep", *given[:1], f"--table={tmp_path}")


def test_the_name_of_a_folder_is_not_too_long(given, tmp_path):
    file = Path(given[0].partition("=")[2])
    points = """
def sweep():
    for last in "ab":
        yield {"seed": 1, "prompt.start": "text", "prompt.text": "cat " * 80 + last}
"""
    file.write_text(CONFIG.format(root=str(ROOT)).partition("def sweep")[0] + points)
    first, second = (run.workdir.name for run in list_runs(str(file), tmp_path / "runs"))
    assert first != second and max(map(len, (first, second))) < 120
    assert first.startswith("seed=1-prompt.start=text-prompt.text=catcat")
    with pytest.raises(InputError, match="changes so many fields that the folder"):
        _folder_of(["optim.lr=0.01"] * 30)


def test_a_point_with_an_unknown_field_is_refused_before_anything_runs(tmp_path, capsys):
    file = tmp_path / "grid.py"
    text = CONFIG.format(root=str(ROOT)).replace('"optim.lr"', '"optim.lt"')
    file.write_text(text)
    code, _, err = jaxprompt(capsys, "sweep", f"--config={file}", f"--workdir={tmp_path}", "--run")
    assert code == 2
    assert "unknown config field 'optim.lt'; nearest: optim.lr" in err


@pytest.mark.parametrize(
    "body, told",
    [
        ("yield {'seed': 1}\n    raise ValueError('x')", ": ValueError: x"),
        ("yield 3", "sweep() yields 3; yield a dict of fields for each run"),
        ("yield {3: 4}", "sweep() yields {3: 4}; yield a dict of fields"),
        ("return None", "sweep() returns None; yield a dict of fields"),
        ("return {'seed': 1}", "sweep() returns {'seed': 1}; yield a dict of fields"),
        ("return ({'seed': 1 // n} for n in (1, 0))", ": ZeroDivisionError: "),
        ("return ()", "sweep() yields nothing"),
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
def test_points_that_are_wrong_are_refused_before_anything_runs(body, told, tmp_path, refused):
    file = tmp_path / "grid.py"
    file.write_text(METHOD_CONFIG + f"def sweep():\n    {body}\n")
    assert told in refused("sweep", f"--config={file}", f"--workdir={tmp_path / 'runs'}", "--run")
    assert not (tmp_path / "runs").exists()


def test_an_argument_of_a_point_may_be_a_number(tmp_path):
    file = tmp_path / "grid.py"
    text = METHOD_CONFIG.replace("getattr(methods, method)(c)", "c.seed = int(method)")
    file.write_text(text + "def sweep():\n    yield {'config': 3}\n")
    assert [run.workdir for run in list_runs(str(file), "runs")] == [Path("runs/3")]
