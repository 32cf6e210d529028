"""Saves and restores a run: the trained numbers, their optimizer state and where the data stood.

    <workdir>/checkpoints/<step>/       state and position, the newest `keep` steps
    <workdir>/checkpoints/best/<step>/  trained numbers and their dev result

A folder named by a bare number is complete: orbax writes beside it, the checksums of all files are
added, and it is renamed. All of this goes on in the background while the next steps run. A save
returns once the numbers are copied and the disk has room for them; what fails later is raised by
`settle`, which every save and every reader calls first.

Several processes share the folder and call every function together: each writes and reads its part
of divided arrays, process 0 does the rest and decides. In the background they meet at barriers of
JAX's coordinator alone, since collectives of devices would mix with those of the steps.
"""

import contextlib
import copy
import itertools
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_flatten_with_path

from jaxprompt.errors import InputError
from jaxprompt.files import make_folder, write_error
from jaxprompt.parallel import processes
from jaxprompt.training.checkpoint_folders import (
    BEST,
    agreed_steps,
    check_shared,
    clean,
    find,
    partial,
    remove,
    seal,
    steps_of,
)

Tree = Any
MIN_PART = 1 << 20  # bytes that a device writes at least of an array that all devices hold
OVERHEAD, OVERHEAD_ARRAY = 16384, 2048  # bytes at most for shapes, checksums and the like
# One thread, so that saves get their names in the order in which they were begun.
_BEHIND = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
_SAVES = itertools.count()


class Pending(NamedTuple):
    """A save that goes on in the background."""

    done: Future
    on_complete: Callable[[], None]


class Checkpoints:
    """The checkpoints of one workdir.

    Readers (restore, restore_best) change nothing on disk. A run that writes calls `rewind` once
    with the step it goes on from, and saves a step after all else of that step is done. It saves
    in a block of `settling`, or calls `settle` behind its last save.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int = 2):
        """Opens `<workdir>/checkpoints`, keeping the newest `keep` steps when saving."""
        if keep < 1:
            raise InputError(f"{keep=} checkpoints leave nothing to resume from; keep 1 or more")
        self._root = Path(os.path.abspath(workdir)) / "checkpoints"
        self._best = self._root / BEST
        self._keep = keep
        # At most a best and a state, by their folders; the same on every process.
        self._pending: dict[Path, Pending] = {}

    def latest(self) -> int | None:
        """Returns the newest saved step, None when there is none."""
        return max(self._steps(self._root), default=None)

    def best(self) -> int | None:
        """Returns the step of the newest best, None when there is none."""
        return max(self._steps(self._best), default=None)

    def save(
        self, step: int, state: Tree, position: dict,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Saves a tree of arrays and a JSON-able dict as `step`; a step that is there stays.

        Returns once they are copied, so that the arrays may be donated. `on_complete` is called
        when the step is complete, in another thread or by `settle`.
        Raises InputError when the disk refuses, now or an earlier save; the earlier checkpoints are
        then untouched.
        """
        # Beside a best that is still being written, never beside another state: two copies of a
        # state might be more than the memory holds.
        if self._root in self._pending:
            self.settle()
        self._begin(self._root, step, state, position, on_complete)

    def save_best(self, step: int, trainable: Tree, info: dict) -> None:
        """Saves the best trained numbers so far with a JSON-able dict (metric, value, ...).

        Every kept step keeps the best of its time, so a run resumed from it misses nothing: the
        state of a step is complete only after the best that was begun before it.
        """
        self.settle()
        self._begin(self._best, step, trainable, info, lambda: None)

    def settle(self) -> None:
        """Waits until all that was saved is complete.

        Raises InputError, once and on every process, where the disk refused a part of it.
        """
        pending, self._pending = self._pending, {}
        if not pending:
            return
        wait(save.done for save in pending.values())

        def check() -> None:
            for save in pending.values():
                save.done.result()

        if not processes.is_first():
            check()
        processes.on_first(check)
        if not processes.is_first():  # process 0 has called it at the time
            for save in pending.values():
                save.on_complete()

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Settles at the end of a block. One that fails waits too, and raises its own error."""
        try:
            yield
        except BaseException as error:
            # Without a word to the other processes, which may not be here.
            pending, self._pending = self._pending, {}
            wait(save.done for save in pending.values())
            for save in pending.values():
                if failure := save.done.exception():
                    error.add_note(f"besides: {failure}")
            raise
        self.settle()

    def restore(self, template: Tree, step: int | None = None) -> tuple[Tree, dict]:
        """Reads (state, position) of `step`, the newest by default, bit for bit.

        `template` is a tree of arrays or jax.ShapeDtypeStruct; names, shapes and dtypes must be
        those saved, and a leaf that has a sharding is read into it.
        Raises InputError for a checkpoint that is absent, damaged or of another model.
        """
        self.settle()
        return _read(self._root, step, template)

    def position(self) -> dict:
        """Reads the newest position alone; errors as in `restore`."""
        self.settle()
        with _checkpointer() as checkpointer:
            args = ocp.args.Composite(position=ocp.args.JsonRestore())
            return checkpointer.restore(find(self._root, None), args=args).position

    def restore_best(
        self, template: Tree, step: int | None = None, *, or_newer: bool = False
    ) -> tuple[Tree, dict]:
        """Reads (trainable, info) of the best at `step`, the newest by default.

        With `or_newer` a better one may have taken its place since. Errors as in `restore`.
        """
        self.settle()
        if or_newer and step is not None:
            step = max(step, *agreed_steps(self._best))
        return _read(self._best, step, template)

    def steps(self) -> list[int]:
        """Lists the steps whose trained numbers are there, in order."""
        return sorted({*self._steps(self._root), *self._steps(self._best)})

    def restore_trainable(self, template: Tree, step: int) -> Tree:
        """Reads the trained numbers of one of `steps`, and no optimizer state.

        Errors as in `restore`.
        """
        # A best has no optimizer state, so there is less to check and to read.
        if step in self._steps(self._best):
            return self.restore_best(template, step)[0]
        return _read(self._root, step, template, part="trainable/")[0]

    def check_best(self, step: int | None = None) -> None:
        """Raises InputError where the best of `step`, or any, is absent or damaged."""
        self.settle()
        find(self._best, step)

    def rewind(self, step: int) -> None:
        """Removes what was saved after `step` (-1: all) and what killed saves left behind.

        Raises InputError where several processes do not share the folder.
        """
        self.settle()

        def forget() -> None:
            for folder in (self._root, self._best):
                clean(folder)
                for later in [s for s in steps_of(folder) if s > step]:
                    remove(folder / str(later))

        processes.on_first(forget)
        check_shared(self._root)

    def bytes(self, step: int | None = None) -> int:
        """Returns the bytes on disk of `step`, the newest by default."""
        self.settle()
        folder = self._root / str(self.latest() if step is None else step)
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def _steps(self, folder: Path) -> list[int]:
        self.settle()
        return agreed_steps(folder)

    def _begin(
        self, folder: Path, step: int, tree: Tree, position: dict, on_complete: Callable[[], None]
    ) -> None:
        """Copies what is to be saved, and leaves the rest to the background."""
        path = folder / str(step)
        if step in agreed_steps(folder):
            return

        def prepare() -> None:
            make_folder(folder)
            _check_room(folder, tree)

        processes.on_first(lambda: _try(prepare, path))
        args = ocp.args.Composite(
            # Orbax copies it to the host before `save` returns. On a CPU that is a view: XLA then
            # gives the next step, to which the state is donated, other memory.
            state=ocp.args.PyTreeSave(_flat(tree)),
            # Written in the background too, while the run goes on to change it.
            position=ocp.args.JsonSave(copy.deepcopy(position)),
        )
        checkpointer = _background_checkpointer()
        # A save that was killed may have left the folder, which force writes over.
        _try(lambda: checkpointer.save(partial(path), args=args, force=True), path)
        before = [save.done for save in self._pending.values()]

        def complete() -> None:
            with contextlib.closing(checkpointer):
                checkpointer.wait_until_finished()  # also for the other processes
            for save in before:
                save.result()  # a state without the best of its time must not be there
            if processes.is_first():
                seal(path)
                if folder == self._root:
                    self._prune()
                on_complete()

        self._pending[folder] = Pending(_BEHIND.submit(_try, complete, path), on_complete)

    def _prune(self) -> None:
        steps, bests = steps_of(self._root), steps_of(self._best)
        kept = steps[-self._keep :]
        # A run that resumes from a kept step ends with the best of that time.
        needed = {max((b for b in bests if b <= step), default=None) for step in kept}
        for old in steps[: -self._keep]:
            remove(self._root / str(old))
        for old in bests:
            # A newer best is of a step whose state is still to be saved.
            if old not in needed and old <= kept[-1]:
                remove(self._best / str(old))


# No ocp.CheckpointManager: it keeps the newest and the best, but not the best as of each kept step,
# and what it has finished cannot be given checksums before it counts as finished.
def _handler() -> ocp.CompositeCheckpointHandler:
    # Orbax divides replicated arrays among the devices for writing, and each slice is a program to
    # compile: not worth it for small ones.
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_PART)
    # OCDBT: few files, where plain zarr has two files and a folder an array.
    state = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=True,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )
    return ocp.CompositeCheckpointHandler(state=state, position=ocp.JsonCheckpointHandler())


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(_handler())


def _background_checkpointer() -> ocp.AsyncCheckpointer:
    # Orbax logs with a traceback what it then raises; `settle` says it in one line.
    logging.getLogger("absl").addFilter(_is_news)
    # The barriers of a best and of a state of one step would else have one name.
    prefix = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=f"save{next(_SAVES)}")
    return ocp.AsyncCheckpointer(_handler(), multiprocessing_options=prefix)


def _is_news(record: logging.LogRecord) -> bool:
    return "in background save thread" not in str(record.msg)


def _flat(tree: Tree) -> dict[str, Any]:
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _try(action: Callable[[], None], path: Path) -> None:
    """Runs a part of writing `path`. Raises InputError where the disk refuses, and cleans up."""
    try:
        action()
    except InputError:
        clean(path.parent)
        raise
    except (OSError, ValueError) as error:
        # tensorstore reports a failed write as a ValueError that quotes the system's code.
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code:
            cause = OSError(int(code[1]), os.strerror(int(code[1])))
        elif isinstance(error, OSError):
            cause = error
        else:
            raise
        clean(path.parent)
        raise write_error(path, cause) from error


def _read(folder: Path, step: int | None, template: Tree, part: str = "") -> tuple[Tree, dict]:
    """Reads what was saved of a step, or the `part` of it whose names begin so."""
    path = find(folder, step)
    wanted = {part + name: abstract(leaf) for name, leaf in _flat(template).items()}
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


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Gives an array's shape, and where it lives."""
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
            "use the config it was saved with, or another workdir"
        )
