"""Paths, JSON, messages and written files: what comes from outside is refused in one line."""

import ast
import contextlib
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxprompt import files
from jaxprompt.__main__ import main
from jaxprompt.errors import InputError, brief, escape, is_kind
from jaxprompt.files import (
    check_output,
    open_scratch,
    parse_json,
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
    "text, part",
    [
        ("a\0b", "path 'a\\x00b' contains a NUL character"),
        ("x" * 256, "is too long; use up to 255 bytes"),
        ("folder/" + "é" * 128, "is too long; use up to 255 bytes"),
        ("/x" * 2100, "is too long; use up to 255 bytes in a name, 4095 in a path"),
        ("~nouser-of-this-name/x", "write the home folder out"),
        ("a\udcff", "is not UTF-8; rename the file"),
    ],
)
def test_no_file_can_be_called_so(text, part):
    with pytest.raises(InputError) as error:
        user_path(text)
    assert part in str(error.value) and len(str(error.value)) < 250


def test_paths_that_are_fine(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/é b") == Path("/home/me/é b")
    assert user_path("x" * 255).name == "x" * 255 and user_path("") == Path()


# -- JSON -----------------------------------------------------------------------------------------


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    "text, reason",
    [
        (nested(65), "nested deeper than 64 levels"),
        (nested(100_000), "nested deeper than 64 levels"),
        ('{"a": ["\\ud800"]}', "half a surrogate pair"),
        ('{"\\udc00": 1}', "half a surrogate pair"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' appears twice in one object"),
        (b"\xff", "can't decode"),
        ("1" * 5000, "4300 digits"),
    ],
)
def test_json_that_is_not_read(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_json_that_is_read():
    assert parse_json(nested(64)) == parse_json(nested(64).encode())
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


# -- messages -------------------------------------------------------------------------------------


def test_nothing_in_a_message_moves_a_terminal(capsys, monkeypatch):
    assert escape("a\x1b[2J\rb\x9b1m\x7f\u202e\udcff\n") == (
        "a\\x1b[2J\\rb\\x9b1m\\x7f\\u202e\\udcff\n"
    )
    assert escape("Zürich 不好 😀 a\nb") == "Zürich 不好 😀 a\nb"
    assert main(["train", "--config=\x1b]0;owned\x07.py", "--workdir=w"]) == 2
    assert main(["\x1b[31mtrain"]) == 2
    assert main(["train", "--config=\udcff.py"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 3
    assert err.isascii() and err.replace("\n", "").isprintable()
    assert "argument '--config=\\udcff.py' is not UTF-8" in err


def test_nor_in_a_line_of_a_log(tmp_path, capsys):
    with RunLog(tmp_path, tracker="none", terminal=False) as log:
        log.info("classes a\x1b[0m\nb")
        log.progress(1)
        log.write(1, dev={"x": "\x1b"})
    assert capsys.readouterr().err.splitlines() == ["classes a\\x1b[0m", "b", "step 1  dev \\x1b"]


def test_all_that_is_printed_on_stderr_is_escaped():
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
    assert not is_kind("\ud800", str) and not is_kind(("a", "\ud800"), tuple)


# -- written files --------------------------------------------------------------------------------


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    victim, target = tmp_path / "victim", tmp_path / "run/prompt.json"
    victim.write_text("mine")
    target.parent.mkdir()
    for name in (".prompt.json.tmp", ".prompt.json", "prompt.json"):
        (target.parent / name).symlink_to(victim)
    write_atomic(target, "new")
    assert victim.read_text() == "mine" and target.read_text() == "new"
    assert not target.is_symlink() and len(list(target.parent.iterdir())) == 3
    # Even under the name that is drawn.
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "drawn")
    (target.parent / ".drawn.tmp").symlink_to(victim)
    with pytest.raises(InputError, match="File exists"):
        write_atomic(target, "newer")
    assert victim.read_text() == "mine" and target.read_text() == "new"


def test_written_files_have_the_modes_of_ordinary_ones(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    def full(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a", "x")
    assert list(tmp_path.iterdir()) == []


# -- what --output names --------------------------------------------------------------------------


def test_a_pipe_is_written_into(tmp_path):
    pipe, found = tmp_path / "pipe.csv", []
    os.mkfifo(pipe)
    # What it is called and that it is read too are no matter: nothing is lost.
    assert check_output(str(pipe), {"--input": pipe}) == pipe
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "é\n" * 100_000)  # more than a pipe holds
    reader.join(60)
    assert found == ["é\n" * 100_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode) and os.listdir(tmp_path) == ["pipe.csv"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "to").mkdir()
    target, link = tmp_path / "to/out.jsonl", tmp_path / "link"
    link.symlink_to("to/out.jsonl")
    for text in ("new", "newer"):
        write_output(check_output(str(link), {}), text)
        assert target.read_text() == text and os.readlink(link) == "to/out.jsonl"
    assert os.listdir(tmp_path / "to") == ["out.jsonl"]
    (full := tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(InputError, match="cannot write .*full: No space left on device"):
        write_output(check_output(str(full), {}), "x")
    assert os.readlink(full) == "/dev/full"


def test_what_stdout_leads_to_is_added_to(tmp_path):
    code = "from pathlib import Path; from jaxprompt.files import write_output as w; "
    code += "print(1); w(Path('/dev/stdout'), '2\\n'); print(3)"
    log = tmp_path / "log"
    log.write_text("0\n")
    with log.open("a") as file:
        subprocess.run([sys.executable, "-c", code], cwd=PRODUCT.parent, stdout=file, check=True)
    assert log.read_text() == "0\n1\n2\n3\n"


@pytest.mark.parametrize(
    "output, name, part",
    [
        ("out.csv", "", "JSON lines are written, not .csv; call it out.jsonl"),
        ("out.TSV", "", "JSON lines are written, not .tsv; call it out.jsonl"),
        ("out.parquet", "", "not .parquet; call it out.jsonl"),
        ("out.jsonl.gz", "", "JSON lines are written, not .gz; call it out.jsonl"),
        ("out.csv", "RTE.tsv", "tab-separated lines are written, not .csv; call it out.tsv"),
        ("out.tsv", "BoolQ.jsonl", "JSON lines are written, not .tsv; call it out.jsonl"),
        ("out.gz", "predictions.json", "JSON is written, not .gz; call it out.json"),
        (".", "", "is a folder; give a file, e.g. "),
        ("new/", "", "is a folder; give a file, e.g. "),
        (".", "made", "made is a folder; give a file, e.g. "),
        ("none/out.jsonl", "", "none does not exist; create it, or give another"),
        ("dangling", "", "none does not exist; create it, or give another"),
        ("file/out.jsonl", "", "file is not a folder; create it, or give another"),
        ("file/new/", "RTE.tsv", "file is not a folder; create it, or give another"),
        ("loop", "", "Too many levels of symbolic links"),
        ("file", "", "file would overwrite a file of the test"),
        ("link", "", "link would overwrite a file of the test"),
    ],
)
def test_an_output_that_is_refused(output, name, part, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "made").mkdir()
    for link, target in (("link", "file"), ("dangling", "none/x"), ("loop", "loop")):
        (tmp_path / link).symlink_to(target)
    before = sorted(os.listdir(tmp_path))
    sources = {"absent": tmp_path / "absent", "a file of the test": tmp_path / "file"}
    with pytest.raises(InputError) as error:
        check_output(f"{tmp_path}/{output}", sources, name)
    assert part in str(error.value)
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "file").read_text() == "mine"


OWN = "would replace a file in the folder of .*; give another file, e.g."


@pytest.mark.parametrize(
    "output, name, part",
    [
        ("prompt.json", "", OWN),
        ("prompt.safetensors", "", OWN),
        ("record.json", "", OWN),
        ("metrics.jsonl", "", OWN),
        ("config.json", "predictions.json", OWN),
        ("link", "", OWN),
        ("answers.jsonl", "", ""),
        ("answers.json", "predictions.json", ""),
        ("new.json", "", ""),
    ],
)
def test_a_file_of_a_run_an_export_or_a_backbone_is_not_replaced(output, name, part, tmp_path):
    """Whoever writes answers beside a card must not lose the card."""
    for mine in ("prompt.json", "prompt.safetensors", "record.json", "metrics.jsonl", "config.json",
                 "answers.jsonl", "answers.json"):  # fmt: skip
        (tmp_path / mine).write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link").symlink_to(tmp_path / "prompt.json")
    place = tmp_path / "elsewhere/link" if output == "link" else tmp_path / output
    if not part:
        assert check_output(str(place), {}, name) == place
        return
    with pytest.raises(InputError, match=part):
        check_output(str(place), {}, name)


def test_outputs_that_are_fine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for output in ("out", "out.jsonl", "out.json", "out.txt"):
        assert check_output(f"~/{output}", {}) == tmp_path / output
    assert check_output(f"{tmp_path}/mine.tsv", {}, "RTE.tsv") == tmp_path / "mine.tsv"
    assert check_output(f"{tmp_path}/a/b/", {}, "RTE.tsv") == tmp_path / "a/b/RTE.tsv"
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(InputError, match="no write permission in .*; change its mode"):
        check_output(f"{tmp_path}/out", {})


# -- stdout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["tasks"], ["--version"]])
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_stdout_that_takes_nothing(command, buffering, capsys, monkeypatch):
    full = open("/dev/full", "w", buffering)  # 1: as a terminal, each line at once
    monkeypatch.setattr("sys.stdout", full)
    assert main(command) == 2
    line = f"jaxprompt {command[0]}: cannot write to stdout: No space left on device"
    assert capsys.readouterr().err.startswith(line)
    with contextlib.suppress(OSError):  # where it has kept what it could not write
        full.close()


def test_an_error_of_another_kind_is_no_matter_of_stdout(monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("jaxprompt.cli.tasks.get_task", fail)
    with pytest.raises(OSError, match="Input/output error"):
        main(["tasks", "sst2"])


COMMAND = (sys.executable, "-m", "jaxprompt")
ENTRY = """
import sys
from jaxprompt import __main__ as program
program.main = lambda: (print("é"), print("Zürich \\udcff", file=sys.stderr), 0)[-1]
program.entry()
"""


def entered(words, **streams):
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    done = subprocess.run(words, env=env, cwd=PRODUCT.parent, timeout=120, **streams)
    return done.returncode, done.stdout, done.stderr


def test_the_streams_of_a_command_are_utf_8():
    assert entered([sys.executable, "-c", ENTRY]) == (
        0,
        "é\n".encode(),
        "Zürich \\udcff\n".encode(),
    )


def test_a_command_tells_once_that_stdout_is_full():
    with open("/dev/full", "w") as full:
        code, _, err = entered([*COMMAND, "tasks", "--help"], stdout=full)
    assert code == 2 and err.decode().startswith(
        "jaxprompt tasks: cannot write to stdout: No space"
    )
    assert err.count(b"\n") == 1


def test_a_command_with_closed_streams_says_nothing():
    for closed in (1, 2):  # stderr is not told on stdout
        words = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *COMMAND, "nothing"]
        code, out, err = entered(words)
        assert code == 2 and out == b"" and bool(err) is (closed == 1)


def test_a_pipe_that_is_read_no_more_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)
    code, _, err = entered([*COMMAND, "tasks"], stdout=writes)
    os.close(writes)
    assert (code, err) == (0, b"")


def test_scratch_of_a_fixed_name_is_no_link(tmp_path):
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
