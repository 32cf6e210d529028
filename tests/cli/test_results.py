"""Tables of any folder of runs, and a folder of several runs where one is asked for."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_run import ROOT, jaxprompt, succeed

from jaxprompt import __version__, cli
from jaxprompt.__main__ import commands
from jaxprompt.cli import completion
from jaxprompt.config.load import load_config
from jaxprompt.config.open_blocks import NAMED


def write_run(folder, config="quickstart:prefix", dev=0.5, test=0.5, metric="accuracy", **fields):
    """Writes what a finished run leaves. Fields as in optim__lr=0.1."""
    changes = [(name.replace("__", "."), str(value)) for name, value in fields.items()]
    run_config = load_config(config, changes)
    result = {
        "method": run_config.prompt.name,
        "seed": run_config.seed,
        "trained": 10,
        "total": 1000,
        "best_step": 3,
    }
    result |= {"dev": {metric: dev}, "test": {metric: test}, "time": {"seconds": 3.0}}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(run_config.to_json())
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def rows_of(capsys, *words):
    out, _ = succeed(capsys, "sweep", *words)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    return lines[0], {line[0]: line[1:] for line in lines[2:]}


def test_single_runs_side_by_side(tmp_path, capsys):
    for seed, test in ((0, 0.5), (1, 0.7), (2, 0.6)):
        write_run(tmp_path / f"mine-{seed}", seed=seed, test=test)
    write_run(tmp_path / "deep" / "er", "quickstart:soft", data__seed=4, metric="accuracy")
    write_run(tmp_path / "bias", "quickstart:bias_only", train__tracker="none")
    (tmp_path / "mine-0" / "backbone").mkdir()  # a model's config is no run
    (tmp_path / "mine-0" / "backbone" / "config.json").write_text('{"model_type": "bert"}')
    adapted = write_run(tmp_path / "adapted")
    (adapted / "result.json").write_text('{"objective": "mlm", "best_step": 1}')
    heads, rows = rows_of(capsys, f"--table={tmp_path}")
    assert heads == [
        "method", "runs", "seeds", "learning rate", "trained", "share", "dev accuracy",
        "test accuracy", "seconds",
    ]  # fmt: skip
    write_run(tmp_path / "copy", seed=1, test=0.9, train__tracker="none")  # counted before mine-1
    out, err = succeed(capsys, "sweep", f"--table={tmp_path}")
    assert len({len(line) for line in out.splitlines()}) == 1  # aligned
    (line,) = err.splitlines()
    assert f"{tmp_path}/mine-1 has the same config and seed as {tmp_path}/copy;" in line
    assert "3    | 1, 0, 2" in out
    shutil.rmtree(tmp_path / "copy")
    deviation = np.std([0.5, 0.7, 0.6])
    assert rows["prefix"][:3] == ["3", "0, 1, 2", "0.02"]
    assert rows["prefix"][6] == f"0.600 ± {deviation:.3f}"
    assert rows["soft"][:3] == ["1", "0", "0.03"]
    assert rows["none backbone/.*/bias head/.*"][2] == "0.001"
    assert len(rows) == 3


def test_a_row_is_named_by_nothing_that_its_run_did_not_read(tmp_path, capsys):
    """A run of several tasks has the name of one."""
    write_run(tmp_path / "whole", data__protocol="")
    write_run(tmp_path / "few", data__protocol="kshot", data__protocol__k=4)
    write_run(tmp_path / "fewer", data__protocol="kshot", data__protocol__k=2)
    _, rows = rows_of(capsys, f"--table={tmp_path}")
    few = {f"prefix data.protocol.name=kshot data.protocol.k={k}" for k in (2, 4)}
    assert rows.keys() == {"prefix", *few}
    write_run(tmp_path / "two/shared", shared__tasks="a.json,b.json", task__name="custom")
    write_run(tmp_path / "two/alone", task__name="custom")
    _, rows = rows_of(capsys, f"--table={tmp_path / 'two'}")
    assert any("shared.tasks" in row and "task.name" not in row for row in rows), rows


def test_pre_training_and_tuning_share_a_table(tmp_path, capsys):
    write_run(tmp_path / "tuned", dev=0.75)
    before = write_run(tmp_path / "before", "quickstart:soft")
    result = json.loads((before / "result.json").read_text())
    del result["dev"], result["test"], result["time"]
    result |= {"held_out": {"loss": 1.5, "accuracy": 0.25}}
    (before / "result.json").write_text(json.dumps(result))
    heads, rows = rows_of(capsys, f"--table={tmp_path}")
    assert heads[6:] == ["dev accuracy", "test accuracy", "accuracy", "loss", "seconds"]
    assert rows["prefix"][5:] == ["0.750", "0.500", "-", "-", "3"]
    assert rows["soft"][5:] == ["-", "-", "0.250", "1.500", "-"]


def test_a_plot_path_is_checked_before_the_table(tmp_path, refused):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "mine")
    write_run(tmp_path / "other", "quickstart:soft")
    for plot in ("chart.xyz", "nowhere/chart.png", "mine"):
        # Before the runs are looked at: with --run they would be trained.
        line = refused("sweep", f"--table={tmp_path / 'absent'}", f"--plot={tmp_path / plot}")
        assert str(tmp_path / plot) in line
    result = {"method": "soft", "best_step": 1, "held_out": {"loss": 1.0}}
    (tmp_path / "other/result.json").write_text(json.dumps(result))
    assert "no score in common" in refused(
        "sweep", f"--table={tmp_path}", f"--plot={tmp_path / 'chart.png'}"
    )


def test_the_best_runs_of_a_row_are_added(tmp_path, capsys):
    """Where a row has more runs than that."""
    for seed in range(4):
        write_run(tmp_path / f"mine-{seed}", seed=seed, dev=seed / 10, test=seed / 20)
    write_run(tmp_path / "other", "quickstart:soft")
    _, rows = rows_of(capsys, f"--table={tmp_path}", "--best=3")
    assert rows.keys() == {"prefix", "soft", "prefix, best 3 on dev"}
    assert rows["prefix, best 3 on dev"][1] == "3, 2, 1"
    assert rows["prefix, best 3 on dev"][6].startswith("0.100 ±")
    assert rows_of(capsys, f"--table={tmp_path}", "--best=4")[1].keys() == {"prefix", "soft"}


def test_a_searched_learning_rate_is_chosen_on_dev(tmp_path, capsys):
    for seed, (low, high) in {0: (0.6, 0.8), 1: (0.9, 0.7), 2: (0.5, 0.6)}.items():
        for lr, dev in ((0.01, low), (0.02, high)):
            folder = tmp_path / f"seed={seed},lr={lr}"
            write_run(folder, seed=seed, data__seed=seed + 10, optim__lr=lr, dev=dev, test=dev / 2)
    grid = load_config("quickstart", [("runs.seeds", "0,1,2"), ("runs.lr", "0.01,0.02")]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(grid))
    _, rows = rows_of(capsys, "--table", str(tmp_path))
    assert list(rows) == ["prefix optim.lr=0.01", "prefix optim.lr=0.02", "prefix best on dev"]
    assert rows["prefix optim.lr=0.01"][:3] == ["3", "0/10, 1/11, 2/12", "0.01"]
    best = rows["prefix best on dev"]
    assert best[:3] == ["3", "0/10, 1/11, 2/12", "0.02 (2), 0.01 (1)"]
    assert best[6].startswith(f"{np.mean([0.4, 0.45, 0.3]):.3f} ±")


def test_a_searched_batch_size_is_chosen_on_dev(tmp_path, capsys):
    """LM-BFF's grid is over both: the four runs of a split are one search."""
    for seed, devs in {13: (0.6, 0.8, 0.7, 0.5), 21: (0.4, 0.5, 0.3, 0.6)}.items():
        for number, dev in enumerate(devs):
            point = dict(optim__lr=(1e-5, 5e-5)[number % 2], data__batch=(2, 8)[number // 2])
            write_run(
                tmp_path / f"{seed}-{number}", "dart/lm_bff:sst2", dev=dev, test=dev - 0.1,
                data__seed=seed, **point,
            )  # fmt: skip
    _, rows = rows_of(capsys, f"--table={tmp_path}")
    assert len(rows) == 4 + 1
    (best,) = (row for name, row in rows.items() if name.endswith("best on dev"))
    assert best[0] == "2" and best[6] == "0.600 ± 0.100"


def test_folds_share_a_row_and_choose_together(tmp_path, capsys):
    for seed in (0, 1):
        for lr, devs in ((0.01, (0.9, 0.3)), (0.02, (0.6, 0.8))):
            for fold, dev in enumerate(devs):
                write_run(
                    tmp_path / f"{seed}-{lr}-{fold}", data__seed=seed, optim__lr=lr, dev=dev,
                    data__protocol="kfold", data__protocol__fold=fold, test=dev,
                )  # fmt: skip
    _, rows = rows_of(capsys, f"--table={tmp_path}")
    assert list(rows) == ["prefix optim.lr=0.01", "prefix optim.lr=0.02", "prefix best on dev"]
    assert rows["prefix optim.lr=0.01"][:3] == ["4", "0/0, 0/1", "0.01"]
    assert rows["prefix best on dev"][:3] == ["4", "0/0, 0/1", "0.02"]
    assert rows["prefix best on dev"][5] == "0.700 ± 0.100"


def test_a_sweep_of_a_papers_config_by_its_folder(tmp_path, capsys):
    for task, metric in (("rte", "accuracy"), ("cb", "macro_f1")):
        for method in ("pt", "ppt"):
            config = f"ppt/t5_small:{task},{method}"
            write_run(tmp_path / f"{task}-{method}", config, metric=metric, seed=10)
    heads, rows = rows_of(capsys, f"--table={tmp_path}")
    assert heads[6:8] == ["dev", "test"]  # of several metrics
    assert len(rows) == 4 and all("task.name=" in row for row in rows)
    assert [row[6] for name, row in rows.items() if "=cb" in name] == ["0.500 macro_f1"] * 2


def test_a_folder_without_results(tmp_path, refused):
    assert f"{tmp_path} contains no finished run" in refused("sweep", f"--table={tmp_path}")


@pytest.mark.parametrize("command", ["evaluate", "export", "predict"])
def test_a_folder_of_several_runs_says_which(command, tmp_path, refused):
    folder = tmp_path / "cell"
    for seed in (1, 2):
        write_run(folder / f"seed={seed}", seed=seed)
    words = [command, f"--workdir={folder}"] + ["--text=x"] * (command == "predict")
    expected = f"several runs: seed=1, seed=2; choose one, e.g. --workdir={folder}/seed=1"
    assert expected in refused(*words)
    grid = load_config("quickstart", [("runs.seeds", "1,2")]).to_dict()
    (folder / "config.json").write_text(json.dumps(grid))
    assert expected in refused(*words)
    if command != "predict":
        assert expected in refused(*words, "--config=quickstart")


def test_a_finished_run_needs_no_config(run, capsys, refused, tmp_path):
    place, config = f"--workdir={run}", f"--config={run / 'config.json'}"
    expected = jaxprompt(capsys, "evaluate", place, config)
    assert expected[0] == 0
    assert jaxprompt(capsys, "evaluate", place)[:2] == expected[:2]
    succeed(capsys, "export", place, f"--output={tmp_path / 'out'}")
    assert (tmp_path / "out" / "prompt.json").exists()
    line = refused("export", f"--workdir={tmp_path / 'none'}")
    assert "none/config.json does not exist; give the --workdir of a run, or --config" in line
    assert "--config is missing" in refused("evaluate")


def test_version_touches_no_device():
    code = "import sys\nfrom jaxprompt.__main__ import main\nassert main(['--version']) == 0\n"
    code += "assert 'jax' not in sys.modules"
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert actual.returncode == 0, actual.stderr
    import jax

    assert actual.stdout == f"jaxprompt {__version__}, jax {jax.__version__}\n"


def test_help_lists_the_commands_in_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = jaxprompt(capsys, "--help")
    lines = out.splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 60 and "other" not in lines
    names = [line.split()[0] for line in lines if line[:2] == "  " and line[2] != " "]
    assert sorted(names) == sorted(commands())


def test_every_flag_of_a_command_has_a_help_text():
    files = set(Path(cli.__file__).parent.glob("*.py")) - {Path(completion.__file__)}
    calls = [x for file in files for x in ast.walk(ast.parse(file.read_text()))]
    flags = [x for x in calls if getattr(getattr(x, "func", None), "attr", "") == "add_argument"]
    assert len(flags) > 60
    assert [x.args[0].value for x in flags if "help" not in {y.arg for y in x.keywords}] == []


def test_help_lists_flags_and_blocks_then_the_fields_of_a_block(capsys, monkeypatch, refused):
    """What the list shows of a field tests/config checks."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        jaxprompt(capsys, "train", "--help")
    flags, _, blocks = capsys.readouterr().out.partition("config fields")
    assert "--coordinator" in flags and "--debug" in flags
    assert {line[2:].split(" ")[0] for line in blocks.splitlines()} >= {"optim", "prompt", "data"}
    with pytest.raises(SystemExit):
        jaxprompt(capsys, "train", "--help=optim")
    fields = capsys.readouterr().out
    assert "  optim.lr = 0.01" in fields and "optim.schedule.warmup_steps = 0" in fields
    assert "train." not in fields and max(map(len, fields.splitlines())) <= 100
    assert "--help='optm' is unknown; nearest: optim" in refused("train", "--help=optm")
    with pytest.raises(SystemExit):
        jaxprompt(capsys, "train", "--help=all")
    fields = capsys.readouterr().out
    lines = re.findall("^  ([a-z].*?) = ", fields, re.M)
    named = tuple(f"{block}." for block in NAMED)  # blocks whose fields are of what they name
    names = [name for name in lines if not name.startswith(named)]
    assert sorted(names) == sorted(
        x for x in load_config("base").leaves() if not x.startswith(named)
    )
    assert "optim.lr = 0.01 number, at least 0; learning rate" in " ".join(fields.split())
    with pytest.raises(SystemExit):
        jaxprompt(capsys, "evaluate", "--help")
    assert "optim.lr =" not in capsys.readouterr().out
