"""A module imports only modules of lower rank; the folders listed are packages of one rank."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from rules import label, report

from jaxprompt.config.fields import Block
from jaxprompt.config.schema import FIELDS, OPEN

ROOT = Path(__file__).resolve().parents[1] / "jaxprompt"
ROOMS = (  # from the ground up
    "errors signals hidden",
    "types files tree rng",
    "parallel",
    "layers",
    "data",
    "corpus",
    "scoring",
    "convert",
    "backbones prompts heads",  # none knows another
    "models",
    "training",
    "assembly",
    "sweeps",
    "planning",
    "api",
    "cli",
    "__main__",
)
RANKS = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms.split()}
HOST_ONLY = ("data", "corpus", "types", "errors", "files", "signals", "hidden")
DEVICE = {"jax", "flax", "optax", "orbax", "jaxlib"}
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """Gives the dotted name under jaxprompt: "prompts.soft", "data", ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path) -> dict[str, int]:
    """Finds every import of a file, inside functions too. -> {dotted name: first line}"""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import keeps its dots, and so is of no known package.
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            found[name] = min(node.lineno, found.get(name, node.lineno))
    return found


@functools.cache
def for_checkers(path: Path) -> set[int]:
    """Finds the lines that type checkers alone read."""
    blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    blocks = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    return {line for node in blocks for line in range(node.lineno, node.end_lineno + 1)}


NAMES = {name_of(path): path for path in MODULES}


def inner(path: Path) -> dict[str, int]:
    """Finds the modules of jaxprompt that a file imports. -> {name under jaxprompt: first line}"""
    found = {}
    for full, line in imports(path).items():
        package, _, rest = full.partition(".")
        if package == "jaxprompt":
            name = rest if rest in NAMES else rest.rpartition(".")[0]
            found[name] = min(line, found.get(name, line))
    return found


def misplaced(path: Path) -> list[str]:
    """Lists the imports of a file that its rank forbids, and the names without a rank."""
    own, lines = name_of(path).split(".")[0], []
    if own and own not in RANKS:
        return [f"{label(path, 1)}: add {own!r} to RANKS, above all that it imports"]
    for name, line in inner(path).items():
        other = name.split(".")[0]
        if not own:
            if line not in for_checkers(path):
                lines.append(f"{label(path, line)}: jaxprompt itself imports {name}")
        elif other not in RANKS:
            lines.append(f"{label(path, line)}: add {other!r} to RANKS, above all that it imports")
        elif other == own and (ROOT / own).is_dir():
            continue  # of the same folder
        elif RANKS[other] >= RANKS[own]:
            ranks = f"{own} (rank {RANKS[own]}) imports {name} (rank {RANKS[other]})"
            lines.append(f"{label(path, line)}: {ranks}")
    return lines


def test_imports_only_lower_ranks():
    assert len(MODULES) > 100
    report([line for path in MODULES for line in misplaced(path)])


def test_no_import_is_relative():
    report(
        [
            f"{label(path, line)}: relative import of {name}"
            for path in MODULES
            for name, line in imports(path).items()
            if name.startswith(".")
        ]
    )


def test_nothing_listed_is_missing():
    assert {name.split(".")[0] for name in NAMES if name} == set(RANKS)


@pytest.mark.parametrize("start", HOST_ONLY)
def test_what_runs_on_the_host_never_reaches_jax(start):
    todo = [name for name in NAMES if name.split(".")[0] == start]
    seen, lines = set(todo), []
    while todo:
        path = NAMES[todo.pop()]
        lines += [
            f"{label(path, line)}: imports {full}"
            for full, line in imports(path).items()
            if full.split(".")[0] in DEVICE
        ]
        more = inner(path).keys() - seen
        seen |= more
        todo += more
    assert seen
    report(lines)


def test_methods_know_nothing_of_backbones_and_config():
    report(
        [
            f"{label(path, line)}: imports {name}"
            for path in sorted((ROOT / "prompts").glob("*.py"))
            for found, forbidden in (
                (inner(path), {"backbones", "heads", "losses"}),
                (imports(path), {"ml_collections"}),
            )
            for name, line in found.items()
            if name.split(".")[0] in forbidden
        ]
    )


def test_only_assembly_and_the_command_line_make_configs():
    report(
        [
            f"{label(path, line)}: imports {full}"
            for name, path in NAMES.items()
            for full, line in imports(path).items()
            if "ml_collections" in full and name.split(".")[0] not in ("assembly", "cli")
        ]
    )


def named_outside(path: Path, folder: str, word: str) -> list[str]:
    """Lists the branches of a file on the name of what stands in an open room, as a file each.

    These are comparisons of something called `word` with a name, and keys of a table by name.
    """
    known = {p.stem for p in (ROOT / folder).glob("[!_]*.py")}
    if path.parent == ROOT / folder:
        return []
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            others = [side for side in sides if not isinstance(side, ast.Constant)]
            about = any(word in ast.unparse(side) for side in others)
        elif isinstance(node, ast.Dict):
            sides, about = [k for k in node.keys if k], True
            if not {getattr(k, "value", None) for k in sides} >= known:
                continue
        else:
            continue
        named = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
        if about and named & known:
            lines.append(f"{label(path, node.lineno)}: names {', '.join(sorted(named & known))}")
    return lines


def test_no_branch_on_a_kind_of_answer_outside_its_file():
    report([line for path in MODULES for line in named_outside(path, "heads", "head")])


def test_no_branch_on_a_method_outside_its_file():
    report([line for path in MODULES for line in named_outside(path, "prompts", "prompt")])


def reads_of_configs(path: Path) -> Iterator[tuple[int, str]]:
    """Finds `c.data`, `run.config.optim`, `x.train.log_steps`: where a field of a config is read.

    A block that another thing has too, as the `task` of a scorer, counts behind a config's name.
    """
    shared = {"task", "runs", *OPEN}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        inner = node.value
        named = isinstance(inner, ast.Name) and inner.id in ("c", "config")
        named = named or (isinstance(inner, ast.Attribute) and inner.attr == "config")
        block = inner.attr if isinstance(inner, ast.Attribute) else ""
        known = FIELDS.get(block) if block not in shared else None
        if (named and node.attr in (*FIELDS, *OPEN)) or (
            isinstance(known, Block) and node.attr in known
        ):
            yield node.lineno, ast.unparse(node)


def test_a_config_is_read_in_assembly_alone():
    report(
        [
            f"{label(path, line)}: {text}; let assembly read it, as in config/settings.py"
            for name, path in NAMES.items()
            if name.split(".")[0] != "assembly"
            for line, text in reads_of_configs(path)
        ]
    )
    assert len(list(reads_of_configs(NAMES["assembly.settings"]))) > 10
