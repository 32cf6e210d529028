"""Checkpoint folders: which are complete or damaged, and cleaning up after interrupted saves.

    <workdir>/checkpoints/<step>/state/           what a run resumes from
    <workdir>/checkpoints/<step>/best/            trained parameters, if they are the best so far
    <workdir>/checkpoints/<step>/position/        position of the run, as JSON
    <workdir>/checkpoints/<step>/checksums.json   of the files of all three

A folder named by a bare number is complete. Functions that communicate with other
processes are called by every process together.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxprompt.errors import InputError
from jaxprompt.files import folder_checksums, make_folder, parse_json, write_atomic
from jaxprompt.parallel import processes

STATE, BEST, POSITION = "state", "best", "position"  # the items of a step
SEAL = "checksums.json"  # file name -> CRC-32
TEMPORARY = ".orbax-checkpoint-tmp"  # orbax's name for a step that is not complete
_STEP = re.compile("0|[1-9][0-9]*")
# Names that only checkpoints and orbax give; whatever else lies there is the user's.
_LEFT_BEHIND = re.compile(rf"\d+{re.escape(TEMPORARY)}.*|0\.shared-\w+")


def folder_of(workdir: str | os.PathLike) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(os.path.abspath(workdir)) / "checkpoints"


def steps_of(folder: Path, item: str = STATE) -> list[int]:
    """Returns the complete steps of a folder that have an item, in order."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(int(path.name) for path in steps if _has(path, item))


def _has(path: Path, item: str) -> bool:
    if item == STATE:  # nor does a folder of something else pass for one without a state
        return (path / STATE).is_dir() or not (path / BEST).is_dir()
    return (path / item).is_dir()


def agreed_steps(folder: Path, item: str = STATE) -> list[int]:
    """Returns the complete steps that process 0 sees."""
    # A folder that was just written may look older to another host.
    return json.loads(processes.gather_texts(json.dumps(steps_of(folder, item)))[0])


def outdated(states: Iterable[int], bests: Iterable[int], keep: int) -> set[int]:
    """Returns the steps to delete when the newest `keep` states are kept.

    Every kept state needs the best parameters of its time to resume, and best parameters that are
    newer than all states belong to the next state.
    """
    states, bests = sorted(states), sorted(bests)
    best_of = lambda step: max((best for best in bests if best <= step), default=None)
    needed = {*states[-keep:], *map(best_of, states[-keep:]), *bests[-1:]}
    return {*states, *bests} - needed


def rewind(folder: Path, step: int, keep: int) -> None:
    """Removes checkpoints after `step`, outdated ones, and the rest of interrupted saves."""
    remove_left_behind(folder)
    states, bests = ({s for s in steps_of(folder, x) if s <= step} for x in (STATE, BEST))
    needed = (states | bests) - outdated(states, bests, keep)
    # The newest first: what is left by a kill in between is a run that was saved earlier.
    for later in sorted({*steps_of(folder), *steps_of(folder, BEST)} - needed, reverse=True):
        path = folder / str(later)
        # Renamed first: a kill in the middle of the removal must not leave half a checkpoint.
        shutil.rmtree(path.rename(path.with_name(path.name + TEMPORARY)), ignore_errors=True)


def remove_left_behind(folder: Path) -> None:
    """Removes what interrupted or failed saves left behind."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFT_BEHIND.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def check_shared(folder: Path) -> None:
    """Raises InputError if several processes do not share a folder."""
    if jax.process_count() == 1:
        return
    make_folder(folder)
    # A new name: what a host has looked up before, it may remember.
    probe = folder / f"0.shared-{processes.gather_texts(uuid.uuid4().hex)[0]}"
    processes.run_on_first(lambda: write_atomic(probe, ""))
    _check_seen(probe)
    processes.run_on_first(probe.unlink)


def _check_seen(path: Path) -> None:
    seen = processes.gather_texts("yes" if path.exists() else "")

    def conclude() -> None:
        if "" in seen:
            raise InputError(
                f"process {seen.index('')} does not see the {path.parent} of process 0; several "
                "processes need a --workdir on a disk that all of them share"
            )

    processes.run_on_first(conclude)


def seal(path: Path) -> None:
    """Adds checksums to a written step. Raises InputError or OSError."""
    sums = folder_checksums(path)
    # Orbax changes its own notes of a step once more when it gives the step its name.
    write_atomic(path / SEAL, json.dumps({name: x for name, x in sums.items() if "/" in name}))


def find(folder: Path, item: str, step: int | None, state: int | None = None) -> Path:
    """Returns the checkpoint of `step` with an item, the newest by default.

    `state` is the step of the state that needs a best. Raises InputError if the item is missing or
    damaged.
    """
    steps = agreed_steps(folder, item)
    newest = max(steps, default=None) if step is None else step
    fix = _fix(folder, steps, newest, item, state)
    if newest is None or newest not in steps:
        there = f"saved steps: {', '.join(map(str, steps))}" if steps else "nothing is saved"
        kind = "best parameters" if item == BEST else "checkpoint"
        what = "no checkpoint" if step is None else f"no {kind} of step {step}"
        is_lost = step is not None and item == BEST  # a state or a result says it was there
        first = "train first, until dev is evaluated, or give another workdir"
        raise InputError(f"{what} in {folder} ({there}); {fix if is_lost else first}")
    path = folder / str(newest)
    # Every process reads a part, so each of them has to see the folder.
    _check_seen(path)
    processes.run_on_first(lambda: _check_whole(path, item, fix))
    return path


def _fix(folder: Path, steps: list[int], step: int | None, item: str, state: int | None) -> str:
    """Says what to delete if an item of `step` is missing or damaged."""
    older: list[int] = []
    if step is not None and item == STATE:
        older, state = [s for s in steps if s < step], step
    elif step is not None and state is not None:  # a state from before this best, with another
        states = [s for s in agreed_steps(folder, STATE) if s < step]
        older = [s for s in states if any(best <= s for best in steps)]
    if older:
        return f"delete {folder / str(state)} to resume from step {older[-1]}"
    # With the checkpoints alone a result would stay, and the run pass for finished.
    return f"delete {folder.parent} to train again"


def _check_whole(path: Path, item: str, fix: str) -> None:
    try:
        sealed = parse_json((path / SEAL).read_bytes())
        # Of these and no more: a state is larger than its best.
        sums = {
            f"{part}/{name}": checksum
            for part in (item, POSITION)
            for name, checksum in folder_checksums(path / part).items()
        }
        names = {name for name in sealed if name.startswith((f"{item}/", f"{POSITION}/"))}
        bad = [name for name in sorted(names | sums.keys()) if sealed.get(name) != sums.get(name)]
        reason = f"{bad[0]} is missing, truncated or changed" if bad else ""
    except (OSError, ValueError, AttributeError) as error:
        reason = f"{SEAL} cannot be read, {error}"
    if reason:
        raise InputError(
            f"checkpoint {path} is damaged or belongs to another run ({reason}); {fix}"
        )
