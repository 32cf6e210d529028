"""One of several processes: `python host_job.py JOB FOLDER --coordinator=... ...`.

Prints one JSON object on standard output.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.serialization import serialization

from jaxprompt.errors import InputError
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.training import checkpoint_folders
from jaxprompt.training.checkpoint import Checkpoints, handlers
from jaxprompt.training.checkpoint_writer import CheckpointWriter

SPECS = {
    "whole": P(),
    "by_data": P("data"),
    "by_model": P(None, "model"),
    "both": P("data", "model"),
}


def make_state(placement, seed: int, start: float = 0.0):
    """Divides known numbers over a mesh in every way."""
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(size=(8, 6)).astype(np.float32) + start for name in SPECS}
    shardings = {n: jax.sharding.NamedSharding(placement.mesh, spec) for n, spec in SPECS.items()}
    return {
        name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__)
        for name, x in values.items()
    }


def same(state, other) -> bool:
    """Compares the parts that this process holds, bit for bit."""
    return all(
        a.sharding == b.sharding
        and all(
            np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        )
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True)
    )


def refusal(function, *args) -> str:
    """Returns the InputError's message."""
    try:
        function(*args)
    except InputError as error:
        return str(error)
    return ""


def talk(_folder: Path) -> dict:
    """Gathers texts of unlike lengths and compares facts."""
    number = jax.process_index()
    texts = processes.gather_texts("né" * 40_000 * number)
    processes.check_agreement({"code": "1", "data": "x"})
    facts = {"config": f"v{number // 2}", "a": f"a{number}", "same": "1"}
    differing = refusal(processes.check_agreement, facts)
    absent = refusal(processes.check_agreement, {"dev": "2"} if number else {})
    return {
        "devices": [len(jax.devices()), len(jax.local_devices())],
        "texts": [[len(text), text[-1:]] for text in texts],
        "first": processes.is_first(),
        "differing": differing,
        "absent": absent,
    }


def save(folder: Path) -> dict:
    """Saves, restores, meets a full disk, damage and a folder that is not shared."""
    placement = make_placement(data=-1, model=2)
    first, second = make_state(placement, 1), make_state(placement, 2)
    checkpoints, writer = Checkpoints(folder / "run"), CheckpointWriter(folder / "run", -1, keep=1)
    completed, place = [], folder / "run/checkpoints/1"
    best, position = {"whole": first["whole"]}, {"at": 1, "best": {"value": 1}}
    on_complete = lambda: completed.append(place.exists())
    writer.save(1, position, state=first, best=best, on_complete=on_complete)
    # While they are written, the devices use the buffers of the saved arrays again.
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    moved = advance(first)
    for _ in range(20):
        moved = advance(moved)
    first = make_state(placement, 1)
    writer.wait_for_saves()
    is_first_same = same(checkpoints.restore(first)[0], first)
    writer.save(2, {"at": 2}, state=second)
    writer.wait_for_saves()
    restored, position = checkpoints.restore(first)
    best, info = checkpoints.restore_best({"whole": first["whole"]})
    result = {
        "steps": [checkpoints.latest(), checkpoints.best()],
        "position": [position, info],
        "same": same(restored, second) and same(best["whole"], first["whole"]) and is_first_same,
        "completed": completed,
    }
    # A checkpoint that one process wrote on other devices.
    other, _ = Checkpoints(folder / "one").restore(first)
    result["other_mesh"] = same(other, make_state(placement, 3))

    def full(*_args, **_kwargs):
        raise OSError(28, os.strerror(28))

    def fail_in(owner, name, process):
        """Saves where a part fails on one process, and returns the message."""
        original = getattr(owner, name)
        if jax.process_index() == process:
            setattr(owner, name, full)
        started = time.monotonic()
        try:
            writer.save(3, {}, state=first)
            message = refusal(writer.wait_for_saves)
        except InputError as error:
            message = str(error)
        setattr(owner, name, original)
        assert time.monotonic() - started < 60  # no process waits at a barrier alone
        return message

    handler = type(handlers()["state"])
    result["full_disk"] = [
        fail_in(os, "posix_fallocate", 0),
        fail_in(checkpoint_folders, "folder_checksums", 0),
        fail_in(handler, "async_save", 0),
        fail_in(handler, "async_save", 1),
        fail_in(handler, "finalize", 0),
        fail_in(serialization, "async_serialize_from_host", 1),
    ]
    processes.gather_texts("")
    result["steps_left"] = sorted(path.name for path in (folder / "run/checkpoints").iterdir())
    if processes.is_first():
        files = sorted((folder / "one/checkpoints/5/state").rglob("*"))
        file = next(path for path in files if path.is_file() and path.stat().st_size > 60)
        file.write_bytes(b"damage" + file.read_bytes()[6:])
    processes.gather_texts("")
    result["damaged"] = refusal(Checkpoints(folder / "one").restore, first)
    result["apart"] = refusal(CheckpointWriter, folder / f"apart{jax.process_index()}", -1)
    return result


def fail(folder: Path) -> dict:
    """Process 1 alone fails, the others wait for it."""
    total = jax.jit(jnp.sum)
    x = make_state(make_placement(), 1)["by_data"]
    for step in range(10_000):
        total(x).block_until_ready()
        if step == 3 and jax.process_index() == 1:
            raise InputError("process 1 alone")
    return {}


def fail_all(_folder: Path) -> dict:
    """All fail alike."""
    processes.check_agreement({"number": str(jax.process_index())})
    return {}


def wait(folder: Path) -> dict:
    """Reports that the run has started, and ends once the file "go" exists."""
    processes.gather_texts("")
    (folder / f"ready-{jax.process_index()}").touch()
    total = jax.jit(jnp.sum)
    x = make_state(make_placement(), 1)["by_data"]
    # All processes leave the loop at once.
    while not all(processes.gather_texts("go" if (folder / "go").exists() else "")):
        total(x).block_until_ready()
        time.sleep(0.05)
    return {"texts": processes.gather_texts(f"{jax.process_index()}")}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    jobs = {"talk": talk, "save": save, "fail": fail, "fail_all": fail_all, "wait": wait}
    try:
        processes.connect(args.coordinator, args.processes, args.process, timeout=60)
        with processes.exit_on_failure():
            print(json.dumps(jobs[args.job](args.folder)))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
