"""Paths, JSON, messages and written files: what comes from outside is refused in one line."""

import ast
import os
import stat
from pathlib import Path

import pytest

from jaxprompt import files
from jaxprompt.__main__ import main
from jaxprompt.errors import InputError, brief, escape, is_kind
from jaxprompt.files import open_scratch, parse_json, user_path, write_atomic
from jaxprompt.training.checkpoint import _check_room
from jaxprompt.training.feature_store import DiskStore
from jaxprompt.training.log import RunLog

PRODUCT = Path(files.__file__).parent


# -- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, part",
    [
        ("a\0b", "path 'a\\x00b' holds a NUL character; take it out"),
        ("x" * 256, "is too long: a name has at most 255 bytes"),
        ("folder/" + "é" * 128, "is too long: a name has at most 255 bytes"),
        ("/x" * 2100, "is too long: a name has at most 255 bytes, a path 4095"),
        ("~nouser-of-this-name/x", "write the folder out"),
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
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' stands twice in one object; keep one"),
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
        log.say("classes a\x1b[0m\nb")
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
    _check_room(tmp_path, {"x": np.zeros(3)})
    assert victim.read_text() == "mine" and len(list(tmp_path.iterdir())) == 4
