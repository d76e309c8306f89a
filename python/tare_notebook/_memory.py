"""`%tare mem`: one table of who has how much."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional

from . import _driver, _holders, _ipython, _torch
from ._tables import Showable, Shown, Table, size


class Reading:
    """Memory at one moment, in bytes. Devices are those that this process uses."""

    def __init__(self) -> None:
        torch = _torch.module()
        self.books = _torch.books(torch)
        self.rss = _driver.rss()

    @property
    def allocated(self) -> int:
        return sum(one.allocated for one in self.books)

    @property
    def reserved(self) -> int:
        return sum(one.reserved for one in self.books)

    def as_dict(self) -> Dict[str, Any]:
        return {"allocated": self.allocated, "reserved": self.reserved, "rss": self.rss, "devices": [one._asdict() for one in self.books]}


class Memory(Showable):
    """What `mem()` returns: prints as text, shows as HTML."""

    def __init__(self, reading: Reading, others: Optional[List[_driver.GpuProcess]], largest: List[_holders.Holder], remark: str) -> None:
        self.reading = reading
        self.others = others
        self.largest = [(holder.nbytes, holder.example) for holder in largest]
        self.remark = remark

    def as_dict(self) -> Dict[str, Any]:
        found = self.reading.as_dict()
        found["other_processes"] = None if self.others is None else [one._asdict() for one in self.others]
        found["largest"] = [{"bytes": nbytes, "what": what} for nbytes, what in self.largest]
        return found

    def shown(self) -> Shown:
        rows: List[List[str]] = []
        for one in self.reading.books:
            name = f"GPU {one.device}"
            rows.append([name, "allocated by tensors", size(one.allocated)])
            rows.append(["", "reserved by torch", size(one.reserved)])
            rows.append(["", "reserved but idle", size(one.reserved - one.allocated)])
            if one.used is not None:
                rows.append(["", "used on the card, all processes", f"{size(one.used)} of {size(one.total)}"])
        if not self.reading.books and not self.remark:
            rows.append(["GPU", "not used by this process", size(0)])
        for process in self.others or []:
            rows.append([f"GPU {process.device}", f"process {process.pid} ({process.name})", size(process.nbytes)])
        rows.append(["host", "resident (RSS)", size(self.reading.rss)])
        parts: List[Any] = [Table(["", "memory", "bytes"], rows, right=["bytes"])]
        if self.largest:
            parts.append(Table(["bytes", "largest tensors"], [[size(nbytes), what] for nbytes, what in self.largest], right=["bytes"]))
        if self.remark:
            parts.append(self.remark)
        return Shown(*parts)


def mem(top: int = 5, namespace: Optional[Dict[str, Any]] = None) -> Memory:
    """Reads memory now: the allocator, the driver, other processes, this process, and the `top` largest tensors by name."""
    torch = _torch.module()
    reading = Reading()
    others = None
    if reading.books:
        listed = _driver.gpu_processes()
        others = None if listed is None else [one for one in listed if one.pid != os.getpid()]
    largest: List[_holders.Holder] = []
    if torch is not None and top > 0:
        largest = _largest(torch, top, namespace if namespace is not None else _ipython.namespace())
    return Memory(reading, others, largest, _torch.why_not() if torch is None else "")


def _largest(torch: Any, top: int, namespace: Optional[Dict[str, Any]]) -> List[_holders.Holder]:
    """One entry a tensor, with the name that leads to it."""
    found, _ = _holders.survivors(torch, 1)
    found.sort(key=lambda one: -one.seen.nbytes)
    seen = set()
    chosen = []
    for one in found:
        if one.seen.key not in seen:
            seen.add(one.seen.key)
            chosen.append(one)
        if len(chosen) == top:
            break
    return _holders.name_each(chosen, found, namespace, _ipython.shell())
