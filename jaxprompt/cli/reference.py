"""Lists the fields of a config for --help: what each may hold, its default and a note.

Kinds and ranges are those of jaxprompt/assembly/schema.py, notes the comments in configs/base.py;
fields of a method or a head are read from its file.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxprompt.cli.blocks import make_block, names, source_of
from jaxprompt.cli.configs import load_module, shipped

_FIELD = r"\s*c\.([\w.]+) = .*?  # (.*)"  # of base.py
_OWN = r"    (\w+): \w+ = .*?  # (.*)"  # of a method's class
_KINDS = {str: "text", bool: "true or false", int: "whole number", float: "number",
          tuple: "list of texts"}  # fmt: skip
_CONSTANTS = "constant"  # what a trained method folds to: never asked for by a config


def list_fields() -> str:
    """Writes a line for every field, block by block, those of each method under its name."""
    from jaxprompt.assembly.schema import FIELDS, OPEN

    notes = _notes(shipped()["base"], _FIELD)
    config = load_module(str(shipped()["base"])).get_config()
    lines = ["fields of a config, as in --config.optim.lr=0.01:", ""]
    for name, held in FIELDS.items():
        if isinstance(held, Mapping):
            lines += ["", f"{name}: {notes[name]}" if name in notes else name]
            lines += _block(f"{name}.", held, config[name], notes)
        else:
            lines.append(_line(name, config[name], describe(held), notes.get(name, "")))
    for block in OPEN:
        for name in (name for name in names(block) if name != _CONSTANTS):
            lines += ["", f"{block}, with {block}.name={name}"]
            lines += _open_block(block, name, config, notes)
    return "\n".join(lines)


def describe(field: Any) -> str:
    """Says what a field may hold, in words."""
    if isinstance(field.limit, str):
        kind = ", ".join([_KINDS[field.kind], *([field.limit] if field.limit else [])])
    else:
        kind = " | ".join(field.limit)
    return f"several of: {kind}" if field.many else kind


def _notes(path: Path, pattern: str) -> dict[str, str]:
    found = (re.match(pattern, line) for line in path.read_text("utf-8").splitlines())
    return dict(match.groups() for match in found if match)


def _block(
    prefix: str, held: Mapping[str, Any], config: Any, notes: Mapping[str, str]
) -> Iterator[str]:
    for name, field in held.items():
        if isinstance(field, Mapping):
            yield from _block(f"{prefix}{name}.", field, config[name], notes)
        else:
            full = prefix + name
            yield _line(full, config[name], describe(field), notes.get(full, ""))


def _open_block(block: str, name: str, config: Any, notes: Mapping[str, str]) -> Iterator[str]:
    own, made = _notes(source_of(block, name), _OWN), make_block(block, name, config)
    for field in (field for field in made if field != "name"):
        note = own.get(field) or notes.get(f"{block}.{field}", "") * (field == "init")
        yield _line(f"{block}.{field}", made[field], _KINDS[type(made[field])], note)


def _line(name: str, default: Any, kind: str, note: str) -> str:
    words = re.match(r"(\w+(?: \| \w+)+)(?:[,:;] |$)", note)
    if words and set(words[1].split(" | ")) <= set(kind.split(" | ")):  # they need no saying twice
        note = note[words.end() :]
    shown = f'"{default}"' if isinstance(default, str) else f"{default}"
    return f"  {f'{name} = {shown}':36s}  {kind}" + f"; {note}" * bool(note)
