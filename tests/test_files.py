"""Paths, JSON, messages, written files and output streams."""

import ast
import contextlib
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from jaxprompt import files
from jaxprompt.__main__ import main
from jaxprompt.errors import InputError, brief, escape, is_kind
from jaxprompt.files import (
    check_output,
    json_line,
    open_regular,
    open_scratch,
    parse_json,
    user_cache,
    user_path,
    write_atomic,
    write_output,
)
from jaxprompt.training.checkpoint_writer import _check_disk_space
from jaxprompt.training.features.store import DiskStore
from jaxprompt.training.log import RunLog

PRODUCT = Path(files.__file__).parent


# -- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, reason",
    [
        ("a\0b", "null byte"),
        ("é" * 128, "File name too long"),
        ("~nouser-of-this-name/x", "Could not determine home directory"),
        ("a\udcff", "surrogates not allowed"),
        (3, "not int"),
    ],
)
def test_paths_that_no_file_can_have(path, reason):
    with pytest.raises(InputError, match=reason) as error:
        user_path(path)
    assert len(str(error.value)) < 250


def test_paths_that_a_file_can_have(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/é b") == Path("/home/me/é b")
    assert user_path("x" * 255).name == "x" * 255 and user_path("") == Path()


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    for path in (tmp_path / "pipe", tmp_path / "socket", tmp_path, Path("/dev/zero")):
        for mode in ("rb", "ab"):
            with pytest.raises(OSError) as error:
                open_regular(path, mode)
            assert error.value.filename == str(path)


@pytest.mark.parametrize("home", [None, "absent"])
def test_a_user_without_a_home_has_a_private_cache(home, tmp_path, monkeypatch):
    def no_entry(_uid):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", str(tmp_path / home))
    folder = tmp_path / f"jaxprompt-{os.getuid()}"
    for _ in range(2):
        assert user_cache() == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="others can write there"):
        user_cache()
    folder.rmdir()
    folder.symlink_to(tmp_path)  # of somebody else it has another owner, which only root can give
    with pytest.raises(PermissionError, match="others can write there"):
        user_cache()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" and not (tmp_path / ".cache").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "deep/cache"))
    assert user_cache() == tmp_path / "deep/cache"


# -- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a": ["\\ud800"]}', "surrogates not allowed"),
        ('{"\\udc00": 1}', "surrogates not allowed"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' appears twice in one object"),
        (b"\xff", "can't decode"),
        ("1" * 5000, "4300 digits"),
    ],
)
def test_json_that_is_not_read(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_json_that_is_read():
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


# -- messages -------------------------------------------------------------------------------------


def test_a_line_of_json_has_no_terminal_control_codes():
    value = {
        "a": "\x1b\x7f\x85\x9b1m\u200e\u2028\u202e\u2066\u061c",
        "Zürich": "不好 😀 می\u200cخواهم",
    }
    line = json_line(value)
    assert json.loads(line) == value and line.endswith('"Zürich": "不好 😀 می\u200cخواهم"}')
    assert line.replace("\u200c", "").isprintable()


def test_messages_have_no_terminal_control_codes(tmp_path, capsys):
    assert escape("a\x1b[2J\rb\x9b1m\x7f\u202e\udcff\n") == (
        "a\\x1b[2J\\rb\\x9b1m\\x7f\\u202e\\udcff\n"
    )
    assert escape("Zürich 不好 😀 a\nb") == "Zürich 不好 😀 a\nb"
    assert main(["train", "--config=\x1b]0;title\x07.py", "--workdir=w"]) == 2
    assert main(["\x1b[31mtrain"]) == 2
    assert main(["train", "--config=\udcff.py"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 3
    assert err.isascii() and err.replace("\n", "").isprintable()
    with RunLog(tmp_path, tracker="none") as log:
        log.info("classes a\x1b[0m\nb")
    assert capsys.readouterr().err.splitlines() == ["classes a\\x1b[0m", "b"]


def test_text_for_stderr_is_escaped():
    for path in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
            if named and any(ast.unparse(k.value) == "sys.stderr" for k in node.keywords):
                assert ast.unparse(node.args[0]).startswith("escape("), (path, node.lineno)


def test_long_values_are_cut():
    assert brief("x" * 200) == "'" + "x" * 79 + "..."
    assert brief(10**5000) == "a int too long to show"


def test_kinds():
    big = 10**400
    assert is_kind(big, int) and not is_kind(big, float) and not is_kind(-big, float)
    assert not any(is_kind(x, float) for x in (float("nan"), float("inf"), 1e39, True, "1", None))
    assert is_kind(3, float) and is_kind(-3.4e38, float)
    assert is_kind(3, int) and not is_kind(True, int) and is_kind(True, bool)
    assert is_kind(("a", "b"), tuple) and not is_kind(("a", 1), tuple)


# -- written files --------------------------------------------------------------------------------


def test_planted_links_are_not_followed(tmp_path, monkeypatch):
    victim, target = tmp_path / "victim", tmp_path / "run/prompt.json"
    victim.write_text("mine")
    target.parent.mkdir()
    for name in (".prompt.json.tmp", ".prompt.json", "prompt.json"):
        (target.parent / name).symlink_to(victim)
    write_atomic(target, "new")
    assert victim.read_text() == "mine" and target.read_text() == "new"
    assert not target.is_symlink() and len(list(target.parent.iterdir())) == 3
    # Even one with the random name of the temporary file.
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "random")
    (target.parent / ".random.tmp").symlink_to(victim)
    with pytest.raises(InputError, match="File exists"):
        write_atomic(target, "newer")
    assert victim.read_text() == "mine" and target.read_text() == "new"


def test_written_files_have_the_mode_of_the_umask(tmp_path):
    old_mask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a", "x")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a", "x")
    assert list(tmp_path.iterdir()) == []


def test_a_write_removes_what_killed_writes_left_an_hour_ago(tmp_path):
    """Other processes may be writing what is newer."""
    old, new = ".0123456789abcdef.tmp", ".fedcba9876543210.tmp"
    for name in (old, new, ".notes.tmp", "a.tmp"):
        (tmp_path / name).write_text("{")
    for name in (old, ".notes.tmp", "a.tmp"):
        os.utime(tmp_path / name, (0, time.time() - 3601))
    write_atomic(tmp_path / "a", "x")
    assert sorted(os.listdir(tmp_path)) == sorted([new, ".notes.tmp", "a.tmp", "a"])


# -- --output ---------- --------------------------------------------------------------------------


def test_a_pipe_is_written_to(tmp_path):
    pipe, texts = tmp_path / "pipe.csv", []
    os.mkfifo(pipe)
    # Its ending does not matter, and it may be an input too: nothing is lost.
    assert check_output(str(pipe), {"--input": pipe}) == pipe
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()))
    reader.start()
    write_output(pipe, ["é\n" * 100_000])  # more than a pipe holds
    reader.join(60)
    assert texts == ["é\n" * 100_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode) and os.listdir(tmp_path) == ["pipe.csv"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "to").mkdir()
    target, link = tmp_path / "to/out.jsonl", tmp_path / "link"
    link.symlink_to("to/out.jsonl")
    for text in ("new", "newer"):
        write_output(check_output(str(link), {}), [text])
        assert target.read_text() == text and os.readlink(link) == "to/out.jsonl"
    assert os.listdir(tmp_path / "to") == ["out.jsonl"]
    (full := tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(InputError, match="cannot write .*full: No space left on device"):
        write_output(check_output(str(full), {}), ["x"])
    assert os.readlink(full) == "/dev/full"


def test_output_that_ends_early_leaves_the_old_file(tmp_path):
    def texts():
        yield "new\n"
        assert len(list(tmp_path.iterdir())) == 2  # the scratch file
        raise InputError("line 2")

    path = tmp_path / "out"
    path.write_text("old\n")
    with pytest.raises(InputError, match="line 2"):
        write_output(path, texts())
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]


def test_the_file_of_stdout_is_appended_to(tmp_path):
    code = "from pathlib import Path; from jaxprompt.files import write_output as w; "
    code += "print(1); w(Path('/dev/stdout'), ['2\\n']); print(3)"
    log = tmp_path / "log"
    log.write_text("0\n")
    with log.open("a") as file:
        subprocess.run([sys.executable, "-c", code], cwd=PRODUCT.parent, stdout=file, check=True)
    assert log.read_text() == "0\n1\n2\n3\n"


@pytest.mark.parametrize(
    "output, name, reason",
    [
        ("out.TSV", "", ".jsonl, not .tsv"),
        ("out.jsonl.gz", "", ".jsonl, not .gz"),
        ("out.csv", "RTE.tsv", ".tsv, not .csv"),
        (".", "", "is a folder; give a file, e.g. "),
        ("new/", "", "is a folder; give a file, e.g. "),
        (".", "made", "made is a folder; give a file, e.g. "),
        ("none/out.jsonl", "", "none is not a folder that you can write to"),
        ("dangling", "", "none is not a folder that you can write to"),
        ("file/new/", "RTE.tsv", "file is not a folder that you can write to"),
        ("file", "", "would overwrite --input"),
        ("link", "", "would overwrite --input"),
        ("run/prompt.json", "", "would replace a file in the folder of a run"),
        ("run/prompt.safetensors", "", "would replace a file in the folder of a run"),
        ("run/config.json", "predictions.json", "would replace a file in the folder of a run"),
        ("prompt", "", "would replace a file in the folder of a run"),
    ],
)
def test_outputs_that_are_refused(output, name, reason, tmp_path):
    (tmp_path / "file").write_text("input")
    (tmp_path / "made").mkdir()
    make_run(tmp_path / "run")
    links = {"link": "file", "dangling": "none/x", "prompt": "run/prompt.json"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(target)
    before = sorted(tmp_path.rglob("*"))
    sources = {"--labels": tmp_path / "absent", "--input": tmp_path / "file"}
    with pytest.raises(InputError, match=reason):
        check_output(f"{tmp_path}/{output}", sources, name)
    assert sorted(tmp_path.rglob("*")) == before


def make_run(folder: Path) -> None:
    folder.mkdir()
    for name in ("prompt.json", "prompt.safetensors", "config.json", "old.jsonl", "old.json"):
        (folder / name).write_text("")


def test_outputs_that_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for output in ("out", "out.jsonl", "out.json", "out.txt"):
        assert check_output(f"~/{output}", {}) == tmp_path / output
    assert check_output(f"{tmp_path}/mine.tsv", {}, "RTE.tsv") == tmp_path / "mine.tsv"
    assert check_output(f"{tmp_path}/a/b/", {}, "RTE.tsv") == tmp_path / "a/b/RTE.tsv"
    assert os.listdir(tmp_path) == []
    make_run(tmp_path / "run")
    for output, name in (("old.jsonl", ""), ("old.json", "predictions.json"), ("new.json", "")):
        path = tmp_path / "run" / output
        assert check_output(str(path), {}, name) == path
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(InputError, match="is not a folder that you can write to"):
        check_output(f"{tmp_path}/out", {})


# -- stdout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["tasks"], ["--version"]])
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_full_stdout(command, buffering, capsys, monkeypatch):
    full = open("/dev/full", "w", buffering)  # 1: as a terminal, each line at once
    monkeypatch.setattr("sys.stdout", full)
    assert main(command) == 2
    line = f"jaxprompt {command[0]}: cannot write to stdout: No space left on device"
    assert capsys.readouterr().err.startswith(line)
    with contextlib.suppress(OSError):  # its buffer may not be empty
        full.close()


def test_other_os_errors_are_raised(monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("jaxprompt.cli.listing.get_task", fail)
    with pytest.raises(OSError, match="Input/output error"):
        main(["tasks", "sst2"])


COMMAND = (sys.executable, "-m", "jaxprompt")
ENTRY = """
import os
import sys
from jaxprompt import __main__ as program
program.user_cache = lambda: "/caches"
def main():
    print("é", os.environ["XDG_CACHE_HOME"])
    print("Zürich \\udcff", *(name for name in os.environ if "PROMOTION" in name), file=sys.stderr)
    return 0
program.main = main
program.entry()
"""


def entered(words, **streams):
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    env |= {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    done = subprocess.run(words, env=env, cwd=PRODUCT.parent, timeout=120, **streams)
    return done.returncode, done.stdout, done.stderr


def test_what_a_command_sets_up():
    """UTF-8 streams, one folder for all caches, and JAX without its strict modes."""
    assert entered([sys.executable, "-c", ENTRY]) == (
        0,
        "é /caches\n".encode(),
        "Zürich \\udcff\n".encode(),
    )


def test_a_command_reports_a_full_stdout_once():
    with open("/dev/full", "w") as full:
        code, _, err = entered([*COMMAND, "tasks", "--help"], stdout=full)
    assert code == 2 and err.decode().startswith(
        "jaxprompt tasks: cannot write to stdout: No space"
    )
    assert err.count(b"\n") == 1


def test_a_command_with_closed_streams_prints_nothing():
    for closed in (1, 2):
        words = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *COMMAND, "nothing"]
        code, out, err = entered(words)
        assert code == 2 and out == b"" and bool(err) is (closed == 1)


def test_a_closed_pipe_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)
    code, _, err = entered([*COMMAND, "tasks"], stdout=writes)
    os.close(writes)
    assert (code, err) == (0, b"")


def test_scratch_files_with_a_fixed_name_do_not_follow_links(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        open_scratch(tmp_path / "lock")
    (tmp_path / ".train.states.tmp").symlink_to(victim)
    import numpy as np

    with pytest.raises(InputError, match="cannot write"):
        DiskStore(tmp_path / "train", np.array([2]), 4, np.dtype("f4"))
    (tmp_path / "0.room").symlink_to(victim)
    _check_disk_space(tmp_path / "1", {"state": {"x": np.zeros(3)}})
    assert victim.read_text() == "mine" and len(list(tmp_path.iterdir())) == 4
