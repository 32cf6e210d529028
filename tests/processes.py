"""Starts the processes of one run on this machine, and ends them whatever happens."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# As for users: transformers would load torch for a second and a half, which nothing here needs.
PYTHON_PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "without_torch")))


def free_port() -> int:
    """Finds a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listening(process: int) -> set[tuple[str, int]]:
    """Lists where a process of this machine listens. -> addresses as /proc has them, ports"""
    inodes = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                host, port = fields[1].split(":")
                addresses.add((host, int(port, 16)))
    return addresses


def quick_env(devices: int = 1) -> dict[str, str]:
    """Gives what a process needs to drive CPU devices and to compile as the tests themselves do."""
    test_flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    flags = [f"--xla_force_host_platform_device_count={devices}", *test_flags]
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


class Processes:
    """Python processes with their standard outputs in files. Leave the block and they are gone."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None, devices: int = 2):
        """Keeps the outputs in `folder`; each process drives `devices` devices."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.all = folder, []
        self._env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
        self._env |= quick_env(devices) | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
        self._env |= env or {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, words: Sequence[object], **env: str) -> subprocess.Popen:
        """Starts one process more."""
        path = self._folder / str(len(self.all))
        with open(f"{path}.out", "w") as out, open(f"{path}.err", "w") as err:
            process = subprocess.Popen(
                [sys.executable, *map(str, words)], env=self._env | env, stdout=out, stderr=err
            )
        self.all.append(process)
        return process

    def start_all(self, number: int, words: Sequence[object]) -> None:
        """Starts `number` processes of the same words, each with its flags of hosts."""
        port = free_port()
        for process in range(number):
            flags = [f"--coordinator=127.0.0.1:{port}", f"--processes={number}"]
            self.start([*words, *flags, f"--process={process}"])

    def wait(self, timeout: float = 120) -> list[int]:
        """Waits for all. -> their exit codes"""
        end = time.monotonic() + timeout
        try:
            return [p.wait(max(0.1, end - time.monotonic())) for p in self.all]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {timeout} s: {self.told()}") from error

    def out(self, process: int) -> str:
        """Reads what a process has written on standard output."""
        return (self._folder / f"{process}.out").read_text()

    def err(self, process: int) -> str:
        """Reads what a process has written on standard error."""
        return (self._folder / f"{process}.err").read_text()

    def told(self) -> str:
        """Shows the end of every error output."""
        return "\n".join(f"-- {i}\n{self.err(i)[-3000:]}" for i in range(len(self.all)))

    def signal(self, process: int, which: int = signal.SIGKILL) -> None:
        """Sends a signal to one process."""
        self.all[process].send_signal(which)
