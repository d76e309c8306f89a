"""`%tare`, `%%tare setup` and `%%experiment`."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, List, Optional

from . import _binary, _experiment, _holders, _ipython, _memory, _restart, _zero
from ._tables import parse_size

#: Sources of the cells marked `%%tare setup`, in the order they first ran, each once.
SETUP: List[str] = []

USAGE = """%tare mem [--top N]                        who has how much memory, and the largest tensors
%tare zero [--keep NAME…] [--dry-run] [--hard]   let go of everything; say what was there and what will not go
%tare holders [--min SIZE]                 what holds memory now, and the line that lets it go
%tare record [--stop] [--max-entries N]    record allocations, for whatif
%tare snapshot FILE                        write the allocator's snapshot
%tare whatif [FILE] [--conf …] [--sweep] [--capacity SIZE]   what other settings would have done
%tare report [FILE]                        the experiments so far
%%tare setup                               a cell that --hard runs again in the new kernel
%%experiment [--zero] NAME                 note what the cell took and gave back"""


class _Stop(Exception):
    """The arguments were wrong; said already."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise _Stop(f"{self.prog}: {message}")

    def exit(self, status: int = 0, message: Optional[str] = None) -> Any:
        raise _Stop(message or "")


def _parser() -> _Parser:
    parser = _Parser(prog="%tare", add_help=False)
    commands = parser.add_subparsers(dest="command", parser_class=_Parser)
    mem = commands.add_parser("mem", add_help=False, prog="%tare mem")
    mem.add_argument("--top", type=int, default=5)
    zero = commands.add_parser("zero", add_help=False, prog="%tare zero")
    zero.add_argument("--keep", nargs="+", default=[], action="extend", metavar="NAME")
    zero.add_argument("--dry-run", action="store_true")
    zero.add_argument("--hard", action="store_true")
    holders = commands.add_parser("holders", add_help=False, prog="%tare holders")
    holders.add_argument("--min", type=parse_size, default=None, metavar="SIZE")
    record = commands.add_parser("record", add_help=False, prog="%tare record")
    record.add_argument("--stop", action="store_true")
    record.add_argument("--max-entries", type=int, default=100_000)
    snapshot = commands.add_parser("snapshot", add_help=False, prog="%tare snapshot")
    snapshot.add_argument("file", metavar="FILE")
    commands.add_parser("whatif", add_help=False, prog="%tare whatif")
    report = commands.add_parser("report", add_help=False, prog="%tare report")
    report.add_argument("file", nargs="?", metavar="FILE")
    commands.add_parser("help", add_help=False)
    return parser


def run(line: str) -> None:
    """One `%tare` line. Shows its answer; a wrong line is answered with what is right."""
    try:
        words = shlex.split(line)
        if not words or words[0] in ("help", "-h", "--help"):
            print(USAGE)
            return
        if words[0] == "whatif":
            file, rest = _binary.split(words[1:])
            _ipython.show(_binary.whatif(*rest, file=file))
            return
        arguments = _parser().parse_args(words)
        _dispatch(arguments)
    except _Stop as stop:
        print(f"{stop}\n{USAGE}" if str(stop) else USAGE)
    except (_binary.TareNotFound, RuntimeError, OSError) as error:
        print(f"tare: {error}")
    except ValueError as error:  # an open quotation
        print(f"tare: {error}")


def _dispatch(arguments: Any) -> None:
    if arguments.command == "mem":
        _ipython.show(_memory.mem(arguments.top))
    elif arguments.command == "zero":
        if arguments.hard and not arguments.dry_run:
            started, message = _restart.restart(list(SETUP))
            print(f"tare: {message}")
            if started:
                return
        _ipython.show(_zero.zero(arguments.keep, arguments.dry_run))
        if arguments.hard and arguments.dry_run:
            print(f"tare: --hard would restart the kernel and run {len(SETUP)} setup cells again")
    elif arguments.command == "holders":
        _zero.settle()
        _ipython.show(_holders.find(_ipython.namespace(), _ipython.shell(), min_cpu=arguments.min))
    elif arguments.command == "record":
        _binary.record(arguments.max_entries, arguments.stop)
        print("tare: recording stopped" if arguments.stop else "tare: allocations are recorded; `%tare whatif` asks what other settings would have done")
    elif arguments.command == "snapshot":
        print(f"tare: wrote {_binary.snapshot(arguments.file)}")
    elif arguments.command == "report":
        _ipython.show(_experiment.report(arguments.file))


def magic(line: str, cell: Optional[str] = None) -> None:
    """`%tare …`, and `%%tare setup`."""
    if cell is None:
        run(line)
        return
    if line.strip() != "setup":
        print(f"%%tare {line}: the only cell of this kind is `%%tare setup`")
        return
    running = _ipython.shell()
    if running is None:
        return
    result = running.run_cell(cell, store_history=False)
    if result.success and cell not in SETUP:
        SETUP.append(cell)


def experiment_magic(line: str, cell: str) -> None:
    """`%%experiment [--zero] [--keep NAME…] NAME`."""
    parser = _Parser(prog="%%experiment", add_help=False)
    parser.add_argument("--zero", action="store_true")
    parser.add_argument("--keep", action="append", default=[], metavar="NAME")
    parser.add_argument("name", metavar="NAME")
    try:
        arguments = parser.parse_args(shlex.split(line))
    except (_Stop, ValueError) as stop:
        print(f"{stop}\nusage: %%experiment [--zero] [--keep NAME] NAME")
        return
    running = _ipython.shell()
    if running is None:
        return
    with _experiment.Experiment(arguments.name, zero=arguments.zero, keep=arguments.keep) as done:
        # Its errors are shown by IPython and not raised here: the experiment is told by the result.
        result = running.run_cell(cell, store_history=False)
        failed = result.error_in_exec or result.error_before_exec
        if failed is not None:
            done.fail(type(failed).__name__)
        del result, failed
    _ipython.show(done)


def load(shell: Any) -> None:
    """Registers the magics, and runs the setup cells that wait for this kernel."""
    shell.register_magic_function(magic, magic_kind="line_cell", magic_name="tare")
    shell.register_magic_function(experiment_magic, magic_kind="cell", magic_name="experiment")
    waiting = _restart.take(_restart.connection_file())
    for cell in waiting:
        magic("setup", cell)
    if waiting:
        print(f"tare: {len(waiting)} setup cells ran again")


def unload(shell: Any) -> None:
    """Takes the magics back."""
    for kind, name in (("line", "tare"), ("cell", "tare"), ("cell", "experiment")):
        shell.magics_manager.magics[kind].pop(name, None)
