"""config.runs of `pretrain`: each run is as if it had been alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from spoil import BASE
from test_resume import arrays
from test_runs import results
from tiny_adapt import losses, scores
from tiny_pretrain import kill, stop, words_of
from tiny_run import flags, jaxprompt, read_lines, timeless, tiny_fields

STEPS, SCORED = 6, 2
KILLED = 5  # SIGKILL and then SIGTERM after this step; what is saved is of SCORED before
# Tasks with other label words, other decoders, other rows and other held-out examples.
GRID = dict(
    runs__tasks="nsp,nss", runs__seeds="1,2", runs__size=4, data__max_len=100,
    train__total_steps=STEPS, train__eval_steps=SCORED,
)  # fmt: skip
NAMES = [f"task={task},seed={seed}" for task in ("nsp", "nss") for seed in (1, 2)]
ALONE = {
    f"runs__{axis}": "()" for axis in ("tasks", "seeds", "lr", "weight_decay", "prompt_starts")
}
ALONE["runs__size"] = 0
SAME = ("task", "method", "seed", "trained", "total", "steps", "skipped", "best_step")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Writes the command of a case's grid in a folder, some fields changed."""
    stores = tmp_path_factory.mktemp("stores")

    def write(workdir: Path, name: str = "nsp-t5", **changes: object) -> list[str]:
        fields = GRID | {"corpus__store": stores / name} | changes
        return words_of(tmp_path_factory, name, workdir, **fields)

    return write


@pytest.fixture(scope="module")
def grid(command, tmp_path_factory):
    """The folder of a grid that nothing disturbs."""
    from jaxprompt.__main__ import main

    folder = tmp_path_factory.mktemp("whole") / "grid"
    assert main(command(folder)) == 0
    return folder


def compare(together: Path, alone: Path) -> None:
    """Compares a run of a grid with the same run alone."""
    found, right = (json.loads((f / "result.json").read_text()) for f in (together, alone))
    assert {n: found[n] for n in SAME} == {n: right[n] for n in SAME}
    assert found["held_out"] == pytest.approx(right["held_out"], rel=1e-3)
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-3)
    assert scores(together) == [pytest.approx(own, rel=1e-3) for own in scores(alone)]
    for file in ("config.json", "record.json"):
        given, expected = (json.loads((f / file).read_text()) for f in (together, alone))
        assert given == expected
    lines, others = (read_lines(f / "metrics.jsonl") for f in (together, alone))
    for own, other in zip(lines, others, strict=True):
        assert own.keys() == other.keys() and own["time"].keys() == other["time"].keys()
        if "scores" in own:
            assert own["scores"] == pytest.approx(other["scores"], rel=1e-3)


@pytest.mark.long
def test_every_run_is_as_if_alone(command, grid, tmp_path, capsys):
    own = dict(ppt__task="nss", seed=1, **ALONE)
    code, _, err = jaxprompt(capsys, *command(tmp_path / "alone", **own))
    assert code == 0, err
    compare(grid / "task=nss,seed=1", tmp_path / "alone")


@pytest.mark.long
def test_a_table_and_exports(command, grid, capsys):
    code, out, err = jaxprompt(capsys, *command(grid))  # again: nothing is left to do
    assert code == 0 and "at once" not in err
    held_out, lines = {n: x["held_out"] for n, x in results(grid).items()}, out.splitlines()
    assert list(sorted(held_out)) == NAMES
    header = (
        "| method | runs | seeds | learning rate | trained | share | accuracy | loss | seconds |"
    )
    assert lines[0] == header
    for line, task in zip(lines[2:], ("nsp", "nss"), strict=True):
        pair = [held_out[f"task={task},seed={seed}"] for seed in (1, 2)]
        shown = [
            f"{np.mean(x):.3f} ± {np.std(x):.3f}"
            for x in ([scores[name] for scores in pair] for name in ("accuracy", "loss"))
        ]
        cells = line.split(" | ")
        assert cells[:3] == [f"| task={task}", "2", "1, 2"] and cells[6:8] == shown
        folder = grid / f"task={task},seed=2"
        assert jaxprompt(capsys, "export", f"--workdir={folder}")[0] == 0
        card = json.loads((folder / "export/prompt.json").read_text())
        about = card["pretrained"]
        assert (about["task"], about.get("options")) == (task, [6, 6] if task == "nss" else None)
        assert about["held_out"] == held_out[folder.name] == card["metrics"]["held_out"]


@pytest.mark.long
def test_killed_and_stopped_it_ends_with_the_same_bits(command, grid, tmp_path, capsys):
    folder = tmp_path / "grid"
    words = command(folder)
    kill(words, tmp_path / "logs", "taken", KILLED)
    code, out, err = stop(words, KILLED, capsys)
    assert code == 0 and out == "" and f"resumed at step {KILLED - 1}" in err
    assert f"stopped by SIGTERM at step {KILLED}" in err and not results(folder)
    code, _, err = jaxprompt(capsys, *words)
    assert code == 0 and f"4 runs at once, {STEPS} steps, resumed at step {KILLED}" in err
    for name in NAMES:
        assert timeless(results(folder)[name]) == timeless(results(grid)[name])
        lines, right = (read_lines(f / name / "metrics.jsonl") for f in (folder, grid))
        assert list(map(timeless, lines)) == list(map(timeless, right))
        numbers, others = (arrays(f / name, "best")[0] for f in (folder, grid))
        for leaf in others:
            assert numbers[leaf].tobytes() == others[leaf].tobytes()


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"runs__words": "'a,b,c','d,e,f'"}, "config.runs.words is for tuning, pre"),
        ({"runs__prompt_starts": "normal,task"}, "prompt.start=task uses words of training"),
        ({"runs__tasks": "nsp,nsq"}, "runs.tasks='nsq' is unknown; nearest: "),
        ({"runs__tasks": "nsp,cls"}, "ppt.annotations is empty; cls needs the folder that"),
    ],
)  # fmt: skip
def test_a_grid_that_is_wrong(changes, line, refused, command, tmp_path):
    assert line in refused(*command(tmp_path / "new", **changes))
    assert not (tmp_path / "new/config.json").exists()


def test_train_has_no_tasks(refused, data, backbone, tmp_path):
    words = flags(tiny_fields(backbone, data) | {"runs.tasks": "nsp,nss"})
    line = refused("train", f"--config={BASE}", f"--workdir={tmp_path / 'new'}", *words)
    assert line.startswith("ppt.task=nsp pre-trains a prompt, which is only valid with")
