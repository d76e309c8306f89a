import pickle

from .. import _books


def _record_memory_history(enabled="all", max_entries=100_000, **_):
    _books.DEVICE.recording = enabled is not None
    if enabled is not None:
        _books.DEVICE.events.clear()


def _snapshot():
    return {"segments": _books.DEVICE.snapshot(), "device_traces": [list(_books.DEVICE.events)], "allocator_settings": {}}


def _dump_snapshot(filename="dump_snapshot.pickle"):
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)
