"""Compiler options, and the folder of the persistent compilation cache."""

import os
import pwd
from pathlib import Path

import jax
import pytest
from packaging.version import Version

from jaxprompt.errors import InputError
from jaxprompt.parallel import compilation


@pytest.fixture(autouse=True)
def clear_caches():
    caches = compilation._compiler_options, compilation.supported_options
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_jit_computes_and_donates():
    step = compilation.jit(lambda x, y: (x + y, x * y), donate_argnums=0)
    x = jax.numpy.arange(3.0)
    total, product = step(x, 2.0)
    assert total.tolist() == [2, 3, 4] and product.tolist() == [0, 2, 4]
    assert x.is_deleted()


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    real = jax.jit

    def strict(function, compiler_options=None, **settings):
        if compiler_options:
            compiler_options = {"xla_no_such_option": False}
        return real(function, compiler_options=compiler_options, **settings)

    monkeypatch.setattr(jax, "jit", strict)
    assert compilation._compiler_options(True) is None
    assert compilation.jit(lambda x: x + 1)(1) == 2
    monkeypatch.undo()
    options = {"xla_no_such_option": False, "xla_backend_optimization_level": 0}
    assert compilation.supported_options(**options) == {"xla_backend_optimization_level": 0}


def test_other_backends_have_no_options(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compilation._compiler_options(True) is None


# -- folder of programs ---------------------------------------------------------------------------


@pytest.fixture
def jax_config(monkeypatch, tmp_path):
    """Fields of JAX's config that are set; the user's cache is in a temporary folder."""
    fields, old_folder = {}, jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    with monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", fields.__setitem__)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield fields
    jax.config.update("jax_compilation_cache_dir", old_folder)


def test_the_default_folder_is_in_the_users_cache(jax_config, tmp_path):
    compilation.enable_compilation_cache()
    folder = tmp_path / "cache/jaxprompt/compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    path = jax_config["jax_compilation_cache_dir"]
    assert path.startswith(f"{folder}/cpu-") and Path(path).stat().st_mode & 0o777 == 0o700
    compilation.enable_compilation_cache()  # the same for the next run
    assert jax_config["jax_compilation_cache_dir"] == path


def test_another_folder_or_none(jax_config, tmp_path):
    compilation.enable_compilation_cache(str(tmp_path / "mine"))
    assert jax_config.pop("jax_compilation_cache_dir").startswith(f"{tmp_path}/mine/cpu-")
    compilation.enable_compilation_cache("none")
    assert "jax_compilation_cache_dir" not in jax_config


def test_a_default_folder_that_cannot_be_used_is_a_warning(
    jax_config, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "cache/jaxprompt/compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    compilation.enable_compilation_cache()
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    compilation.enable_compilation_cache()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and not jax_config
    assert all(line.startswith("compiled programs are not cached: ") for line in lines)


def test_a_user_with_a_number_only_has_no_limit(jax_config, tmp_path, monkeypatch):
    """JAX looks up the user's name to limit the size, and would store nothing."""
    folder = str(tmp_path / "mine")
    compilation.enable_compilation_cache(folder)
    assert jax_config.pop("jax_compilation_cache_max_size") == 4 * 2**30

    def no_entry(_uid):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    compilation.enable_compilation_cache(folder)
    assert jax_config["jax_compilation_cache_dir"].startswith(folder)
    assert "jax_compilation_cache_max_size" not in jax_config


def test_programs_that_others_can_write_are_not_used(jax_config, tmp_path, capsys):
    """They are unpickled and executed."""
    root = tmp_path / "mine"
    compilation.enable_compilation_cache(str(root))
    folder = Path(jax_config["jax_compilation_cache_dir"])
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
            jax_config.clear()
            if is_safe or root_mode == 0o700:  # which no one else can enter
                compilation.enable_compilation_cache(str(root))
                assert jax_config["jax_compilation_cache_dir"] == str(folder)
                continue
            wrong = program if folder_mode == 0o755 else folder
            with pytest.raises(InputError, match=f"{wrong}: others can write there; delete it"):
                compilation.enable_compilation_cache(str(root))
            assert not jax_config
    assert not capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_programs_of_someone_else_are_not_used(jax_config, tmp_path, monkeypatch):
    root = tmp_path / "mine"
    compilation.enable_compilation_cache(str(root))
    program = Path(jax_config.pop("jax_compilation_cache_dir")) / "jit_f-1a2b-cache"
    program.parent.mkdir(exist_ok=True)
    program.write_bytes(b"program")
    os.chown(program, 12345, -1)
    with pytest.raises(InputError, match=f"{program}: others can write there"):
        compilation.enable_compilation_cache(str(root))


def test_a_partly_written_program_is_deleted(jax_config, tmp_path):
    """JAX would store no other program."""
    from jax._src.lru_cache import LRUCache

    compilation.enable_compilation_cache(str(tmp_path / "mine"))
    cache = LRUCache(jax_config["jax_compilation_cache_dir"], max_size=2**20)
    cache.put("whole", b"program")
    (cache.path / "cut-cache").write_bytes(b"pro")
    if Version(jax.__version__) < Version("0.12"):
        with pytest.raises(FileNotFoundError):
            cache.put("other", b"program")
    compilation.enable_compilation_cache(str(tmp_path / "mine"))
    cache.put("other", b"program")
    assert cache.get("whole") == cache.get("other") == b"program" and cache.get("cut") is None
