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
from jaxprompt.errors import InputError, escape, first_line, is_of_jax, out_of_memory

HEARTBEAT_SECONDS = 30  # a process that is silent for so long counts as lost
MAX_SHOWN = 3  # differing facts that a message names
MAX_TIMEOUT, MAX_PROCESSES = 10**6, 10**5  # seconds to wait, processes of a run
GRACE_SECONDS = 2  # for which a failing process 0 waits for the others
ACCEPTED, REFUSED = "jaxprompt: come", "jaxprompt: refused: "  # what process 0 answers
RETRY_SECONDS = 0.5  # between two tries to reach the coordinator
ANSWER_SECONDS = 10  # a process that signed in waits for so much longer than its timeout
# What transports and the coordination service say of a process that is gone.
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
    given = [name for name, value in arguments.items() if value is not None]
    if not 0 < timeout <= MAX_TIMEOUT:  # NaN is neither
        raise InputError(
            f"--timeout={timeout:g} must be more than 0 and at most {MAX_TIMEOUT} seconds"
        )
    if cluster and given:
        raise InputError(f"--cluster sets --{given[0]} itself; give only one of the two")
    if not cluster and not given:
        return
    if not cluster:
        coordinator, processes, process = _check_arguments(coordinator, processes, process)
        _rendezvous(coordinator, processes, process, timeout)
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
            # All have met and come at once, except on a cluster, where JAX itself waits for them.
            initialization_timeout=max(HEARTBEAT_SECONDS, round(timeout))
            if cluster
            else HEARTBEAT_SECONDS,
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

    def act() -> Result | None:
        return action() if is_first() else None

    return run_on_all(act)


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
    facts_of_all = [json.loads(text) for text in gather_texts(json.dumps(dict(facts)))]
    names = list(dict.fromkeys(name for facts in facts_of_all for name in facts))
    differing = [name for name in names if len({facts.get(name) for facts in facts_of_all}) > 1]
    if not differing:
        return
    differences = ", ".join(
        f"{name} ({_format_values(name, facts_of_all)})" for name in differing[:MAX_SHOWN]
    )
    more_text = f" and {len(differing) - MAX_SHOWN} more" if len(differing) > MAX_SHOWN else ""
    raise InputError(
        f"the processes differ in {differences}{more_text}; start all with the same config, code "
        "and data"
    )


def _format_values(name: str, facts_of_all: list[dict[str, str]]) -> str:
    # "a on process 0, b on processes 1 and 2"
    processes_by_value: dict[str | None, list[int]] = {}
    for process, facts in enumerate(facts_of_all):
        processes_by_value.setdefault(facts.get(name), []).append(process)
    return ", ".join(
        f"{'nothing' if value is None else value} on {_format_processes(holders)}"
        for value, holders in processes_by_value.items()
    )


def _format_processes(processes: list[int]) -> str:
    *rest, last = map(str, processes)
    return f"processes {', '.join(rest)} and {last}" if rest else f"process {last}"


def _check_arguments(
    coordinator: str | None, processes: int | None, process: int | None
) -> tuple[str, int, int]:
    if coordinator is None or processes is None or process is None:
        arguments = {"coordinator": coordinator, "processes": processes, "process": process}
        absent = [f"--{name}" for name, value in arguments.items() if value is None]
        raise InputError(
            f"{' and '.join(absent)} missing; give --coordinator=HOST:PORT, --processes and "
            "--process together"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--coordinator={coordinator!r} must be HOST:PORT, e.g. 10.0.0.1:1234")
    if not 1 <= processes <= MAX_PROCESSES:
        raise InputError(f"--processes={processes} must be at least 1 and at most {MAX_PROCESSES}")
    if not 0 <= process < processes:
        raise InputError(
            f"--process={process} must be 0 to {processes - 1}, below --processes={processes}"
        )
    return coordinator, processes, process


def _split_address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)  # [::1]:1234


def _bind_address(coordinator: str) -> str:
    """Returns the numeric address that process 0 listens on."""
    family, (host, port) = _resolve(coordinator)
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"


def _resolve(coordinator: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, port = _split_address(coordinator)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, (str(address[0]), int(address[1]))


def _rendezvous(coordinator: str, processes: int, process: int, timeout: float) -> None:
    # JAX aborts a process whose coordinator is silent, and a coordinator whose others stay away,
    # before Python can say a word. So all meet here first, at the address that JAX takes next.
    deadline = time.monotonic() + timeout
    if process == 0:
        with _listen(coordinator) as server, contextlib.ExitStack() as stack:
            _accept_processes(server, stack, coordinator, processes, deadline, timeout)
    else:
        _sign_in(coordinator, processes, process, deadline, timeout)


def _listen(coordinator: str) -> socket.socket:
    try:
        family, address = _resolve(coordinator)
        # JAX's own server, which comes next, would share a port that is taken.
        return socket.create_server(address, family=family)
    except OSError as error:
        raise InputError(
            f"--coordinator={coordinator}: process 0 cannot listen there "
            f"({_os_error_text(error)}); give an address of process 0's host and a free port"
        ) from error


def _accept_processes(
    server: socket.socket, stack: contextlib.ExitStack, coordinator: str, processes: int,
    deadline: float, timeout: float,
) -> None:  # fmt: skip
    connections: dict[int, socket.socket] = {}
    refusal = ""
    while not refusal and len(connections) < processes - 1:
        seconds_left = deadline - time.monotonic()
        absent = [number for number in range(1, processes) if number not in connections]
        if seconds_left <= 0:
            refusal = (
                f"--coordinator={coordinator}: {_format_processes(absent)} of {processes} did not "
                f"connect within {timeout:g} s{_loopback_note(server, coordinator)}; start all of "
                "them, or raise --timeout"
            )
            break
        # A second at most, so that processes which went away are noticed meanwhile.
        server.settimeout(min(seconds_left, 1))
        try:
            connection, address = server.accept()
        except OSError:  # nobody in this second
            continue
        finally:
            # A process that was killed and started again signs in under the same number.
            connections = {
                process: connected
                for process, connected in connections.items()
                if not _is_gone(connected)
            }
        number, count = _read_greeting(connection)
        if not number:
            connection.close()
            message = f"jaxprompt: ignored {address[0]}, which is not a process of this run"
            print(escape(message), file=sys.stderr)
            continue
        stack.enter_context(connection)
        if count != processes:
            refusal = (
                f"--processes={count} on process {number}, {processes} on process 0; give the same "
                "number to all"
            )
        elif number in connections:
            refusal = (
                f"--process={number} was given twice; number the processes 0 to {processes - 1}"
            )
        # The second one of a number stands under -1, so that it is told of the refusal too.
        connections[-1 if number in connections else number] = connection
    for connection in connections.values():
        # One that has gone just now is missed by JAX's own start.
        with contextlib.suppress(OSError):
            connection.sendall(f"{REFUSED + refusal if refusal else ACCEPTED}\n".encode())
    if refusal:
        raise InputError(refusal)


def _read_greeting(connection: socket.socket) -> tuple[int, int]:
    """Reads (process, processes) of a new connection; (0, 0) if it is not one of ours."""
    try:
        connection.settimeout(1)
        process, processes = map(int, connection.recv(64).split())
    except (OSError, ValueError):
        return 0, 0
    return (process, processes) if 0 < process < processes <= MAX_PROCESSES else (0, 0)


def _loopback_note(server: socket.socket, coordinator: str) -> str:
    # Many systems give a host's own name an address such as 127.0.1.1, which no other host reaches.
    host = server.getsockname()[0]
    is_loopback = host.startswith("127.") or host == "::1"
    if not is_loopback or _split_address(coordinator)[0] == host:
        return ""
    return f" (the name resolves to {host}, which only this host can reach: give an address)"


def _os_error_text(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:  # not that of a name
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _is_gone(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        # At its end a connection gives nothing, without any error.
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _sign_in(
    coordinator: str, processes: int, process: int, deadline: float, timeout: float
) -> None:
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                _split_address(coordinator), timeout=seconds_left
            ) as connection:
                connection.sendall(f"{process} {processes}".encode())
                # Process 0 may have started as long ago, and says who is absent when it gives up.
                connection.settimeout(seconds_left + ANSWER_SECONDS)
                answer = connection.makefile(encoding="utf-8", errors="replace").readline()
        except OSError as error:
            answer, reason = "", _os_error_text(error)
        else:
            reason = "another program listens there" if answer else "connection closed"
        if answer.strip() == ACCEPTED:
            return
        if answer.startswith(REFUSED):
            raise InputError(answer.removeprefix(REFUSED).strip())
        time.sleep(RETRY_SECONDS)
    raise InputError(
        f"--coordinator={coordinator} does not answer ({reason}; tried for {timeout:g} s); start "
        "process 0 there, or fix the address or the firewall"
    )


def _check_even() -> None:
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{n} on process {process}" for process, n in sorted(counts.items()))
        raise InputError(
            f"the processes have different numbers of devices: {shown}; use the same for all"
        )


def _silence_gloo() -> None:
    # Gloo tells of its connections on standard output, where results stand: from here on what is
    # not Python's goes nowhere.
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        # JAX aborts processes that lose the coordinator; those that failed alike go first.
        time.sleep(GRACE_SECONDS)
    os._exit(code)


def lost_process_message(error: BaseException) -> str:
    """Returns the message of an error caused by a lost process, "" for other errors."""
    # Where hosts gather values JAX says it with a ValueError. NCCL fails between the GPUs of one
    # process too.
    is_lost = (is_of_jax(error) or isinstance(error, ValueError)) and _LOST.search(str(error))
    return first_line(error) if is_lost and jax.process_count() > 1 else ""
