"""Saves checkpoints in the background while the next steps run.

orbax's CheckpointManager writes a step to a temporary folder; the checksums of its files are added,
and the folder is renamed. A save returns once the arrays are copied and the disk has room for them;
later errors are raised by `wait_for_saves`, which every save calls first.

Several processes call every function together: each writes its part of sharded arrays, process 0
does the rest. In the background they synchronise only at barriers of JAX's coordinator, because
device collectives would interfere with those of the steps.
"""

import asyncio
import collections
import contextlib
import copy
import functools
import itertools
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from jaxprompt.errors import InputError
from jaxprompt.files import make_folder, write_error
from jaxprompt.parallel import processes
from jaxprompt.training.checkpoint import Checkpoints, Tree, handlers, named_leaves
from jaxprompt.training.checkpoint_folders import (
    BEST,
    POSITION,
    STATE,
    agreed_steps,
    check_shared,
    checkpoint_folder,
    outdated_steps,
    remove_interrupted,
    rewind,
    write_checksums,
)

# Maximum bytes on disk besides the values: shapes, checksums, and a block of 4 KiB for each small
# file and folder. Measured: the state and the best parameters each have 13 to 17 files and one per
# array, and half as many again leave room.
_STEP_OVERHEAD, _ARRAY_OVERHEAD = 3 * 2**16, 2**12
_WRITER_IDS = itertools.count()


class CheckpointWriter:
    """Saves the checkpoints of one workdir; a context manager that waits for the last save.

    The best parameters up to each kept state are kept too, so a run that resumes from that state
    loses nothing.
    """

    def __init__(self, workdir: str | os.PathLike, step: int, keep: int = 2):
        """Removes checkpoints after `step` (-1: all) and what interrupted saves left behind.

        Keeps the newest `keep` states when saving. Raises InputError if the folder is not writable,
        and if several processes do not share it.
        """
        self.saved = Checkpoints(workdir)
        self._folder = checkpoint_folder(workdir)
        processes.run_on_first(lambda: make_folder(self._folder))
        processes.run_on_first(lambda: rewind(self._folder, step, keep))
        check_shared(self._folder)
        # The steps that are saved or being saved.
        self._steps = {item: set(agreed_steps(self._folder, item)) for item in (STATE, BEST)}
        self._background = _BackgroundSave()
        for library in ("absl", "asyncio"):
            logging.getLogger(library).addFilter(_should_log)
        _silence_late_errors()
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for item, handler in handlers().items():
            args = ocp.args.JsonSave if item == POSITION else ocp.args.PyTreeSave
            registry.add(item, args, _GuardedHandler(handler, self._background))
        options = ocp.CheckpointManagerOptions(
            create=False,
            save_root_metadata=False,
            preservation_policy=_KeepNeeded(self._steps, keep),
            temporary_path_class=_checksummed_path(self._background),
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                barrier_sync_key_prefix=self._background.name
            ),
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=self._background.barrier, create_directories_asynchronously=False
            ),
        )
        self._manager = _Manager(self._folder, options=options, handler_registry=registry)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Waits for all saves; an error of the block takes precedence."""
        try:
            self.wait_for_saves()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"besides: {failure}")
        finally:
            with contextlib.suppress(Exception):  # `wait_for_saves` has raised failed writes
                self._manager.close()

    def save(
        self,
        step: int,
        position: Mapping[str, Any],
        *,
        state: Tree = None,
        best: Tree = None,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves trees of arrays and a JSON-able dict as a new step.

        Returns once the arrays are copied, so that they may be donated.

        Args:
          step: a step that was not saved before.
          position: position of the run. Its "best" is the dev result of the best parameters.
          state: state to resume from; None to save only the best parameters.
          best: trained parameters, if this step is the best so far.
          on_complete: called when the step is complete, in another thread or by `wait_for_saves`.

        Raises:
          InputError: writing failed, now or in the previous save. Earlier steps are unchanged.
        """
        # First, because two copies of a state may not fit into memory.
        self.wait_for_saves()
        trees = {item: tree for item, tree in ((STATE, state), (BEST, best)) if tree is not None}
        path = self._folder / str(step)
        self._background.start(path, on_complete)
        processes.run_on_first(lambda: _check_disk_space(path, trees))
        # Orbax copies arrays to the host before `save` returns. On a CPU the copy is a view, and
        # XLA uses other memory for the next step, although the state is donated to it.
        items: dict[str, Any] = {
            x: ocp.args.PyTreeSave(named_leaves(tree)) for x, tree in trees.items()
        }
        # Copied, because the run changes it while it is written in the background.
        items[POSITION] = ocp.args.JsonSave(copy.deepcopy(dict(position)))
        for item in trees:
            self._steps[item].add(step)
        self._do(lambda: self._manager.save(step, args=ocp.args.Composite(**items), force=True))

    def wait_for_saves(self) -> None:
        """Waits until all saves are complete.

        Raises InputError, once and on every process, if writing failed.
        """
        self._do(self._manager.wait_until_finished)
        if not processes.is_first():  # process 0 has called it when the step was complete
            self._background.on_complete()
        self._background.start(self._folder)

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            if processes.is_first():
                remove_interrupted(self._folder)
            if (write_error := _as_write_error(self._background.path, error)) is error:
                raise
            raise write_error from error


class _BackgroundSave:
    """The current background save: its path, callback and failure."""

    def __init__(self) -> None:
        self.name = f"checkpoints{next(_WRITER_IDS)}"
        self.path = Path()  # of the step
        self.on_complete: Callable[[], None] = lambda: None
        self.failure = ""  # of this process, not yet sent to the others
        self._barriers: collections.Counter[str] = collections.Counter()

    def start(self, path: Path, on_complete: Callable[[], None] = lambda: None) -> None:
        """Starts the save of another step."""
        self.path, self.on_complete = path, on_complete

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turns a write error into an error that is raised on every process."""
        try:
            yield
        except Exception as error:
            if jax.process_count() == 1:
                raise
            write_error = _as_write_error(self.path, error)
            message = str(write_error) if isinstance(write_error, InputError) else repr(write_error)
            self.failure = self.failure or message

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other processes. If any of them failed to write, all raise InputError.

        Otherwise the others would wait for it.
        """
        if jax.process_count() == 1:
            return
        self._barriers[key] += 1
        failure, self.failure = self.failure, ""
        name = f"{self.name}/{key}/{self._barriers[key]}"
        if failures := processes.wait_for_all(name, timeout_ms / 1000, failure):
            raise InputError(failures[0])


class _Manager(ocp.CheckpointManager):
    """A CheckpointManager that leaves preemption signals to the training loop."""

    def reached_preemption(self, step: int) -> bool:
        """Returns False."""
        return False


class _KeepNeeded(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the newest states, and the best parameters up to each of them."""

    def __init__(self, steps: Mapping[str, set[int]], keep: int):
        self._steps, self._keep = steps, keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns for each checkpoint whether it is kept."""
        old = outdated_steps(self._steps[STATE], self._steps[BEST], self._keep)
        return [checkpoint.step not in old for checkpoint in checkpoints]


class _GuardedHandler(ocp.AsyncCheckpointHandler):
    """Wraps a handler so that its write errors reach every process."""

    def __init__(self, handler: Any, background: _BackgroundSave):
        self._handler, self._background = handler, background

    def save(self, *args: Any, **kwargs: Any) -> None:
        with self._background.guard():
            self._handler.save(*args, **kwargs)

    async def async_save(self, *args: Any, **kwargs: Any) -> list[Any]:
        futures: list[Any] = []
        with self._background.guard():
            futures += await self._handler.async_save(*args, **kwargs)
        return [_GuardedFuture(future, self._background) for future in futures]

    def restore(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler.restore(*args, **kwargs)

    def finalize(self, directory: Any) -> None:
        if not self._background.failure:
            with self._background.guard():
                self._handler.finalize(directory)

    def close(self) -> None:
        self._handler.close()


class _GuardedFuture:
    """A background write of `_GuardedHandler`."""

    def __init__(self, future: Any, background: _BackgroundSave):
        self._future, self._background = future, background

    def result(self, timeout: float | None = None) -> None:
        with self._background.guard():
            self._future.result(timeout)

    def cancel(self) -> None:
        self._future.cancel()


def _checksummed_path(save: _BackgroundSave) -> type:
    """Returns the temporary-path class for steps and their items."""

    class ChecksummedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
        """A temporary path; the checksums of a step are added before it is renamed."""

        async def finalize(self) -> None:
            if save.failure:
                return
            with save.guard():
                is_step = Path(self.get_final()) == save.path
                if is_step:
                    await asyncio.to_thread(write_checksums, Path(self.get()))
                await super().finalize()
                if is_step:
                    save.on_complete()

    return ChecksummedPath


def _as_write_error(path: Path, error: Exception) -> Exception:
    """Returns an InputError for a failed write to `path`, other errors unchanged."""
    # tensorstore reports a failed write as a ValueError that quotes the system's code.
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        error = OSError(int(code[1]), os.strerror(int(code[1])))
    return write_error(path, error) if isinstance(error, OSError) else error


def _check_disk_space(path: Path, trees: Mapping[str, Tree]) -> None:
    # Inside orbax each thread would report a full disk; here it is one OSError.
    size = _STEP_OVERHEAD + sum(
        leaf.nbytes + _ARRAY_OVERHEAD for leaf in jax.tree.leaves(dict(trees))
    )
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise write_error(path, error) from error


def _should_log(record: logging.LogRecord) -> bool:
    # Orbax logs errors with a traceback before it raises them; `wait_for_saves` raises them in one
    # line. Versions before 0.12 warn that they create folders in the main thread.
    return not record.exc_info and "blocking the main thread" not in str(record.msg)


@functools.cache
def _silence_late_errors() -> None:
    """Drops the tracebacks of arrays that fail after the first one has closed orbax's loop."""
    report = sys.unraisablehook

    def report_others(error: Any) -> None:
        if str(error.exc_value) != "Event loop is closed":
            report(error)

    sys.unraisablehook = report_others
