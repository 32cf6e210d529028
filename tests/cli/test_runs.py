"""config.runs through the command line: each run is as if it had been alone."""

import json
import re

import numpy as np
import pytest
from test_resume import arrays
from tiny_run import (
    DROPS,
    jaxprompt,
    losses,
    make_backbone,
    make_config,
    read_lines,
    sentences,
    succeed,
    timeless,
    write_rows,
)

from jaxprompt.build.method import get_method
from jaxprompt.cli.results import train_grid
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError
from jaxprompt.runs.grid import batched_runs
from jaxprompt.runs.grid.batched_runs import BatchedRuns
from jaxprompt.runs.grid.expand import list_runs
from jaxprompt.runs.train import train_prompt

SHORT = dict(train__total_steps=6, train__eval_steps=2, train__log_steps=1)
GRID = dict(runs__seeds="1,2", runs__lr="1e-2,3e-2", runs__size=4)
NAMES = [f"seed={seed},lr={rate}" for seed in (1, 2) for rate in (0.01, 0.03)]
WORDS = {"head.name": "verbalizer", "task.words": "beast,food,tool"}
SAME = ("method", "seed", "trained", "total", "steps", "skipped", "best_step", "dev", "test")


def write(config, folder):
    """Writes a config. -> the flags of a run of it in `folder`"""
    path = folder / "grid.json"
    path.write_text(config.to_json())
    return f"--config={path}", f"--workdir={folder / 'grid'}"


def results(folder):
    return {p.parent.name: json.loads(p.read_text()) for p in folder.glob("*/result.json")}


def compare(config, folder, name=""):
    """Does the runs of a grid in `folder` alone too, or that of a name, and compares."""
    for run in list_runs(config, str(folder.parent / "alone")):
        if name not in ("", run.name):
            continue
        expected = train_prompt(run.config, str(run.folder)).to_json()
        together = folder / run.name
        document = json.loads((together / "result.json").read_text())
        assert {n: document[n] for n in SAME} == {n: expected[n] for n in SAME}, run.name
        np.testing.assert_allclose(losses(together), losses(run.folder), rtol=1e-3)
        grid_config, right = (
            json.loads((f / "config.json").read_text()) for f in (together, run.folder)
        )
        assert grid_config == right


@pytest.fixture(scope="module")
def config(dropping, data):
    return make_config(dropping, data, "prefix", **SHORT, **GRID, **DROPS, data__multiple=4)


@pytest.fixture(scope="module")
def grid(config, tmp_path_factory):
    """The folder of a grid that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "grid"
    assert train_grid(config, str(folder)) == 0
    return folder


def test_every_run_is_as_if_alone(config, grid):
    """With AdamW and every kind of dropout, though batches are filled up to those of others."""
    compare(config, grid, NAMES[1])


def test_a_table_and_the_best_rate_of_each_seed(config, grid, capsys):
    assert train_grid(config, str(grid)) == 0  # again: nothing is left to do
    out, err = capsys.readouterr()
    assert "at once" not in err
    actual = results(grid)
    assert list(sorted(actual)) == NAMES
    best = [max(NAMES[i : i + 2], key=lambda n: actual[n]["dev"]["accuracy"]) for i in (0, 2)]
    tests = [actual[name]["test"]["accuracy"] for name in best]
    row = out.splitlines()[-1]
    assert row.split()[:7] == ["|", "best", "on", "dev", "|", "2", "|"]
    assert f"{np.mean(tests):.3f} ± {np.std(tests):.3f}" in row
    rows = [line.split()[1:4] for line in out.splitlines()[2:4]]
    assert rows == [["lr=0.01", "|", "2"], ["lr=0.03", "|", "2"]]
    for name in NAMES:  # each logs its own learning rate
        lines = [x for x in read_lines(grid / name / "metrics.jsonl") if "loss" in x]
        rate = float(name.partition("lr=")[2])
        expected = [rate * (1 - (x["step"] - 1) / config.train.total_steps) for x in lines]
        assert [x["lr"] for x in lines] == pytest.approx(expected, rel=1e-5) and lines


def test_a_finished_grid_is_of_its_data_alone(config, grid):
    """Nothing is read of it any more, so that other data would pass for these."""
    other = config
    other = other.replace({"data.source": "elsewhere"})
    with pytest.raises(InputError, match="a run with a different config: data.source"):
        train_grid(other, str(grid))


def test_the_folder_of_a_run_serves_every_verb(grid, capsys):
    folder = grid / NAMES[1]
    place = (f"--config={folder / 'config.json'}", f"--workdir={folder}")
    code, out, err = jaxprompt(capsys, "evaluate", *place, "--split=test")
    expected = results(grid)[NAMES[1]]["test"]
    assert code == 0 and json.loads(out)["accuracy"] == expected["accuracy"], err
    assert jaxprompt(capsys, "export", *place)[0] == 0
    assert jaxprompt(capsys, "predict", place[1], "--text=a cat")[0] == 0
    _, err = succeed(capsys, "train", *place)
    assert "already trained" in err


class Cut(Exception):
    """Ends a group as a kill would."""


@pytest.mark.long
def test_a_group_that_is_killed_resumes_bit_for_bit(config, grid, tmp_path, monkeypatch, capsys):
    folder, live = tmp_path / "grid", BatchedRuns.live

    def cut(self, *args, **kwargs):
        if self.step == 3:
            raise Cut
        return live(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(BatchedRuns, "live", cut)
        train_grid(config, str(folder))
    assert not results(folder)
    assert train_grid(config, str(folder)) == 0
    for name in NAMES:
        assert timeless(results(folder)[name]) == timeless(results(grid)[name])
        lines, expected = (read_lines(f / name / "metrics.jsonl") for f in (folder, grid))
        assert list(map(timeless, lines)) == list(map(timeless, expected))
        params, others = (arrays(f / name, "best")[0] for f in (folder, grid))
        for leaf in others:
            assert params[leaf].tobytes() == others[leaf].tobytes()
    # An evaluation of all runs is one line: the best of them.
    shown = [x for x in capsys.readouterr().err.splitlines() if x.startswith("step ")]
    assert len(shown) == 3
    for step, line in zip((2, 4, 6), shown, strict=True):
        logged = {name: read_lines(grid / name / "metrics.jsonl") for name in NAMES}
        values = {name: [x for x in logged[name] if x["step"] == step] for name in NAMES}
        best = max(NAMES, key=lambda name: values[name][1]["dev"]["accuracy"])
        (train, dev) = values[best]
        scores = f"loss {train['loss']:.4f}  dev accuracy {dev['dev']['accuracy']:.4f}"
        assert line.endswith(f"  {scores}  best of 4 running: {best}")


@pytest.mark.long
def test_finished_runs_leave_and_the_others_go_on(backbone, data, tmp_path, capsys, monkeypatch):
    """A rate of 0 gains nothing, so that its run ends early."""
    monkeypatch.setattr(batched_runs, "MIN_STEPS_SAVED", 0)
    config = make_config(
        backbone, data, "prefix", **SHORT | dict(train__total_steps=8),
        runs__lr="0,1e-2", train__patience=2,
    )  # fmt: skip
    assert train_grid(config, str(tmp_path / "grid")) == 0
    assert "1 of 2 runs continue, 1 at once" in capsys.readouterr().err
    ends = {name: result["steps"] for name, result in results(tmp_path / "grid").items()}
    assert ends == {"lr=0.0": 6, "lr=0.01": 8}
    compare(config, tmp_path / "grid")


@pytest.mark.long
def test_a_run_that_breaks_ends_alone(backbone, data, tmp_path, capsys):
    config = make_config(
        backbone, data, "prefix", **SHORT | {"train__eval_steps": 4}, runs__lr="1e-2,1e38",
        train__max_nonfinite_steps=2, optim__clip=0,
    )  # fmt: skip
    place = write(config, tmp_path)
    for _ in range(2):  # and again: neither is trained another time
        code, out, err = jaxprompt(capsys, "train", *place)
        assert code == 2 and re.search(r"\| lr=0.01 +\| 1 +\|", out)
        assert "1 of 2 runs failed: lr=1e+38" in err.splitlines()[-1]
        assert "lr=1e+38: 2 steps in a row had a non-finite loss" in err
    broken = (tmp_path / "grid" / "lr=1e+38" / "error.txt").read_text()
    assert "2 steps in a row had a non-finite loss" in broken and "lower optim.lr" in broken
    assert list(results(tmp_path / "grid")) == ["lr=0.01"]
    shown = jaxprompt(capsys, "show", tmp_path / "grid" / "lr=1e+38")[1]
    assert "failed, will not be retried by its grid: 2 steps in a row" in shown


@pytest.mark.long
def test_scores_that_are_nan_end_a_run_alone(backbone, data, tmp_path, capsys):
    """argmax of NaN is class 0, which would be an accuracy like any other."""
    fields = dict(runs__lr="1e-2,1e38", optim__clip=0, train__test=True)
    config = make_config(backbone, data, "prefix", **SHORT, **fields)
    place = write(config, tmp_path)
    code, out, err = jaxprompt(capsys, "train", *place)
    assert code == 2 and re.search(r"\| lr=0.01 +\| 1 +\|", out) and "Traceback" not in err
    assert "lr=1e+38: the scores of " in err and "are NaN, first in" in err
    assert list(results(tmp_path / "grid")) == ["lr=0.01"]
    broken = (tmp_path / "grid" / "lr=1e+38" / "error.txt").read_text()
    assert "lower optim.lr" in broken


def rows_file(folder, sizes):
    """Lists train and dev rows for data seeds 0, 1, ... of the given sizes."""
    lines = [
        {"seed": seed, "train": list(range(n)), "dev": list(range(40, 40 + dev))}
        for seed, (n, dev) in enumerate(sizes)
    ]
    return write_rows(folder / "rows.jsonl", lines)


@pytest.mark.long
def test_splits_of_unequal_sizes(backbone, data, tmp_path, capsys):
    """Dev is filled up; another number of steps an epoch is another group."""
    fields = {
        "data.protocol": "listed",
        "data.protocol.rows": rows_file(tmp_path, [(30, 7), (32, 3), (12, 5)]),
        "data.eval_batch": 2, "data.multiple": 2, "runs.data_seeds": "0,1,2", "head.dropout": 0,
        "backbone.dropout": 0, "prompt.dropout": 0,
    }  # fmt: skip
    config = make_config(backbone, data, "prefix", **SHORT, **fields)
    assert train_grid(config, str(tmp_path / "grid")) == 0
    err = capsys.readouterr().err
    assert "one after another: 2 + 1 runs" in err
    for seed, n in enumerate((10, 11, 4)):  # in each run's own draw
        assert f"data_seed={seed}: labels in train: 0 = beast ({n}), 1 = food (" in err
    compare(config, tmp_path / "grid")


@pytest.mark.long
def test_label_words_and_starts_are_values_too(backbone, data, tmp_path, capsys):
    fields = WORDS | {
        "task.template": "{text} about [mask] .", "prompt.text": "good", "backbone.dropout": 0,
        "runs.words": "('beast,food,tool', 'cat,bread,saw', 'cat|dog,rice|bread,saw|nail')",
        "runs.prompt_starts": "text,vocab",
    }  # fmt: skip
    config = make_config(backbone, data, "soft", **SHORT, **fields)
    assert train_grid(config, str(tmp_path / "grid")) == 0
    err = capsys.readouterr().err
    assert "one after another: 4 + 2 runs" in err  # two words a class are other shapes
    assert "start=vocab,words=cat+bread+saw" in results(tmp_path / "grid")
    said = [line for line in err.splitlines() if "labels in train" in line]  # equal in all, so once
    assert said == ["  labels in train: 0 = beast (16), 1 = food (16), 2 = tool (16)"]
    compare(config, tmp_path / "grid")


@pytest.mark.long
def test_free_texts(data, tmp_path):
    """With a part that is drawn from a run's seed and does not train."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for seed, (name, size) in enumerate({"train": 24, "dev": 6, "test": 6}.items()):
        rows = [{"text": r["text"], "answer": r["label"]} for r in sentences(seed, size)]
        write_rows(texts / f"{name}.jsonl", rows)
    fields = {
        "head.name": "text", "task.target": "answer", "data.max_target": 6,
        "generate.max_new_tokens": 5, "data.max_len": 30, "runs.seeds": "1,2",
        "task.template": "{text}", "trainable": "prompt/soft/.*",
    }  # fmt: skip
    parts = {"parts": "prefix(length=2,shift=False)+soft(length=2)"}
    backbone = make_backbone(tmp_path / "t5", "t5")
    config = make_config(backbone, texts, "compose", arguments=parts, **SHORT, **fields)
    assert train_grid(config, str(tmp_path / "grid")) == 0
    compare(config, tmp_path / "grid")


CHUNKS = {
    "config.runs.size=3 allows 3 at once": (3, [3, 1]),
    "on a CPU only runs with the same batches train at once": (0, [2, 2]),
}


@pytest.mark.long
@pytest.mark.parametrize("why", CHUNKS)
def test_chunks(why, config, grid, tmp_path, capsys):
    size, sizes = CHUNKS[why]
    sized = config.replace({"runs.size": size})
    assert train_grid(sized, str(tmp_path / "grid")) == 0
    assert f"4 runs in {len(sizes)} chunks: {why}" in capsys.readouterr().err
    chunks = json.loads((tmp_path / "grid/chunks.json").read_text())["chunks"]
    assert list(map(len, chunks)) == sizes
    expected = results(grid)
    for name, result in results(tmp_path / "grid").items():
        assert {n: result[n] for n in SAME} == {n: expected[name][n] for n in SAME}
        np.testing.assert_allclose(losses(tmp_path / "grid" / name), losses(grid / name), rtol=1e-3)


def test_a_damaged_list_of_chunks_is_told(config, tmp_path):
    for damage in ("{", '{"size": 0}'):
        (tmp_path / "chunks.json").write_text(damage)
        with pytest.raises(InputError, match="chunks.json.*or delete it and run"):
            train_grid(config, str(tmp_path))


def test_the_number_of_a_long_text_is_no_other_run(tmp_path):
    fields = [("prompt.name", "soft"), ("prompt.start", "text")]  # prompt.text is the list's
    texts = ("2", "of more letters than the name of a folder is to have")
    config = load_config("base", [*fields, ("runs.texts", texts)])
    assert [run.name for run in list_runs(config, str(tmp_path))] == ["text=1", "text=2"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"runs.lr": "0.01,1e-2"}, "config.runs has the run lr=0.01 twice"),
        ({"runs.seeds": "1,x"}, "runs.seeds='1,x' must be a list"),
        ({"runs.seeds": "-1"}, "runs.seeds=-1 must be in [0, 2**32)"),
        ({"runs.lr": "-0.1,1"}, "runs.lr=-0.1 must be at least 0"),
        ({"runs.prompt_starts": "vocab"}, "prompt.start='vocab' is unknown; known: normal,"),
        ({"runs.rate": "1"}, "unknown config field 'runs.rate'"),
        (
            {"runs.words": "cat,rice,saw;dog,soup,axe"},
            "config.runs.words has no effect with head.name=linear; use head.name=ver",
        ),
        ({"runs.data_seeds": "1,2"}, "runs.data_seeds: no examples are sampled, so the"),
        ({"runs.seeds": "0,1", "rng": "rbg"}, "rng=rbg: runs of config.runs train as one program"),
        ({"runs.lr": "1,2", "optim.name": "adamx"}, "optim.name='adamx' is unknown"),
    ],
)  # fmt: skip
def test_a_grid_that_is_wrong(changes, words, train):
    assert words in train(**changes)


def test_a_grid_of_which_no_run_can_be_prepared(train, tmp_path):
    line = train(**{"runs.lr": "0.01,0.02", "data.source": str(tmp_path / "nowhere")})
    assert "nowhere does not exist; set data.source" in line


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"runs.words": "cat,rice,saw;dog,soup,axe", "head.name": "verbalizer",
             "task.template": "{text} it [mask] ."},
            "task.words has 1 entries for 3 labels",
        ),
        (
            {"runs.folds": "9", "data.protocol": "kfold"},
            "data.protocol.fold=9 is out of range; folds count from 0 to 3",
        ),
    ],
)  # fmt: skip
def test_a_grid_that_is_refused_leaves_no_folder(changes, words, train, tmp_path):
    assert words in train(**changes)
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    assert words in train(**changes)
    assert list((tmp_path / "new").iterdir()) == []


def test_starts_are_for_a_method_that_has_some(tmp_path):
    config = load_config("base", [("prompt.name", "none"), ("runs.prompt_starts", "zero")])
    with pytest.raises(
        InputError, match=r"config.runs.prompt_starts needs a method with prompt.start"
    ):
        list_runs(config, str(tmp_path))


def test_runs_that_differ_in_a_scale_that_lasts_are_no_one_program(data):
    """IPT makes the rows of words by it in every step; soft tokens only start from it."""

    def values(method, **fields):
        return get_method(make_config("backbone", data, method, **fields)).static_values()

    assert values("ipt", prompt__scale=0.05) != values("ipt", prompt__scale=3.0)
    assert values("soft", prompt__scale=0.05) == values("soft", prompt__scale=3.0)
    parts = [f"ipt(length=2,scale={scale})+soft(length=2)" for scale in (0.05, 3.0)]
    assert len({values("compose", prompt__parts=text) for text in parts}) == 2
