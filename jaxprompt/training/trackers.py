"""Experiment trackers besides metrics.jsonl: TensorBoard event files, wandb, trackio.

Nested values get one name, "dev/accuracy"; values that are not numbers are only in metrics.jsonl.
A package is imported only if its tracker is used.
"""

import abc
import contextlib
import contextvars
import importlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxprompt.errors import InputError, check_extra
from jaxprompt.files import make_folder, write_atomic, write_error
from jaxprompt.tree import flatten

_IDENTITY = "tracker.id"
PROJECT = "jaxprompt"  # of all runs, unless WANDB_PROJECT is set


class Tracker:
    """Logs the numbers of one run. This base class, `none`, writes nothing."""

    PACKAGE = ""  # an optional one that it needs

    def __init__(self, workdir: Path):
        """Opens the tracker of the run in `workdir`."""

    def resume(self, step: int) -> None:
        """Continues after `step` (-1 = from the start); call it before the first write."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the numbers of a step, nested as in metrics.jsonl. Raises InputError."""

    def flush(self) -> None:
        """Flushes written numbers. Raises InputError."""

    def close(self) -> None:
        """Closes the tracker. Raises InputError."""


class TensorBoard(Tracker):
    """Event files in <workdir>/tensorboard."""

    def __init__(self, workdir: Path):
        """Opens nothing yet: the first write creates the file."""
        self._folder = workdir / "tensorboard"
        self._first = 0  # step that this session starts with
        self._writer: Any = None  # tensorboardX's RecordWriter, once something is written

    def resume(self, step: int) -> None:
        """Starts the session after `step`."""
        self._first = step + 1

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes a scalar for each number. Raises InputError on a full disk."""
        # Not tensorboardX's SummaryWriter, whose thread only prints the error of a full disk.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        now = time.time()
        events = [
            Event(wall_time=now, step=step, summary=scalar(name, number))
            for name, number in flat_numbers(values).items()
        ]
        with self._errors():
            # Opened by the first write, after `resume`.
            if self._writer is None:
                # A new session hides what a killed run wrote after the step resumed from.
                start = SessionLog(status=SessionLog.START)
                events.insert(0, Event(wall_time=now, step=self._first, session_log=start))
                # The first event of a file names its format.
                events.insert(0, Event(wall_time=now, file_version="brain.Event:2"))
                self._writer = _open_events(make_folder(self._folder), self._first)
            for event in events:
                self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        """Flushes the buffer of the file. Raises InputError on a full disk."""
        if self._writer is not None:
            with self._errors():
                self._writer.flush()

    def close(self) -> None:
        """Closes the event file. Raises InputError on a full disk."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._errors():
                writer.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._folder, error) from error


class _Service(Tracker, abc.ABC):
    """A package named like its tracker, whose `init` returns a run with `log` and `finish`."""

    ADVICE = "fix this"

    def __init__(self, workdir: Path):
        """Opens or resumes the run of this workdir. Raises InputError."""
        package, path = importlib.import_module(self.PACKAGE), workdir.resolve()
        with self._errors():
            self._run = self._open(package, path, _run_id(path))

    @abc.abstractmethod
    def _open(self, package: ModuleType, workdir: Path, run_id: str) -> Any:
        """Opens the run; `run_id` is a unique name."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs the numbers of a step."""
        with self._errors():
            self._run.log(flat_numbers(values), step=step)

    def close(self) -> None:
        """Finishes the run after sending what is pending."""
        with self._errors():
            self._run.finish()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            # Standard output is for the results of commands; trackio prints to it.
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except Exception as error:  # the errors of these packages have no class in common
            text = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"train.tracker={self.PACKAGE}: {text[:300].rstrip('.')}; {self.ADVICE}, or resume "
                "the run with train.tracker=none"
            ) from error


class Wandb(_Service):
    """A run of Weights & Biases; WANDB_MODE, WANDB_PROJECT and the like apply."""

    PACKAGE = "wandb"
    ADVICE = "log in with `wandb login`, set WANDB_MODE=offline"

    def _open(self, package: ModuleType, workdir: Path, run_id: str) -> Any:
        return package.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=workdir.name,
            dir=str(workdir),
            id=run_id,
            resume="allow",
            config=None,
            reinit="create_new",  # the runs of a grid are open at once, in one process
        )


class Trackio(_Service):
    """A run of trackio, stored on this machine unless its environment variables say otherwise."""

    PACKAGE = "trackio"

    def _open(self, package: ModuleType, workdir: Path, run_id: str) -> Any:
        # trackio identifies a run by its name, and ends the previous one of the same context.
        name = f"{workdir.name}-{run_id[:8]}"
        return contextvars.Context().run(package.init, project=PROJECT, name=name, resume="allow")


def _run_id(workdir: Path) -> str:
    """Returns the random run id of a service, which is stored in the folder.

    So a resumed command continues the same run. A folder that was deleted and created again is
    another run, and so is the same path on another machine.
    """
    path = workdir / _IDENTITY
    if not path.exists():
        write_atomic(path, secrets.token_hex(8) + "\n")
    return path.read_text().strip()


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "none": Tracker}


def check_tracker(name: str) -> None:
    """Raises InputError if the package of a tracker is missing."""
    if TRACKERS[name].PACKAGE:
        check_extra("tracking", TRACKERS[name].PACKAGE, f"train.tracker={name}")


def open_tracker(name: str, workdir: Path, *, enabled: bool = True) -> Tracker:
    """Opens a tracker by name; if it is not `enabled`, it writes nothing."""
    return TRACKERS[name](workdir) if enabled else Tracker(workdir)


def flat_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of nested values by name, e.g. {"dev/accuracy": 0.5}."""
    plain = {name: x.tolist() if hasattr(x, "tolist") else x for name, x in flatten(values).items()}
    return {name: float(x) for name, x in plain.items() if isinstance(x, int | float)}


def _open_events(folder: Path, first: int) -> Any:
    """Opens an event file with a name that TensorBoard reads after existing ones."""
    from tensorboardX.record_writer import RecordWriter

    # TensorBoard reads files in the order of their names, and the clock may be behind the last one.
    times = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.[0-9]*.*")]
    new_time = max(int(time.time()), max(times, default=0) + 1)
    name = f"events.out.tfevents.{new_time}.{socket.gethostname()}.{first}"
    return RecordWriter(str(folder / name))
