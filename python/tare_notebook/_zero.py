"""`%tare zero`: let go of everything, say what was there before and after, and name what stays."""

from __future__ import annotations

import gc
import sys
import time
import types
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from . import _holders, _ipython, _memory, _torch
from ._safe import is_a
from ._tables import Showable, Shown, Table, Verdict, size


def many(count: int, what: str) -> str:
    """`1 name`, `2 names`."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def settle(limit: int = 10) -> int:
    """`gc.collect()` until it finds nothing more and the allocator's figure stands still. Returns how many objects it freed.

    Finalizers make new garbage, so one collection is not enough.
    """
    torch = _torch.module()
    freed, quiet, last = 0, 0, None
    for _ in range(limit):
        found = gc.collect()
        freed += found
        now = _torch.allocated(torch)
        quiet = quiet + 1 if found == 0 and last in (None, now) else 0
        last = now
        if quiet:
            break
    return freed


class Zeroed(Showable):
    """What `zero()` did. `verdict` is `ZERO` or `HELD`, or `DRY RUN`."""

    def __init__(self) -> None:
        self.before = _memory.Reading()
        self.after = self.before
        self.names: List[str] = []
        self.named: List[Tuple[str, int]] = []
        self.modules = 0
        self.kept_names: List[str] = []
        self.outputs = 0
        self.errors = 0
        self.freed = 0
        self.caches: List[Tuple[str, str]] = []
        self.holders = _holders.Holders()
        self.dry_run = False
        self.seconds = 0.0
        self.remark = ""

    @property
    def held(self) -> _holders.Holders:
        """Holders that nobody asked to keep and that are no library's own."""
        return _holders.Holders([holder for holder in self.holders if not holder.kept and holder.kind != "library"], self.holders.remarks)

    @property
    def verdict(self) -> str:
        if self.dry_run:
            return "DRY RUN"
        return "HELD" if self.held or self.holders.remarks else "ZERO"

    def __bool__(self) -> bool:
        return self.verdict == "ZERO"

    def as_dict(self) -> Dict[str, Any]:
        return {
            "verdict": self.verdict,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "names": self.names,
            "kept": self.kept_names,
            "outputs": self.outputs,
            "errors": self.errors,
            "collected": self.freed,
            "caches": [{"what": what, "result": result} for what, result in self.caches],
            "holders": [holder.as_dict() for holder in self.holders],
            "remarks": self.holders.remarks,
            "seconds": round(self.seconds, 3),
        }

    def _rows(self) -> List[List[str]]:
        rows = []
        after = {one.device: one for one in self.after.books}
        before = {one.device: one for one in self.before.books}
        for device in sorted(set(before) | set(after)):
            old, new = before.get(device), after.get(device)
            for what in ("allocated", "reserved", "used"):
                first = getattr(old, what) if old is not None else 0
                last = getattr(new, what) if new is not None else (0 if what != "used" else None)
                if first is None and last is None:
                    continue
                change = size(last - first) if first is not None and last is not None else "–"
                label = {"allocated": "allocated", "reserved": "reserved", "used": "used on the card"}[what]
                rows.append([f"GPU {device} {label}", size(first), size(last), change])
        first, last = self.before.rss, self.after.rss
        rows.append(["host RSS", size(first), size(last), size(last - first) if first is not None and last is not None else "–"])
        return rows

    def _libraries(self) -> str:
        kept = [f"{holder.where} {size(holder.nbytes)}" for holder in self.holders if holder.kind == "library"]
        for one in self.after.books:
            # The driver's figure counts every process: only what torch does not have itself can be the context.
            if one.used is not None and one.used > one.reserved:
                kept.append(f"CUDA context, modules of kernels and other processes on GPU {one.device}: {size(one.used - one.reserved)}")
        return "; ".join(kept)

    def shown(self) -> Shown:
        parts: List[Any] = []
        if self.dry_run:
            rows = [[name, size(nbytes) if nbytes else ""] for name, nbytes in sorted(self.named, key=lambda one: -one[1])[:20]]
            parts.append(Table(["name", "tensors"], rows, "would remove", right=["tensors"]) if rows else "no names to remove")
            if len(self.named) > 20:
                parts.append(f"and {len(self.named) - 20} more names")
            more = [many(self.outputs, "output") if self.outputs else "", "the last error" if self.errors else ""]
            more += [what for what, _ in self.caches]
            parts.append("would also let go of: " + ", ".join(part for part in more if part) if any(more) else None)
            parts.append(Verdict("DRY RUN", "nothing was changed", True))
            return Shown(*parts)
        parts.append(Table(["", "before", "after", "change"], self._rows(), right=["before", "after", "change"]))
        names = many(len(self.names), "name") + (f" ({many(self.modules, 'module')})" if self.modules else "")
        did = [names if self.names else "", many(self.outputs, "output") if self.outputs else "", "the last error" if self.errors else ""]
        did.append(f"{many(self.freed, 'object')} in cycles" if self.freed else "")
        did += [what for what, result in self.caches if result == "cleared"]
        parts.append("let go of: " + ", ".join(part for part in did if part) if any(did) else None)
        failed = [f"{what}: {result}" for what, result in self.caches if result != "cleared"]
        parts.append("could not clear " + "; ".join(failed) if failed else None)
        held, kept = self.held, [holder for holder in self.holders if holder.kept]
        if kept:
            parts.append("kept as asked: " + ", ".join(f"{holder.where} {size(holder.nbytes)}" for holder in kept))
        libraries = self._libraries()
        if libraries:
            parts.append("libraries keep: " + libraries)
        if held:
            parts.append(held.table())
            word = "thing holds" if len(held) == 1 else "things hold"
            parts.append(Verdict("HELD", f"{size(held.nbytes)}: {len(held)} {word} memory", False))
        elif self.holders.remarks:
            parts.append(Verdict("HELD", "not everything could be looked at", False))
        else:
            parts.append(Verdict("ZERO", "no tensor is left" + (" but what was to be kept" if kept else ""), True))
        parts.extend(self.holders.remarks)
        parts.append(self.remark or None)
        return Shown(*parts)


def _bytes_by_name(space: Dict[str, Any], names: Sequence[str]) -> List[Tuple[str, int]]:
    torch = _torch.module()
    if torch is None:
        return [(name, 0) for name in names]
    found, _ = _holders.survivors(torch, 1)
    by_id = {id(one.tensor): one.seen for one in found}
    result, counted = [], set()
    for name in names:
        total = 0
        for key in _holders.reachable_from([space[name]], 200_000):
            seen = by_id.get(key)
            if seen is not None and seen.key not in counted:
                counted.add(seen.key)
                total += seen.nbytes
        result.append((name, total))
    return result


def zero(
    keep: Iterable[str] = (),
    dry_run: bool = False,
    namespace: Optional[Dict[str, Any]] = None,
    names: bool = True,
    budget: float = 10.0,
    min_cpu: Optional[int] = None,
) -> Zeroed:
    """Lets go of the user's names, IPython's memory of results and errors, and every cache of torch; then looks at what is left.

    keep: names (or patterns such as `data*`) that stay. dry_run: only say what would go. namespace: where the names are; IPython's by default, and
    in a plain script none are touched. names: False leaves all names. Returns a `Zeroed`, true where nothing is held.
    """
    start = time.monotonic()
    keep = [keep] if is_a(keep, str) else list(keep)
    done = Zeroed()
    done.dry_run = dry_run
    torch = _torch.module()
    space = namespace if namespace is not None else _ipython.namespace()
    if space is not None and names:
        done.names = _ipython.user_names(space, keep)
        going = set(done.names)
        done.kept_names = [name for name in _ipython.user_names(space) if name not in going]
        done.modules = sum(is_a(space[name], types.ModuleType) for name in done.names)
        absent = [name for name in keep if not any(mark in name for mark in "*?[") and name not in space]
        if absent:
            done.remark = "no such name to keep: " + ", ".join(absent)
    if dry_run:
        done.named = _bytes_by_name(space, done.names) if space is not None else []
        running = _ipython.shell()
        done.outputs = len(running.user_ns.get("_oh", ())) if running is not None else 0
        done.errors = sum(getattr(sys, name, None) is not None for name in ("last_value", "last_traceback"))
        done.caches = _torch.clear_caches(torch, dry_run=True)
        done.seconds = time.monotonic() - start
        return done
    if space is not None and names:
        _ipython.remove_names(space, done.names)
    done.outputs = _ipython.forget_outputs()
    done.errors = _ipython.forget_errors()
    done.freed = settle()
    done.caches = _torch.clear_caches(torch)
    freed = settle()
    if freed:
        # Dynamo's and others' caches free objects that had memory.
        done.caches = _merge(done.caches, _torch.clear_caches(torch))
        done.freed += freed
    done.after = _memory.Reading()
    kept = [space[name] for name in done.kept_names if name in space] if space is not None else []
    done.holders = _holders.find(space, _ipython.shell(), keep=kept, min_cpu=min_cpu, budget=budget)
    kept.clear()
    done.seconds = time.monotonic() - start
    return done


def _merge(first: List[Tuple[str, str]], second: List[Tuple[str, str]]) -> List[Tuple[str, str]]:
    merged = dict(first)
    merged.update(second)
    return list(merged.items())


class StillHeld(AssertionError):
    """`assert_zero()` found holders; `holders` lists them."""

    def __init__(self, holders: _holders.Holders) -> None:
        self.holders = holders
        super().__init__(f"{size(holders.nbytes)} held\n{holders.text()}")


class Baseline:
    """What was there at a moment: only what comes later is held against anyone."""

    def __init__(self, min_cpu: Optional[int] = None) -> None:
        settle()
        self.min_cpu = min_cpu
        self.reading = _memory.Reading()
        torch = _torch.module()
        self.storages = {one.seen.key for one in _holders.survivors(torch, min_cpu)[0]} if torch is not None else set()

    def holders(self, namespace: Optional[Dict[str, Any]] = None) -> _holders.Holders:
        """What holds memory that was not there at the baseline."""
        settle()
        found = _holders.find(
            namespace if namespace is not None else _ipython.namespace(), _ipython.shell(), min_cpu=self.min_cpu, ignore_storages=self.storages
        )
        rest = [holder for holder in found if holder.kind != "library"]
        native = [holder for holder in rest if holder.kind == "C++" and holder.tensors == 0]
        if native:
            # Counted over the whole process: what was there before is not new.
            grown = _memory.Reading().allocated - self.reading.allocated
            known = sum(holder.gpu_bytes for holder in rest if holder not in native)
            for holder in native:
                holder.nbytes = holder.gpu_bytes = max(0, min(holder.nbytes, grown - known))
        return _holders.Holders([holder for holder in rest if holder.nbytes], found.remarks)


def assert_zero(baseline: Optional[Baseline] = None, clear: bool = True, min_cpu: Optional[int] = None) -> None:
    """Raises `StillHeld` where tensors are still held: any, or with a baseline those that came after it.

    clear: forget the last error and torch's caches first, as `zero()` does. Names are never touched.
    """
    if clear:
        _ipython.forget_errors()
        settle()
        _torch.clear_caches(_torch.module())
    if baseline is not None:
        found = baseline.holders()
    else:
        settle()
        found = _holders.find(_ipython.namespace(), _ipython.shell(), min_cpu=min_cpu)
        found = _holders.Holders([holder for holder in found if holder.kind != "library"], found.remarks)
    if found or found.remarks:
        raise StillHeld(found)
