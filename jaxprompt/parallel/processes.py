"""Several processes that train together: they connect, and check that they agree.

Each process controls its own devices, and jax.devices() lists those of all. Process 0 is the
coordinator: the others connect to its address.
"""

import atexit
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxprompt import signals
from jaxprompt.errors import InputError, first_line, is_of_jax, out_of_memory

HEARTBEAT_SECONDS = 30  # a process that is silent for longer counts as lost
MAX_TIMEOUT, MAX_PROCESSES = 10**6, 10**5  # seconds to wait, processes of a run
GRACE_SECONDS = 2  # for which a failing or refusing process 0 waits for the others
ACCEPTED, REFUSED = "jaxprompt: accepted", "jaxprompt: refused: "  # answers of process 0
RETRY_SECONDS = 0.5  # between two tries to reach the coordinator
ANSWER_SECONDS = 10  # that a connected process waits beyond its timeout
# In messages of transports and the coordination service about a lost process.
_LOST = re.compile(r"gloo|nccl|closed by peer|reset by peer|heartbeat|another task died", re.I)

Result = TypeVar("Result")


def connect(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    *,
    cluster: bool = False,
    timeout: float = 300,
) -> None:
    """Connects the processes of a run; call it before anything uses a device.

    Without any argument this process runs alone.

    Args:
      coordinator: HOST:PORT of process 0.
      processes: number of processes.
      process: number of this process.
      cluster: let JAX detect the other three, on Slurm and TPU pods.
      timeout: seconds to wait for the other processes.

    Raises:
      InputError: the values are inconsistent, or the others do not answer in time.
    """
    arguments = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [f"--{name}" for name, value in arguments.items() if value is None]
    if not 0 < timeout <= MAX_TIMEOUT:  # NaN is neither
        raise InputError(
            f"--timeout={timeout:g} must be more than 0 and at most {MAX_TIMEOUT} seconds"
        )
    if cluster and len(missing) < len(arguments):
        raise InputError(
            f"--cluster sets {', '.join(map('--{}'.format, arguments))} itself; remove them"
        )
    if not cluster and len(missing) == len(arguments):
        return
    if coordinator is not None and processes is not None and process is not None:
        _check_arguments(coordinator, processes, process)
        _meet(coordinator, processes, process, timeout)
    elif not cluster:
        raise InputError(
            f"{' and '.join(missing)} missing; give --coordinator=HOST:PORT, --processes and "
            "--process together"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM over.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            # JAX's own default is every address of this host.
            coordinator_bind_address=_bind_address(coordinator)
            if coordinator and process == 0
            else None,
            # Here all are present, except on a cluster, where JAX itself waits for them.
            initialization_timeout=max(HEARTBEAT_SECONDS, round(timeout) if cluster else 0),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except ValueError as error:
        raise InputError(
            f"--cluster: JAX finds no cluster here ({error}); give --coordinator, --processes "
            "and --process"
        ) from error
    except RuntimeError as error:
        where = f"--coordinator={coordinator}" if coordinator else "--cluster"
        raise InputError(
            f"{where}: not all processes connected within {timeout:g} s; start all of them, or "
            "raise --timeout"
        ) from error
    # `Placement.share` gives every process an equal part of a batch.
    _check_even()
    if jax.default_backend() == "cpu":
        _silence_gloo()


@contextlib.contextmanager
def exit_on_failure() -> Iterator[None]:
    """Ends this process without waiting for the others if the block fails.

    At exit JAX would wait for all processes, and they may wait for this one.
    """
    try:
        yield
    except BaseException as error:
        if jax.distributed.is_initialized():
            is_input = isinstance(error, InputError) or out_of_memory(error)
            code = 2 if is_input else signals.exit_code(1)
            # The newest is run first, and so before JAX's own shutdown, which waits.
            atexit.register(_exit, code)
        raise


def is_first() -> bool:
    """Returns whether this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def gather_texts(text: str) -> list[str]:
    """Returns the text of every process, in order. All processes must call it."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental.multihost_utils import process_allgather

    encoded = np.frombuffer(text.encode(), np.uint8)
    sizes = process_allgather(np.asarray(encoded.size, np.int32)).reshape(-1)
    # All processes must give arrays of one shape, so the texts are filled up to the longest.
    encoded_texts = process_allgather(
        np.pad(encoded, (0, int(sizes.max()) - encoded.size))
    )  # [process, byte]
    return [
        bytes(encoded_text[:size]).decode()
        for encoded_text, size in zip(encoded_texts, sizes, strict=True)
    ]


def run_on_first(action: Callable[[], Result]) -> Result | None:
    """Runs an action on process 0 while the others wait; its InputError is raised on all.

    Returns the result of the action on process 0, None on the others.
    """
    return run_on_all(lambda: action() if is_first() else None)


def run_on_all(action: Callable[[], Result]) -> Result:
    """Runs an action on every process; the first InputError is raised on all."""
    error: InputError | None = None
    try:
        result = action()
    except InputError as input_error:
        error = input_error
    message = next(filter(None, gather_texts(str(error or ""))), "")
    if error and str(error) == message:
        raise error
    if message:
        raise InputError(message) from error
    return result  # there is one: an error was raised above


def wait_for_all(name: str, timeout: float, failure: str = "") -> list[str]:
    """Waits until every process reaches the barrier `name`, which can be used once.

    No device is involved, so any thread may wait. All processes must call it.

    Args:
      name: name of the barrier.
      timeout: seconds to wait.
      failure: message of this process to the others, "" if it did not fail.

    Returns:
      The failures of all processes that have one.
    """
    from jax._src import distributed

    client: Any = distributed.global_state.client  # there is one where there are processes
    if failure:
        client.key_value_set(f"{name}/{jax.process_index()}", failure)
    client.wait_at_barrier(name, round(timeout * 1000))
    return [text for _, text in sorted(client.key_value_dir_get(f"{name}/"))]


def check_agreement(facts: Mapping[str, str]) -> None:
    """Raises the same InputError on every process if their `facts` differ."""
    first, *others = (json.loads(text) for text in gather_texts(json.dumps(dict(facts))))
    differences: dict[str, str] = {}
    for process, other in enumerate(others, start=1):
        for name in first | other:
            values = first.get(name), other.get(name)
            if values[0] != values[1]:
                text = f"{name} ({values[0]} on process 0, {values[1]} on process {process})"
                differences.setdefault(name, text)
    if differences:
        raise InputError(
            f"the processes differ in {', '.join(differences.values())}; start all with the same "
            "config, code and data"
        )


def _check_arguments(coordinator: str, processes: int, process: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        raise InputError(f"--coordinator={coordinator!r} must be HOST:PORT, e.g. 10.0.0.1:1234")
    if not 1 <= processes <= MAX_PROCESSES:
        raise InputError(f"--processes={processes} must be at least 1 and at most {MAX_PROCESSES}")
    if not 0 <= process < processes:
        raise InputError(
            f"--process={process} must be 0 to {processes - 1}, below --processes={processes}"
        )


def _resolve(coordinator: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Resolves HOST:PORT to a numeric address. Raises OSError."""
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")  # [::1]:1234
    family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    return family, (str(address[0]), int(address[1]))


def _bind_address(coordinator: str) -> str:
    """Returns the numeric address that process 0 listens on."""
    family, (host, port) = _resolve(coordinator)
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"


def _meet(coordinator: str, processes: int, process: int, timeout: float) -> None:
    """Waits until all processes are present, at the address that JAX uses next.

    jax.distributed.initialize cannot report who is absent. Measured on jax 0.10: without an answer
    of the coordinator, with an absent process, or with a number given twice it ends every process
    by SIGABRT and a stack trace of C++ before Python sees an exception; a host name that does not
    resolve is a segmentation fault; and processes with different --processes start, with the wrong
    number.
    """
    deadline = time.monotonic() + timeout
    if process:
        _sign_in(coordinator, processes, process, deadline)
        return
    try:
        family, address = _resolve(coordinator)
        # JAX's own server, which comes next, would share a port that is taken.
        server = socket.create_server(address, family=family)
    except OSError as error:
        raise InputError(
            f"--coordinator={coordinator}: process 0 cannot listen there "
            f"({error.strerror or error}); give an address of process 0's host and a free port"
        ) from error
    with server, contextlib.ExitStack() as stack:
        refusal = _accept_processes(server, stack, processes, deadline)
    if refusal:
        raise InputError(refusal)


def _accept_processes(
    server: socket.socket, stack: contextlib.ExitStack, processes: int, deadline: float
) -> str:
    """Accepts the other processes and answers them. Returns why they are refused, or ""."""
    connections: dict[int, socket.socket] = {}
    refusal = ""
    while len(connections) < processes - 1:
        # A second at most, so that processes that ended are noticed meanwhile.
        server.settimeout(min(max(deadline - time.monotonic(), 0.01), 1))
        newcomer = _accept(server, stack)
        # A process that was killed and started again has the same number.
        connections = {
            number: connection
            for number, connection in connections.items()
            if not _is_closed(connection)
        }
        if newcomer:
            number, count, connection = newcomer
            problem = ""
            if count != processes:
                problem = (
                    f"--processes={count} on process {number}, {processes} on process 0; give the "
                    "same number to all"
                )
            elif number in connections:
                problem = f"--process={number} was given twice; use each of 0 to {processes - 1}"
            # The second process of a number is answered, too.
            connections[-len(connections) if number in connections else number] = connection
            if problem and not refusal:
                # Those that connect a little later learn the reason as well.
                refusal, deadline = problem, min(deadline, time.monotonic() + GRACE_SECONDS)
        elif time.monotonic() > deadline:
            absent = [str(number) for number in range(1, processes) if number not in connections]
            # Many systems give the name of a host an address that only itself can reach, 127.0.1.1.
            refusal = refusal or (
                f"process {', '.join(absent)} of {processes} did not connect to "
                f"{server.getsockname()[0]} in time; start all of them, raise --timeout, or give "
                "another address as --coordinator"
            )
            break
    for connection in connections.values():
        with contextlib.suppress(OSError):  # it ended just now, which JAX notices
            connection.sendall(f"{REFUSED + refusal if refusal else ACCEPTED}\n".encode())
    return refusal


def _accept(
    server: socket.socket, stack: contextlib.ExitStack
) -> tuple[int, int, socket.socket] | None:
    """Accepts a process. Returns (process, processes, connection); None for anything else."""
    try:
        connection = stack.enter_context(server.accept()[0])
        connection.settimeout(1)
        process, processes = map(int, connection.recv(64).split())
    except (OSError, ValueError):
        return None
    return (process, processes, connection) if 0 < process < processes <= MAX_PROCESSES else None


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _sign_in(coordinator: str, processes: int, process: int, deadline: float) -> None:
    """Connects to process 0 and waits for its answer. Raises InputError."""
    reason = ""
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            address = _resolve(coordinator)[1]
            with socket.create_connection(address, timeout=seconds_left) as connection:
                connection.sendall(f"{process} {processes}".encode())
                # Process 0 may have started as long ago, and names who is absent when it gives up.
                connection.settimeout(seconds_left + ANSWER_SECONDS)
                answer = connection.makefile(encoding="utf-8", errors="replace").readline().strip()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if answer == ACCEPTED:
                return
            if answer.startswith(REFUSED):
                raise InputError(answer.removeprefix(REFUSED))
            reason = "another program listens there" if answer else "connection closed"
        time.sleep(RETRY_SECONDS)
    raise InputError(
        f"--coordinator={coordinator} does not answer ({reason}); start process 0 there, or fix "
        "the address or the firewall"
    )


def _check_even() -> None:
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{n} on process {process}" for process, n in sorted(counts.items()))
        raise InputError(
            f"the processes have different numbers of devices: {shown}; use the same for all"
        )


def _silence_gloo() -> None:
    # Gloo prints its connections to stdout, where results are: only Python writes there from now
    # on.
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        # JAX aborts processes that lose the coordinator; those that fail alike end first.
        time.sleep(GRACE_SECONDS)
    os._exit(code)


def lost_process_message(error: BaseException) -> str:
    """Returns the message of an error caused by a lost process, "" for other errors."""
    # Where hosts gather values JAX says it with a ValueError. NCCL fails between the GPUs of one
    # process too.
    is_lost = (is_of_jax(error) or isinstance(error, ValueError)) and _LOST.search(str(error))
    return first_line(error) if is_lost and jax.process_count() > 1 else ""
