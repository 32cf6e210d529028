"""Several processes find each other, agree, and save together; what cannot work is refused."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from host_job import make_state, same
from processes import Processes, free_port, listening

from jaxprompt.errors import InputError
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_writer import CheckpointWriter

JOB = Path(__file__).with_name("host_job.py")


def answers(team: Processes) -> list[dict]:
    """Waits, and reads the JSON line of each process."""
    codes = team.wait()
    assert not any(codes), team.told()
    return [json.loads(team.out(i)) for i in range(len(codes))]


def test_processes_exchange_texts_and_compare_facts(tmp_path):
    with Processes(tmp_path) as team:
        team.start_all(3, [JOB, "talk", tmp_path])
        results = answers(team)
    assert [result.pop("first") for result in results] == [True, False, False]
    assert results[0] == results[1] == results[2]
    result = results[0]
    assert result["devices"] == [6, 2]
    assert result["texts"] == [[0, ""], [80_000, "é"], [160_000, "é"]]
    differences = "a (a0 on process 0, a1 on process 1), config (v0 on process 0, v1 on process 2)"
    assert f"the processes differ in {differences}; " in result["differing"]
    assert " in dev (None on process 0, 2 on process 1); " in result["absent"]


def test_a_process_alone_needs_no_other():
    processes.connect(None, None, None)
    assert processes.gather_texts("text") == ["text"] and processes.is_first()
    processes.check_agreement({"a": "1"})
    with pytest.raises(InputError), processes.exit_on_failure():
        raise InputError("one process")


def test_checkpoints_of_two_processes(tmp_path):
    one = make_placement(data=4, model=2)
    with CheckpointWriter(tmp_path / "one", -1) as writer:
        writer.save(5, {"at": 5}, state=make_state(one, 3))
    with Processes(tmp_path / "logs") as team:
        team.start_all(2, [JOB, "save", tmp_path])
        result, other_result = answers(team)
    assert result == other_result
    assert result["steps"] == [2, 1] and result["position"] == [{"at": 2}, {"value": 1}]
    assert result["same"] and result["other_mesh"] and result["completed"] == [True]
    run = tmp_path / "run/checkpoints"
    (message,) = set(result["full_disk"])
    assert message.startswith(f"cannot write {run}/3: No space left on device; ")
    assert result["steps_left"] == ["1", "2"]
    assert f"checkpoint {tmp_path}/one/checkpoints/5 is damaged" in result["damaged"]
    apart = tmp_path / "apart0/checkpoints"
    assert result["apart"].startswith(f"process 1 does not see the {apart} of process 0; ")
    # Restored on other meshes of one process: 8 x 1, 2 x 4, one device.
    for mesh in ({"data": 8}, {"data": 2, "model": 2}, {"data": 1, "model": 1}):
        wanted = make_state(make_placement(**mesh), 2)
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted
        )
        restored, position = Checkpoints(tmp_path / "run").restore(template)
        assert position == {"at": 2} and same(restored, wanted)
    plain = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), wanted)
    restored, _ = Checkpoints(tmp_path / "run").restore(plain)
    assert all(np.array_equal(restored[name], wanted[name]) for name in wanted)


@pytest.mark.long
def test_who_fails_ends_with_its_own_code(tmp_path):
    with Processes(tmp_path / "all") as alike, Processes(tmp_path / "one") as alone:
        alike.start_all(2, [JOB, "fail_all", tmp_path])
        alone.start_all(2, [JOB, "fail", tmp_path])
        assert alike.wait(60) == [2, 2]
        assert alike.err(0) == alike.err(1) and "differ in number (0 on" in alike.err(0)
        assert alone.all[1].wait(60) == 2
        assert alone.err(1) == "process 1 alone\n"


@pytest.mark.long
def test_unlike_numbers_of_devices(tmp_path):
    port = free_port()
    with Processes(tmp_path) as team:
        for process, devices in enumerate((2, 1)):
            flags = f"--xla_force_host_platform_device_count={devices}"
            words = [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}"]
            team.start([JOB, "talk", tmp_path, *words], XLA_FLAGS=flags)
        assert team.wait(60) == [2, 2]
        message = "different numbers of devices: 2 on process 0, 1 on process 1"
        assert all(message in team.err(i) for i in (0, 1))


# -- other programs --------------------------------------------------------------------------------

LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")  # 127.0.0.1 in /proc
GARBAGE = (b"", b"\x00" * 64, b"7 2", b"0 2", b"1", b"1 2 3", b"-1 2", b"GET / HTTP/1.1\r\n\r\n")


def send(port: int, data: bytes) -> None:
    """Sends garbage, which may be refused."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), 2) as connection,
    ):
        connection.sendall(data)


def wait_until(is_true, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_connections_of_other_programs_are_ignored(tmp_path):
    rng, port = np.random.default_rng(0), free_port()
    words = [JOB, "wait", tmp_path, f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    with Processes(tmp_path / "logs") as team:
        first = team.start([*words, "--process=0"])
        wait_until(lambda: listening(first.pid))
        assert {place for place, at in listening(first.pid) if at == port} <= set(LOOPBACK)
        for data in (*GARBAGE, rng.bytes(200)):
            send(port, data)
        second = team.start([*words, "--process=1"])
        wait_until(lambda: all((tmp_path / f"ready-{i}").exists() for i in (0, 1)))
        open_at = {at for process in (first, second) for at in listening(process.pid)}
        assert {place for place, at in open_at if at == port} <= set(LOOPBACK)
        for _, at in open_at:
            for size in (0, 1, 9, 500, 100_000):
                send(at, rng.bytes(size))
        (tmp_path / "go").touch()
        assert answers(team) == [{"texts": ["0", "1"]}] * 2


def test_only_the_coordinators_address_is_bound():
    for address in ("127.0.0.1:7", "[::1]:7"):
        assert processes._bind_address(address) == address


# -- errors before JAX starts, in threads ---------------------------------------------------------


def connect_all(*arguments: tuple, timeout: float = 2) -> list[str]:
    """Calls connect() in threads, and returns the InputError of each."""
    messages = [""] * len(arguments)

    def call(i: int) -> None:
        try:
            processes.connect(*arguments[i], timeout=timeout)
        except InputError as error:
            messages[i] = str(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(messages) and not jax.distributed.is_initialized()
    return messages


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("h:1", 2, None), "--process missing; give --coordinator=HOST:PORT"),
        ((None, None, 1), "--coordinator and --processes missing; "),
        (("host", 2, 0), "--coordinator='host' must be"),
        ((":1", 2, 0), "--coordinator=':1' must be"),
        (("host:65536", 2, 0), "--coordinator='host:65536' must be HOST:PORT"),
        (("host:" + "9" * 5000, 2, 0), "must be HOST:PORT"),
        (("host:0", 2, 0), "--coordinator='host:0' must be HOST:PORT"),
        (("h:1", 2, 2), "--process=2 must be 0 to 1, below --processes=2"),
        (("h:1", 2, -1), "--process=-1 must be 0 to 1"),
        (("h:1", 0, 0), "--processes=0 must be at least 1"),
        (("h:1", 10**5 + 1, 0), "--processes=100001 must be at least 1 and at most"),
        (("192.0.2.1:9", 2, 0), "192.0.2.1:9: process 0 cannot listen there ("),
        (("no.invalid:9", 2, 0), "--coordinator=no.invalid:9: process 0 cannot listen"),
        (("no.invalid:9", 2, 1), "--coordinator=no.invalid:9 does not answer ("),
    ],
)
def test_flags(arguments, message):
    assert message in connect_all(arguments, timeout=0.2)[0]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_out_of_range(timeout):
    with pytest.raises(InputError, match=f"--timeout={timeout:g} must be more than 0"):
        processes.connect("h:1", 2, 0, timeout=timeout)


def test_cluster(monkeypatch):
    with pytest.raises(InputError, match="--cluster sets .*--processes"):
        processes.connect(None, 2, None, cluster=True)

    def initialize(*_args, **_settings):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(InputError, match="JAX finds no cluster here .*; give --coordinator"):
        processes.connect(None, None, None, cluster=True)


@pytest.mark.long
def test_a_coordinator_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        silent, busy = connect_all((address, 2, 1), (address, 2, 0), timeout=1)
    (refused,) = connect_all((address, 2, 1), timeout=1)
    assert f"--coordinator={address} does not answer (timed out)" in silent
    assert f"--coordinator={address} does not answer (Connection refused)" in refused
    assert f"--coordinator={address}: process 0 cannot listen there (Address already" in busy


def test_another_program_as_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            for _ in range(2):
                with server.accept()[0] as connection:
                    connection.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=greet, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (message,) = connect_all((address, 2, 1), timeout=0.8)
    assert "does not answer (another program listens there)" in message


def test_absent_processes():
    address = f"127.0.0.1:{free_port()}"
    messages = connect_all((address, 4, 0), (address, 4, 2), timeout=1)
    assert messages[0] == messages[1]
    assert messages[0].startswith("process 1, 3 of 4 did not connect to 127.0.0.1 in time; ")


@pytest.mark.parametrize(
    "second, message",
    [
        ((3, 1), "--process=1 was given twice; use each of 0 to 2"),
        ((4, 2), "--processes=4 on process 2, 3 on process 0; give the same number to all"),
    ],
)
def test_process_numbers_that_do_not_fit(second, message):
    address = f"127.0.0.1:{free_port()}"
    messages = connect_all((address, 3, 0), (address, 3, 1), (address, *second), timeout=20)
    assert set(messages) == {message}


def test_a_process_that_connects_after_a_refusal_is_told_why():
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        connections = [socket.socket() for _ in range(2)]
        for connection in map(stack.enter_context, connections):
            connection.settimeout(20)

        def connect_one_by_one():
            for number, (connection, count) in enumerate(zip(connections, "43", strict=True), 1):
                connection.connect(server.getsockname())
                connection.sendall(f"{number} {count}".encode())
                time.sleep(0.3)

        threading.Thread(target=connect_one_by_one).start()
        refusal = processes._accept_processes(server, stack, 3, time.monotonic() + 20)
        assert refusal.startswith("--processes=4 on process 1, 3 on process 0")
        answers = {connection.recv(256).decode() for connection in connections}
    assert answers == {f"{processes.REFUSED}{refusal}\n"}


def test_a_restarted_process_replaces_its_predecessor():
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        address, results = server.getsockname(), []
        accept = lambda: results.append(
            processes._accept_processes(server, stack, 3, time.monotonic() + 20)
        )
        thread = threading.Thread(target=accept)
        thread.start()
        socket.create_connection(address).close()
        with socket.create_connection(address) as ended:
            ended.sendall(b"1 3")
            time.sleep(0.2)
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(2)]
        for number, connection in enumerate(connections, start=1):
            connection.sendall(f"{number} 3".encode())
        thread.join(20)
        assert results == [""]
        assert {connection.recv(64) for connection in connections} == {
            f"{processes.ACCEPTED}\n".encode()
        }
