"""Saves and restores a run: the trained numbers, their optimizer state and where the data stood.

    <workdir>/checkpoints/<step>/       state and position, the newest `keep` steps
    <workdir>/checkpoints/best/<step>/  trained numbers and their dev result

A folder named by a bare number is complete: orbax writes beside it, the checksums of all files are
added, and it is renamed. Saving is synchronous: at prompt size it takes some 40 ms, and a full disk
is known at the call that met it.

Several processes share the folder and call every function together: each writes and reads its part
of divided arrays, process 0 does the rest and decides.
"""

import json
import os
import re
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_flatten_with_path

from jaxprompt.errors import InputError
from jaxprompt.files import make_folder, parse_json, write_atomic, write_error
from jaxprompt.parallel import processes

Tree = Any
SEAL = "checksums.json"  # file name -> CRC-32, written last
# Names that only this module and orbax give; whatever else lies there is the user's.
_LEFT_BEHIND = re.compile(r"\d+\.(partial|removed)(\.orbax-checkpoint-tmp.*)?|0\.shared-\w+")
OVERHEAD, OVERHEAD_ARRAY = 16384, 2048  # bytes at most for shapes, checksums and the like


class Checkpoints:
    """The checkpoints of one workdir.

    Readers (restore, restore_best) change nothing on disk. A run that writes calls `rewind` once
    with the step it goes on from, and saves a step after all else of that step is done.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int = 2):
        """Opens `<workdir>/checkpoints`, keeping the newest `keep` steps when saving."""
        if keep < 1:
            raise InputError(f"{keep=} checkpoints leave nothing to resume from; keep 1 or more")
        self._root = Path(os.path.abspath(workdir)) / "checkpoints"
        self._best = self._root / "best"
        self._keep = keep

    def latest(self) -> int | None:
        """Returns the newest saved step, None when there is none."""
        return max(_agreed_steps(self._root), default=None)

    def best(self) -> int | None:
        """Returns the step of the newest best, None when there is none."""
        return max(_agreed_steps(self._best), default=None)

    def save(self, step: int, state: Tree, position: dict) -> None:
        """Saves a tree of arrays and a JSON-able dict as `step`; a step that is there stays.

        Raises InputError when the disk refuses; the earlier checkpoints are then untouched.
        """
        _write(self._root, step, state, position)
        self._prune()

    def save_best(self, step: int, trainable: Tree, info: dict) -> None:
        """Saves the best trained numbers so far with a JSON-able dict (metric, value, ...).

        Every kept step keeps the best of its time, so a run resumed from it misses nothing.
        """
        _write(self._best, step, trainable, info)

    def restore(self, template: Tree, step: int | None = None) -> tuple[Tree, dict]:
        """Reads (state, position) of `step`, the newest by default, bit for bit.

        `template` is a tree of arrays or jax.ShapeDtypeStruct; names, shapes and dtypes must be
        those saved, and a leaf that has a sharding is read into it.
        Raises InputError for a checkpoint that is absent, damaged or of another model.
        """
        return _read(self._root, step, template)

    def position(self) -> dict:
        """Reads the newest position alone; errors as in `restore`."""
        with _checkpointer() as checkpointer:
            args = ocp.args.Composite(position=ocp.args.JsonRestore())
            return checkpointer.restore(_find(self._root, None), args=args).position

    def restore_best(self, template: Tree, step: int | None = None) -> tuple[Tree, dict]:
        """Reads (trainable, info) of the best at `step`, the newest by default.

        Errors as in `restore`.
        """
        return _read(self._best, step, template)

    def steps(self) -> list[int]:
        """Lists the steps whose trained numbers are there, in order."""
        return sorted({*_agreed_steps(self._root), *_agreed_steps(self._best)})

    def restore_trainable(self, template: Tree, step: int) -> Tree:
        """Reads the trained numbers of one of `steps`, and no optimizer state.

        Errors as in `restore`.
        """
        # A best has no optimizer state, so there is less to check and to read.
        if step in _agreed_steps(self._best):
            return self.restore_best(template, step)[0]
        return _read(self._root, step, template, part="trainable/")[0]

    def check_best(self, step: int | None = None) -> None:
        """Raises InputError where the best of `step`, or any, is absent or damaged."""
        _find(self._best, step)

    def rewind(self, step: int) -> None:
        """Removes what was saved after `step` (-1: all) and what killed saves left behind.

        Raises InputError where several processes do not share the folder.
        """

        def remove() -> None:
            for folder in (self._root, self._best):
                _clean(folder)
                for later in [s for s in _steps(folder) if s > step]:
                    _remove(folder / str(later))

        processes.on_first(remove)
        _check_shared(self._root)

    def bytes(self, step: int | None = None) -> int:
        """Returns the bytes on disk of `step`, the newest by default."""
        folder = self._root / str(self.latest() if step is None else step)
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def _prune(self) -> None:
        if not processes.is_first():
            return
        steps, bests = _steps(self._root), _steps(self._best)
        kept = steps[-self._keep :]
        # A run that resumes from a kept step ends with the best of that time.
        needed = {max((b for b in bests if b <= step), default=None) for step in kept}
        for old in steps[: -self._keep]:
            _remove(self._root / str(old))
        for old in bests:
            # A newer best is of a step whose state is still to be saved.
            if old not in needed and old <= kept[-1]:
                _remove(self._best / str(old))


def _steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and p.is_dir())


def _agreed_steps(folder: Path) -> list[int]:
    # A folder that was just written may look older to another host.
    return json.loads(processes.gather(json.dumps(_steps(folder)))[0])


def _check_shared(folder: Path) -> None:
    if jax.process_count() == 1:
        return
    make_folder(folder)
    # A new name: what a host has looked up before, it may remember.
    probe = folder / f"0.shared-{processes.gather(uuid.uuid4().hex)[0]}"
    processes.on_first(lambda: write_atomic(probe, ""))
    _check_seen(probe)
    processes.on_first(probe.unlink)


def _check_seen(path: Path) -> None:
    seen = processes.gather("yes" if path.exists() else "")

    def conclude() -> None:
        if "" in seen:
            raise InputError(
                f"process {seen.index('')} does not see the {path.parent} of process 0; several "
                "processes need a --workdir on a disk that all of them share"
            )

    processes.on_first(conclude)


def _clean(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFT_BEHIND.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    # Renamed first: a kill in the middle of the removal must not leave half a checkpoint.
    doomed = path.rename(path.with_name(path.name + ".removed"))
    shutil.rmtree(doomed, ignore_errors=True)


# No ocp.CheckpointManager: it keeps the newest and the best, but not the best as of each kept step,
# and what it has finished cannot be given checksums before it counts as finished.
def _checkpointer() -> ocp.Checkpointer:
    # OCDBT: few files, where plain zarr has two files and a folder an array.
    state = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(state=state, position=ocp.JsonCheckpointHandler())
    )


def _flat(tree: Tree) -> dict[str, Any]:
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _write(folder: Path, step: int, tree: Tree, position: dict) -> None:
    path = folder / str(step)
    if step in _agreed_steps(folder):
        return
    partial = path.with_name(path.name + ".partial")
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(_flat(tree)), position=ocp.args.JsonSave(position)
    )

    def prepare() -> None:
        make_folder(folder)
        _check_room(folder, tree)

    def seal() -> None:
        write_atomic(partial / SEAL, json.dumps(_checksums(partial)))
        partial.rename(path)

    processes.on_first(lambda: _try(prepare, path))
    with _checkpointer() as checkpointer:
        # A save that was killed may have left the folder, which force writes over.
        _try(lambda: checkpointer.save(partial, args=args, force=True), path)
    processes.on_first(lambda: _try(seal, path))


def _try(action: Callable[[], None], path: Path) -> None:
    """Runs a part of writing `path`. Raises InputError where the disk refuses, and cleans up."""
    try:
        action()
    except InputError:
        _clean(path.parent)
        raise
    except (OSError, ValueError) as error:
        # tensorstore reports a failed write as a ValueError that quotes the system's code.
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if not code and not isinstance(error, OSError):
            raise
        _clean(path.parent)
        cause = OSError(int(code[1]), os.strerror(int(code[1]))) if code else error
        raise write_error(path, cause) from error


def _find(folder: Path, step: int | None) -> Path:
    steps = _agreed_steps(folder)
    if not steps or (step is not None and step not in steps):
        there = f"steps there: {', '.join(map(str, steps))}" if steps else "there is none"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise InputError(f"{what} in {folder} ({there}); train first, or give another --workdir")
    path = folder / str(steps[-1] if step is None else step)
    # Every process reads a part, so each of them has to see the folder.
    _check_seen(path)
    processes.on_first(lambda: _check_whole(path, older=[s for s in steps if s < int(path.name)]))
    return path


def _read(folder: Path, step: int | None, template: Tree, part: str = "") -> tuple[Tree, dict]:
    """Reads what was saved of a step, or the `part` of it whose names begin so."""
    path = _find(folder, step)
    wanted = {part + name: _abstract(leaf) for name, leaf in _flat(template).items()}
    with _checkpointer() as checkpointer:
        saved = checkpointer.metadata(path).item_metadata["state"].tree
        _check_same(path, {n: leaf for n, leaf in saved.items() if n.startswith(part)}, wanted)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(
                item=wanted, restore_args=restore_args, partial_restore=bool(part)
            ),
            position=ocp.args.JsonRestore(),
        )
        restored = checkpointer.restore(path, args=args)
    leaves = [restored.state[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(template), leaves), restored.position


def _check_room(folder: Path, tree: Tree) -> None:
    # A full disk met inside orbax is reported by each of its threads; here it is one OSError.
    size = OVERHEAD + sum(leaf.nbytes + OVERHEAD_ARRAY for leaf in jax.tree.leaves(tree))
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, size)


def _checksums(path: Path) -> dict[str, int]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): zlib.crc32(file.read_bytes()) for file in files}


def _check_whole(path: Path, older: list[int]) -> None:
    try:
        sealed = parse_json((path / SEAL).read_bytes())
        found = _checksums(path)
        bad = [name for name, checksum in sealed.items() if found.get(name) != checksum]
        reason = f"{bad[0]} is missing, cut or changed" if bad else ""
    except (OSError, ValueError, AttributeError) as error:
        reason = f"{SEAL} cannot be read, {error}"
    if reason:
        cure = f"go on from step {older[-1]}" if older else "start anew (no older one is there)"
        raise InputError(f"checkpoint {path} is damaged or foreign ({reason}); delete it to {cure}")


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    # Without a sharding orbax takes the saved one, of devices that may not be here.
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_same(path: Path, saved: dict, wanted: dict) -> None:
    def show(leaf: Any) -> str:
        return "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"

    differing = [
        f"{name} (saved {show(saved.get(name))}, wanted {show(wanted.get(name))})"
        for name in sorted(saved.keys() | wanted.keys())
        if show(saved.get(name)) != show(wanted.get(name))
    ]
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise InputError(
            f"checkpoint {path} is of another model or optimizer: {differing[0]}{more}; "
            "use the config it was saved with, or another --workdir"
        )
