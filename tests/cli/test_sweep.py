"""A sweep prints commands that work, runs what has no result, and tabulates over seeds."""

import json
import shlex

import numpy as np
import pytest
from tiny_run import ROOT, flags, jaxprompt, tiny_fields

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


def test_a_sweep_prints_one_train_command_a_run(given, capsys, tmp_path):
    code, out, _ = jaxprompt(capsys, "sweep", *given)
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 4)
    words = shlex.split(lines[1])
    assert words[:4] == ["python", "-m", "jaxprompt", "train"]
    assert f"--config={tmp_path / 'grid.py'}:prefix" in words
    assert "--config.seed=1" in words
    code, out, _ = jaxprompt(capsys, *words[3:])
    assert code == 0
    assert json.loads(out)["seed"] == 1


def test_a_sweep_runs_once_and_tabulates_mean_and_deviation(given, capsys, tmp_path):
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
    code, again, err = jaxprompt(capsys, "sweep", *given, "--run")
    assert (code, again) == (0, out)
    assert "-- " not in err
    assert times == {name: path.stat().st_mtime_ns for name, path in results.items()}
    chart = tmp_path / "chart.png"
    assert jaxprompt(capsys, "sweep", *given, "--table", f"--plot={chart}")[1] == out
    assert chart.read_bytes()[:4] == b"\x89PNG"


def test_how_many_train_at_once_is_no_part_of_a_run(given, capsys, tmp_path):
    """Alone they would train one by one, for each seed has batches of its own."""
    code, out, _ = jaxprompt(capsys, "sweep", *given, "--config.runs.size=2", "--run")
    saved = json.loads((tmp_path / "runs" / "chunks.json").read_text())["chunks"]
    assert code == 0 and [len(chunk) for chunk in saved] == [2, 2]
    assert jaxprompt(capsys, "sweep", *given, "--run")[:2] == (0, out)


def test_fewer_than_no_runs_at_once(given, capsys):
    code, _, err = jaxprompt(capsys, "sweep", *given, "--config.runs.size=-1", "--run")
    assert code != 0 and "config.runs.size=-1" in err and err.count("\n") == 1


def test_a_run_that_fails_does_not_stop_the_others(given, capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "prefix-seed=0-optim.lr=0.01").write_text("in the way")
    code, out, err = jaxprompt(capsys, "sweep", *given, "--run")
    assert code == 2
    assert "1 of 4 runs failed: prefix-seed=0-optim.lr=0.01" in err.splitlines()[-1]
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 3
    assert "| head_only optim.lr=0.01 | 2 |" in out


def test_a_point_with_an_unknown_field_is_refused_before_anything_runs(tmp_path, capsys):
    file = tmp_path / "grid.py"
    text = CONFIG.format(root=str(ROOT)).replace('"optim.lr"', '"optim.lt"')
    file.write_text(text)
    code, _, err = jaxprompt(capsys, "sweep", f"--config={file}", f"--workdir={tmp_path}", "--run")
    assert code == 2
    assert "unknown config field 'optim.lt'; nearest: optim.lr" in err
