"""Files of a run directory: its config, its data record, its result and its lock.

    <workdir>/lock         locked by the process that trains here, released when it dies
    <workdir>/config.json  resolved config of the run
    <workdir>/record.json  what the run was trained on: task, label names, digests, backbone
    <workdir>/result.json  the scores; a run that has it is finished
    <workdir>/error.txt    why a run of a grid failed

Several processes share the folder and call every function together: process 0 writes and decides.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from jaxprompt import signals
from jaxprompt.config.block import flatten_config
from jaxprompt.errors import InputError, list_differences
from jaxprompt.files import (
    CONFIG,
    LOCK,
    acquire_lock,
    add_checksum,
    dumps,
    is_run,
    make_folder,
    pop_checksum,
    read_bytes,
    read_json,
    remove_scratch,
    write_atomic,
)
from jaxprompt.parallel import processes
from jaxprompt.training.checkpoint_folders import checkpoint_folder, list_steps
from jaxprompt.training.run_record import RunRecord, record_from_json
from jaxprompt.training.run_result import RunResult

Record = TypeVar("Record", bound=RunRecord)
RECORD, RESULT = "record.json", "result.json"
FAILURE = "error.txt"  # instead of the result, of a run of a grid
_RUN_FILES = ("metrics.jsonl", RESULT, RECORD, "checkpoints")
# Characters that break checkpoints below a path. Orbax searches it by patterns: [ab] and ** match
# nothing, * and ? also the files of other runs. tensorstore reads a backslash as a slash, and etils
# gs:/ as gs://.
_FORBIDDEN = ("[", "*", "?", "\\", "gs:/")


# -- lock -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock_workdir(workdir: str | os.PathLike) -> Iterator[None]:
    """Creates a run directory and holds its lock, so that only one run at a time writes there.

    The system releases the lock when the process dies for any reason, also on a file system shared
    by several hosts. Without locks in the file system a warning is printed. Raises InputError with
    the process that holds the lock.
    """
    with contextlib.ExitStack() as stack:
        # Process 0 holds it for all processes of a run.
        processes.run_on_first(lambda: stack.enter_context(_lock_folder(Path(workdir))))
        yield


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    path, is_new = folder / LOCK, not folder.exists()
    make_folder(folder)
    lock_file = acquire_lock(path, folder, "use another workdir")
    try:
        yield
    finally:
        # A rejected command leaves nothing behind. Removed while it is locked, see `acquire`.
        if not (folder / CONFIG).exists():
            with contextlib.suppress(OSError):
                path.unlink()
                if is_new:
                    folder.rmdir()  # fails if it contains other files
        os.close(lock_file)


# -- config ---------------------------------------------------------------------------------------


def bind_workdir(
    workdir: str | os.PathLike, resolved: Mapping[str, object], ignored: tuple[str, ...] = ()
) -> None:
    """Binds `workdir` to a resolved config: writes config.json, or compares with it.

    Arguments and errors as in `check_workdir`; also InputError if the folder is not writable.
    """
    make_folder(workdir)
    check_workdir(workdir, resolved, ignored)
    if processes.is_first():
        remove_scratch(workdir)
        write_atomic(Path(workdir) / CONFIG, json.dumps(resolved, indent=2, sort_keys=True) + "\n")


def check_workdir(
    workdir: str | os.PathLike, resolved: Mapping[str, object], ignored: tuple[str, ...] = ()
) -> None:
    """Compares a resolved config with config.json of `workdir`, if it exists.

    `ignored` lists the dotted fields (or blocks of fields) that may differ. Raises InputError with
    the fields that differ, for a path that orbax cannot write to, for a folder inside the
    checkpoints of another run, and for one with files of a run but no config.json. Any other folder
    without one is accepted.
    """
    full_path, path = os.path.abspath(workdir), Path(workdir) / CONFIG
    if forbidden := [part for part in _FORBIDDEN if part in full_path]:
        raise InputError(
            f"{full_path} contains {forbidden[0]}, so checkpoints cannot be saved there: orbax or "
            "tensorstore reads it as a pattern, a separator or a URL; use another workdir"
        )
    for folder in (Path(full_path), *Path(full_path).parents):
        if folder.name == "checkpoints" and is_run(folder.parent):
            raise InputError(f"{workdir} belongs to the run {folder.parent}; use another workdir")
    if not os.path.exists(path):
        # A run writes config.json before these files.
        if foreign := [name for name in _RUN_FILES if os.path.exists(path.with_name(name))]:
            raise InputError(
                f"{workdir} contains {foreign[0]} but no {CONFIG}, so it is not a run directory; "
                "use another workdir"
            )
        return
    saved = flatten_config(read_json(path, "the unchanged file of the run, or another workdir"))
    # Through JSON, so that a tuple equals the saved list.
    current = flatten_config(json.loads(json.dumps(resolved)))
    if not saved.keys() & current.keys():
        raise InputError(f"{path} is not the config of a run; use another workdir")
    prefixes = tuple(f"{field}." for field in ignored)

    def is_checked(leaf):
        return not f"{leaf[0]}.".startswith(prefixes)

    if differing := list_differences(
        dict(filter(is_checked, saved.items())), dict(filter(is_checked, current.items()))
    ):
        raise InputError(
            f"{workdir} contains a run with a different config: {differing}; "
            "use the saved values or another workdir, or delete this one to start again"
        )


# -- data record ----------------------------------------------------------------------------------


def write_record(workdir: str | os.PathLike, record: RunRecord) -> None:
    """Writes the record of a run as JSON."""
    if processes.is_first():
        text = json.dumps(add_checksum(record.to_json()), indent=2)
        write_atomic(Path(workdir) / RECORD, text + "\n")


def read_record(workdir: str | os.PathLike, kind: type[Record]) -> Record | None:
    """Reads the record of a run, None if there is none yet.

    Raises InputError for a record that was changed after it was written, or belongs to another kind
    of run.
    """
    path = Path(workdir) / RECORD
    values = _read_object(path, RunRecord.FIX)
    if values is None:
        return None
    if not pop_checksum(values):
        raise InputError(
            f"{path} was changed, or written by another version of jaxprompt; {RunRecord.FIX}"
        )
    record = record_from_json(values, path)
    if not isinstance(record, kind):
        raise InputError(f"{path} belongs to another kind of run; {RunRecord.FIX}")
    return record


def require_record(folder: str | os.PathLike, workdir: str | os.PathLike) -> None:
    """Raises InputError if `folder`, whose checkpoints are in `workdir`, has no record.

    Without a record the run could resume with different data.
    """
    path = Path(folder) / RECORD
    if not path.exists():
        raise InputError(
            f"{workdir} has checkpoints but no {path}, which says what they were trained on; "
            "restore it, or train again in another workdir"
        )


def check_record(workdir: str | os.PathLike, record: RunRecord) -> None:
    """Raises InputError if a run would train on different data than its record says."""
    saved = read_record(workdir, type(record))
    if saved is None:
        if list_steps(checkpoint_folder(workdir)):
            require_record(workdir, workdir)
        return
    if differing := list_differences(
        flatten_config(saved.to_json()), flatten_config(record.to_json())
    ):
        raise InputError(
            f"{workdir} contains a run that was trained on different data: {differing}; restore "
            "that data, or use another workdir"
        )


# -- result ---------------------------------------------------------------------------------------


def write_result(workdir: str | os.PathLike, result: RunResult) -> None:
    """Writes the result of a run, which is then finished."""
    if processes.is_first():
        write_atomic(Path(workdir) / RESULT, dumps(result.to_json(), indent=2) + "\n")
    signals.note("after everything was saved")


def read_result(workdir: str | os.PathLike) -> RunResult | None:
    """Reads the result of a run, None if there is none. Raises InputError for a damaged one."""
    path = Path(workdir) / RESULT
    values = _read_object(path, f"or {RunResult.FIX}")
    return None if values is None else RunResult.from_json(values, path)


def read_failure(workdir: str | os.PathLike) -> str | None:
    """Reads why a run of a grid failed, None if it has not. Raises InputError if that fails."""
    path = Path(workdir) / FAILURE
    try:
        return read_bytes(path).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); delete it to train the run again"
        ) from error


def _read_object(path: Path, advice: str) -> dict[str, object] | None:
    return read_json(path, f"the unchanged file of the run; {advice}") if path.exists() else None
