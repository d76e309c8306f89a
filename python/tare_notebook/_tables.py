"""Tables as text and as HTML, and sizes as people write them."""

from __future__ import annotations

import html
from typing import Any, List, Optional, Sequence


def size(nbytes: Optional[int]) -> str:
    """`1.5 GiB`; `–` where nothing is known."""
    if nbytes is None:
        return "–"
    value, sign = float(abs(nbytes)), "-" if nbytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return ""


def parse_size(text: str) -> int:
    """Bytes of `4096`, `512KiB`, `1.5 GiB`, `2GB` (decimal).

    Raises ValueError for anything else.
    """
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "k": 2**10, "m": 2**20, "g": 2**30}
    body = text.strip().lower()
    number = body.rstrip("abcdefghijklmnopqrstuvwxyz ").strip()
    unit = body[len(number) :].strip()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit not in units or not 0 <= value < 2**60:
        raise ValueError(f"`{text}` is no size: such as 64MiB")
    return int(value * units[unit])


class Table:
    """Rows under a heading; columns named in `right` are set to the right."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", right: Sequence[str] = ()) -> None:
        self.columns = list(columns)
        self.rows: List[List[str]] = [[str(cell) for cell in row] for row in rows]
        self.title = title
        self.right = {index for index, name in enumerate(columns) if name in right}

    def text(self) -> str:
        widths = [max([len(name)] + [len(row[index]) for row in self.rows]) for index, name in enumerate(self.columns)]

        def line(cells: Sequence[str]) -> str:
            set_out = [cell.rjust(width) if index in self.right else cell.ljust(width) for index, (cell, width) in enumerate(zip(cells, widths))]
            return "  ".join(set_out).rstrip()

        lines = [self.title] if self.title else []
        if any(self.columns):
            lines += [line(self.columns), line(["-" * width for width in widths])]
        return "\n".join(lines + [line(row) for row in self.rows])

    def html(self) -> str:
        def cell(tag: str, index: int, text: str) -> str:
            align = "right" if index in self.right else "left"
            font = "font-family:monospace;" if tag == "td" else ""
            wrap = "pre" if index in self.right or len(text) <= 24 else "pre-wrap;overflow-wrap:anywhere"
            return f'<{tag} style="text-align:{align};{font}padding:1px 8px;white-space:{wrap}">{html.escape(text)}</{tag}>'

        head = "".join(cell("th", index, name) for index, name in enumerate(self.columns))
        body = "".join("<tr>" + "".join(cell("td", index, text) for index, text in enumerate(row)) + "</tr>" for row in self.rows)
        title = f'<div style="font-weight:600;margin:4px 0 2px">{html.escape(self.title)}</div>' if self.title else ""
        top = f"<thead><tr>{head}</tr></thead>" if any(self.columns) else ""
        return f'{title}<table style="border-collapse:collapse;font-size:90%">{top}<tbody>{body}</tbody></table>'


class Shown:
    """What a command shows: parts that are tables, lines, or HTML with a text beside it. Holds nothing but text."""

    def __init__(self, *parts: Any) -> None:
        self.parts = [part for part in parts if part is not None]

    def text(self) -> str:
        return "\n\n".join(part.text() if hasattr(part, "text") else str(part) for part in self.parts)

    def html(self) -> str:
        return "".join(part.html() if hasattr(part, "html") else f'<pre style="margin:4px 0">{html.escape(str(part))}</pre>' for part in self.parts)

    def _repr_html_(self) -> str:
        return f"<div>{self.html()}</div>"

    def __repr__(self) -> str:
        return self.text()

    __str__ = __repr__


class Showable:
    """Shown through its `shown()`: HTML in a notebook, text elsewhere."""

    def shown(self) -> Shown:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.shown()._repr_html_()

    def __repr__(self) -> str:
        return self.shown().text()

    __str__ = __repr__


class Verdict:
    """One line that stands out."""

    def __init__(self, word: str, rest: str, good: bool) -> None:
        self.word, self.rest, self.good = word, rest, good

    def text(self) -> str:
        return f"{self.word}: {self.rest}"

    def html(self) -> str:
        colour = "#1a7f37" if self.good else "#b35900"
        return (
            f'<div style="margin:6px 0"><span style="background:{colour};color:#fff;padding:2px 8px;border-radius:4px;font-weight:700">'
            f"{html.escape(self.word)}</span> {html.escape(self.rest)}</div>"
        )
