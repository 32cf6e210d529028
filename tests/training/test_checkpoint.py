"""Checkpoints come back bit for bit, and survive kills, full disks and damage."""

import asyncio
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from orbax.checkpoint._src.serialization import serialization

from jaxprompt.errors import InputError
from jaxprompt.files import folder_checksums
from jaxprompt.training import checkpoint, checkpoint_folders
from jaxprompt.training.checkpoint import Checkpoints

POSITION = {"epoch": 2, "iterator": {"next_index": 17, "state": "a\nb"}, "best": 0.1 + 0.2}


class State(NamedTuple):
    step: Any
    trainable: Any
    opt_state: Any


def make_state(width=64, seed=0, dtype=jnp.float32):
    """A state of `20 * width + 3` trained numbers whose every leaf is random."""
    trainable = {
        "prompt/table": jnp.zeros((20, width), dtype),
        "head/bias": jnp.zeros(3, jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32),
    }
    state = State(jnp.int32(7), trainable, optax.adamw(0.1).init(trainable))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 50).astype(x.dtype), state)


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save(folder, step, state, position):
    """Saves a step to the end."""
    with (checkpoints := Checkpoints(folder)).settling():
        checkpoints.save(step, state, position)


def one_line(error):
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_restores_bit_for_bit(tmp_path, dtype):
    state = make_state(dtype=dtype)
    special = jnp.asarray([jnp.nan, jnp.inf, -0.0, 1e-40], dtype)
    table = state.trainable["prompt/table"].at[0, :4].set(special)
    state.trainable["prompt/table"] = table
    save(tmp_path, 7, state, POSITION)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    for template in (state, shapes):
        restored, position = Checkpoints(tmp_path).restore(template)
        assert_same(restored, state)
        assert position == POSITION


def test_sharded_leaf_is_read_into_its_sharding(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    table = jax.device_put(jnp.arange(16.0).reshape(8, 2), sharding)
    save(tmp_path, 1, {"table": table}, {})
    restored, _ = Checkpoints(tmp_path).restore({"table": table})
    assert restored["table"].sharding == sharding
    assert_same(restored, {"table": table})


def test_only_large_arrays_are_divided_among_the_devices_that_write(tmp_path, monkeypatch):
    """A slice is a program to compile, and small arrays would need hundreds."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    divided, slice_in_dim = [], jax.lax.slice_in_dim

    def spy(array, *args, **kwargs):
        divided.append(array.shape)
        return slice_in_dim(array, *args, **kwargs)

    monkeypatch.setattr(jax.lax, "slice_in_dim", spy)
    small, large = (8, 4), (8 * checkpoint.MIN_PART // 4,)
    tree = {
        name: jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), replicated)
        for name, shape in (("small", small), ("large", large))
    }
    save(tmp_path, 1, tree, {})
    assert divided == [large] * jax.device_count()
    restored, _ = Checkpoints(tmp_path).restore(tree)
    assert_same(restored, tree)
    assert restored["large"].sharding == replicated


def test_keeps_the_newest_and_restores_any_kept_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (2, 9, 10, 100):
        checkpoints.save(step, make_state(seed=step), {"at": step})
    assert checkpoints.latest() == 100
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "100"]
    state, position = checkpoints.restore(make_state(), 10)
    assert_same(state, make_state(seed=10))
    assert position == {"at": 10}
    with pytest.raises(InputError, match=r"no checkpoint of step 9 .*steps there: 10, 100"):
        checkpoints.restore(make_state(), 9)


def test_trained_numbers_of_any_kept_step_are_read_without_the_optimizers(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4, 6, 8):
        state = make_state(seed=step)
        if step in (2, 6):
            checkpoints.save_best(step, state.trainable, {"step": step})
        checkpoints.save(step, state, {})
    assert checkpoints.steps() == [2, 4, 6, 8]  # 2 is the best of its time of step 4
    for step in checkpoints.steps():
        found = checkpoints.restore_trainable(make_state().trainable, step)
        assert_same(found, make_state(seed=step).trainable)
    with pytest.raises(InputError, match="no checkpoint of step 3"):
        checkpoints.restore_trainable(make_state().trainable, 3)
    with pytest.raises(InputError, match="another model or optimizer: trainable/prompt/table"):
        checkpoints.restore_trainable(make_state(width=8).trainable, 4)
    assert Checkpoints(tmp_path / "none").steps() == []


def test_saving_a_step_again_leaves_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, make_state(seed=1), {"at": 1})
    checkpoints.save(3, make_state(seed=2), {"at": 2})
    assert checkpoints.restore(make_state())[1] == {"at": 1}


def test_best_of_every_kept_step_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.best() is None
    for step in range(1, 7):
        if step in (1, 2, 5):
            best = make_state(seed=step).trainable
            checkpoints.save_best(step, best, {"dev": step / 10})
        checkpoints.save(step, make_state(seed=step), {})
        checkpoints.settle()
        if step == 5:
            # Resumed from step 4, the best is that of step 2.
            names = sorted(p.name for p in (tmp_path / "checkpoints/best").iterdir())
            assert names == ["2", "5"]
    assert [p.name for p in (tmp_path / "checkpoints/best").iterdir()] == ["5"]
    trainable, info = checkpoints.restore_best(make_state().trainable)
    assert_same(trainable, make_state(seed=5).trainable)
    assert info == {"dev": 0.5}
    assert checkpoints.best() == 5


def test_rewind_forgets_later_steps_and_leftovers(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save_best(1, make_state().trainable, {"dev": 0.1})
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(), {})
    checkpoints.save_best(3, make_state().trainable, {"dev": 0.3})
    root = tmp_path / "checkpoints"
    for name in ("4.partial", "4.partial.orbax-checkpoint-tmp", "best/2.removed"):
        (root / name / "state").mkdir(parents=True)
    (root / "notes").mkdir()
    assert checkpoints.latest() == 3
    checkpoints.rewind(2)
    assert sorted(p.name for p in root.iterdir()) == ["1", "2", "best", "notes"]
    assert [p.name for p in (root / "best").iterdir()] == ["1"]
    checkpoints.rewind(-1)
    assert checkpoints.latest() is None and checkpoints.best() is None


@pytest.mark.parametrize("width", [64, 18432])  # 18432: P-tuning v2 at BERT-base shape, P = 20
def test_holds_three_numbers_for_each_trained_one(tmp_path, width):
    state = make_state(width)
    numbers = sum(x.size for x in jax.tree.leaves(state.trainable))
    save(tmp_path, 1, state, POSITION)
    size = Checkpoints(tmp_path).bytes()
    assert 0.85 * 3 * 4 * numbers < size < 3 * 4 * numbers + 12_000
    files = [p for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()]
    assert len(files) < 50  # 15 to 25, by how orbax's writers meet


KILLED = """
import functools
import sys
sys.path.insert(0, {repo!r})
import jax.numpy as jnp
from jaxprompt.training.checkpoint import Checkpoints

def tree(step):
    return {{"prompt": jnp.arange(5000.0) + step, "step": jnp.int32(step)}}

checkpoints = Checkpoints({workdir!r})
step = 0
if checkpoints.latest() is not None:
    step = checkpoints.latest()
    state, position = checkpoints.restore(tree(0))
    assert position == {{"step": step}} and int(state["step"]) == step, (position, step)
    assert (state["prompt"] == tree(step)["prompt"]).all()
    checkpoints.rewind(step)
print(step, flush=True)
while True:
    step += 1
    if step % 3 == 0:
        checkpoints.save_best(step, tree(step), {{"step": step}})
    told = functools.partial(print, step, flush=True)
    checkpoints.save(step, tree(step), {{"step": step}}, told)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path):
    script = KILLED.format(repo=str(Path(__file__).parents[2]), workdir=str(tmp_path))
    delays = random.Random(0)
    done = 0
    for _ in range(4):
        run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        started = int(run.stdout.readline())
        assert started >= done  # it went on from what was known to be saved, or later
        said = [int(run.stdout.readline()) for _ in range(3)]  # it saves, however slow the machine
        time.sleep(0.2 * delays.random())
        run.send_signal(signal.SIGKILL)
        rest = run.communicate()[0].splitlines(keepends=True)
        done = max(said + [int(line) for line in rest if "\n" in line])
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() >= done >= 12
    template = {"prompt": jnp.zeros(5000), "step": jnp.int32(0)}
    trainable, info = checkpoints.restore_best(template)
    assert int(trainable["step"]) == info["step"] == checkpoints.best()


def fill(*_):
    """Stands for a disk that is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def file_size_limit():
    """Lets no file grow past 20,000 bytes: writes fail as on a full disk, for root too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("where", ["before", "inside orbax", "at the seal"])
def test_a_write_that_fails_leaves_the_earlier_checkpoint(
    tmp_path, monkeypatch, file_size_limit, where, capfd
):
    # One array: of several that fail at once, orbax leaves tasks behind that warn later.
    state = {"table": jax.random.normal(jax.random.key(0), (20, 18432))}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"at": 1})
    checkpoints.settle()
    if where == "inside orbax":
        monkeypatch.setattr("jaxprompt.training.checkpoint._check_room", lambda folder, tree: None)
    if where == "at the seal":
        monkeypatch.setattr("jaxprompt.training.checkpoint_folders.folder_checksums", fill)
    else:
        file_size_limit()
    if where != "before":  # in the background
        checkpoints.save(2, state, {"at": 2}, lambda: pytest.fail("it is not complete"))
    with pytest.raises(InputError, match="cannot write .*checkpoints/2") as error:
        checkpoints.save(2, state, {"at": 2}) if where == "before" else checkpoints.settle()
    reason = errno.ENOSPC if where == "at the seal" else errno.EFBIG
    assert os.strerror(reason) in one_line(error)
    assert capfd.readouterr().err == ""  # orbax logs tracebacks of its threads
    checkpoints.settle()  # it is raised once
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
    restored, position = checkpoints.restore(state)
    assert_same(restored, state)
    assert position == {"at": 1}


@pytest.fixture
def held(monkeypatch):
    """Lets no checkpoint become complete before an event is set."""
    sums, event = folder_checksums, threading.Event()

    def late(path):
        assert event.wait(60)
        return sums(path)

    monkeypatch.setattr(checkpoint_folders, "folder_checksums", late)
    yield event
    event.set()


def test_a_save_goes_on_in_the_background(tmp_path, held):
    checkpoints, told = Checkpoints(tmp_path), []
    position = {"best": {"step": 3}}
    checkpoints.save(3, make_state(seed=3), position, lambda: told.append(3))
    position["best"]["step"] = 4
    assert not told and not (tmp_path / "checkpoints/3").exists()
    held.set()
    assert checkpoints.latest() == 3 and told == [3]  # a reader waits
    state, found = checkpoints.restore(make_state())
    assert_same(state, make_state(seed=3))
    assert found == {"best": {"step": 3}}


def test_what_is_saved_is_the_state_of_its_step(tmp_path, monkeypatch):
    """Though its buffers are donated to steps that end before any of it is written."""
    write, stepped = serialization.async_serialize_from_host, threading.Event()

    async def write_late(*args, **kwargs):
        assert await asyncio.to_thread(stepped.wait, 60)
        return await write(*args, **kwargs)

    monkeypatch.setattr(serialization, "async_serialize_from_host", write_late)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = {"whole": jax.sharding.PartitionSpec(), "cut": jax.sharding.PartitionSpec("data")}
    where = {name: jax.sharding.NamedSharding(mesh, spec) for name, spec in specs.items()}
    make = lambda: jax.device_put(dict.fromkeys(where, jnp.arange(4096.0).reshape(64, 64)), where)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    checkpoints, state = Checkpoints(tmp_path), step(make())
    checkpoints.save(1, state, {})
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    assert not (tmp_path / "checkpoints/1").exists()
    stepped.set()
    assert_same(checkpoints.restore(make())[0], step(make()))
    assert_same(state, jax.tree.map(lambda x: x + 6, make()))


def test_a_state_is_complete_after_its_best_and_not_without_it(tmp_path, monkeypatch, held):
    state, order, seal = make_state(), [], checkpoint_folders.seal

    def sealed(path):
        seal(path)
        order.append(path.relative_to(tmp_path / "checkpoints").as_posix())

    monkeypatch.setattr(checkpoint, "seal", sealed)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_best(1, state.trainable, {})
    checkpoints.save(1, state, {})  # both are under way
    assert not order
    held.set()
    checkpoints.save(2, state, {})
    checkpoints.settle()
    assert order == ["best/1", "1", "2"]

    def refuse_best(path):
        return fill() if path.parent.name == "best" else {}

    monkeypatch.setattr(checkpoint_folders, "folder_checksums", refuse_best)
    checkpoints.save_best(3, state.trainable, {})
    checkpoints.save(3, state, {})
    with pytest.raises(InputError, match="cannot write .*checkpoints/best/3: No space left"):
        checkpoints.save(4, state, {})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2", "best"]
    assert [path.name for path in (tmp_path / "checkpoints/best").iterdir()] == ["1"]


def test_a_block_that_fails_waits_for_its_saves_and_keeps_its_error(tmp_path, monkeypatch, held):
    state, checkpoints = make_state(), Checkpoints(tmp_path)
    with pytest.raises(KeyError) as error, checkpoints.settling():
        checkpoints.save(1, state, {})
        threading.Timer(0.2, held.set).start()
        raise KeyError("its own")
    assert (tmp_path / "checkpoints/1").exists() and not hasattr(error.value, "__notes__")
    monkeypatch.setattr(checkpoint_folders, "folder_checksums", fill)
    with pytest.raises(KeyError) as error, checkpoints.settling():
        checkpoints.save(2, state, {})
        raise KeyError("its own")
    (note,) = error.value.__notes__
    assert "cannot write" in note and "checkpoints/2: No space left" in note
    with pytest.raises(InputError, match="checkpoints/3: No space left"), checkpoints.settling():
        checkpoints.save(3, state, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_damage_to_any_file_is_found(tmp_path):
    state = make_state()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"at": 1})
    checkpoints.save(2, state, {"at": 2})
    checkpoints.settle()
    folder = tmp_path / "checkpoints/2"
    whole = shutil.copytree(folder, tmp_path / "whole")
    for file in sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file()):
        data = (whole / file).read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        for damaged in (None, b"", data[:middle], flipped):
            if damaged is None:
                (folder / file).unlink()
            else:
                (folder / file).write_bytes(damaged)
            with pytest.raises(InputError, match="checkpoints/2 is damaged") as error:
                checkpoints.restore(state)
            assert "delete it to go on from step 1" in one_line(error)
            (folder / file).write_bytes(data)
    assert checkpoints.restore(state)[1] == {"at": 2}
    shutil.rmtree(folder)
    assert checkpoints.restore(state)[1] == {"at": 1}


def test_foreign_checkpoints_are_refused(tmp_path):
    state = make_state()
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(InputError, match="no checkpoint in .*train first"):
        checkpoints.restore(state)
    (tmp_path / "checkpoints/5").mkdir(parents=True)
    again = f"delete {tmp_path} to train from the start"
    with pytest.raises(InputError, match=f"damaged or foreign .*; {again}") as error:
        checkpoints.restore(state)
    one_line(error)
    (tmp_path / "checkpoints/00007").mkdir()  # no name that a run gives
    with pytest.raises(InputError, match="checkpoints/5 is damaged"):
        checkpoints.restore(state)
    (tmp_path / "checkpoints/best/6").mkdir(parents=True)
    with pytest.raises(InputError, match=f"best/6 is damaged or foreign .*; {again}"):
        checkpoints.restore_best({}, 6)
    with pytest.raises(InputError, match=f"no checkpoint of step 4 in .*best .*; {again}"):
        checkpoints.restore_best({}, 4)
    (tmp_path / "checkpoints/best/6").rmdir()
    checkpoints.rewind(-1)

    checkpoints.save(1, state, {})
    bigger = r"opt_state/0/mu/prompt/table \(saved float32\[20, 64\], wanted float32\[20, 65\]\)"
    with pytest.raises(InputError, match=bigger) as error:
        checkpoints.restore(make_state(65))
    assert "and 2 more" in one_line(error) and "another workdir" in one_line(error)
    with pytest.raises(InputError, match="saved float32.*wanted bfloat16"):
        checkpoints.restore(make_state(dtype=jnp.bfloat16))
    renamed = State(state.step, {"prompt/other": state.step}, ())
    with pytest.raises(InputError, match="of another model or optimizer"):
        checkpoints.restore(renamed)
    with pytest.raises(InputError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot write .*file"):
        save(tmp_path / "file", 1, make_state(), {})


def test_only_what_saving_leaves_behind_is_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(), {})
    folder = tmp_path / "checkpoints"
    own = ["12.bak", "1.copy", "notes.txt", "2.removed.mine"]
    left = ["3.partial", "3.partial.orbax-checkpoint-tmp", "1.removed"]
    for name in (*own, *left):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    checkpoints.rewind(1)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["1", *own])


def test_the_best_that_is_asked_for(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step, width in ((2, 3), (5, 4)):
        checkpoints.save_best(step, {"prompt/table": jnp.ones((2, width))}, {"step": step})
    template = {"prompt/table": jnp.ones((2, 3))}
    assert checkpoints.restore_best(template, 2)[1] == {"step": 2}
    # One who reads beside the run asks for the best of a moment ago.
    wider = {"prompt/table": jnp.ones((2, 4))}
    for asked in (2, 3, 5):
        assert checkpoints.restore_best(wider, asked, or_newer=True)[1] == {"step": 5}
    shutil.rmtree(tmp_path / "checkpoints/best/5")
    with pytest.raises(InputError, match="no checkpoint of step 5 .*steps there: 2"):
        checkpoints.check_best(5)
