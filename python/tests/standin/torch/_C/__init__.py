"""What C++ keeps: memory without a Python object."""

from .. import _books

_workspaces = []
_held = []


def _hold(nbytes):
    """Stands for an extension that allocates for itself."""
    _held.append(_books.DEVICE.malloc(nbytes))


def _release_held():
    while _held:
        _books.DEVICE.free(_held.pop())


def _cuda_clearCublasWorkspaces():
    while _workspaces:
        _books.DEVICE.free(_workspaces.pop())
