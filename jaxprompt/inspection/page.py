"""A self-contained HTML page with embedded figures."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem;
  color: #1a1a1a; background: #fff; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem;
  border-top: 1px solid #ddd; padding-top: 1rem; }
figure { margin: 0; } figcaption { font-size: .85rem; color: #555; }
img { max-width: 100%; height: auto; display: block; }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.pictures.wide { grid-template-columns: 1fr; }
.wide img { max-width: min(100%, 44rem); }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
.breaks td { overflow-wrap: anywhere; } summary { cursor: pointer; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top;
  border-bottom: 1px solid #eee; }
small { color: #666; white-space: nowrap; }
mark { color: #b00020; background: #fdecee; font-weight: 600; }
"""
# Nothing is fetched or executed, whatever the texts of a run contain.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Page:
    """An HTML page, written from top to bottom. All text except `Markup` is escaped."""

    def __init__(self, title: str):
        """Starts with a heading."""
        self._title, self._parts = title, [f"<h1>{html.escape(title)}</h1>"]
        self.paths: list[Path] = []  # of the pictures

    def section(self, title: str, note: str = "") -> None:
        """Starts a section, with a paragraph if there is a note."""
        self._parts.append(f"<h2>{html.escape(title)}</h2>")
        if note:
            self.paragraph(note)

    def paragraph(self, text: str) -> None:
        """Adds a paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence["str | Markup"]],
        *,
        folded: bool = False,
        breaks: bool = False,
    ) -> None:
        """Adds a table.

        Args:
          head: the column names; () = none.
          rows: the cells.
          folded: whether it is collapsed until it is clicked.
          breaks: whether words are broken to fit the screen of a phone.
        """
        header = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        header = f"<tr>{header}</tr>" if head else ""
        lines = [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows]
        css_class = "table breaks" if breaks else "table"
        table = f'<div class="{css_class}"><table>{header}{"".join(lines)}</table></div>'
        if folded:
            table = f"<details><summary>All {len(rows)} rows</summary>{table}</details>"
        self._parts.append(table)

    def pictures(self, paths: Sequence[tuple[Path, str]], *, wide: bool = False) -> None:
        """Adds PNG files with captions, next to each other unless `wide`."""
        figures = []
        for path, text in paths:
            data = base64.b64encode(path.read_bytes()).decode()
            caption = html.escape(text, quote=True)
            figures.append(
                f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
        self.paths += [path for path, _ in paths]
        css_class = "pictures wide" if wide else "pictures"
        self._parts.append(f'<div class="{css_class}">{"".join(figures)}</div>')

    def text(self) -> str:
        """Returns the page as HTML."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            f"<title>{html.escape(self._title)}</title><style>{_STYLE}</style></head><body>"
            + "\n".join(self._parts)
            + "</body></html>\n"
        )


class Markup(str):
    """Text of a cell that is HTML already."""


def markup_with_notes(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Returns texts separated by commas, each followed by a small note."""
    cells = [f"<bdi>{html.escape(x)}</bdi> <small>{html.escape(note)}</small>" for x, note in pairs]
    return Markup(", ".join(cells))


def markup_with_marks(words: Sequence[str], marked: Sequence[int]) -> Markup:
    """Returns words separated by spaces, with the words at some positions marked."""
    parts = [html.escape(word) for word in words]
    return Markup(" ".join(f"<mark>{x}</mark>" if i in marked else x for i, x in enumerate(parts)))


def _cell(value: str) -> str:
    return f"<td>{value if isinstance(value, Markup) else html.escape(value)}</td>"
