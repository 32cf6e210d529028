"""Compilation of train steps, and the persistent compilation cache."""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import pwd
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxprompt.errors import InputError, escape
from jaxprompt.files import user_cache

_MAX_CACHE_BYTES = 4 * 2**30  # the least recently used programs are deleted first
_MIN_COMPILE_SECONDS = 0.3  # programs that compile faster are not cached


# Decorator of factories of compiled functions: equal models of a process compile only once.
cached_factory = functools.lru_cache(maxsize=16)


def jit(function: Callable, *, has_dropout: bool = True, **settings: Any) -> Callable:
    """Compiles like jax.jit, on CPUs without XLA's fusion emitters for programs with dropout.

    There they need hundreds of MiB to compile, and the step is no faster.
    """
    return jax.jit(function, compiler_options=_compiler_options(has_dropout), **settings)


@functools.cache
def _compiler_options(has_dropout: bool) -> dict[str, Any] | None:
    if jax.default_backend() != "cpu" or not has_dropout:
        return None
    return supported_options(xla_cpu_use_fusion_emitters=False) or None


@functools.cache
def supported_options(**options: Any) -> dict[str, Any]:
    """Returns the compiler options that this XLA knows; it rejects unknown ones."""

    def has(name: str) -> bool:
        try:  # with an empty program
            jax.jit(lambda: 0, compiler_options={name: options[name]}).lower().compile()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in options.items() if has(name)}


def enable_compilation_cache(folder: str = "") -> None:
    """Enables the persistent compilation cache in `folder`, by default in the user's cache.

    Cached programs are run without any check, so nobody else may be able to write to the folder,
    to its subfolder for the kind of device, and to the programs. "none" disables the cache;
    JAX_COMPILATION_CACHE_DIR takes precedence over `folder`. Raises InputError for a `folder` that
    cannot be used; if the default folder cannot be used, a warning is printed.
    """
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # JAX adds its flags
    if folder == "none" or configured:
        return
    try:
        root = _private_folder(Path(folder) if folder else user_cache() / "jaxprompt" / "compiled")
        path = _private_folder(root / _device_name(), inside_closed=_is_closed(root))
    except OSError as error:
        message = (
            f"{error.filename}: {error.strerror}; delete it, or set train.compilation_cache to a "
            "folder that only you can write to, or to none"
        )
        if folder:
            raise InputError(f"train.compilation_cache={folder}: {message}") from error
        print(escape(f"compiled programs are not cached: {message}"), file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    if _can_limit_size():
        jax.config.update("jax_compilation_cache_max_size", _MAX_CACHE_BYTES)
        _delete_partial_programs(path)


def _can_limit_size() -> bool:
    """Returns whether JAX can limit the size of the cache: it needs filelock and a user name."""
    with contextlib.suppress(KeyError):  # in a container the user may have a number only
        return bool(pwd.getpwuid(os.getuid()) and importlib.util.find_spec("filelock"))
    return False


def _delete_partial_programs(folder: Path) -> None:
    """Deletes partly written programs, after a killed process or on a full disk.

    JAX writes the access time after the program. If one has none, JAX caches no other program.
    """
    if not folder.is_dir():
        return
    # JAX's lock: another process may be between the two writes. Then the next command checks.
    try:
        with (folder / ".lockfile").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for program in folder.glob("*-cache"):
                if not program.with_name(program.name.removesuffix("cache") + "atime").exists():
                    program.unlink()
    except OSError:
        pass  # such a cache is only slow


def _private_folder(path: Path, *, inside_closed: bool = False) -> Path:
    """Creates a folder for the user only. Raises OSError if others can write to it.

    If others can enter the folder or its parent, the programs in it are checked too, because JAX
    creates folders and programs with the permissions of the umask.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    is_closed = inside_closed or _is_closed(path)
    for member in (path, *path.glob("*-cache")):
        with contextlib.suppress(FileNotFoundError):  # a program that another process deleted
            status = member.stat()
            is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_closed
            if status.st_uid != os.getuid() or is_open:
                raise PermissionError(0, "others can write there", str(member))
    return path


def _is_closed(path: Path) -> bool:
    return not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _device_name() -> str:
    """Returns a name for the kind of device that programs run on.

    Programs for one CPU may crash on another with an illegal instruction.
    """
    kind = jax.default_backend()
    if kind != "cpu":
        return kind
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    # x86 calls them flags, Arm Features.
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"cpu-{hashlib.sha256((platform.processor() + flags).encode()).hexdigest()[:12]}"
