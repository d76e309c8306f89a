"""A stand-in for torch: lists instead of tensors, a counter instead of a GPU. Just enough for the programs of the check."""
import contextlib
import os
import pickle
import weakref

from . import version
from .version import __version__

GPU = os.environ.get("STAND_IN_GPU", "")
MIB = 1 << 20

live = weakref.WeakSet()
workspace = [0]
float16, bfloat16, float32, float64, int32, int64, uint8, bool_ = "float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool"


def nested(data, change):
    return [nested(item, change) for item in data] if isinstance(data, list) else change(data)


def flat(data):
    if not isinstance(data, list):
        return [data]
    return [value for item in data for value in flat(item)]


class Tensor:
    def __init__(self, data, dtype=float32, device="cpu", size=512, base=None, power=1):
        self.data, self.dtype, self.device, self.size = data, dtype, str(device), size
        self.base, self.power, self.grad = base, power, None
        if self.device.startswith("cuda"):
            live.add(self)

    def like(self, data, dtype=None, **more):
        return Tensor(data, dtype or self.dtype, self.device, self.size, **more)

    def __matmul__(self, other):
        if self.device.startswith("cuda"):
            workspace[0] = 8 * MIB
        if self.data is None or other.data is None:
            return self.like(None)
        columns = [tuple(column) for column in zip(*other.data)]
        known = {}
        out = []
        for row in map(tuple, self.data):
            if row not in known:
                sums = {column: float(sum(a * b for a, b in zip(row, column))) for column in set(columns)}
                known[row] = [sums[column] for column in columns]
            out.append(known[row])
        if os.environ.get("STAND_IN_WRONG") and self.device.startswith("cuda"):
            out[0] = [value + 1 for value in out[0]]
        return self.like(out)

    def __mul__(self, other):
        if self.base is not None or other.base is not None:
            return self.like(self.data, base=self.base or self, power=self.power + other.power)
        return self.like([[a * b for a, b in zip(row, other.data)] for row in self.data])

    def sum(self):
        return self.like(sum(flat(self.data)) if self.data is not None else 0.0, base=self.base, power=self.power)

    def item(self):
        return self.data

    def __int__(self):
        return int(self.data)

    def __gt__(self, other):
        return self.like(nested(self.data, lambda value: value > other))

    def backward(self):
        if self.base is not None:
            self.base.grad = self.base.like([self.power * value ** (self.power - 1) for value in self.base.data])

    def to(self, dtype):
        return self.like(nested(self.data, int) if dtype.startswith("int") else self.data, dtype)

    def cpu(self):
        return self

    def tolist(self):
        return self.data

    def sort(self):
        class Sorted:
            values = self.like(sorted(self.data))

        return Sorted

    def float(self):
        return self

    def pow(self, _):
        return self.like(None)

    def mean(self):
        return self.like(None)


def tensor(data, dtype=float32, device="cpu", requires_grad=False):
    made = Tensor(data, dtype, device)
    if requires_grad:
        made.base = made
    return made


def ones(rows, columns, dtype=float32, device="cpu"):
    row = [1.0] * columns
    return Tensor([list(row) for _ in range(rows)], dtype, device)


def arange(count, dtype=float32, device="cpu"):
    return Tensor([float(value) for value in range(count)], dtype, device)


def empty(*shape, dtype=float32, device="cpu", requires_grad=False):
    size = 1
    for length in shape:
        size *= length
    return Tensor(None, dtype, device, -(-size // 512) * 512)


randn = zeros = empty


def relu(x):
    return x


def softmax(x, _):
    import math

    powers = [math.exp(value) for value in x.data]
    return x.like([value / sum(powers) for value in powers])


class _C:
    @staticmethod
    def _cuda_clearCublasWorkspaces():
        workspace[0] = 0


class memory:
    @staticmethod
    def _record_memory_history(enabled="all", max_entries=0):
        pass

    @staticmethod
    def _dump_snapshot(path):
        # A recording of two small blocks in a segment of 2 MiB: the second one takes the place of the first, which went before.
        base = 0x7F0000000000
        second = base + 4096 if os.environ.get("STAND_IN_OTHER_ADDRESS") else base

        def event(action, addr, size):
            return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": [], "time_us": 1}

        def block(address, size, state):
            return {"address": address, "size": size, "requested_size": size, "state": state, "frames": []}

        trace = [
            event("segment_alloc", base, 2 * MIB),
            event("alloc", base, 512),
            event("free_requested", base, 512),
            event("free_completed", base, 512),
            event("alloc", second, 1024),
        ]
        blocks = [block(second, 1024, "active_allocated"), block(second + 1024, base + 2 * MIB - second - 1024, "inactive")]
        if second > base:
            blocks.insert(0, block(base, second - base, "inactive"))
        segment = {
            "device": 0, "address": base, "total_size": 2 * MIB, "allocated_size": 1024, "active_size": 1024, "requested_size": 1024,
            "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
        }
        settings = {
            "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0, "expandable_segments": False,
            "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False, "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {},
        }
        with open(path, "wb") as file:
            pickle.dump({"segments": [segment], "device_traces": [trace], "allocator_settings": settings}, file, protocol=4)


class cuda:
    memory = memory

    @staticmethod
    def is_available():
        return bool(GPU)

    @staticmethod
    def init():
        if not GPU:
            raise RuntimeError("Found no NVIDIA driver on your system.")

    @staticmethod
    def device_count():
        return 1 if GPU else 0

    @staticmethod
    def get_device_name(_):
        return "Stand-in GPU"

    @staticmethod
    def get_device_capability(_):
        return tuple(int(part) for part in GPU.split("."))

    @staticmethod
    def device(_):
        return contextlib.nullcontext()

    class Stream:
        pass

    @staticmethod
    def stream(_):
        return contextlib.nullcontext()

    @staticmethod
    def synchronize(_=None):
        pass

    @staticmethod
    def empty_cache():
        pass

    @staticmethod
    def memory_allocated(_=None):
        leak = 3 * MIB if os.environ.get("STAND_IN_LEAK") and workspace[0] and cuda.busy else 0
        size = sum(tensor.size for tensor in live)
        cuda.busy = cuda.busy or size > MIB
        return workspace[0] + size + leak

    @staticmethod
    def memory_reserved(_=None):
        return -(-cuda.memory_allocated() // (2 * MIB)) * 2 * MIB

    busy = False


class backends:
    class cudnn:
        @staticmethod
        def version():
            return 92600
