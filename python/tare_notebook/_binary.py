"""The `tare` program: where it is, and handing it the allocator's snapshots."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from typing import Any, List, Optional, Sequence

from . import _torch


class TareNotFound(RuntimeError):
    """There is no `tare` program to hand the snapshot to."""


def binary() -> str:
    """Path of the `tare` program: TARE_BINARY, else the one that installed this package, else the first on PATH.

    Raises TareNotFound.
    """
    tried = []
    for path in (os.environ.get("TARE_BINARY"), _remembered(), shutil.which("tare")):
        if not path:
            continue
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
        tried.append(path)
    gone = f"; `{tried[0]}` is not there any more" if tried else ""
    raise TareNotFound(f"the program `tare` was not found{gone}; put it on PATH, or set TARE_BINARY")


def _remembered() -> Optional[str]:
    try:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "_binary.json"), encoding="utf-8") as file:
            found = json.load(file).get("binary")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


class Answer:
    """What the program said. Prints as it would in a terminal."""

    def __init__(self, command: Sequence[str], code: int, text: str, error: str) -> None:
        self.command, self.code, self.text, self.error = list(command), code, text, error

    def __repr__(self) -> str:
        return "\n".join(part for part in (self.text.rstrip(), self.error.rstrip()) if part)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        import html

        return f'<pre style="font-size:90%">{html.escape(str(self))}</pre>'


def call(arguments: Sequence[str], timeout: float = 600.0) -> Answer:
    """Runs `tare` with these arguments, without colours."""
    command = [binary(), *arguments]
    env = dict(os.environ, NO_COLOR="1")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, env=env)
    return Answer(command, done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def record(max_entries: int = 100_000, stop: bool = False) -> None:
    """Starts (or stops) the recording of allocations that `whatif` needs.

    Raises RuntimeError where torch cannot.
    """
    torch = _torch.module()
    switch = _torch.dig(torch, "cuda.memory._record_memory_history") if torch is not None else None
    if switch is None:
        raise RuntimeError(_torch.why_not() if torch is None else "this torch cannot record allocations")
    if stop:
        switch(enabled=None)
    else:
        switch(max_entries=max_entries)


def snapshot(path: str) -> str:
    """Writes the allocator's snapshot to a file and returns its path.

    Raises RuntimeError where there is nothing to write.
    """
    torch = _torch.module()
    if torch is None:
        raise RuntimeError(_torch.why_not())
    if not _torch.cuda_ready(torch):
        raise RuntimeError("this process has not used CUDA: the allocator has nothing to show")
    dump = _torch.dig(torch, "cuda.memory._dump_snapshot")
    if dump is None:
        raise RuntimeError("this torch cannot write a snapshot of its allocator")
    dump(os.fspath(path))
    return os.fspath(path)


def whatif(*arguments: str, file: Optional[str] = None) -> Answer:
    """`tare gpu whatif` over `file`, or over a snapshot taken now. `arguments` are its options, such as `--conf expandable_segments:True`."""
    binary()  # before a snapshot is written for nobody
    if file is not None:
        return call(["gpu", "whatif", file, *arguments])
    handle, path = tempfile.mkstemp(prefix="tare-", suffix=".pickle")
    os.close(handle)
    try:
        snapshot(path)
        answer = call(["gpu", "whatif", path, *arguments])
    finally:
        os.unlink(path)
    if answer.code != 0 and "record" not in answer.error:
        answer.error += "\nthe answer needs a recording: `%tare record`, run the cells, then ask again"
    return answer


def split(arguments: List[str]) -> Any:
    """The file among the arguments of `%tare whatif`, if there is one, and the rest."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return None, arguments
