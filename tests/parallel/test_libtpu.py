"""The flags of libtpu in the environment."""

import os
import sys

import pytest

from jaxprompt.__main__ import main
from jaxprompt.parallel.libtpu import FLAGS


@pytest.mark.parametrize("user_flags", [None, "", "--xla_enable_async_all_reduce=false"])
@pytest.mark.parametrize("is_installed", [True, False])
def test_a_command_adds_the_flags_where_libtpu_is(is_installed, user_flags, tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", user_flags or "")
    if user_flags is None:
        monkeypatch.delenv("LIBTPU_INIT_ARGS")
    if is_installed:
        (tmp_path / "libtpu.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "libtpu", None)
    for _ in range(2):  # the second time as in a process that a command starts
        main(["--version"])
    # Of a flag that is there twice, libtpu takes the last.
    expected = " ".join([*FLAGS, *(user_flags or "").split()]) if is_installed else user_flags
    assert os.environ.get("LIBTPU_INIT_ARGS") == expected
