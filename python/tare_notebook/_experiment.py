"""Experiments: what each took, and whether it gave it back. One JSON line each."""

from __future__ import annotations

import datetime
import html
import json
import os
import platform
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from . import _driver, _memory, _torch, _zero
from ._tables import Shown, Table, size
from ._version import __version__

SCHEMA = 1


def log_path() -> str:
    """Where the lines go: TARE_EXPERIMENTS, else `tare-experiments.jsonl` in the working folder."""
    return os.environ.get("TARE_EXPERIMENTS") or "tare-experiments.jsonl"


def _versions() -> Dict[str, Optional[str]]:
    torch = _torch.module()
    found: Dict[str, Optional[str]] = {"python": platform.python_version(), "tare": __version__}
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", "?"))
        cuda = _torch.dig(torch, "version.cuda")
        found["cuda"] = str(cuda) if cuda else None
        if _torch.cuda_ready(torch):
            try:
                found["gpu"] = str(torch.cuda.get_device_name())
            except Exception:
                pass
    for name in ("numpy", "transformers"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def environment_facts() -> Tuple[Optional[str], Optional[str]]:
    """SHA-256 of the lock that this environment was made from, and the digest of its packages, as tare wrote them down (conda-meta/tare)."""
    try:
        with open(os.path.join(sys.prefix, "conda-meta", "tare", "environment.json"), encoding="utf-8") as file:
            facts = json.load(file)
    except (OSError, ValueError):
        return None, None
    if not isinstance(facts, dict):
        return None, None

    def text(*path: str) -> Optional[str]:
        value: Any = facts
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        return value if isinstance(value, str) else None

    return text("metadata", "lock", "sha256"), text("environment_digest")


class Experiment:
    """One experiment, as a context manager. After the block `record` is the line that was written, `held` what it left behind.

    Peaks of the allocator are counted from its start (torch.cuda.reset_peak_memory_stats), so the outer of two nested experiments is told the peak
    of the inner one too.
    """

    _running: List["Experiment"] = []

    def __init__(self, name: str, path: Optional[str] = None, zero: bool = False, keep: Any = ()) -> None:
        self.name = name
        self.path = path
        self.zero = zero
        self.keep = keep
        self.record: Dict[str, Any] = {}
        self.held: List[Any] = []
        self._peak = 0
        self._peak_rss = 0
        self._outcome = "finished"

    def _note_peak(self) -> None:
        books = _torch.books(_torch.module())
        self._peak = max(self._peak, sum(one.peak for one in books))
        self._peak_rss = max(self._peak_rss, _driver.peak_rss() or 0)

    def __enter__(self) -> "Experiment":
        for outer in Experiment._running:
            outer._note_peak()
        self._baseline = _zero.Baseline()
        self._start = self._baseline.reading
        _torch.reset_peaks(_torch.module())
        self._rss_reset = _driver.reset_peak_rss()
        self._clock = time.monotonic()
        self._began = datetime.datetime.now(datetime.timezone.utc)
        Experiment._running.append(self)
        return self

    def fail(self, outcome: str) -> None:
        """Says that the block failed where its error is not raised through it (a cell of IPython)."""
        self._outcome = outcome

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        seconds = time.monotonic() - self._clock
        self._note_peak()
        if self in Experiment._running:
            Experiment._running.remove(self)
        for outer in Experiment._running:
            outer._peak = max(outer._peak, self._peak)
            outer._peak_rss = max(outer._peak_rss, self._peak_rss)
        if self.zero:
            _zero.zero(keep=self.keep)
        holders = self._baseline.holders()
        end = _memory.Reading()
        self.held = list(holders)
        lock, environment = environment_facts()
        self.record = {
            "schema_version": SCHEMA,
            "name": self.name,
            "time": self._began.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "seconds": round(seconds, 3),
            "outcome": self._outcome if kind is None else getattr(kind, "__name__", str(kind)),
            "gpu": {
                "start": self._start.allocated,
                "peak": max(self._peak, end.allocated),
                "end": end.allocated,
                "reserved_start": self._start.reserved,
                "reserved_end": end.reserved,
            },
            "host": {"start": self._start.rss, "peak": self._peak_rss or None, "end": end.rss},
            "released": not self.held,
            "held": [{"kind": one.kind, "where": one.where, "bytes": one.nbytes, "release": one.release} for one in self.held],
            "versions": _versions(),
            "lock": lock,
            "environment": environment,
        }
        _append(self.path or log_path(), self.record)

    def _repr_html_(self) -> str:
        return Report([self.record] if self.record else [], plot=False)._repr_html_()

    def __repr__(self) -> str:
        return str(Report([self.record], plot=False)) if self.record else f"<experiment `{self.name}`, running>"


def experiment(name: str, path: Optional[str] = None, zero: bool = False, keep: Any = ()) -> Experiment:
    """`with experiment("vit-large") as e:` notes start, peak, end, what was released or is held, time, versions and the lock's digest.

    path: the JSON-lines file (`log_path()` by default). zero: run `zero(keep)` at the end, before what is held is looked at.
    """
    return Experiment(name, path, zero, keep)


def _append(path: str, record: Dict[str, Any]) -> None:
    # One write in append mode: lines of two notebooks do not mix.
    line = json.dumps(record, sort_keys=True, ensure_ascii=False) + "\n"
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        print(f"tare: the experiment was not written down: {error}", file=sys.stderr)


def read(path: Optional[str] = None) -> List[Dict[str, Any]]:
    """The records of a file; lines that are no records are left out."""
    found = []
    try:
        with open(path or log_path(), encoding="utf-8") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and isinstance(record.get("name"), str) and isinstance(record.get("gpu"), dict):
                    found.append(record)
    except FileNotFoundError:
        pass
    return found


class Report:
    """Experiments as a table and a plot."""

    def __init__(self, records: List[Dict[str, Any]], plot: bool = True) -> None:
        self.records = records
        self.plot = plot

    def table(self) -> Table:
        rows = []
        for record in self.records:
            gpu, host = record.get("gpu", {}), record.get("host", {})
            on_gpu = any(gpu.get(name) for name in ("start", "peak", "end"))
            books = gpu if on_gpu else host
            held = record.get("held", [])
            rest = "released" if record.get("released") else f"held: {', '.join(str(one.get('where')) for one in held[:3])}"
            if not record.get("released"):
                rest += f" ({size(sum(int(one.get('bytes', 0)) for one in held))})"
            outcome = record.get("outcome", "finished")
            rows.append(
                [
                    record["name"],
                    "GPU" if on_gpu else "host",
                    size(books.get("start")),
                    size(books.get("peak")),
                    size(books.get("end")),
                    rest if outcome == "finished" else f"{outcome}; {rest}",
                    f"{record.get('seconds', 0):.1f} s",
                    str(record.get("versions", {}).get("torch") or "–"),
                    str(record.get("lock") or "–")[:12],
                ]
            )
        columns = ["experiment", "memory", "start", "peak", "end", "afterwards", "time", "torch", "lock"]
        return Table(columns, rows, right=["start", "peak", "end", "time"])

    def svg(self) -> str:
        """Bars of peak, with marks where each began and ended: no library is needed to draw them."""
        return draw(self.records)

    def text(self) -> str:
        return self.table().text() if self.records else "no experiments yet"

    def _repr_html_(self) -> str:
        if not self.records:
            return "<div>no experiments yet</div>"
        return Shown(self.table())._repr_html_() + (self.svg() if self.plot else "")

    def __repr__(self) -> str:
        return self.text()

    __str__ = __repr__


def draw(records: List[Dict[str, Any]]) -> str:
    """An SVG of experiments, one bar each."""
    if not records:
        return ""
    bars = []
    for record in records:
        gpu, host = record.get("gpu", {}), record.get("host", {})
        books = gpu if any(gpu.get(name) for name in ("start", "peak", "end")) else host
        bars.append((record["name"], *(int(books.get(name) or 0) for name in ("start", "peak", "end")), bool(record.get("released"))))
    top = max(bar[2] for bar in bars) or 1
    left, right, row, width = 150, 90, 26, 640
    space = width - left - right
    parts = []
    for index, (name, start, peak, end, released) in enumerate(bars):
        y = 22 + index * row
        label = name if len(name) <= 20 else name[:19] + "…"

        def x(value: int) -> float:
            return left + space * min(value, top) / top

        parts.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{html.escape(label)}<title>{html.escape(name)}</title></text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{max(1.0, x(peak) - left):.1f}" height="16" fill="#9ec5e8"/>')
        colour = "#1a7f37" if released else "#b35900"
        parts.append(f'<rect x="{left}" y="{y}" width="{max(0.0, x(end) - left):.1f}" height="16" fill="{colour}" fill-opacity="0.75"/>')
        parts.append(f'<line x1="{x(start):.1f}" x2="{x(start):.1f}" y1="{y - 2}" y2="{y + 18}" stroke="#333" stroke-width="2"/>')
        parts.append(f'<text x="{x(peak) + 4:.1f}" y="{y + 12}">{html.escape(size(peak))}</text>')
    height = 22 + len(bars) * row + 6
    legend = f'<text x="{left}" y="12">light: peak; dark: end (green: all of it released); line: start</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" role="img">{legend}{"".join(parts)}</svg>'
    )


def report(path: Optional[str] = None, plot: bool = True) -> Report:
    """All experiments of the file: a table, in a notebook with a plot."""
    return Report(read(path), plot)
