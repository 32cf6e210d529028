"""What is installed: the packages and configs of a wheel, and requirements for every import."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from wheels import unpack_wheel

import jaxprompt
from launch.release import PAGES, PICTURES, REPOSITORY, absolute_links

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = [path for room in ("jaxprompt", "configs") for path in (ROOT / room).rglob("*.py")]
# Imported under another name than the one that pip knows.
NAMES = {"sklearn": "scikit-learn", "orbax": "orbax-checkpoint", "mpl_toolkits": "matplotlib"}
OURS = {"jaxprompt", "configs", *sys.stdlib_module_names}
# Asked for only where a checkpoint is a pytorch_model.bin; the error says that it is missing.
OPTIONAL = {"torch"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTALLED = ("tfds", "metrics", "gguf", "corpus")  # extras that requirements.txt has


def required() -> dict[str, str]:
    """Reads requirements.txt. -> {name, as it is normalised: bounds}"""
    return read_bounds((ROOT / "requirements.txt").read_text().splitlines())


def read_bounds(lines: Iterable[str]) -> dict[str, str]:
    """Reads requirements or constraints. -> {name, as it is normalised: bounds}"""
    pairs = [re.match(r"([\w.-]+)(.*)", line).groups() for line in lines if line[:1].isalpha()]
    return {name.lower().replace("_", "-"): bounds for name, bounds in pairs}


def imported() -> dict[str, str]:
    """Lists what the product imports from others, inside functions too. -> {name: a file}"""
    files = {}
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            files |= {name.split(".")[0]: str(path.relative_to(ROOT)) for name in names}
    return {name: path for name, path in files.items() if name not in OURS}


def test_every_import_is_required():
    files = imported()
    names = {NAMES.get(name, name).lower().replace("_", "-"): name for name in files}
    assert len(names) > 20
    optional = read_bounds(itertools.chain(*EXTRAS.values()))
    lacks = names.keys() - required().keys() - OPTIONAL - optional.keys()
    assert not lacks, {name: files[names[name]] for name in lacks}


def test_modules_import_the_core_alone():
    """What an extra brings is imported in functions, behind `check_extra`."""
    core = read_bounds(PROJECT["dependencies"]).keys()
    for path in PRODUCT:
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in {name.split(".")[0] for name in names} - OURS:
                assert NAMES.get(name, name).lower().replace("_", "-") in core, path


def test_the_requirements_of_a_checkout_are_those_of_the_package():
    """Line by line; the core and the extras that the tests and the quickstart need."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    extras = itertools.chain.from_iterable(EXTRAS[name] for name in INSTALLED)
    assert [line for line in lines if line[0] != "#"] == [*PROJECT["dependencies"], *extras]


def test_a_package_has_one_bound():
    """In whatever extras it is, and in what the tests install."""
    bounds = {}
    for line in itertools.chain(PROJECT["dependencies"], *EXTRAS.values()):
        name = re.split(r"[<>=\[]", line)[0]
        if "[" not in line:
            assert bounds.setdefault(name, line) == line


def test_all_has_every_extra_but_the_accelerators():
    (line,) = EXTRAS["all"]
    names = re.fullmatch(r"jaxprompt\[(.*)\]", line)[1].split(",")
    assert {*names, "all", "cuda12", "cuda13", "tpu"} == EXTRAS.keys()


def test_requirements_are_bounded():
    assert all(">=" in bounds for bounds in required().values())
    assert required()["orbax-checkpoint"].endswith("<1.0")
    assert required()["transformers"].endswith("<6")


def test_the_oldest_versions_of_the_tests_are_the_lower_bounds():
    pinned = read_bounds((ROOT / "tests/constraints-oldest.txt").read_text().splitlines())
    lower = {name: bounds.split(",")[0] for name, bounds in required().items()}
    assert pinned == {name: bound.replace(">=", "==") for name, bound in lower.items()}


def test_the_citation_is_of_this_version():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {jaxprompt.__version__}" in lines
    assert f"repository-code: {PROJECT['urls']['Homepage']}" in lines


def test_every_package_is_named():
    """With setuptools' own search configs/ would be a package of that name, beside jaxprompt."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in PRODUCT}
    wanted = {name.replace("/", ".") for name in folders}
    assert {name.removeprefix("jaxprompt.shipped.") for name in named} == wanted


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this tree, built without network and unpacked. -> folder"""
    source = tmp_path_factory.mktemp("source")
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("jaxprompt", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return unpack_wheel(source, tmp_path_factory.mktemp("built"))


def test_the_wheel_holds_what_the_tree_has(wheel):
    for room, place in (("jaxprompt", "jaxprompt"), ("configs", "jaxprompt/shipped/configs")):
        suffixes = (".py", ".pyi", ".jsonl", ".json")
        files = [path for path in (ROOT / room).rglob("*") if path.suffix in suffixes]
        assert len(files) > 20
        for path in files:
            assert (wheel / place / path.relative_to(ROOT / room)).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in wheel.iterdir() if "dist-info" not in path.name) == [
        "jaxprompt"
    ]


def test_the_description_has_no_relative_link():
    """It is shown on the package index, where README.md's own links lead nowhere."""
    assert PROJECT["urls"]["Homepage"] == f"https://github.com/{REPOSITORY}"
    text = absolute_links((ROOT / "README.md").read_text("utf-8"))
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)#]+)", text)
    assert not [link for _, link in links if not link.startswith("https://")]
    ours = [(mark, link) for mark, link in links if link.startswith((PAGES, PICTURES))]
    assert len(ours) > 20
    for mark, link in ours:
        start = PICTURES if mark else PAGES
        assert link.startswith(start) and (ROOT / link.removeprefix(start)).exists(), link


def test_configs_of_a_wheel_are_found_from_any_folder(wheel, tmp_path):
    """By name and by their path in the repository; a user's own config takes their parts."""
    (tmp_path / "mine.py").write_text(
        "from configs.base import get_config as base\nfrom configs.parts import methods\n"
        "def get_config():\n    c = base()\n    methods.soft(c, length=7)\n    return c\n"
    )
    code = """
from jaxprompt.config import files as configs
from jaxprompt.config.load import load_config
for name in ("quickstart:soft", "configs/quickstart.py:soft"):
    assert load_config(name).prompt.name == "soft"
assert load_config("ppt/t5_xxl:boolq,ppt").prompt.get("init") == "prompts/nsp"
assert load_config("base", [("prompt.name", "soft")]).prompt.get("length") == 20
assert load_config("mine.py").prompt.get("length") == 7
import configs.base
print(configs.base.__file__)
"""
    env = {"PYTHONPATH": str(wheel), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(wheel / "jaxprompt" / "shipped" / "configs" / "base.py")


def test_a_command_imports_torch_for_its_files_alone(tmp_path):
    """transformers would import it for the tokenizer, which takes most of the time to start."""
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "pytorch_model.bin")
    code = "\n".join((
        "import contextlib, sys",
        "from contextlib import ExitStack",
        "from pathlib import Path",
        "sys.argv = ['jaxprompt', '--version']",
        "from jaxprompt.__main__ import entry",
        "with contextlib.suppress(SystemExit):",
        "    entry()",
        "import transformers",
        "transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast",
        "assert 'torch' not in sys.modules",
        "from jaxprompt.convert.weights import _open_torch",
        "with ExitStack() as stack:",
        f"    (entry,) = _open_torch(Path({str(tmp_path)!r}, 'pytorch_model.bin'), stack).values()",
        "    print(entry.read(slice(0, 2), slice(0, 3)).tolist())",
    ))  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]"
