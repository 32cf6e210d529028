"""Figures of what a run learned: states, label rows, confusion, attention. They need matplotlib.

Classes differ by colour and by marker, so that they can be distinguished without colours, too.
Text is large enough to be read on a phone that shows a figure at half its size.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxprompt.training.pictures import COLOURS, mark_best, new_figure, save_figure

_MARKERS = "os^DvP*X<>hpd"
MAX_NAMED_CLASSES = 16  # up to so many classes have a legend, and so many words a label in a matrix
_MAX_NAME_LENGTH = 18  # characters of a name


# Fonts with characters that matplotlib's default font lacks; used if they are installed.
_MORE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari",
    "Noto Sans Thai", "Noto Sans", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans",
    "Microsoft YaHei", "Arial Unicode MS",
)  # fmt: skip


def shorten_name(name: str) -> str:
    """Shortens a name to fit beside an axis, and escapes formulas of matplotlib."""
    name = name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"
    # matplotlib leaves names that start with an underscore out of a legend.
    return (f" {name}" if name.startswith("_") else name).replace("$", r"\$")


def _with_fonts(draw: Callable[..., Path]) -> Callable[..., Path]:
    """Decorates a plotting function to use fonts for all scripts; missing glyphs become boxes."""

    @functools.wraps(draw)
    def wrapper(*args: Any, **kwargs: Any) -> Path:
        import matplotlib
        from matplotlib.font_manager import fontManager

        names = {font.name for font in fontManager.ttflist}
        fonts = ["DejaVu Sans", *(name for name in _MORE_FONTS if name in names)]
        with matplotlib.rc_context({"font.family": fonts}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            return draw(*args, **kwargs)

    return wrapper


def class_style(index: int) -> dict[str, Any]:
    """Returns the colour and marker of a class; 104 combinations differ."""
    marker = _MARKERS[(index + index // len(COLOURS)) % len(_MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker}


@_with_fonts
def draw_states(
    points: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    title: str,
    path: Path,
    limits: tuple[np.ndarray, np.ndarray] | None = None,
) -> Path:
    """Plots projected states by class.

    Args:
      points: float [n, 2].
      labels: int [n].
      names: of the classes.
      title: of the figure.
      path: of the file.
      limits: lowest and highest values of the axes, for figures to be compared.
    """
    has_legend = len(names) <= MAX_NAMED_CLASSES
    rows = -(-len(names) // 3) if has_legend else 0
    figure = new_figure(4.8, 4.6 + 0.22 * rows)
    axis = figure.subplots()
    for index, name in enumerate(names):
        x, y = points[labels == index].T
        alpha = 0.75 if len(points) < 500 else 0.5
        axis.scatter(
            x, y, **class_style(index), s=26, alpha=alpha, linewidths=0, label=shorten_name(name)
        )
    axis.set(title=title, xticks=[], yticks=[])
    if limits is not None:
        low, high = limits
        margin = 0.05 * np.maximum(high - low, 1e-9)
        axis.set(xlim=(low[0] - margin[0], high[0] + margin[0]))
        axis.set(ylim=(low[1] - margin[1], high[1] + margin[1]))
    if has_legend:
        figure.legend(loc="outside lower center", ncols=min(3, len(names)), frameon=False)
    return save_figure(figure, path)


@_with_fonts
def draw_ratio(ratios: Mapping[int, float], best: int, path: Path) -> Path:
    """Plots R_D over the steps of a run, with the best step marked."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(6.0, 3.4)
    axis = figure.subplots()
    axis.plot(list(ratios), list(ratios.values()), "o-", color=COLOURS[0], markersize=5)
    if best in ratios:
        mark_best(axis, best, f"best step {best}: {ratios[best]:.3f}", 0.93)
    axis.set(xlabel="step", ylabel="$R_D$ = intra / inter")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.margins(y=0.2)
    axis.grid(alpha=0.3)
    return save_figure(figure, path)


@_with_fonts
def draw_labels(
    labels: np.ndarray,
    starts: np.ndarray | None,
    words: np.ndarray,
    owners: Sequence[int],
    names: Sequence[str],
    tokens: Sequence[str],
    title: str,
    path: Path,
) -> Path:
    """Plots label rows [C, 2], their initial values [C, 2] and their words [W, 2].

    `owners` are the labels of the words, `tokens` their texts. A line connects each label row with
    its initial value.
    """
    figure = new_figure(5.6, 5.2)
    axis = figure.subplots()
    annotations = []
    for index, (name, row) in enumerate(zip(names, labels, strict=True)):
        colour = class_style(index)["color"]
        axis.scatter(row[0], row[1], color=colour, marker="*", s=190)
        annotations.append(
            (row, shorten_name(name), {"color": colour, "weight": "bold", "fontsize": 11})
        )
        if starts is not None:
            axis.plot(*np.stack([starts[index], row]).T, color=colour, lw=1.2, ls="--")
            axis.scatter(
                starts[index, 0], starts[index, 1], facecolors="none", edgecolors=colour, s=110
            )
    for point, owner, token in zip(words, owners, tokens, strict=True):
        axis.scatter(point[0], point[1], color=class_style(owner)["color"], marker="o", s=16)
        if len(names) <= MAX_NAMED_CLASSES:
            annotations.append((point, shorten_name(token), {"color": "#333333", "fontsize": 9}))
    axis.set(title=title, xticks=[], yticks=[])
    axis.margins(0.15)  # room for the texts
    _annotate_points(figure, axis, annotations)
    return save_figure(figure, path)


def _annotate_points(
    figure: Any, axis: Any, annotations: Sequence[tuple[np.ndarray, str, dict[str, Any]]]
) -> None:
    """Writes texts next to points without overlaps.

    Each text gets the first position around its point that covers no other text; so the first ones
    are closest to their points.
    """
    figure.draw_without_rendering()  # computes the layout of the axes
    used_boxes: list[tuple[float, float, float, float]] = []  # left, bottom, right, top, in points
    scale = 72 / figure.dpi
    for point, text, style in annotations:
        anchor = axis.transData.transform(point) * scale
        # Estimates: a character is some 0.62 of the font's size wide, a line 1.15 of it high.
        width, height = 0.62 * style["fontsize"] * len(text), 1.15 * style["fontsize"]
        corners = [
            (anchor[0] + dx * reach + (dx - 1) / 2 * width, anchor[1] + dy * reach - height / 2)
            for reach in (8, 16, 26, 38, 52)
            for dx, dy in ((1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
        ]
        boxes = [(left, bottom, left + width, bottom + height) for left, bottom in corners]
        free_boxes = (box for box in boxes if not any(_overlap(box, other) for other in used_boxes))
        box = next(free_boxes, boxes[0])
        used_boxes.append(box)
        offset = box[0] - anchor[0], box[1] - anchor[1]
        is_far = max(map(abs, (offset[0] + width * (offset[0] < 0), offset[1] + height / 2))) > 14
        axis.annotate(
            text,
            point,
            offset,
            textcoords="offset points",
            va="bottom",
            annotation_clip=False,
            **style,
            arrowprops={"arrowstyle": "-", "color": "#999999", "lw": 0.6} if is_far else None,
        )


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@_with_fonts
def draw_confusion(counts: np.ndarray, names: Sequence[str], path: Path) -> Path:
    """Draws the confusion matrix, each row as shares of its true label. int [C, C + 1]

    The last column, no class, is only plotted if it is not empty.
    """
    counts = counts if counts[:, -1].any() else counts[:, :-1]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    columns = [*names, "no class"][: counts.shape[1]]
    figure = _draw_matrix(
        shares,
        counts.astype(str),
        names,
        columns,
        cmap="Blues",
        vmin=0,
        dark=0.55,
        label="share of the true label",
    )
    figure.axes[0].set(xlabel="predicted label", ylabel="true label")
    return save_figure(figure, path)


@_with_fonts
def draw_similarity(cosines: np.ndarray, names: Sequence[str], path: Path) -> Path:
    """Plots the matrix of cosine similarities, float [N, N]."""
    texts = np.vectorize("{:.2f}".format)(cosines)
    figure = _draw_matrix(
        cosines,
        texts,
        names,
        names,
        cmap="RdBu_r",
        vmin=-1,
        dark=0.6,
        label="cosine of the mean tokens",
    )
    return save_figure(figure, path)


def _draw_matrix(
    values: np.ndarray,
    texts: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    cmap: str,
    vmin: float,
    dark: float,
    label: str,
) -> Any:
    """Plots values up to 1 as colours, with text if there are few; above `dark` it is white."""
    shows_texts = len(rows) <= MAX_NAMED_CLASSES
    side = 1.8 + (0.52 if shows_texts else 0.16) * len(rows)
    figure = new_figure(max(side + 0.8, 4.4), max(side, 3.6))
    axis = figure.subplots()
    image = axis.imshow(values, cmap=cmap, vmin=vmin, vmax=1)
    ticks = {"fontsize": 10 if shows_texts else 6}
    names = list(map(shorten_name, columns))
    axis.set_xticks(range(len(columns)), names, rotation=45, ha="right", **ticks)
    axis.set_yticks(range(len(rows)), list(map(shorten_name, rows)), **ticks)
    for (row, column), text in np.ndenumerate(texts if shows_texts else texts[:0]):
        colour = "white" if abs(values[row, column]) > dark else "black"
        axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
    figure.colorbar(image, label=label, shrink=0.8)
    return figure


@_with_fonts
def draw_attention(parts: Mapping[str, np.ndarray], even: float, title: str, path: Path) -> Path:
    """Plots the attention on a prompt by layer and head, float [L, N], one panel for each part.

    `even` is the share with uniform attention over all visible positions.
    """
    from matplotlib.ticker import MaxNLocator

    layers, heads = next(iter(parts.values())).shape
    height = 2.1 + min(0.22 * layers + 0.6, 6.0)
    figure = new_figure(1.2 + 2.9 * len(parts), height)
    panels = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
    maximum = max(float(part.max()) for part in parts.values())
    for axis, (name, part) in zip(panels, parts.items(), strict=True):
        image = axis.imshow(
            part,
            cmap="viridis",
            vmin=0,
            vmax=max(maximum, 1e-9),
            aspect="auto",
            origin="lower",
            extent=(0.5, heads + 0.5, 0.5, layers + 0.5),
        )
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("head")
        for axis_line in (axis.xaxis, axis.yaxis):
            axis_line.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(panels), label="share of attention")
    figure.suptitle(f"{title}; uniform attention: {even:.2f}", fontsize=11)
    return save_figure(figure, path)
