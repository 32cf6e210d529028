"""Folders of checkpoints: what is complete, what is damaged, what killed saves leave behind.

All functions that ask other processes are called by every process together.
"""

import json
import re
import shutil
import uuid
from pathlib import Path

import jax

from jaxprompt.errors import InputError
from jaxprompt.files import folder_checksums, make_folder, parse_json, write_atomic
from jaxprompt.parallel import processes

SEAL = "checksums.json"  # file name -> CRC-32, written last
BEST = "best"  # the folder of the best numbers, beside the states
_STEP = re.compile("0|[1-9][0-9]*")
# Names that only checkpoints and orbax give; whatever else lies there is the user's.
_LEFT_BEHIND = re.compile(r"\d+\.(partial|removed)(\.orbax-checkpoint-tmp.*)?|0\.shared-\w+")


def steps_of(folder: Path) -> list[int]:
    """Lists the complete steps of a folder, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())


def agreed_steps(folder: Path) -> list[int]:
    """Lists the complete steps that process 0 sees."""
    # A folder that was just written may look older to another host.
    return json.loads(processes.gather(json.dumps(steps_of(folder)))[0])


def check_shared(folder: Path) -> None:
    """Raises InputError where several processes do not share a folder."""
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


def clean(folder: Path) -> None:
    """Removes what saves left behind that were killed or have failed."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFT_BEHIND.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Removes a checkpoint."""
    # Renamed first: a kill in the middle of the removal must not leave half a checkpoint.
    doomed = path.rename(path.with_name(path.name + ".removed"))
    shutil.rmtree(doomed, ignore_errors=True)


def partial(path: Path) -> Path:
    """Returns where a checkpoint lies until it is complete."""
    return path.with_name(path.name + ".partial")


def seal(path: Path) -> None:
    """Adds the checksums to what is written of a checkpoint, and gives it its name."""
    write_atomic(partial(path) / SEAL, json.dumps(folder_checksums(partial(path))))
    partial(path).rename(path)


def find(folder: Path, step: int | None) -> Path:
    """Finds the checkpoint of `step`, the newest by default.

    Raises InputError where it is absent or damaged.
    """
    steps = agreed_steps(folder)
    if not steps or (step is not None and step not in steps):
        there = f"steps there: {', '.join(map(str, steps))}" if steps else "there is none"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        is_lost = step is not None and folder.name == BEST  # a state or a result says it was there
        first = "train first, until dev is scored, or give another workdir"
        cure = _anew(folder) if is_lost else first
        raise InputError(f"{what} in {folder} ({there}); {cure}")
    path = folder / str(steps[-1] if step is None else step)
    # Every process reads a part, so each of them has to see the folder.
    _check_seen(path)
    processes.on_first(lambda: _check_whole(path, older=[s for s in steps if s < int(path.name)]))
    return path


def _check_whole(path: Path, older: list[int]) -> None:
    try:
        sealed = parse_json((path / SEAL).read_bytes())
        found = folder_checksums(path)
        bad = [name for name, checksum in sealed.items() if found.get(name) != checksum]
        reason = f"{bad[0]} is missing, cut or changed" if bad else ""
    except (OSError, ValueError, AttributeError) as error:
        reason = f"{SEAL} cannot be read, {error}"
    if reason:
        goes_on = older and path.parent.name != BEST  # a state counts on the best of its time
        cure = f"delete it to go on from step {older[-1]}" if goes_on else _anew(path.parent)
        raise InputError(f"checkpoint {path} is damaged or foreign ({reason}); {cure}")


def _anew(folder: Path) -> str:
    """Says how to start again where nothing can be gone on from."""
    root = folder.parent if folder.name == BEST else folder
    # With the checkpoints alone a result would stay, and the run pass for finished.
    return f"delete {root.parent} to train from the start"
