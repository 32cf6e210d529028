"""What may import what: packages in one order, and no cycle of modules."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from rules import label, report

ROOT = Path(__file__).resolve().parents[1] / "jaxprompt"
LAYERS = (  # from the ground up; a package imports those above it in this list
    "errors",
    "signals hidden types rng registry",
    "files tree",
    "config",  # every field of a run
    "data",  # rows of numpy arrays
    "corpus",
    "parallel",
    "layers",
    "scoring",
    "convert",
    "backbones prompts heads",  # none knows another
    "models",
    "training",
    "build",
    "runs",
    "serving",
    "inspection planning",
    "api",
    "cli",
    "__main__",
)
DATA = ("rows", "tasks", "sources", "sampling", "text", "batches")  # the same inside of data/
HOST_ONLY = (
    "config", "data", "corpus", "types", "errors", "files", "signals", "hidden", "registry",
)  # fmt: skip
DEVICE = {"jax", "flax", "optax", "orbax", "jaxlib"}
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """Returns the dotted name under jaxprompt: "prompts.soft", "data", ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path) -> dict[str, int]:
    """Finds every import of a file, inside functions too. Returns {dotted name: first line}."""
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import keeps its dots, and so is of no package that is listed.
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            lines[name] = min(node.lineno, lines.get(name, node.lineno))
    return lines


@functools.cache
def for_checkers(path: Path) -> set[int]:
    """Finds the lines that type checkers alone read."""
    blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    blocks = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    return {line for node in blocks for line in range(node.lineno, node.end_lineno + 1)}


NAMES = {name_of(path): path for path in MODULES}


@functools.cache
def inner(path: Path) -> dict[str, int]:
    """Finds the modules of jaxprompt that a file imports. Returns {dotted name: first line}."""
    lines: dict[str, int] = {}
    for full, line in imports(path).items():
        package, _, rest = full.partition(".")
        if package == "jaxprompt" and line not in for_checkers(path):
            name = rest if rest in NAMES else rest.rpartition(".")[0]
            lines[name] = min(line, lines.get(name, line))
    return lines


def ranks_of(layers: tuple[str, ...]) -> dict[str, int]:
    """Numbers the names of layers from the ground up."""
    return {name: rank for rank, names in enumerate(layers) for name in names.split()}


RANKS, DATA_RANKS = ranks_of(LAYERS), ranks_of(DATA)


def upward(path: Path) -> Iterator[str]:
    """Yields the imports of a file that the order of packages forbids."""
    package, _, rest = name_of(path).partition(".")
    for name, line in inner(path).items():
        other, _, below = name.partition(".")
        if not package:
            yield f"{label(path, line)}: jaxprompt itself imports {name}"
        elif package == "data" == other:
            ranks = [DATA_RANKS.get(part.split(".")[0], -1) for part in (rest, below)]
            if ranks[1] > ranks[0]:
                yield f"{label(path, line)}: data/ imports {below} in {rest}, which comes later"
        elif package != other and RANKS[other] >= RANKS[package]:
            yield f"{label(path, line)}: {package} imports {name}, which is not below it"


def test_packages_import_those_below_them():
    assert len(MODULES) > 100
    packages = {name.split(".")[0] for name in NAMES if name}
    assert packages == set(RANKS), "list a new package in LAYERS, above all that import it"
    report([line for path in MODULES for line in upward(path)])


def test_no_modules_import_each_other():
    """Also where an import stands in a function: it only hides the cycle."""
    imported = {name: set(inner(path)) & NAMES.keys() - {name} for name, path in NAMES.items()}
    # What imports nothing that is left is taken away, until only cycles are left.
    while free := [name for name, others in imported.items() if not others & imported.keys()]:
        for name in free:
            del imported[name]
    report([f"{name} imports {sorted(imported[name] & imported.keys())}" for name in imported])


@pytest.mark.parametrize("start", HOST_ONLY)
def test_what_runs_on_the_host_never_reaches_jax(start):
    todo = [name for name in NAMES if name.split(".")[0] == start]
    reached, lines = set(todo), []
    while todo:
        path = NAMES[todo.pop()]
        lines += [
            f"{label(path, line)}: imports {full}"
            for full, line in imports(path).items()
            if full.split(".")[0] in DEVICE
        ]
        more = inner(path).keys() - reached
        reached |= more
        todo += more
    assert reached
    report(lines)


def test_methods_know_nothing_of_backbones_and_config():
    report(
        [
            f"{label(path, line)}: imports {name}"
            for path in sorted((ROOT / "prompts").glob("*.py"))
            for lines, forbidden in (
                (inner(path), {"backbones", "heads", "config"}),
                (imports(path), {"ml_collections"}),
            )
            for name, line in lines.items()
            # The kinds of fields say what each class declares; no config is read through them.
            if name.split(".")[0] in forbidden and name != "config.kinds"
        ]
    )


def test_configs_are_made_in_config_and_where_users_enter():
    report(
        [
            f"{label(path, line)}: imports {full}"
            for name, path in NAMES.items()
            for full, line in imports(path).items()
            if "ml_collections" in full and name.split(".")[0] not in ("config", "api", "cli")
        ]
    )


def named_outside(path: Path, folder: str, word: str) -> list[str]:
    """Lists the branches of a file on the name of a file in an open package.

    These are comparisons of something called `word` with a name, and keys of a table by name.
    """
    names = {p.stem for p in (ROOT / folder).glob("[!_]*.py")}
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
            if not {getattr(k, "value", None) for k in sides} >= names:
                continue
        else:
            continue
        texts = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
        if about and texts & names:
            lines.append(f"{label(path, node.lineno)}: names {', '.join(sorted(texts & names))}")
    return lines


def test_no_branch_on_a_kind_of_answer_outside_its_file():
    report([line for path in MODULES for line in named_outside(path, "heads", "head")])


def test_no_branch_on_a_method_outside_its_file():
    report([line for path in MODULES for line in named_outside(path, "prompts", "prompt")])
