"""Several processes, and several devices of one, train as one device does."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from processes import Processes, free_port
from safetensors.numpy import load_file
from spoil import BASE
from test_resume import assert_same_end
from tiny_run import (
    DROPS,
    flags,
    jaxprompt,
    losses,
    make_config,
    read_lines,
    sentences,
    succeed,
    tiny_fields,
    write_rows,
)

from jaxprompt.parallel import compilation
from jaxprompt.runs.train import train_prompt
from jaxprompt.training import one_run
from jaxprompt.training.checkpoint import Checkpoints

STEPS = 8
SCRIPT = Path(__file__).with_name("watched.py")
MESHES = {2: (2, 2), 4: (4, 1)}  # processes -> data x model, on four devices


@pytest.fixture(scope="module")
def config(dropping, data, tmp_path_factory):
    """Eight steps, grouped, with dropout. Some hosts hold none of dev's one short batch."""
    config = make_config(
        dropping, data, "prefix", train__total_steps=STEPS, train__eval_steps=2,
        train__log_steps=1, optim__lr=1e-2, data__batch=4, **DROPS,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(config.to_json())
    return path


@pytest.fixture(scope="module")
def train(config, tmp_path_factory):
    """Trains in `workdir` until every process has ended. -> Processes

    (signal, step, who): that process sends itself the signal; killed, the others are ended too.
    """
    logs = tmp_path_factory.mktemp("logs")

    def call(workdir: Path, number: int, mesh, devices: int, ends=(0, -1, -1)) -> Processes:
        log = logs / f"{len(list(logs.iterdir()))}"
        words = [SCRIPT, log, *map(int, ends), "train", f"--config={config}"]
        words += [f"--workdir={workdir}", *mesh_flags(mesh)]
        with Processes(log, devices=devices) as processes:
            processes.start_all(number, words) if number > 1 else processes.start(words)
            if ends[0] == signal.SIGKILL:
                assert processes.all[ends[2]].wait(120) == -signal.SIGKILL
            else:
                assert processes.wait() == [0] * number, processes.told()
        processes.batches = [
            [set(line) - {-1} for line in read_lines(path)]
            for path in sorted(log.glob("batches-*.jsonl"))
        ]
        return processes

    return call


def mesh_flags(mesh) -> list[str]:
    return [f"--config.mesh.data={mesh[0]}", f"--config.mesh.model={mesh[1]}"]


@pytest.fixture(scope="module", params=MESHES)
def whole(request, train, tmp_path_factory):
    """A run of several processes that nothing disturbs: (number, workdir, Processes)."""
    n = request.param
    workdir = tmp_path_factory.mktemp("whole") / str(n)
    return n, workdir, train(workdir, n, MESHES[n], 4 // n)


def measured(workdir: Path) -> list:
    """Lists all metrics of dev and test: shares of 30 and 24 rows."""
    dev = [r["dev"] for r in read_lines(workdir / "metrics.jsonl") if "dev" in r]
    return [*dev, json.loads((workdir / "result.json").read_text())["test"]]


@pytest.mark.default_cases("2")
def test_several_processes_train_as_one(whole, train, tmp_path):
    """Each reads its share of the batches, and the first alone writes and prints."""
    n, workdir, processes = whole
    alone, process = tmp_path / "alone", train(tmp_path / "alone", 1, (1, 1), 1)
    assert len(losses(workdir)) == STEPS
    np.testing.assert_allclose(losses(workdir), losses(alone), rtol=1e-5)
    assert measured(workdir) == measured(alone)

    (expected,) = process.batches
    assert len(processes.batches) == n and len(expected) > STEPS
    for call, parts in enumerate(zip(*processes.batches, strict=True)):
        assert sum(map(len, parts)) == len(set().union(*parts)) == len(expected[call])
        assert set().union(*parts) == expected[call]
        if call < 2:  # of train; batches of dev are larger, and leave nothing for the last
            assert [len(part) for part in parts] == [4 // n] * n
    assert not all(map(all, zip(*processes.batches, strict=True)))

    assert json.loads(processes.out(0)) == json.loads((workdir / "result.json").read_text())
    assert "step 8/8" in processes.err(0)
    assert len(read_lines(workdir / "metrics.jsonl")) == STEPS + STEPS // 2
    for i in range(1, n):
        assert processes.out(i) == processes.err(i) == ""
    assert sorted(p.name for p in workdir.iterdir()) == [
        "checkpoints", "config.json", "lock", "metrics.jsonl", "record.json", "result.json"
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("whole", [2], indirect=True)
def test_sigterm_then_sigkill_then_the_same_end(whole, train, tmp_path):
    _, expected, _ = whole
    how, workdir = (2, MESHES[2], 2), tmp_path / "run"
    processes = train(workdir, *how, ends=(signal.SIGTERM, 3, 1))
    step = Checkpoints(workdir).latest()
    assert step in (4, 5) and not (workdir / "result.json").exists()
    said = [f"stopped by SIGTERM at step {step}; " in processes.err(i) for i in range(2)]
    assert said == [True, False] and not processes.out(0) and not processes.out(1)
    stopped = shutil.copytree(workdir, tmp_path / "stopped")
    train(workdir, *how, ends=(signal.SIGKILL, 7, 0))  # the coordinator is lost
    assert Checkpoints(workdir).latest() == 6
    processes = train(workdir, *how)
    assert "resumed at step 6" in processes.err(0)
    assert_same_end(workdir, expected)
    # One process goes on with what two have saved, on other devices.
    train(stopped, 1, (4, 2), 8)
    np.testing.assert_allclose(losses(stopped), losses(expected), rtol=1e-5)
    assert measured(stopped) == measured(expected)


@pytest.mark.long
def test_tasks_that_share_a_prompt_train_on_two_processes_as_on_one(backbone, data, tmp_path):
    """Each process takes its share of the same batches, of the task that is sampled for both."""
    beasts = tmp_path / "rows"
    beasts.mkdir()
    for number, part in enumerate(("train", "dev", "test")):
        rows = [row | {"label": str(row["label"] == "beast")} for row in sentences(number, 18)]
        write_rows(beasts / f"{part}.jsonl", rows)
    sources = {"topics": data, "beasts": beasts}
    for name, source in sources.items():
        fields = {"task.name": "custom", "data.source": str(source)}
        (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    config = make_config(
        backbone, data, "prefix", backbone__dropout=0, prompt__dropout=0, head__dropout=0,
        optim__lr=1e-2, shared__tasks=",".join(str(tmp_path / f"{name}.json") for name in sources),
        train__total_steps=6, train__eval_steps=3, train__log_steps=1, data__batch=8,
    )  # fmt: skip
    (tmp_path / "c.json").write_text(config.to_json())
    for number in (1, 2):
        words = ["-m", "jaxprompt", "train", f"--config={tmp_path / 'c.json'}"]
        words += [f"--workdir={tmp_path / str(number)}", *mesh_flags((number, 1))]
        with Processes(tmp_path / f"logs{number}", devices=1) as processes:
            processes.start_all(2, words) if number == 2 else processes.start(words)
            assert processes.wait() == [0] * number, processes.told()
    alone, both = (tmp_path / str(number) for number in (1, 2))
    assert len(losses(both)) == 6
    np.testing.assert_allclose(losses(both), losses(alone), rtol=1e-5)
    expected, scores = measured(alone), measured(both)
    assert "beasts/accuracy" in scores[0] and scores == [pytest.approx(x) for x in expected]
    for name in sources:
        one, two = (load_file(at / f"export/{name}/prompt.safetensors") for at in (alone, both))
        assert one.keys() == two.keys() and "head/main/out/kernel" in one
        for part in one:
            np.testing.assert_allclose(two[part], one[part], rtol=1e-4, atol=1e-6)


def test_a_silent_coordinator_is_named(refused, backbone, data, tmp_path):
    at = f"127.0.0.1:{free_port()}"
    words = ["train", f"--config={BASE}", f"--workdir={tmp_path / 'run'}"]
    words += [f"--coordinator={at}", "--processes=2", "--timeout=0.3"]
    words += flags(tiny_fields(backbone, data))
    assert refused(*words, "--process=1").startswith(f"--coordinator={at} does not answer")
    assert refused(*words, "--process=0").startswith("process 1 of 2 did not connect to 127.0.0.1")


# -- the commands on a mesh -----------------------------------------------------------------------

# Dev's rows do not fill its batches; dropout is on: its masks are the same on every mesh.
COMMON = dict(data__eval_batch=16, train__log_steps=1, **DROPS)
MESH_OF = {
    "prefix": dict(mesh__data=4, mesh__model=2),
    "soft": dict(mesh__data=4, mesh__model=2, mesh__fsdp=True),
    "full": dict(mesh__data=8, mesh__fsdp=True),
}


def start(folder, backbone, data, method, **changes):
    """Runs a few steps. Returns the config, the result and the losses."""
    more = {} if method == "full" else {"arguments": dict(length=4)}
    config = make_config(backbone, data, method, **COMMON, **more, **changes)
    result = train_prompt(config, str(folder)).to_json()
    return config, result, losses(folder)


@pytest.mark.long
@pytest.mark.parametrize("method", MESH_OF)
def test_a_run_on_eight_devices_is_that_on_one(method, dropping, data, tmp_path, monkeypatch):
    steps, jit = [], compilation.jit
    remember = lambda *args, **kwargs: steps.append(jit(*args, **kwargs)) or steps[-1]
    monkeypatch.setattr(one_run, "jit", remember)
    names = ("trained", "total", "steps", "best_step", "dev", "test")
    _, one, expected = start(tmp_path / "one", dropping, data, method)
    _, eight, spread = start(tmp_path / "eight", dropping, data, method, **MESH_OF[method])
    np.testing.assert_allclose(spread, expected, rtol=1e-5)
    assert {name: eight[name] for name in names} == {name: one[name] for name in names}
    assert [step._cache_size() for step in steps] == [1, 1]


@pytest.mark.long
def test_evaluate_export_and_predict_take_any_mesh(dropping, data, tmp_path, capsys):
    config, result, _ = start(tmp_path / "run", dropping, data, "soft", **MESH_OF["soft"])
    path = tmp_path / "c.json"
    path.write_text(config.to_json())
    where = (f"--config={path}", f"--workdir={tmp_path / 'run'}")
    for mesh in ("4", "1"):
        words = (f"--config.mesh.model={2 if mesh == '4' else 1}", f"--config.mesh.data={mesh}")
        out, _ = succeed(capsys, "evaluate", *where, "--split=test", *words)
        assert {k: v for k, v in json.loads(out).items() if k in result["test"]} == result["test"]
    assert jaxprompt(capsys, "export", *where)[0] == 0
    answers = []
    for mesh in ("1x1", "2x2"):
        words = ("--text", "a b", "--text", "c", "--batch=4", f"--mesh={mesh}")
        out, _ = succeed(capsys, "predict", where[1], *words)
        answers.append([json.loads(line)["scores"] for line in out.splitlines()])
    for one, other in zip(*answers, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mesh.data": 3}, "mesh.data=3 x mesh.model=1 does not divide the 8 devices"),
        ({"mesh.model": -2}, "mesh.model=-2 does not divide the 8 devices"),
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
    [("2", "--mesh='2' must be DATAxMODEL"), ("9" * 5000 + "x1", "must be DATAxMODEL"),
     ("4x1", "--batch=6 must be a multiple of 4"), ("16x1", "does not divide the 8 devices")],
)  # fmt: skip
def test_predict_refuses_a_mesh_that_does_not_fit(mesh, words, refused, run):
    line = refused("predict", f"--workdir={run}", "--text=a", f"--mesh={mesh}", "--batch=6")
    assert words in line
