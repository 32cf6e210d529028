"""Pictures and the page hold what they are given, whatever texts a user's data have."""

import html
import re

import numpy as np
import pytest

from jaxprompt.inspection import pictures as draw
from jaxprompt.inspection.page import Page, markup_with_notes

pytest.importorskip("matplotlib")
ODD = ("_hidden", "$x^{", "a$b$c", "好书", "<b>&", "a name that is longer than any axis has room")
RNG = np.random.default_rng(0)


def pixels(path):
    from matplotlib.image import imread

    image = imread(path)[..., :3]
    assert image.min() < 0.9 and image.max() == 1
    return image


def test_odd_names_are_drawn_as_they_are(tmp_path):
    """Every warning is an error here: of glyphs, of formulas, of names that a legend leaves out."""
    labels = np.repeat(range(len(ODD)), 4)
    points = RNG.normal(size=(len(labels), 2))
    counts = RNG.integers(0, 9, (len(ODD), len(ODD) + 1))
    pictures = [
        draw.draw_states(points, labels, ODD, "states", tmp_path / "a.png"),
        draw.draw_confusion(counts, ODD, tmp_path / "b.png"),
        draw.draw_labels(
            points[:6], points[6:12], points[12:], [i // 2 for i in range(12)], ODD, ODD * 2,
            "labels", tmp_path / "c.png",
        ),
    ]  # fmt: skip
    for path in pictures:
        pixels(path)


@pytest.mark.long_cases("40")
@pytest.mark.parametrize("classes", [2, 40])
def test_many_classes_are_told_apart(classes, tmp_path):
    styles = [(style["color"], style["marker"]) for style in map(draw.class_style, range(104))]
    assert len(set(styles)) == 104
    labels = np.arange(classes * 3) % classes
    points, names = RNG.normal(size=(len(labels), 2)), [f"class {i}" for i in range(classes)]
    pixels(draw.draw_states(points, labels, names, "", tmp_path / "a.png"))
    pixels(draw.draw_confusion(np.eye(classes, classes + 1, dtype=int), names, tmp_path / "b.png"))


def test_a_colour_is_the_share(tmp_path):
    """Attention 0 in one half of the heads and 1 in the other: two colours, far apart."""
    mass = np.tile([0.0, 1.0], (3, 2))
    image = pixels(draw.draw_attention({"all tokens": mass}, 0.5, "here", tmp_path / "a.png"))
    for end in ((68, 1, 84), (253, 231, 37)):  # of viridis
        assert (np.abs(image * 255 - end).max(-1) < 2).sum() > 1000


def test_texts_beside_points_do_not_cover_one_another():
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(figsize=(5, 5), layout="constrained")
    axis = figure.subplots()
    points = np.array([[0, 0], [0.01, 0], [0, 0.01], [1, 1], [1, 0.99]])
    axis.scatter(*points.T)
    said = [(p, f"word {i}", {"fontsize": 9}) for i, p in enumerate(points)]
    draw._annotate_points(figure, axis, said)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axis.texts]  # without their lines
    assert len(boxes) == 5
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_the_page_escapes_and_needs_nothing_else(tmp_path):
    path = draw.draw_ratio({0: 0.9, 5: 0.5}, 5, tmp_path / "ratio.png")
    page = Page('<script>alert("1")</script>')
    page.paragraph("a & b <img src=x onerror=y>")
    page.table(("<i>",), [(markup_with_notes([("<u>", "1 < 2")]), "</table>")])
    page.pictures([(path, '"quoted" <caption>')])
    text = page.text()
    tags = set(re.findall(r"<([a-z0-9]+)", text))
    assert not tags & {"script", "u", "i", "link", "iframe"} and text.count("<img") == 1
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', text) == []
    assert html.escape('"quoted" <caption>', quote=True) in text
    assert "default-src 'none'" in text and 'name="viewport"' in text
