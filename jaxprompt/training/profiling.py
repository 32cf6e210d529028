"""Traces a few steps, and tabulates the slowest operations."""

import glob
import os
import re
import shutil
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import jax

WARMUP_STEPS = (
    2  # steps before the trace: the first compiles, and the device is still idle in the next
)
MAX_ROWS = 10  # kinds of operation in the table
FOLDER = "profile"
# Operations that contain others, and whose time is already counted.
_CONTAINERS = ("while", "call", "conditional", "async-start", "async-done")


class OperationKind(NamedTuple):
    """All operations of a trace with the same name, without its number."""

    name: str
    times: int
    seconds: float
    share: float  # of the seconds of all


class Profiler:
    """Traces steps of a run to WORKDIR/profile, for TensorBoard; 0 steps = no trace."""

    def __init__(self, workdir: str, steps: int, start_step: int):
        """`start_step` is the step that the run starts or resumes from."""
        self._folder = os.path.join(workdir, FOLDER)
        self._first, self._steps = start_step + WARMUP_STEPS, steps
        self._is_tracing = False

    def before(self, step: int) -> None:
        """Starts the trace before its first step."""
        if self._steps and step == self._first:
            # One trace per run: the table would include the traces of interrupted runs.
            shutil.rmtree(self._folder, ignore_errors=True)
            jax.profiler.start_trace(self._folder)
            self._is_tracing = True

    def after(self, step: int, state: Any, last: bool) -> list[str]:
        """Stops the trace after its last step. Returns the lines of its table, else []."""
        if self._steps and last and step <= self._first:
            num_steps = step - self._first + WARMUP_STEPS
            return [
                f"no trace: tracing starts after {WARMUP_STEPS} steps, and this run took "
                f"{num_steps}"
            ]
        if not self._is_tracing or not (last or step == self._first + self._steps):
            return []
        jax.block_until_ready(state)
        self.close()
        num_steps = step - self._first
        return format_operations(read_operations(self._folder), num_steps, self._folder)

    def close(self) -> None:
        """Stops a trace that was interrupted."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


def read_operations(folder: str) -> list[OperationKind]:
    """Sums the operations of the newest trace in a folder by kind, slowest first."""
    paths = glob.glob(os.path.join(glob.escape(folder), "plugins", "profile", "*", "*.xplane.pb"))
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for path in paths:
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                # GPUs and CPUs name the operation of an event; a TPU has a line of them.
                is_op_line = line.name == "XLA Ops"
                for event in line.events:
                    if is_op_line or any(name == "hlo_op" for name, _ in event.stats):
                        name = operation_kind(event.name)
                        seconds[name] += event.duration_ns / 1e9
                        counts[name] += 1
    for name in _CONTAINERS:
        seconds.pop(name, None)
    total = sum(seconds.values())
    slowest = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    return [
        OperationKind(name, counts[name], duration, duration / total) for name, duration in slowest
    ]


def operation_kind(name: str) -> str:
    """Removes the number of an operation. "%fusion.12 = f32[8]{0} fusion(...)" -> "fusion" """
    return re.sub(r"([.:]\d+|\.clone)+$", "", name.partition(" = ")[0].lstrip("%"))


def format_operations(kinds: list[OperationKind], steps: int, folder: str) -> list[str]:
    """Returns the table of a trace of `steps` steps as lines."""
    lines = [f"trace of {steps} steps in {folder}; open it with TensorBoard or ui.perfetto.dev"]
    if not kinds:
        return [*lines, "the trace has no operations of this device"]
    width = max(len(kind.name) for kind in kinds[:MAX_ROWS])
    lines.append(f"  {'operation':{width}}  times a step  ms a step  share")
    for kind in kinds[:MAX_ROWS]:
        milliseconds = 1e3 * kind.seconds / steps
        lines.append(
            f"  {kind.name:{width}}  {kind.times / steps:12,.1f}  {milliseconds:9,.2f}  "
            f"{kind.share:5.1%}"
        )
    return lines
