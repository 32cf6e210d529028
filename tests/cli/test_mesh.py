"""The commands on a mesh: the same run on other devices, and what a mesh cannot take."""

import json

import numpy as np
import pytest
from spoil import BASE
from tiny_run import DROPS, flags, jaxprompt, make_config, read_lines, tiny_fields

from jaxprompt.parallel import compilation
from jaxprompt.runs.train import train_prompt
from jaxprompt.training import one_run

# Dev's rows do not fill its batches; dropout is on: its masks are the same on every mesh.
COMMON = dict(data__eval_batch=16, train__log_steps=1, **DROPS)
MESHES = {
    "prefix": dict(mesh__data=4, mesh__model=2),
    "soft": dict(mesh__data=4, mesh__model=2, mesh__fsdp=True),
    "full": dict(mesh__data=8, mesh__fsdp=True),
}


def start(folder, backbone, data, method, **changes):
    """Runs a few steps. Returns the config, the result and the losses."""
    more = {} if method == "full" else {"arguments": dict(length=4)}
    c = make_config(backbone, data, method, **COMMON, **more, **changes)
    result = train_prompt(c, str(folder)).to_json()
    lines = read_lines(folder / "metrics.jsonl")
    return c, result, [line["loss"] for line in lines if "loss" in line]


@pytest.mark.long
@pytest.mark.parametrize("method", MESHES)
def test_a_run_on_eight_devices_is_that_on_one(method, dropping, data, tmp_path, monkeypatch):
    steps, jit = [], compilation.jit
    remember = lambda *args, **kwargs: steps.append(jit(*args, **kwargs)) or steps[-1]
    monkeypatch.setattr(one_run, "jit", remember)
    names = ("trained", "total", "steps", "best_step", "dev", "test")
    _, one, expected = start(tmp_path / "one", dropping, data, method)
    _, eight, losses = start(tmp_path / "eight", dropping, data, method, **MESHES[method])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert {name: eight[name] for name in names} == {name: one[name] for name in names}
    assert [step._cache_size() for step in steps] == [1, 1]


@pytest.mark.long
def test_evaluate_export_and_predict_take_any_mesh(dropping, data, tmp_path, capsys):
    c, result, _ = start(tmp_path / "run", dropping, data, "soft", **MESHES["soft"])
    path = tmp_path / "c.json"
    path.write_text(c.to_json())
    where = (f"--config={path}", f"--workdir={tmp_path / 'run'}")
    for mesh in ("4", "1"):
        words = (f"--config.mesh.model={2 if mesh == '4' else 1}", f"--config.mesh.data={mesh}")
        code, out, _ = jaxprompt(capsys, "evaluate", *where, "--split=test", *words)
        assert code == 0
        assert {k: v for k, v in json.loads(out).items() if k in result["test"]} == result["test"]
    assert jaxprompt(capsys, "export", *where)[0] == 0
    answers = []
    for mesh in ("1x1", "2x2"):
        words = ("--text", "a b", "--text", "c", "--batch=4", f"--mesh={mesh}")
        code, out, err = jaxprompt(capsys, "predict", where[1], *words)
        assert code == 0, err
        answers.append([json.loads(line)["scores"] for line in out.splitlines()])
    for one, other in zip(*answers, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mesh.data": 3}, "mesh.data=3 x mesh.model=1 does not divide the 8 devices"),
        ({"mesh.model": 0}, "mesh.model=0 must be at least 1"),
        ({"mesh.slices": 0}, "mesh.slices=0 must be at least 1"),
        ({"mesh.data": 8, "data.batch": 12},
         "data.batch=12 is not divisible by mesh.data=8; use a multiple of 8, or mesh.data=4"),
        ({"mesh.data": 4, "data.batch": 24, "optim.accumulate": 4},
         "data.batch=24 / optim.accumulate=4 is not divisible by mesh.data=4"),
        ({"mesh.data": 8, "data.eval_batch": 4},
         "data.eval_batch=4 is not divisible by mesh.data=8; use a multiple of 8"),
        ({"mesh.model": 4}, "mesh.model=4 does not divide the 2 of backbone/layers/attention"),
        ({"coordinator": "127.0.0.1:1"}, "--processes"),
    ],
)  # fmt: skip
def test_what_a_mesh_cannot_take(changes, words, refused, backbone, data, tmp_path):
    fields = tiny_fields(backbone, data) | {k: v for k, v in changes.items() if "." in k}
    more = [f"--{name}={value}" for name, value in changes.items() if "." not in name]
    line = refused(
        "train", f"--config={BASE}", f"--workdir={tmp_path / 'new'}", *flags(fields), *more
    )
    assert words in line
    assert not (tmp_path / "new" / "config.json").exists()


@pytest.mark.parametrize(
    "mesh, words",
    [("2", "--mesh='2' must be DATAxMODEL"), ("4x1", "--batch=6 must be a multiple of 4"),
     ("16x1", "does not divide the 8 devices")],
)  # fmt: skip
def test_predict_refuses_a_mesh_that_does_not_fit(mesh, words, refused, run):
    assert words in refused(
        "predict", f"--workdir={run}", "--text=a", f"--mesh={mesh}", "--batch=6"
    )
