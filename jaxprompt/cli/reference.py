"""Lists the fields of a config, for --help and as docs/config.md.

What they hold is declared in jaxprompt/config/run.py, and for a method or a head in its file.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxprompt.config.block import declared_leaves
from jaxprompt.config.blocks import make_block
from jaxprompt.config.kinds import Field
from jaxprompt.config.load import read_config
from jaxprompt.config.open_blocks import CHOICES, OPEN, declared, names
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError

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
    kind = " | ".join(filter(None, field.words))
    if not kind:
        limits = [field.limit] if isinstance(field.limit, str) and field.limit else []
        kind = ", ".join([_KINDS[field.kind], *limits])
    return f"several of: {kind}" if field.many else kind


def _sections() -> Iterator[tuple[str, list[Line]]]:
    blocks = {n: block for n, block in RunConfig.declared().items() if isinstance(block, type)}
    leaves = [_line(*leaf) for leaf in declared_leaves(RunConfig)]
    yield "", [line for line in leaves if line.name.partition(".")[0] not in blocks]
    for name, block in blocks.items():
        yield f"{name}: {block.note()}", [x for x in leaves if x.name.startswith(f"{name}.")]
    base = read_config("base")
    for named in (*CHOICES, *OPEN):
        for name in (name for name in names(named) if name != _CONSTANTS):
            title = f"{named}, with {named}.name={name}"
            try:
                fields, values = declared(named, name), make_block(named, name, base)
            except InputError as error:  # of a package that cannot be used
                yield f"{title}: unusable: {error}", []
                continue
            lines = [
                _line(f"{named}.{part}", field._replace(default=values[part]))
                for part, field in fields.items()
            ]
            if lines or named in OPEN:
                yield title, lines


def _line(name: str, field: Field) -> Line:
    return Line(name, _shown(field.default), describe(field), field.note)


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _unsaid(note: str, kind: str) -> str:
    """Takes the words that a field may hold off a note that begins with them."""
    words = re.match(r"(\w+(?: \| \w+)+)(?:[,:;] |$)", note)
    if words is None or not set(words[1].split(" | ")) <= set(kind.split(" | ")):
        return note
    return note[words.end() :]


if __name__ == "__main__":
    print(write_page(), end="")
