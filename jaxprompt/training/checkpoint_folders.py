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
from jaxprompt.files import folder_checksums, make_folder, parse_json, read_bytes, write_atomic
from jaxprompt.parallel import processes

STATE, BEST, POSITION = "state", "best", "position"  # the items of a step
CHECKSUMS = "checksums.json"  # file name -> CRC-32
TEMPORARY = ".orbax-checkpoint-tmp"  # orbax's name for a step that is not complete
_STEP = re.compile("0|[1-9][0-9]*")
# Names that only checkpoints and orbax use; other files are the user's.
_INTERRUPTED = re.compile(rf"\d+{re.escape(TEMPORARY)}.*|0\.shared-\w+")


def checkpoint_folder(workdir: str | os.PathLike) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(os.path.abspath(workdir)) / "checkpoints"


def list_steps(folder: Path, item: str = STATE) -> list[int]:
    """Returns the complete steps of a folder that have an item, in order."""
    names = (path.parent.name for path in folder.glob(f"*/{item}") if path.is_dir())
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def agreed_steps(folder: Path, item: str = STATE) -> list[int]:
    """Returns the complete steps that process 0 sees."""
    # A folder that was just written may look older to another host.
    return json.loads(processes.gather_texts(json.dumps(list_steps(folder, item)))[0])


def outdated_steps(states: Iterable[int], bests: Iterable[int], keep: int) -> set[int]:
    """Returns the steps to delete when the newest `keep` states are kept.

    Every kept state needs the best parameters of its time to resume, and best parameters that are
    newer than all states belong to the next state.
    """
    states, bests = sorted(states), sorted(bests)

    def best_up_to(step: int) -> int | None:
        return max((best for best in bests if best <= step), default=None)

    needed = {*states[-keep:], *map(best_up_to, states[-keep:]), *bests[-1:]}
    return {*states, *bests} - needed


def rewind(folder: Path, step: int, keep: int) -> None:
    """Removes checkpoints after `step`, outdated ones, and the rest of interrupted saves."""
    remove_interrupted(folder)
    states, bests = ({s for s in list_steps(folder, x) if s <= step} for x in (STATE, BEST))
    needed = (states | bests) - outdated_steps(states, bests, keep)
    # Newest first, so that a kill in between leaves an earlier state of the run.
    for obsolete in sorted({*list_steps(folder), *list_steps(folder, BEST)} - needed, reverse=True):
        path = folder / str(obsolete)
        # Renamed first: a kill in the middle of the removal must not leave half a checkpoint.
        shutil.rmtree(path.rename(path.with_name(path.name + TEMPORARY)), ignore_errors=True)


def remove_interrupted(folder: Path) -> None:
    """Removes what interrupted or failed saves left behind."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _INTERRUPTED.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def check_shared(folder: Path) -> None:
    """Raises InputError if several processes do not share a folder."""
    if jax.process_count() == 1:
        return
    make_folder(folder)
    # A new name, because hosts cache earlier lookups.
    probe = folder / f"0.shared-{processes.gather_texts(uuid.uuid4().hex)[0]}"
    processes.run_on_first(lambda: write_atomic(probe, ""))
    _check_visible(probe)
    processes.run_on_first(probe.unlink)


def _check_visible(path: Path) -> None:
    visible = processes.gather_texts("yes" if path.exists() else "")

    def check() -> None:
        if "" in visible:
            raise InputError(
                f"process {visible.index('')} does not see the {path.parent} of process 0; several "
                "processes need a --workdir on a disk that all of them share"
            )

    processes.run_on_first(check)


def write_checksums(path: Path) -> None:
    """Adds checksums to a written step. Raises InputError or OSError."""
    sums = folder_checksums(path)
    # Orbax changes its own files of a step once more when it renames the step.
    write_atomic(path / CHECKSUMS, json.dumps({name: x for name, x in sums.items() if "/" in name}))


def find_checkpoint(folder: Path, item: str, step: int | None) -> Path:
    """Returns the checkpoint of `step` with an item, the newest by default.

    Raises InputError if the item is missing or damaged.
    """
    steps = agreed_steps(folder, item)
    newest = max(steps, default=None) if step is None else step
    if newest is None:
        raise InputError(
            f"no checkpoint in {folder}; train first, until dev is evaluated, or use another "
            "workdir"
        )
    # Deleting only the checkpoints would leave a result, and the run would count as finished.
    advice = f"delete {folder.parent} to train again"
    if newest not in steps:
        item_name = "best parameters" if item == BEST else "checkpoint"
        raise InputError(f"no {item_name} of step {step} in {folder} (saved: {steps}); {advice}")
    older = [other for other in steps if other < newest]
    if item == STATE and older:
        advice = f"delete {folder / str(newest)} to resume from step {older[-1]}"
    path = folder / str(newest)
    # Every process reads a part, so the folder must be visible to each.
    _check_visible(path)
    processes.run_on_first(lambda: _check_checksums(path, item, advice))
    return path


def _check_checksums(path: Path, item: str, advice: str) -> None:
    # Only of this item and the position: a state is larger than its best parameters.
    prefixes = f"{item}/", f"{POSITION}/"
    try:
        recorded = parse_json(read_bytes(path / CHECKSUMS))
        expected = {name: crc for name, crc in recorded.items() if name.startswith(prefixes)}
        actual = {
            prefix + name: crc
            for prefix in prefixes
            for name, crc in folder_checksums(path / prefix).items()
        }
        differing = [name for name, _ in sorted(expected.items() ^ actual.items())]
        reason = f"{differing[0]} is missing, truncated or changed" if differing else ""
    except (OSError, ValueError, TypeError, AttributeError) as error:  # or not an object of numbers
        reason = str(error)
    if reason:
        raise InputError(
            f"checkpoint {path} is damaged or belongs to another run ({reason}); {advice}"
        )
