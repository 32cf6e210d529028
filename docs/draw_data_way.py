"""Draws docs/pictures/data_way.svg, how an example becomes an answer.

usage: python docs/draw_data_way.py
"""

from pathlib import Path
from xml.sax.saxutils import escape

TARGET = Path(__file__).parent / "pictures" / "data_way.svg"
WIDTH, HEIGHT = 960, 400
FROZEN, TRAINED, DATA = "#dbe9f6", "#fde3c8", "#f2f2f2"
# name, second line, x, y, width, fill
BOXES = {
    "source": ("JSONL, CSV, Parquet, hub, TFDS", "data/sources", 20, 60, 230, DATA),
    "template": ("{sentence} It was [mask].", "data/text/template", 20, 150, 230, DATA),
    "encode": (
        "ids, mask, slots, positions",
        "data/text/encode: a padded batch",
        300,
        105,
        220,
        DATA,
    ),
    "prompt": ("prompt: soft tokens, or keys", "and values in every layer", 300, 240, 220, TRAINED),
    "backbone": ("BERT, RoBERTa, ELECTRA,", "T5, GPT-2: frozen, sharded", 570, 150, 200, FROZEN),
    "head": ("head: class, word,", "text, tags, span", 810, 150, 130, TRAINED),
    "loss": ("loss, gradient of the", "trained numbers alone", 690, 290, 200, DATA),
    "export": ("prompt.safetensors", "+ prompt.json: kilobytes", 300, 330, 220, TRAINED),
}
# from, to, points of the line
ARROWS = (
    [(250, 85), (300, 120)],
    [(250, 175), (300, 145)],
    [(520, 130), (570, 165)],
    [(410, 160), (410, 240)],
    [(520, 265), (570, 195)],
    [(770, 178), (810, 178)],
    [(875, 206), (875, 290)],
    [(690, 318), (560, 318), (560, 275), (520, 275)],
    [(410, 296), (410, 330)],
)
LABELS = (
    (40, 262, "Where soft tokens stand is data:"),
    (40, 280, "the template places them. What they"),
    (40, 298, "hold is a parameter, and is trained."),
    (566, 338, "update"),
)


def draw() -> str:
    """Makes the picture. -> SVG"""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        '<defs><marker id="tip" markerWidth="6" markerHeight="6" refX="8" refY="4.5" '
        'viewBox="0 0 9 9" orient="auto">'
        '<path d="M0,0 L9,4.5 L0,9 z" fill="#444"/></marker></defs>',
    ]
    for points in ARROWS:
        path = " ".join(f"{x},{y}" for x, y in points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="#444" stroke-width="1.6" '
            'marker-end="url(#tip)"/>'
        )
    for first, second, x, y, width, fill in BOXES.values():
        lines.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="56" rx="7" fill="{fill}" '
            'stroke="#444" stroke-width="1.2"/>'
        )
        for text, down in ((first, 24), (second, 42)):
            lines.append(
                f'<text x="{x + width / 2:g}" y="{y + down}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
    for x, y, text in LABELS:
        lines.append(f'<text x="{x}" y="{y}" fill="#444" font-size="12">{escape(text)}</text>')
    for x, fill, text in ((20, TRAINED, "trained, and shipped"), (200, FROZEN, "frozen")):
        lines.append(f'<rect x="{x}" y="14" width="18" height="18" fill="{fill}" stroke="#444"/>')
        lines.append(f'<text x="{x + 26}" y="28">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(draw())
