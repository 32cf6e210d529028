"""Files of a run directory: its config, its data record, its result and its lock.

    <workdir>/lock         locked by the process that trains here, released when it dies
    <workdir>/config.json  resolved config of the run
    <workdir>/record.json  what the run was trained on: task, label names, digests, backbone
    <workdir>/result.json  the scores; a run that has it is finished

Several processes share the folder and call every function together: process 0 writes and decides.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from jaxprompt import signals
from jaxprompt.errors import InputError
from jaxprompt.files import (
    CONFIG,
    LOCK,
    acquire_lock,
    add_checksum,
    dumps,
    make_folder,
    parse_json,
    pop_checksum,
    read_json,
    remove_scratch,
    write_atomic,
)
from jaxprompt.parallel import processes
from jaxprompt.training.checkpoint_folders import folder_of, steps_of
from jaxprompt.training.run_record import RunRecord, record_from_json
from jaxprompt.training.run_result import RunResult

Record = TypeVar("Record", bound=RunRecord)
RECORD, RESULT = "record.json", "result.json"
_OF_A_RUN = ("metrics.jsonl", RESULT, RECORD, "checkpoints")
_SHOWN = 3  # differences that a message names
# What breaks a checkpoint in its path. Orbax searches below it by patterns: [ab] and ** match
# nothing, * and ? also what another run saves. tensorstore takes a backslash for a slash, and etils
# gs:/ for gs://.
_BREAKING = ("[", "*", "?", "\\", "gs:/")


# -- lock -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock(workdir: str | os.PathLike) -> Iterator[None]:
    """Creates a run directory and holds its lock, so that only one run at a time writes there.

    The system releases the lock when the process dies for any reason, also on a file system shared
    by several hosts. Without locks in the file system a warning is printed. Raises InputError with
    the process that holds the lock.
    """
    with contextlib.ExitStack() as stack:
        # Process 0 holds it for all processes of a run.
        processes.on_first(lambda: stack.enter_context(_hold(Path(workdir))))
        yield


@contextlib.contextmanager
def _hold(folder: Path) -> Iterator[None]:
    path, is_new = folder / LOCK, not folder.exists()
    make_folder(folder)
    held = acquire_lock(path, folder, "use another workdir")
    try:
        yield
    finally:
        # A command that was refused leaves nothing. Removed while it is held: see `acquire`.
        if not (folder / CONFIG).exists():
            with contextlib.suppress(OSError):
                path.unlink()
                if is_new:
                    folder.rmdir()  # unless something else lies there
        os.close(held)


# -- config ---------------------------------------------------------------------------------------


def guard_workdir(
    workdir: str | os.PathLike, resolved: Mapping[str, object], free: tuple[str, ...] = ()
) -> None:
    """Binds `workdir` to a resolved config: writes config.json, or compares with it.

    Arguments and errors as in `check_workdir`; also InputError if the folder is not writable.
    """
    make_folder(workdir)
    old_text = check_workdir(workdir, resolved, free)
    text = json.dumps(resolved, indent=2, sort_keys=True) + "\n"
    if not processes.is_first():
        return
    remove_scratch(workdir)
    if text != old_text:
        write_atomic(Path(workdir) / CONFIG, text)


def check_workdir(
    workdir: str | os.PathLike, resolved: Mapping[str, object], free: tuple[str, ...] = ()
) -> str | None:
    """Compares a resolved config with config.json of `workdir`. Returns its text, None without it.

    `free` lists the dotted fields (or blocks of fields) that may differ. Raises InputError with the
    fields that differ, for a path that orbax cannot write to, and for a folder with files of a run
    but no config.json. Any other folder without one is accepted.
    """
    _check_path(os.path.abspath(workdir))
    path = Path(workdir) / CONFIG
    try:
        old_text = path.read_text() if path.exists() else None
        saved = _leaves(parse_json(old_text)) if old_text is not None else {}
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is not a readable config ({error}); restore it, or use another workdir"
        ) from error
    if old_text is None:
        _check_new(Path(workdir))
        return None
    # As it would be read back: a tuple becomes a list, and equals the saved one.
    given = _leaves(json.loads(json.dumps(resolved)))
    if not saved.keys() & given.keys():
        raise InputError(f"{path} is not the config of a run; use another workdir")
    is_free = lambda name: any(name == f or name.startswith(f + ".") for f in free)
    if differing := _differences(saved, given, "given", is_free):
        raise InputError(
            f"{workdir} contains a run with a different config: {differing}; "
            "use the saved values, or another workdir"
        )
    return old_text


def _check_path(path: str) -> None:
    """Raises InputError for a path that orbax or tensorstore would misread."""
    breaking = [part for part in _BREAKING if part in path] + ["//"] * path.startswith("//")
    if breaking:
        raise InputError(
            f"{path} contains {breaking[0]}, so checkpoints cannot be saved there: orbax or "
            "tensorstore reads it as a pattern, a separator or a URL; use another workdir"
        )


def _check_new(folder: Path) -> None:
    # A run writes config.json before these, so without it they are not a run's.
    if foreign := [name for name in _OF_A_RUN if (folder / name).exists()]:
        raise InputError(
            f"{folder} contains {foreign[0]} but no {CONFIG}, so it is not a run directory; use "
            "another workdir"
        )


# -- what the run learned from --------------------------------------------------------------------


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


def check_kept(folder: str | os.PathLike, workdir: str | os.PathLike) -> None:
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
        if steps_of(folder_of(workdir)):
            check_kept(workdir, workdir)
        return
    if differing := _differences(_leaves(saved.to_json()), _leaves(record.to_json()), "now"):
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


def _read_object(path: Path, cure: str) -> dict[str, object] | None:
    return read_json(path, f"the unchanged file of the run; {cure}") if path.exists() else None


# -- comparison -----------------------------------------------------------------------------------


def _differences(saved: dict, other: dict, name_of_other: str, is_free=lambda name: False) -> str:
    """Lists the first leaves that differ, "" if none does."""
    names = sorted(name for name in saved.keys() | other.keys() if not is_free(name))
    show = lambda values, name: repr(values[name]) if name in values else "nothing"
    differing = [
        f"{name} (saved {show(saved, name)}, {name_of_other} {show(other, name)})"
        for name in names
        if (name in saved, saved.get(name)) != (name in other, other.get(name))
    ]
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return ", ".join(differing[:_SHOWN]) + more


def _leaves(tree: object, name: str = "") -> dict[str, object]:
    """Returns the leaves of nested objects by dotted name."""
    if not isinstance(tree, dict) or (name and not tree):
        return {name: tree}
    prefix = name + "." if name else ""
    return {k: v for key, sub in tree.items() for k, v in _leaves(sub, prefix + key).items()}
