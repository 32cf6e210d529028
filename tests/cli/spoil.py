"""What the tests of bad input spoil, and what must stay as it was."""

import json
from pathlib import Path

from tiny_run import ROOT

from jaxprompt.files import json_checksum

BASE = ROOT / "configs" / "base.py"
PYTHON = """
from configs.base import get_config as base
def get_config():
    c = base()
    {line}
    return c
"""


def files(folder: Path) -> dict[str, bytes]:
    """Reads every file of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def change(tree: dict, field: str, value: object) -> None:
    """Sets a dotted field of nested dicts; removes it where the value is None."""
    *parents, last = field.split(".")
    for part in parents:
        tree = tree[part]
    tree[last] = value
    if value is None:
        del tree[last]


def write_card(path: Path, card: dict) -> None:
    """Writes the card of an export with the checksum that belongs to it."""
    path.write_text(json.dumps(card | {"checksum": json_checksum(card)}))


def edit(path: Path, **changes: object) -> None:
    """Changes fields of a JSON file; None removes one. A card gets its new checksum."""
    value = json.loads(path.read_text())
    for name, new in changes.items():
        change(value, name, new)
    if path.name == "prompt.json":
        write_card(path, value)
    else:
        path.write_text(json.dumps(value))
