from .. import _C, _books
from .._books import OutOfMemoryError
from . import memory

_state = {"initialized": False, "collected": 0}


def _start():
    _state["initialized"] = True


def is_initialized():
    return _state["initialized"]


def is_available():
    return True


def device_count():
    return 1


def current_device():
    _start()
    return 0


def get_device_name(device=0):
    return "stand-in"


def memory_allocated(device=0):
    return _books.DEVICE.allocated


def memory_reserved(device=0):
    return _books.DEVICE.reserved


def max_memory_allocated(device=0):
    return _books.DEVICE.peak


def reset_peak_memory_stats(device=0):
    _books.DEVICE.peak = _books.DEVICE.allocated


def mem_get_info(device=0):
    one = _books.DEVICE
    return one.capacity - one.reserved - one.overhead, one.capacity


def memory_snapshot():
    return _books.DEVICE.snapshot()


def empty_cache():
    _books.DEVICE.empty()


def ipc_collect():
    _state["collected"] += 1


def _first_product():
    if not _C._workspaces:
        _C._workspaces.append(_books.DEVICE.malloc(2 * 4096 * 1024 + 8 * 16 * 1024))


class CUDAGraph:
    _next = 1

    def __init__(self):
        self._id = (0, CUDAGraph._next)
        CUDAGraph._next += 1

    def capture_begin(self):
        _start()
        _books.DEVICE.live_pools.add(self._id)
        _books.DEVICE.pool = self._id

    def capture_end(self):
        _books.DEVICE.pool = (0, 0)

    def pool(self):
        return self._id

    def reset(self):
        _books.DEVICE.live_pools.discard(self._id)
        _books.DEVICE.empty()

    def __del__(self, _books=_books):
        _books.DEVICE.live_pools.discard(self._id)
