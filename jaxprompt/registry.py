"""Methods, heads, backbones and tasks by name: those of jaxprompt and those of installed packages.

An installed package adds methods, heads, backbones and tasks by entry points of the groups
jaxprompt.prompts, jaxprompt.heads, jaxprompt.backbones and jaxprompt.tasks. They are imported when
they are used.
"""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jaxprompt.errors import InputError, first_line, nearest

PACKAGE = Path(__file__).resolve().parent


class Plugin(NamedTuple):
    """An installed package that adds a method, a head, a backbone or a task."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@functools.cache
def entry_points(group: str) -> dict[str, list[metadata.EntryPoint]]:
    """Returns the entry points of a group by name; searches installed packages only once."""
    points: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=group):
        points.setdefault(point.name, []).append(point)
    return points


def is_installed(package: str) -> bool:
    """Returns whether a package of this name is installed."""
    try:
        metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):  # the second for an empty name
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Registry:
    """Objects of one kind by name: a method, a head, a backbone or a task."""

    package: str  # folder of jaxprompt with a file per name, and end of the entry points' group
    kind: str  # "method", as messages call it
    attribute: str = ""  # name of the class in each file; "" = the module itself
    base: str = ""  # class in the package's __init__ that a plugin's class must derive from
    values: Mapping[str, Any] | None = None  # objects by name, instead of files

    def built_in(self) -> list[str]:
        """Returns the built-in names of jaxprompt, sorted. Nothing is imported."""
        if self.values is not None:
            return sorted(self.values)
        return sorted(path.stem for path in (PACKAGE / self.package).glob("[!_]*.py"))

    def names(self) -> list[str]:
        """Returns all names, sorted. Nothing is imported."""
        return sorted({*self.built_in(), *self._points()})

    def load(self, name: str) -> Any:
        """Returns the class of a name, the module of a backbone, or the fields of a task.

        Raises InputError for an unknown name, for a name that several packages or jaxprompt and a
        package define, and for a package that cannot be imported.
        """
        points, is_built_in = self._points().get(name, []), name in self.built_in()
        if not points and not is_built_in:
            raise InputError(f"unknown {self.kind} {name!r}; {nearest(name, self.names())}")
        if len(points) + is_built_in > 1:
            owners = ["jaxprompt"] * is_built_in + [str(_plugin(point)) for point in points]
            raise InputError(
                f"{self.kind} {name!r} is defined by {' and by '.join(owners)}; uninstall "
                f"{_plugin(points[-1]).name}, or rename its entry point"
            )
        if points:
            return self._load_plugin(points[0])
        if self.values is not None:
            return self.values[name]
        module = importlib.import_module(f"jaxprompt.{self.package}.{name}")
        return getattr(module, self.attribute) if self.attribute else module

    def loadable(self) -> dict[str, Any]:
        """Returns the result of `load` by name, without packages that cannot be imported."""
        objects = {}
        for name in self.names():
            try:
                objects[name] = self.load(name)
            except InputError:  # `load` of this name shows the error
                continue
        return objects

    def name_of(self, cls: type) -> str:
        """Returns the name of a class, from its file or its entry point."""
        package, _, module = cls.__module__.rpartition(".")
        if package != f"jaxprompt.{self.package}":
            for name, (point, *_) in self._points().items():
                if getattr(sys.modules.get(point.module), point.attr, None) is cls:
                    return name
        return module

    def plugin(self, name: str) -> Plugin | None:
        """Returns the package that defines a name; None for built-in names."""
        points = self._points().get(name)
        return _plugin(points[0]) if points and name not in self.built_in() else None

    def _points(self) -> dict[str, list[metadata.EntryPoint]]:
        return entry_points(f"jaxprompt.{self.package}")

    def _load_plugin(self, point: metadata.EntryPoint) -> Any:
        where = f"the package {_plugin(point)}, {self.kind} {point.name!r} = {point.value}"
        try:
            value = point.load()
        except Exception as error:  # whatever the package's code raises
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"{where}: {reason}; upgrade, fix or uninstall the package") from error
        if self.base:
            base = getattr(importlib.import_module(f"jaxprompt.{self.package}"), self.base)
            fits = isinstance(value, type) and issubclass(value, base)
            expected = f"a class that derives from jaxprompt.{self.package}.{base.__name__}"
        elif self.values is not None:
            fits, expected = isinstance(value, Mapping), "a dict of fields"
        else:
            fits, expected = isinstance(value, ModuleType), "a module"
        if not fits:
            raise InputError(f"{where}: must be {expected}; fix the entry point of the package")
        return value


def _plugin(point: metadata.EntryPoint) -> Plugin:
    if point.dist is None:  # made by hand, not found in an installed package
        raise ValueError(f"entry point {point.name!r} has no package")
    return Plugin(point.dist.name, point.dist.version)


METHODS = Registry("prompts", "method", "Prompt", base="Method")
HEADS = Registry("heads", "head", "Head", base="Kind")
BACKBONES = Registry("backbones", "backbone")
