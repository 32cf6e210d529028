"""Curves and charts: what is drawn is what was measured, and nothing is drawn without a wish."""

import json

import numpy as np
import pytest

from jaxprompt.errors import InputError
from jaxprompt.training import pictures
from jaxprompt.training.run_result import RunResult

pytest.importorskip("matplotlib")

LINES = [
    {"step": 10, "loss": 1.5, "lr": 0.1},
    {"step": 10, "dev": {"accuracy": 0.5, "macro_f1": 0.4}},
    {"step": 20, "loss": "NaN", "lr": 0.05},
    {"step": 20, "loss": float("nan")},  # of another program
    {"step": 20, "dev": {}},
    {"step": 20, "dev": {"accuracy": 0.75, "macro_f1": 0.7}},
]


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in LINES))
    return tmp_path


def test_curves_are_the_records(workdir):
    assert pictures.read_curves(workdir) == {
        "loss": [(10, 1.5)], "dev accuracy": [(10, 0.5), (20, 0.75)],
    }  # fmt: skip


def test_a_picture_has_something_on_it_and_is_the_same_again(workdir):
    path = pictures.draw_curves(workdir, "a run")
    first = path.read_bytes()
    assert path == workdir / "curves.png" and first[:8] == b"\x89PNG\r\n\x1a\n"
    assert pictures.draw_curves(workdir, "a run").read_bytes() == first
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    assert pixels.shape[0] > 300 and (np.abs(pixels - 1) > 0.2).mean() > 0.005


def test_the_step_that_was_chosen_is_marked(workdir, monkeypatch):
    """By the result: of a loss the lowest is the best, and of a cut run none is known."""
    said: list[str] = []
    note = lambda axis, text, *rest, **how: said.append(text)
    monkeypatch.setattr("matplotlib.axes.Axes.annotate", note)
    pictures.draw_curves(workdir)
    assert said == []
    (workdir / "result.json").write_text(json.dumps({"best_step": 10}))
    pictures.draw_curves(workdir)
    assert said == ["best 0.500 at step 10"]


def test_a_table_is_drawn_with_its_deviations(tmp_path):
    make = lambda value: RunResult(best_step=1, dev={"accuracy": 0.9}, test={"accuracy": value})
    rows = {"prefix": [make(0.8), make(0.9)], "soft": [make(0.7)]}
    for name in ("chart.png", "chart.svg"):
        assert pictures.draw_chart(rows, tmp_path / name).stat().st_size > 1000
    svg = (tmp_path / "chart.svg").read_text()
    assert svg.count("<image") == 0 and "<svg" in svg
    with pytest.raises(InputError, match="no score in common"):
        pictures.draw_chart(
            {"a": [make(0.8)], "b": [RunResult(best_step=1, held_out={"loss": 1.0})]},
            tmp_path / "x.png",
        )
    with pytest.raises(InputError, match="use the ending .png"):
        pictures.draw_chart(rows, tmp_path / "chart.xyz")
    with pytest.raises(InputError, match="nowhere"):
        pictures.draw_chart(rows, tmp_path / "nowhere" / "chart.png")
