"""The compiler's options are taken where they are known, and left out where they are not."""

import os
from pathlib import Path

import jax
import pytest
from packaging.version import Version

from jaxprompt.errors import InputError
from jaxprompt.parallel import compilation


@pytest.fixture(autouse=True)
def ask_again():
    caches = compilation._compiler_options, compilation.supported_options
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_it_computes_and_donates():
    step = compilation.jit(lambda x, y: (x + y, x * y), donate_argnums=0)
    x = jax.numpy.arange(3.0)
    total, product = step(x, 2.0)
    assert total.tolist() == [2, 3, 4] and product.tolist() == [0, 2, 4]
    assert x.is_deleted()


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
    real = jax.jit

    def strict(function, compiler_options=None, **settings):
        if compiler_options:
            compiler_options = {"xla_no_such_option": False}
        return real(function, compiler_options=compiler_options, **settings)

    monkeypatch.setattr(jax, "jit", strict)
    assert compilation._compiler_options(True) is None
    assert compilation.jit(lambda x: x + 1)(1) == 2
    monkeypatch.undo()
    given = {"xla_no_such_option": False, "xla_backend_optimization_level": 0}
    assert compilation.supported_options(**given) == {"xla_backend_optimization_level": 0}


def test_other_backends_keep_their_own(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compilation._compiler_options(True) is None


# -- where programs are kept ----------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch, tmp_path):
    """What JAX is told, by field; the user's cache is in a temporary folder."""
    fields, before = {}, jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    with monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", fields.__setitem__)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield fields
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_lie_in_the_users_own_cache(told, tmp_path):
    compilation.enable_compilation_cache()
    folder = tmp_path / "cache/jaxprompt/compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    path = told["jax_compilation_cache_dir"]
    assert path.startswith(f"{folder}/cpu-") and Path(path).stat().st_mode & 0o777 == 0o700
    compilation.enable_compilation_cache()  # the same for the next run
    assert told["jax_compilation_cache_dir"] == path


def test_another_place_or_none(told, tmp_path):
    compilation.enable_compilation_cache(str(tmp_path / "mine"))
    assert told.pop("jax_compilation_cache_dir").startswith(f"{tmp_path}/mine/cpu-")
    compilation.enable_compilation_cache("none")
    assert "jax_compilation_cache_dir" not in told


def test_a_folder_that_others_can_write_to_is_not_used(told, tmp_path, monkeypatch, capsys):
    open_to_all = tmp_path / "cache/jaxprompt/compiled"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    with pytest.raises(InputError, match="compilation_cache=.*others can write there; delete"):
        compilation.enable_compilation_cache(str(open_to_all))
    compilation.enable_compilation_cache()  # no one asked for it, so the run goes on
    line = capsys.readouterr().err
    assert "others can write there; compiled programs are not cached" in line
    assert line.count("\n") == 1
    open_to_all.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    compilation.enable_compilation_cache()
    assert "compiled programs are not cached" in capsys.readouterr().err and not told


def test_programs_that_others_can_write_are_not_used(told, tmp_path, capsys):
    """They are unpickled and executed."""
    root = tmp_path / "mine"
    compilation.enable_compilation_cache(str(root))
    folder = Path(told["jax_compilation_cache_dir"])
    folder.mkdir(exist_ok=True)
    program = folder / "jit_f-1a2b-cache"
    program.write_bytes(b"program")
    program.with_name("jit_f-1a2b-atime").write_bytes(b"0")
    modes = [(0o700, 0o666, True), (0o755, 0o644, True), (0o777, 0o644, False)]
    modes += [(0o770, 0o600, False), (0o755, 0o666, False), (0o755, 0o664, False)]
    for root_mode in (0o700, 0o755):
        root.chmod(root_mode)
        for folder_mode, program_mode, is_safe in modes:
            folder.chmod(folder_mode)
            program.chmod(program_mode)
            told.clear()
            if is_safe or root_mode == 0o700:  # which no one else can enter
                compilation.enable_compilation_cache(str(root))
                assert told["jax_compilation_cache_dir"] == str(folder)
                continue
            wrong = program if folder_mode == 0o755 else folder
            with pytest.raises(InputError, match=f"{wrong}: others can write there; delete it"):
                compilation.enable_compilation_cache(str(root))
            assert not told
    assert not capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_programs_of_someone_else_are_not_used(told, tmp_path, monkeypatch):
    root = tmp_path / "mine"
    compilation.enable_compilation_cache(str(root))
    program = Path(told.pop("jax_compilation_cache_dir")) / "jit_f-1a2b-cache"
    program.parent.mkdir(exist_ok=True)
    program.write_bytes(b"program")
    os.chown(program, 12345, -1)
    with pytest.raises(InputError, match=f"{program}: others can write there"):
        compilation.enable_compilation_cache(str(root))


def test_a_program_that_was_cut_is_dropped(told, tmp_path):
    """One without its time kept JAX from storing any other program."""
    from jax._src.lru_cache import LRUCache

    compilation.enable_compilation_cache(str(tmp_path / "mine"))
    kept = LRUCache(told["jax_compilation_cache_dir"], max_size=2**20)
    kept.put("whole", b"program")
    (kept.path / "cut-cache").write_bytes(b"pro")
    if Version(jax.__version__) < Version("0.12"):
        with pytest.raises(FileNotFoundError):
            kept.put("other", b"program")
    compilation.enable_compilation_cache(str(tmp_path / "mine"))
    kept.put("other", b"program")
    assert kept.get("whole") == kept.get("other") == b"program" and kept.get("cut") is None
