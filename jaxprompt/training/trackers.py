"""Experiment trackers besides metrics.jsonl: TensorBoard event files, wandb, trackio.

Nested values get one name, "dev/accuracy"; values that are not numbers are only in metrics.jsonl.
A package is imported only if its tracker is used.
"""

import abc
import contextlib
import contextvars
import hashlib
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

from jaxprompt.errors import InputError, check_known
from jaxprompt.files import make_folder, write_atomic, write_error

_IDENTITY = "tracker.id"
PROJECT = "jaxprompt"  # that runs stand under, unless WANDB_PROJECT names another for wandb


class Tracker:
    """Logs the numbers of one run. This base class, `none`, writes nothing."""

    PACKAGE = ""  # that it needs

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

    PACKAGE = "tensorboardX"

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
        # Not by tensorboardX's SummaryWriter: its thread meets a full disk, and only prints that.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        now = time.time()
        events = [
            Event(wall_time=now, step=step, summary=scalar(name, number))
            for name, number in flat_numbers(values).items()
        ]
        with self._errors():
            # Opened by the first write: `resume` has said by then where the session starts.
            if self._writer is None:
                # The start of a session hides what a killed run wrote after the step resumed from.
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

    CURE = "fix this"

    def __init__(self, workdir: Path):
        """Opens or resumes the run of this workdir. Raises InputError."""
        package, path = _load(self.PACKAGE), workdir.resolve()
        with self._errors():
            self._run = self._open(package, path, _identity(path))

    @abc.abstractmethod
    def _open(self, package: ModuleType, workdir: Path, own: str) -> Any:
        """Opens the run; `own` is a unique name."""

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
            # Standard output is for a command's result; trackio greets there.
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except Exception as error:  # the errors of these packages have no class in common
            said = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"train.tracker={self.PACKAGE}: {said[:300].rstrip('.')}; {self.CURE}, or resume "
                "the run with train.tracker=none"
            ) from error


class Wandb(_Service):
    """A run of Weights & Biases; WANDB_MODE, WANDB_PROJECT and the like apply."""

    PACKAGE = "wandb"
    CURE = "log in with `wandb login`, set WANDB_MODE=offline"

    def _open(self, package: ModuleType, workdir: Path, own: str) -> Any:
        return package.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=workdir.name, dir=str(workdir),
            id=own, resume="allow", config=None,
            reinit="create_new",  # the runs of a grid are open at once, in one process
        )  # fmt: skip


class Trackio(_Service):
    """A run of trackio, stored on this machine unless its environment variables say otherwise."""

    PACKAGE = "trackio"

    def _open(self, package: ModuleType, workdir: Path, own: str) -> Any:
        # It knows a run by its name alone, and ends the one before it in the same context.
        name = f"{workdir.name}-{own[:8]}"
        new = contextvars.Context()
        return new.run(package.init, project=PROJECT, name=name, resume="allow")


def _identity(workdir: Path) -> str:
    """Returns the random run id of a service, which is stored in the folder.

    So a resumed command continues the same run. A folder that was deleted and created again is
    another run, and so is the same path on another machine.
    """
    path = workdir / _IDENTITY
    name = path.read_text().strip() if path.exists() else ""
    if not name:
        # A run that began before this file existed is known by its path.
        began = (workdir / "metrics.jsonl").exists()
        old = hashlib.sha256(os.fsencode(workdir)).hexdigest()[:16]
        name = old if began else secrets.token_hex(8)
        write_atomic(path, name + "\n")
    return name


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "none": Tracker}


def open_tracker(name: str, workdir: Path, *, enabled: bool = True) -> Tracker:
    """Opens a tracker by name; if it is not `enabled`, it writes nothing.

    Raises InputError for a missing package, on every process.
    """
    made = TRACKERS[check_known("train.tracker", name, TRACKERS)]
    if made.PACKAGE:
        _load(name)
    return made(workdir) if enabled else Tracker(workdir)


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns the numbers of nested values by name, e.g. {"dev/accuracy": 0.5}."""
    found: dict[str, float] = {}
    for name, value in values.items():
        value = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(value, dict):
            found |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[prefix + name] = float(value)
    return found


def _load(name: str) -> ModuleType:
    """Imports the package of a tracker. Raises InputError if it is missing."""
    package = TRACKERS[name].PACKAGE
    try:
        module = importlib.import_module(package)
        # A mere folder of that name, as wandb leaves beside its runs, is imported too.
        if getattr(module, "__file__", None) is None:
            raise ImportError(f"No module named {package!r}, only a folder")
    except ImportError as error:
        raise InputError(
            f"train.tracker={name} needs the package {package} ({error}); pip install {package}, "
            "or set train.tracker=none"
        ) from error
    return module


def _open_events(folder: Path, first: int) -> Any:
    """Opens an event file with a name that TensorBoard reads after existing ones."""
    from tensorboardX.record_writer import RecordWriter

    # It reads them in the order of their names, and this clock may be behind that of the last one.
    made = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.[0-9]*.*")]
    moment = max(int(time.time()), max(made, default=0) + 1)
    name = f"events.out.tfevents.{moment}.{socket.gethostname()}.{first}"
    return RecordWriter(str(folder / name))
