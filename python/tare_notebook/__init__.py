"""A clean slate in notebooks: what uses memory, letting go of it, and naming what will not let go.

In a notebook: `%load_ext tare_notebook`, then `%tare mem`, `%tare zero`, `%tare holders`. In scripts and tests: `mem()`, `zero()`, `holders()`,
`experiment(name)`, `assert_zero()`. torch is looked at where the user has imported it and never imported here.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional

from . import _holders, _ipython
from ._binary import TareNotFound, binary, snapshot, whatif
from ._experiment import Experiment, experiment, report
from ._holders import Holder, Holders
from ._ipython import forget_errors, forget_outputs
from ._memory import mem
from ._version import __version__
from ._zero import Baseline, StillHeld, Zeroed, assert_zero, settle, zero

__all__ = [
    "Baseline",
    "Experiment",
    "Holder",
    "Holders",
    "StillHeld",
    "TareNotFound",
    "Zeroed",
    "__version__",
    "assert_zero",
    "binary",
    "experiment",
    "forget_errors",
    "forget_outputs",
    "holders",
    "load_ipython_extension",
    "mem",
    "report",
    "settle",
    "snapshot",
    "unload_ipython_extension",
    "whatif",
    "zero",
]


def holders(
    namespace: Optional[Dict[str, Any]] = None, keep: Iterable[Any] = (), min_cpu: Optional[int] = None, budget: float = 10.0
) -> Holders:
    """What holds CUDA memory or large CPU tensors now, largest first, each with the line that lets it go.

    namespace: the user's names (IPython's by default). keep: objects whose memory is meant to stay. min_cpu: CPU tensors from this many bytes on
    count. budget: seconds that the search may take.
    """
    settle()
    space = namespace if namespace is not None else _ipython.namespace()
    return _holders.find(space, _ipython.shell(), keep=keep, min_cpu=min_cpu, budget=budget)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext tare_notebook`."""
    from . import _magics

    _magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext tare_notebook`."""
    from . import _magics

    _magics.unload(shell)
