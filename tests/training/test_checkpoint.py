"""Checkpoints come back bit for bit, and survive kills, full disks and damage."""

import asyncio
import errno
import functools
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
from refusing import refuse_line

from jaxprompt.errors import InputError
from jaxprompt.files import folder_checksums
from jaxprompt.training import checkpoint, checkpoint_folders
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_writer import CheckpointWriter

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
    with CheckpointWriter(folder, step - 1) as writer:
        writer.save(step, position, state=state)


def names(folder):
    """Lists what lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


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


def test_only_large_arrays_are_divided_among_the_devices_that_write(tmp_path, monkeypatch):
    """A slice is a program to compile, and small arrays would need hundreds."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    divided, slice_in_dim = [], jax.lax.slice_in_dim

    def spy(array, *args, **kwargs):
        divided.append(array.shape)
        return slice_in_dim(array, *args, **kwargs)

    monkeypatch.setattr(jax.lax, "slice_in_dim", spy)
    small, large = (8, 4), (8 * checkpoint.MIN_SLICE_BYTES // 4,)
    tree = {
        name: jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), replicated)
        for name, shape in (("small", small), ("large", large))
    }
    save(tmp_path, 1, tree, {})
    assert divided == [large] * jax.device_count()
    restored, _ = Checkpoints(tmp_path).restore(tree)
    assert_same(restored, tree)
    assert restored["large"].sharding == replicated


def test_any_kept_step_is_restored(tmp_path):
    """Its state, or its trained parameters without the optimizer's."""
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None and checkpoints.steps() == []
    with CheckpointWriter(tmp_path, -1, keep=3) as writer:
        for step in (2, 5, 9, 10, 100):
            state = make_state(seed=step)
            best = state.trainable if step in (5, 10) else None
            writer.save(step, {"best": {"step": step}}, state=state, best=best)
    assert checkpoints.latest() == 100
    assert checkpoints.steps() == [5, 9, 10, 100]  # 5 is the best of its time of step 9
    for step in checkpoints.steps():
        trainable = checkpoints.restore_trainable(make_state().trainable, step)
        assert_same(trainable, make_state(seed=step).trainable)
    state, position = checkpoints.restore(make_state(), 10)
    assert_same(state, make_state(seed=10))
    assert position == {"best": {"step": 10}}
    for read in (checkpoints.restore, checkpoints.restore_trainable):
        with pytest.raises(InputError, match=r"no checkpoint of step 3 .*saved: \[5, 9, 10, 100\]"):
            read(make_state().trainable, 3)
    with pytest.raises(InputError, match="a different model or optimizer: trainable/prompt/table"):
        checkpoints.restore_trainable(make_state(width=8).trainable, 9)


def test_a_step_is_saved_once(tmp_path):
    with CheckpointWriter(tmp_path, -1) as writer:
        writer.save(3, {"at": 1}, state=make_state(seed=1))
        with pytest.raises(ValueError, match="step 3 already exists"):
            writer.save(3, {"at": 2}, state=make_state(seed=2))
    assert Checkpoints(tmp_path).restore(make_state())[1] == {"at": 1}


def test_best_of_every_kept_step_stays(tmp_path):
    checkpoints, folder, bests = Checkpoints(tmp_path), tmp_path / "checkpoints", (1, 2, 5, 7, 8)
    assert checkpoints.best() is None
    with CheckpointWriter(tmp_path, -1, keep=2) as writer:
        for step in range(1, 10):
            state = make_state(seed=step)
            best = state.trainable if step in bests else None
            whole = state if step not in (7, 8) else None  # whose best alone is saved
            writer.save(step, {"best": {"dev": step}}, state=whole, best=best)
            writer.wait_for_saves()
            if step == 5:  # resumed from step 4, the best is that of step 2
                assert names(folder) == ["2", "4", "5"]
            if step in (7, 8):  # of a state to come
                assert names(folder) == ["5", "6", str(step)]
                assert checkpoints.latest() == 6 and checkpoints.best() == step
    assert names(folder) == ["5", "6", "8", "9"]
    trainable, info = checkpoints.restore_best(make_state().trainable)
    assert_same(trainable, make_state(seed=8).trainable)
    assert info == {"dev": 8} and checkpoints.best() == 8
    # A run with fewer checkpoints removes at its start what it does not need.
    with CheckpointWriter(tmp_path, 9, keep=1):
        assert names(folder) == ["8", "9"]


def test_what_was_saved_later_and_what_kills_left_is_removed_at_the_start(tmp_path):
    checkpoints, root = Checkpoints(tmp_path), tmp_path / "checkpoints"
    with CheckpointWriter(tmp_path, -1, keep=3) as writer:
        for step in (1, 2, 3, 4):
            state = make_state()
            best = state.trainable if step in (1, 4) else None
            writer.save(step, {}, state=state if step < 4 else None, best=best)
    left = ["5.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-12", "0.shared-x"]
    others = ["12.bak", "1.copy", "notes.txt", "2.orbax.mine", "best"]
    for name in (*left, *others):
        (root / name / "state").mkdir(parents=True)
    assert checkpoints.latest() == 3 and checkpoints.best() == 4
    with CheckpointWriter(tmp_path, 2, keep=3):
        assert names(root) == sorted(["1", "2", *others])
    with CheckpointWriter(tmp_path, -1):
        assert checkpoints.latest() is None and checkpoints.best() is None


def test_holds_three_numbers_for_each_trained_one(tmp_path):
    state = make_state(18432)  # P-tuning v2 at BERT-base shape, P = 20
    numbers = sum(x.size for x in jax.tree.leaves(state.trainable))
    save(tmp_path, 1, state, POSITION)
    files = [p for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()]
    size = sum(file.stat().st_size for file in files)
    assert 0.85 * 3 * 4 * numbers < size < 3 * 4 * numbers + 12_000
    assert len(files) < 50  # 15 to 25, by how orbax's writers meet


KILLED = """
import functools
import sys
sys.path.insert(0, {repo!r})
import jax.numpy as jnp
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_writer import CheckpointWriter

def tree(step):
    return {{"prompt": jnp.arange(5000.0) + step, "step": jnp.int32(step)}}

checkpoints = Checkpoints({workdir!r})
step = 0
if checkpoints.latest() is not None:
    step = checkpoints.latest()
    state, position = checkpoints.restore(tree(0))
    assert position["step"] == int(state["step"]) == step, (position, step)
    assert (state["prompt"] == tree(step)["prompt"]).all()
    best = position["best"]["step"]
    assert int(checkpoints.restore_best(tree(0), best)[0]["step"]) == best
writer = CheckpointWriter({workdir!r}, step)
print(step, flush=True)
while True:
    step += 1
    position = {{"step": step, "best": {{"step": step // 3 * 3}}}}
    best = tree(step) if step % 3 == 0 else None
    state = tree(step) if step % 6 else None
    report = functools.partial(print, step if state else step - 1, flush=True)
    writer.save(step, position, state=state, best=best, on_complete=report)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path):
    script = KILLED.format(repo=str(Path(__file__).parents[2]), workdir=str(tmp_path))
    delays = random.Random(0)
    done = 0
    for _ in range(2):
        run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        started = int(run.stdout.readline())
        assert started >= done  # it went on from what was known to be saved, or later
        said = [int(run.stdout.readline()) for _ in range(3)]  # it saves, however slow the machine
        time.sleep(0.2 * delays.random())
        run.send_signal(signal.SIGKILL)
        rest = run.communicate()[0].splitlines(keepends=True)
        done = max(said + [int(line) for line in rest if "\n" in line])
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() >= done >= 6
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
    state = {f"table{i}": jax.random.normal(jax.random.key(i), (20, 6144)) for i in range(3)}
    writer = CheckpointWriter(tmp_path, -1, keep=1)
    writer.save(1, {"at": 1}, state=state)
    writer.wait_for_saves()
    if where == "inside orbax":
        monkeypatch.setattr(
            "jaxprompt.training.checkpoint_writer._check_disk_space", lambda *_: None
        )
    if where == "at the seal":
        monkeypatch.setattr("jaxprompt.training.checkpoint_folders.folder_checksums", fill)
    else:
        file_size_limit()
    save = functools.partial(writer.save, 2, {"at": 2}, state=state)
    if where != "before":  # in the background
        save(on_complete=lambda: pytest.fail("it is not complete"))
    line = refuse_line(save if where == "before" else writer.wait_for_saves)
    reason = errno.ENOSPC if where == "at the seal" else errno.EFBIG
    assert "checkpoints/2" in line and os.strerror(reason) in line
    assert capfd.readouterr().err == ""  # orbax logs tracebacks of its threads
    writer.wait_for_saves()  # it is raised once
    monkeypatch.undo()
    assert names(tmp_path / "checkpoints") == ["1"]
    restored, position = Checkpoints(tmp_path).restore(state)
    assert_same(restored, state)
    assert position == {"at": 1}


def test_the_disk_is_checked_for_the_blocks_of_all_files(tmp_path, monkeypatch):
    """Files and folders of a step take whole blocks, most of them one."""
    sizes = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _file, _start, size: sizes.append(size))
    state = {f"head/{i}": jnp.arange(3.0) + i for i in range(3)}
    with CheckpointWriter(tmp_path, -1) as writer:
        writer.save(1, {"at": 1}, state=state, best=state)
    paths = list((tmp_path / "checkpoints/1").rglob("*"))
    blocks = sum(-(-path.stat().st_size // 4096) if path.is_file() else 1 for path in paths)
    assert sizes[0] >= 4096 * (blocks + 1)


@pytest.fixture
def blocked(monkeypatch):
    """Lets no checkpoint become complete before an event is set."""
    sums, event = folder_checksums, threading.Event()

    def late(path):
        assert event.wait(60)
        return sums(path)

    monkeypatch.setattr(checkpoint_folders, "folder_checksums", late)
    yield event
    event.set()


def test_a_save_goes_on_in_the_background(tmp_path, blocked):
    checkpoints, messages, position = Checkpoints(tmp_path), [], {"best": {"step": 3}}
    with CheckpointWriter(tmp_path, -1) as writer:
        state = make_state(seed=3)
        writer.save(3, position, state=state, on_complete=lambda: messages.append(3))
        position["best"]["step"] = 4
        assert not messages and checkpoints.latest() is None
        blocked.set()
        writer.wait_for_saves()
        assert checkpoints.latest() == 3 and messages == [3]
    state, actual = checkpoints.restore(make_state())
    assert_same(state, make_state(seed=3))
    assert actual == {"best": {"step": 3}}


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
    state = step(make())
    with CheckpointWriter(tmp_path, -1) as writer:
        writer.save(1, {}, state=state)
        for _ in range(5):
            state = step(state)
        jax.block_until_ready(state)
        assert not (tmp_path / "checkpoints/1").exists()
        stepped.set()
    assert_same(Checkpoints(tmp_path).restore(make())[0], step(make()))
    assert_same(state, jax.tree.map(lambda x: x + 6, make()))


def test_a_block_that_fails_waits_for_its_saves_and_keeps_its_error(tmp_path, monkeypatch, blocked):
    state = make_state()
    with pytest.raises(KeyError) as error, CheckpointWriter(tmp_path, -1) as writer:
        writer.save(1, {}, state=state)
        threading.Timer(0.2, blocked.set).start()
        raise KeyError("its own")
    assert (tmp_path / "checkpoints/1").exists() and not hasattr(error.value, "__notes__")
    monkeypatch.setattr(checkpoint_folders, "folder_checksums", fill)
    with pytest.raises(KeyError) as error, CheckpointWriter(tmp_path, 1) as writer:
        writer.save(2, {}, state=state)
        raise KeyError("its own")
    (note,) = error.value.__notes__
    assert "cannot write" in note and "checkpoints/2: No space left" in note
    full = pytest.raises(InputError, match="checkpoints/3: No space left")
    with full, CheckpointWriter(tmp_path, 1) as writer:
        writer.save(3, {}, state=state)
    assert names(tmp_path / "checkpoints") == ["1"]


def test_damage_to_any_file_is_found(tmp_path):
    state = make_state()
    checkpoints = Checkpoints(tmp_path)
    with CheckpointWriter(tmp_path, -1) as writer:
        writer.save(1, {"at": 1}, state=state)
        writer.save(2, {"at": 2, "best": {}}, state=state, best=state.trainable)
    folder = tmp_path / "checkpoints/2"
    whole = shutil.copytree(folder, tmp_path / "whole")
    files = {p.relative_to(whole) for p in whole.rglob("*") if p.is_file()}
    # Orbax's notes, by which nothing is restored.
    files -= {Path("_CHECKPOINT_METADATA"), Path("commit_success.txt")}
    reads = {
        "state": lambda: checkpoints.restore(state),
        "best": lambda: checkpoints.restore_best(state.trainable),
    }
    for file in sorted(files):
        data = (whole / file).read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        for damaged in (None, b"", data[:middle], flipped):
            if damaged is None:
                (folder / file).unlink()
            else:
                (folder / file).write_bytes(damaged)
            errors = {}
            for item, read in reads.items():
                try:
                    read()
                except InputError as error:
                    errors[item] = str(error)
            # Where a checksum has another bit, the file that it is of is damaged.
            damaged_items = {file.parts[0]} & set(reads) or set(reads)
            assert set(errors) == damaged_items or (file.name == "checksums.json" and errors), file
            for item, message in errors.items():
                assert "checkpoints/2 is damaged" in message and "\n" not in message
                assert ("checkpoints/2 to resume from step 1" in message) == (item == "state")
            (folder / file).write_bytes(data)
    sums = (folder / "checksums.json").read_bytes()
    for text in ("[]", "7", "null", '{"state/_METADATA": []}'):
        (folder / "checksums.json").write_text(text)
        assert "checkpoints/2 is damaged" in refuse_line(checkpoints.restore, state)
    (folder / "checksums.json").write_bytes(sums)
    assert checkpoints.restore(state)[1] == {"at": 2, "best": {}}
    shutil.rmtree(folder)
    assert checkpoints.restore(state)[1] == {"at": 1}


@pytest.mark.parametrize(
    "file, text",
    [
        ("best/_METADATA", "{}"),
        ("best/_METADATA", "[]"),
        ("best/manifest.ocdbt", "{}"),
        ("position/metadata", "{"),
        ("position/metadata", "{}"),
        ("position/metadata", "[]"),
    ],
)
def test_files_that_orbax_cannot_read_are_refused(tmp_path, file, text):
    """Though their checksums are right, e.g. those of another version."""
    best = {"table": jnp.arange(6.0)}
    with CheckpointWriter(tmp_path, -1) as writer:
        writer.save(1, {"best": {"step": 1}}, state=best, best=best)
    path = tmp_path / "checkpoints/1"
    (path / file).write_text(text)
    checkpoint_folders.write_checksums(path)
    for step in (1, None):
        line = refuse_line(Checkpoints(tmp_path).restore_best, best, step)
        assert f"checkpoint {path} cannot be read" in line


def test_foreign_checkpoints_are_refused(tmp_path):
    state = make_state()
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(InputError, match="no checkpoint in .*train first"):
        checkpoints.restore(state)
    (tmp_path / "checkpoints/00007/state").mkdir(parents=True)  # no name that a run gives
    (tmp_path / "checkpoints/6/best").mkdir(parents=True)
    again = f"delete {tmp_path} to train again"
    for read, name in (
        (lambda: checkpoints.restore(state, 6), "step 6"),
        (lambda: checkpoints.restore_best({}, 6), "checkpoints/6"),
        (lambda: checkpoints.restore_best({}, 4), "step 4"),
    ):
        line = refuse_line(read)
        assert name in line and line.endswith(again)

    save(tmp_path, 1, state, {})
    line = refuse_line(checkpoints.restore, make_state(65))
    assert "opt_state/0/mu/prompt/table (saved 'float32[20, 64]', now 'float32[20, 65]')" in line
    with pytest.raises(InputError, match="saved 'float32.*now 'bfloat16"):
        checkpoints.restore(make_state(dtype=jnp.bfloat16))
    renamed = State(state.step, {"prompt/other": state.step}, ())
    with pytest.raises(InputError, match="to a different model or optimizer"):
        checkpoints.restore(renamed)


def test_the_best_that_is_asked_for(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with CheckpointWriter(tmp_path, -1) as writer:
        for step, width in ((2, 3), (5, 4)):
            best = {"prompt/table": jnp.ones((2, width))}
            state = best if step == 2 else None
            writer.save(step, {"best": {"step": step}}, state=state, best=best)
    template = {"prompt/table": jnp.ones((2, 3))}
    assert checkpoints.restore_best(template, 2)[1] == {"step": 2}
    # One who reads beside the run asks for the best of a moment ago.
    wider = {"prompt/table": jnp.ones((2, 4))}
    for requested in (2, 3, 5):
        assert checkpoints.restore_best(wider, requested, or_newer=True)[1] == {"step": 5}
    assert checkpoints.find_best() == checkpoints.find_best(5) == 5
    shutil.rmtree(tmp_path / "checkpoints/5")
    with pytest.raises(InputError, match=r"no best parameters of step 5 .*saved: \[2\]"):
        checkpoints.find_best(5)


def test_a_step_that_a_training_removes_while_it_is_read_is_no_error(tmp_path, monkeypatch):
    """The newest is read then."""
    with CheckpointWriter(tmp_path, -1, keep=1) as writer:
        writer.save(1, {"best": {"step": 1}}, state=make_state(seed=1), best=make_state().trainable)
        writer.wait_for_saves()
        restore = checkpoint._restore

        def late(path, *args, **kwargs):
            if path.name == "1":
                best = make_state(seed=2).trainable
                writer.save(2, {"best": {"step": 2}}, state=make_state(seed=2), best=best)
                writer.wait_for_saves()
            return restore(path, *args, **kwargs)

        monkeypatch.setattr(checkpoint, "_restore", late)
        trainable, info = Checkpoints(tmp_path).restore_best(make_state().trainable)
        assert info == {"step": 2}
        assert_same(trainable, make_state(seed=2).trainable)
        shutil.rmtree(tmp_path / "checkpoints/2/best")
        with pytest.raises(InputError, match="no checkpoint in"):
            Checkpoints(tmp_path).restore_best(make_state().trainable)
