"""Lists the fields of a config, for --help and as docs/config.md.

What they hold is declared in jaxprompt/config/schema.py, and for a method or a head in its file.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxprompt.config.blocks import make_block
from jaxprompt.config.fields import Block, Field
from jaxprompt.config.files import load_module, shipped
from jaxprompt.config.open_blocks import names, own_notes
from jaxprompt.config.schema import FIELDS, OPEN

_KINDS = {str: "text", bool: "true or false", int: "whole number", float: "number",
          tuple: "list of texts"}  # fmt: skip
_CONSTANTS = "constant"  # what a trained method folds to: never asked for by a config
_PAGE = """# Fields of a config

Every field can be set on the command line, as in `--config.optim.lr=0.01`. This page is written by
`python -m jaxprompt.cli.reference > docs/config.md`.
"""


class Line(NamedTuple):
    """One field."""

    name: str
    default: str
    may: str  # what it may hold
    note: str


def list_fields() -> str:
    """Writes a line for every field, block by block, those of each method under its name."""
    lines = ["fields of a config, as in --config.optim.lr=0.01:"]
    for title, own in _sections():
        lines += ["", *([title] if title else [])]
        for line in own:
            note = _unsaid(line.note, line.may)
            shown = f"{line.name} = {line.default}"
            lines.append(f"  {shown:36s}  {line.may}" + f"; {note}" * bool(note))
    return "\n".join(lines)


def write_page() -> str:
    """Writes docs/config.md."""
    lines = [_PAGE]
    for title, own in _sections():
        lines += [
            f"## {title or 'the run'}",
            "",
            "| field | default | may be | |",
            "|---|---|---|---|",
        ]
        for line in own:
            cells = (f"`{line.name}`", f"`{line.default}`", line.may, _unsaid(line.note, line.may))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def describe(field: Field) -> str:
    """Says what a field may hold, in words."""
    kind = " | ".join(field.words)
    if not kind:
        kind = ", ".join([_KINDS[field.kind], *([field.limit] if field.limit else [])])
    return f"several of: {kind}" if field.many else kind


def _sections() -> Iterator[tuple[str, list[Line]]]:
    yield "", [_line(n, field) for n, field in FIELDS.items() if not isinstance(field, Block)]
    for name, held in FIELDS.items():
        if isinstance(held, Block):
            yield f"{name}: {held.note}", list(_block(f"{name}.", held))
    base = load_module(str(shipped()["base"])).get_config()
    for block in OPEN:
        for name in (name for name in names(block) if name != _CONSTANTS):
            made, notes = make_block(block, name, base), own_notes(block, name)
            yield f"{block}, with {block}.name={name}", [
                Line(f"{block}.{field}", _shown(value), _KINDS[type(value)], notes.get(field, ""))
                for field, value in made.items() if field != "name"
            ]  # fmt: skip


def _block(prefix: str, held: Block) -> Iterator[Line]:
    for name, field in held.items():
        if isinstance(field, Block):
            yield from _block(f"{prefix}{name}.", field)
        else:
            yield _line(prefix + name, field)


def _line(name: str, field: Field) -> Line:
    return Line(name, _shown(field.default), describe(field), field.note)


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _unsaid(note: str, kind: str) -> str:
    """Takes the words that a field may hold off a note that begins with them."""
    words = re.match(r"(\w+(?: \| \w+)+)(?:[,:;] |$)", note)
    said = words and set(words[1].split(" | ")) <= set(kind.split(" | "))
    return note[words.end() :] if said else note


if __name__ == "__main__":
    print(write_page(), end="")
