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


def answers(team: Processes, codes=None) -> list[dict]:
    """Waits, and reads the one line of standard output of each."""
    found = team.wait()
    assert found == codes or not any(found), team.told()
    return [json.loads(team.out(i)) for i in range(len(found))]


def test_processes_exchange_texts_and_compare_facts(tmp_path):
    with Processes(tmp_path) as team:
        team.start_all(3, [JOB, "talk", tmp_path])
        found = answers(team)
    assert [answer.pop("first") for answer in found] == [True, False, False]
    assert found[0] == found[1] == found[2]
    assert found[0]["devices"] == [6, 2]
    assert found[0]["texts"] == [[0, ""], [80_000, "é"], [160_000, "é"]]
    cure = "; start all with the same config, code and data"
    three = lambda x: f"{x} ({x}0 on process 0, {x}1 on process 1, {x}2 on process 2)"
    config = "config (v0 on processes 0 and 1, v1 on process 2)"
    line = f"the processes differ in {config}, {three('a')}, {three('b')} and 2 more{cure}"
    assert found[0]["differing"] == line
    line = f"the processes differ in dev (nothing on process 0, 2 on processes 1 and 2){cure}"
    assert found[0]["absent"] == line


def test_a_process_alone_needs_no_other():
    processes.connect(None, None, None)
    assert processes.gather_texts("text") == ["text"] and processes.is_first()
    processes.check_agreement({"a": "1"})
    with pytest.raises(InputError), processes.exit_on_failure():
        raise InputError("nothing ends the process")


def test_checkpoints_of_two_processes(tmp_path):
    one = make_placement(data=4, model=2)
    with CheckpointWriter(tmp_path / "one", -1) as writer:
        writer.save(5, {"at": 5}, state=make_state(one, 3))
    with Processes(tmp_path / "logs") as team:
        team.start_all(2, [JOB, "save", tmp_path])
        found, other = answers(team)
    assert found == other
    assert found["steps"] == [2, 1] and found["position"] == [{"at": 2}, {"value": 1}]
    assert found["same"] and found["other_mesh"] and found["told"] == [True]
    run = tmp_path / "run/checkpoints"
    (full,) = set(found["full"])
    assert full.startswith(f"cannot write {run}/3: No space left on device; ")
    assert found["left"] == ["1", "2"]
    assert f"checkpoint {tmp_path}/one/checkpoints/5 is damaged" in found["damaged"]
    apart = tmp_path / "apart0/checkpoints"
    assert found["apart"].startswith(f"process 1 does not see the {apart} of process 0; ")
    # Onto other meshes of one process: 8 x 1, 2 x 4, one device.
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
        said = (
            "different numbers of devices: 2 on process 0, 1 on process 1; use the same for all\n"
        )
        assert all(team.err(i).endswith(said) for i in (0, 1))


# -- strangers ------------------------------------------------------------------------------------

LOCAL = ("0100007F", "0000000000000000FFFF00000100007F")  # 127.0.0.1 in /proc
RUBBISH = (b"", b"\x00" * 64, b"7 2", b"0 2", b"1", b"1 2 3", b"-1 2", b"GET / HTTP/1.1\r\n\r\n")


def send(port: int, data: bytes) -> None:
    """Sends rubbish, without a look at whether it is taken."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as stranger:
        stranger.sendall(data)


def until(holds, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.long
def test_a_stranger_is_dropped_and_ends_nothing(tmp_path):
    rng, port = np.random.default_rng(0), free_port()
    words = [JOB, "wait", tmp_path, f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    with Processes(tmp_path / "logs") as team:
        first = team.start([*words, "--process=0"])
        until(lambda: listening(first.pid))
        assert {place for place, at in listening(first.pid) if at == port} <= set(LOCAL)
        for data in (*RUBBISH, rng.bytes(200)):
            send(port, data)
        second = team.start([*words, "--process=1"])
        until(lambda: all((tmp_path / f"ready-{i}").exists() for i in (0, 1)))
        open_at = {at for process in (first, second) for at in listening(process.pid)}
        assert {place for place, at in open_at if at == port} <= set(LOCAL)
        for _, at in open_at:
            for size in (0, 1, 9, 500, 100_000):
                send(at, rng.bytes(size))
        (tmp_path / "go").touch()
        found = answers(team)
    assert found == [{"texts": ["0", "1"]}] * 2
    said = "jaxprompt: ignored 127.0.0.1, which is not a process of this run"
    assert team.err(0).splitlines().count(said) == len(RUBBISH) + 1


def test_one_address_is_bound():
    for address in ("127.0.0.1:7", "[::1]:7"):
        assert processes._bind_address(address) == address
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert processes._loopback_note(server, "127.0.0.1:7") == ""
        said = " (the name resolves to 127.0.0.1, which only this host can reach: give an address)"
        assert processes._loopback_note(server, "my-host:7") == said


# -- what is refused before JAX starts, in threads ------------------------------------------------


def start_all(*given: tuple, timeout: float = 2) -> list[str]:
    """Calls start() in threads, all of which must be refused. -> the messages"""
    said = [""] * len(given)

    def call(i: int) -> None:
        try:
            processes.connect(*given[i], timeout=timeout)
        except InputError as error:
            said[i] = str(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(said) and not jax.distributed.is_initialized()
    return said


FLAGS = {
    "no_process": (("h:1", 2, None), "--process missing; give --coordinator=HOST:PORT"),
    "process": ((None, None, 1), "--coordinator and --processes missing; "),
    "no_port": (("host", 2, 0), "--coordinator='host' must be"),
    "big_port": (("host:70000", 2, 0), "--coordinator='host:70000' must be HOST:PORT"),
    "range": (("h:1", 2, 2), "--process=2 must be 0 to 1, below --processes=2"),
    "negative": (("h:1", 2, -1), "--process=-1 must be 0 to 1"),
    "none": (("h:1", 0, 0), "--processes=0 must be at least 1"),
    "many": (("h:1", 10**12, 0), "--processes=1000000000000 must be at least 1 and at most"),
    "not_own": (("192.0.2.1:9", 2, 0), "192.0.2.1:9: process 0 cannot listen there (Cannot assign"),
    "no_name": (("no.invalid:9", 2, 0), "--coordinator=no.invalid:9: process 0 cannot listen"),
    "unknown": (("no.invalid:9", 2, 1), "--coordinator=no.invalid:9 does not answer ("),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_flags(case):
    given, message = FLAGS[case]
    assert message in start_all(given, timeout=0.2)[0]


def test_cluster_stands_alone():
    with pytest.raises(InputError, match="--cluster sets --processes itself"):
        processes.connect(None, 2, None, cluster=True)
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"--timeout={timeout:g} must be more than 0"):
            processes.connect("h:1", 2, 0, timeout=timeout)


def test_no_cluster(monkeypatch):
    def initialize(*_args, **_settings):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(InputError, match="JAX finds no cluster here .*; give --coordinator"):
        processes.connect(None, None, None, cluster=True)


@pytest.mark.long
def test_a_silent_coordinator(monkeypatch):
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        at = f"127.0.0.1:{port}"
        silent, busy = start_all((at, 2, 1), (at, 2, 0), timeout=1)
    (refused,) = start_all((at, 2, 1), timeout=1)
    cure = "tried for 1 s); start process 0 there, or fix the address or the firewall"
    assert silent == f"--coordinator={at} does not answer (timed out; {cure}"
    assert refused == f"--coordinator={at} does not answer (Connection refused; {cure}"
    assert f"--coordinator={at}: process 0 cannot listen there (Address already in use)" in busy


def test_a_coordinator_that_is_something_else():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            for _ in range(2):
                with server.accept()[0] as connection:
                    connection.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=greet, daemon=True).start()
        at = f"127.0.0.1:{server.getsockname()[1]}"
        (said,) = start_all((at, 2, 1), timeout=0.8)
    assert f"--coordinator={at} does not answer (another program listens there; tried" in said


@pytest.mark.long
def test_processes_that_do_not_come():
    at = f"127.0.0.1:{free_port()}"
    said = start_all((at, 4, 0), (at, 4, 2), timeout=4)
    line = f"--coordinator={at}: processes 1 and 3 of 4 did not connect within 4 s; start all of "
    assert said == [line + "them, or raise --timeout"] * 2


def test_numbers_that_do_not_fit():
    at = f"127.0.0.1:{free_port()}"
    line = "--process=1 was given twice; number the processes 0 to 2"
    assert start_all((at, 3, 0), (at, 3, 1), (at, 3, 1), timeout=20) == [line] * 3
    at = f"127.0.0.1:{free_port()}"
    line = "--processes=3 on process 1, 2 on process 0; give the same number to all"
    assert start_all((at, 2, 0), (at, 3, 1), timeout=20) == [line] * 2
