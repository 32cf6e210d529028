"""Finds config files, shipped ones by name, and calls their functions. Imports nothing heavy."""

import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from jaxprompt.errors import InputError, nearest
from jaxprompt.files import user_path

PACKAGE = Path(__file__).resolve().parents[1]


def shipped_root() -> Path:
    """Returns the folder that contains the shipped `configs`: in the wheel, or the repository."""
    folder = PACKAGE / "shipped"
    return folder if (folder / "configs").is_dir() else PACKAGE.parent


def shipped_configs() -> dict[str, Path]:
    """Returns the paths of the shipped configs by name: "base", "ppt/nsp"."""
    folder = shipped_root() / "configs"
    files = [path for path in folder.rglob("*.py") if path.stem != "__init__"]
    names = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(files)}
    return {name: path for name, path in names.items() if not name.startswith("parts/")}


def find_config(file: str) -> Path:
    """Returns the path of a config: a file, or a shipped config by name or repository path.

    Raises:
      InputError: if it is neither.
    """
    path = user_path(file, "config")
    if os.path.isfile(path):
        return Path(os.path.realpath(path))  # Path.resolve raises on circular links
    name = os.path.normpath(file).removesuffix(".py").removeprefix("configs/")
    shipped = shipped_configs()
    if name not in shipped:
        inside = [other for other in shipped if other.startswith(f"{name}/")]
        raise InputError(
            f"config {file!r} is not a file; give a .py file, a saved config.json, or a shipped "
            f"config, {', '.join(inside) or nearest(name, shipped)}"
        )
    return shipped[name]


def load_module(file: str) -> ModuleType:
    """Imports a config file, with the folder above `configs/` on `sys.path` for its imports.

    The user's config files can import the shipped `configs`, too.
    """
    path, shipped = find_config(file), str(shipped_root())
    root = next((p.parent for p in path.parents if p.name == "configs"), path.parent)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if shipped not in sys.path:
        # Last, so that a `configs` package of the user takes precedence.
        sys.path.append(shipped)
    # By its path, since a config need not be part of a package.
    spec = importlib.util.spec_from_file_location(f"jaxprompt_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"config {file!r} is not a Python file; give a .py file or a config.json")
    module = importlib.util.module_from_spec(spec)
    with _errors(file):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _errors(place: str) -> Iterator[None]:
    """Turns the exceptions of a config file into an InputError that names the file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"config {place}: {error}") from error
    except Exception as error:
        raise InputError(f"config {place}: {type(error).__name__}: {error}") from error


def call_config(module: ModuleType, name: str, file: str, *args: str) -> object:
    """Calls a function of a config file. Exceptions in it are raised as InputError.

    If the function is a generator, all its values are returned as a list.
    """
    if not hasattr(module, name):
        raise InputError(f"config {file} does not define {name}(); add this function")
    function = getattr(module, name)
    if args and not inspect.signature(function).parameters:
        raise InputError(f"config {file} takes no argument; remove {':' + args[0]!r}")
    with _errors(":".join((file, *args))):
        result = function(*args)
        # The body of a generator runs when it is read.
        return list(result) if isinstance(result, Iterator) else result
