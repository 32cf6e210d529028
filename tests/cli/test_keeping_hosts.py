"""Several processes cache the states of frozen layers, each of its rows: the run is the same."""

import json
from pathlib import Path

import numpy as np
import pytest
from processes import Processes
from test_keeping import COMMON, UPPER, losses, start
from tiny_run import WIDTH, make_backbone, make_config, timeless

pytestmark = pytest.mark.long

STILL = COMMON | dict(
    prompt__dropout=0, head__dropout=0, data__multiple=4, data__batch=8, data__eval_batch=16,
    train__total_steps=8, train__eval_steps=4,
)  # fmt: skip
UPPER = UPPER | dict(prompt__dropout=0)
CASES = {  # family, method, fields; processes, devices of each, data x model
    "data": ("bert", "prefix", UPPER | dict(cache__location="disk"), (2, 2, (2, 2))),
    "left": (
        "gpt2", "prefix", UPPER | dict(cache__location="host", data__padding_side="left"),
        (2, 1, (2, 1)),
    ),
    "four": (
        "bert", "prefix", UPPER | dict(cache__location="disk", cache__dtype="bfloat16"),
        (4, 1, (2, 2)),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(backbone, tmp_path_factory):
    gpt2 = make_backbone(tmp_path_factory.mktemp("gpt2") / "gpt2", "gpt2")
    return {"gpt2": gpt2, "bert": backbone}


def train(folder: Path, c, number: int, devices: int) -> tuple[dict, list[float], str]:
    """Trains on several processes. Returns the result, the losses and the log of process 0."""
    folder.mkdir(exist_ok=True)
    path = folder / "c.json"
    path.write_text(c.to_json())
    words = ["-m", "jaxprompt", "train", f"--config={path}", f"--workdir={folder / 'run'}"]
    with Processes(folder / "logs", devices=devices) as processes:
        processes.start_all(number, words) if number > 1 else processes.start(words)
        assert processes.wait(300) == [0] * number, processes.told()
        log = processes.err(0)
        assert all(processes.err(i) == "" for i in range(1, number))
    result = json.loads((folder / "run/result.json").read_text())
    return timeless(result), losses(folder / "run"), log


@pytest.mark.parametrize("case", CASES)
def test_several_processes_keep_as_one(case, folders, data, tmp_path):
    family, method, fields, (number, devices, mesh) = CASES[case]
    fields = STILL | fields | dict(mesh__data=mesh[0], mesh__model=mesh[1])
    args = (folders[family], data, method)
    result, cached, log = train(tmp_path / "all", make_config(*args, **fields), number, devices)
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
        assert not size_alone % WIDTH


def test_states_are_read_again_and_those_of_other_processes_are_not(folders, data, tmp_path):
    fields = STILL | UPPER | dict(
        cache__location="disk", cache__folder=tmp_path / "kept", mesh__data=2, mesh__model=1,
        train__total_steps=2, train__eval_steps=2,
    )  # fmt: skip
    args = (folders["bert"], data, "prefix")
    expected, one = start(tmp_path / "one", *args, **fields)
    c = make_config(*args, **fields)
    result, cached, log = train(tmp_path / "two", c, 2, 1)
    assert "earlier" not in log
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "kept").glob("*-of-2.states")}
    assert len(times) == 4
    again, again_losses, log = train(tmp_path / "again", c, 2, 1)
    assert "(2 reused from an earlier run)" in log
    assert times == {p: p.stat().st_mtime_ns for p in times}
    assert result == expected == again
    np.testing.assert_allclose([cached, again_losses], [one, one], rtol=1e-6)
    # One process lacks its rows of dev: all compute that split, and no other, anew.
    (tmp_path / "kept/dev-1-of-2.json").unlink()
    _, again_losses, log = train(tmp_path / "third", c, 2, 1)
    assert "(1 reused from an earlier run)" in log
    np.testing.assert_allclose(again_losses, cached, rtol=1e-6)
    changed = {p.name for p, time in times.items() if p.stat().st_mtime_ns != time}
    assert changed == {"dev-0-of-2.states", "dev-1-of-2.states"}
