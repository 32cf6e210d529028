"""A module imports only modules of lower rank; the folders listed are packages of one rank."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "jaxprompt"
RANKS = {
    "errors": -1, "signals": -1,
    "types": 0, "tree": 0, "rng": 0, "files": 0, "hfconfig": 0, "sharding": 0, "hosts": 0,
    "hlo": 0, "flops": 0, "devices": 0, "published": 0,
    "layers": 1, "runlog": 1, "compiled": 1, "keep": 1,
    "run_folder": 2,
    "backbones": 2, "prompts": 2, "heads": 2, "losses": 2, "metrics": 2, "data": 2, "convert": 2,
    "model": 3, "optim": 3, "tables": 3,
    "state": 4, "folding": 4, "fields": 4, "generate": 4,
    "steps": 5, "checkpoint": 5,
    "evaluate": 6, "scorer": 6, "pretraining": 6,
    "cards": 5, "exported": 7, "initial": 7,
    "build": 8,
    "planning": 9, "group": 9, "loop": 9,
    "cli": 10,
    "__main__": 11,
}  # fmt: skip
HOST_ONLY = ("data", "types", "errors", "files", "hfconfig")
DEVICE = {"jax", "flax", "optax", "orbax", "jaxlib"}
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """Gives the dotted name under jaxprompt: "prompts.soft", "data", ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Lists every import of a file, inside functions too, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


NAMES = {name_of(path): path for path in MODULES}


def inner(path: Path) -> set[str]:
    """Lists the modules of jaxprompt that a file imports."""
    found = set()
    for full in imports(path):
        package, _, rest = full.partition(".")
        if package == "jaxprompt":
            found.add(rest if rest in NAMES else rest.rpartition(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_lower_ranks(path):
    own = name_of(path).split(".")[0]
    if not own:
        assert not inner(path)
        return
    assert own in RANKS, f"add {own!r} to RANKS, above all that it imports"
    for name in inner(path):
        other = name.split(".")[0]
        assert other in RANKS, f"add {other!r} to RANKS, above all that it imports"
        same_folder = other == own and (ROOT / own).is_dir()
        assert same_folder or RANKS[other] < RANKS[own], (
            f"{own} (rank {RANKS[own]}) imports {name} (rank {RANKS[other]})"
        )


def test_nothing_listed_is_missing():
    assert {name.split(".")[0] for name in NAMES if name} == set(RANKS)


@pytest.mark.parametrize("start", HOST_ONLY)
def test_what_runs_on_the_host_never_reaches_jax(start):
    todo = [name for name in NAMES if name.split(".")[0] == start]
    seen = set(todo)
    while todo:
        path = NAMES[todo.pop()]
        outer = {full.split(".")[0] for full in imports(path)}
        assert not outer & DEVICE, f"{path} imports {outer & DEVICE}"
        more = inner(path) - seen
        seen |= more
        todo += more
    assert seen


def test_methods_know_nothing_of_backbones_and_config():
    for path in (ROOT / "prompts").glob("*.py"):
        assert not {name.split(".")[0] for name in inner(path)} & {"backbones", "heads", "losses"}
        assert not {full.split(".")[0] for full in imports(path)} & {"ml_collections"}


def test_only_build_and_the_command_line_read_config_objects():
    readers = {name for name, path in NAMES.items() if "ml_collections" in " ".join(imports(path))}
    assert {name.split(".")[0] for name in readers} <= {"build", "cli"}
