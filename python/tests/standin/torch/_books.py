"""A caching allocator that keeps real books: segments and blocks, rounding, reuse, out of memory. No memory is behind them."""

import threading

MIB = 1 << 20


class OutOfMemoryError(RuntimeError):
    pass


class Block:
    __slots__ = ("address", "size", "free", "segment")

    def __init__(self, address, size, segment):
        self.address, self.size, self.segment, self.free = address, size, segment, True


class Segment:
    __slots__ = ("address", "size", "blocks", "pool")

    def __init__(self, address, size, pool):
        self.address, self.size, self.pool = address, size, pool
        self.blocks = [Block(address, size, self)]


class Allocator:
    def __init__(self, capacity=8 << 30, overhead=300 * MIB):
        self.capacity, self.overhead = capacity, overhead
        self.segments = []
        self.next_address = 0x7F0000000000
        self.allocated = self.peak = 0
        self.pool = (0, 0)
        self.live_pools = set()
        self.by_address = {}
        self.events = []
        self.recording = False
        # Finalizers free blocks while another allocation is under way.
        self.lock = threading.RLock()

    @property
    def reserved(self):
        return sum(segment.size for segment in self.segments)

    def malloc(self, nbytes):
        with self.lock:
            size = max(512, -(-nbytes // 512) * 512)
            block = self._find(size)
            if block is None:
                want = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
                if self.reserved + want + self.overhead > self.capacity:
                    self.empty()
                    if self.reserved + want + self.overhead > self.capacity:
                        raise OutOfMemoryError(
                            f"CUDA out of memory. Tried to allocate {want / MIB:.2f} MiB. GPU 0 has a total capacity of {self.capacity / MIB:.2f} MiB"
                        )
                segment = Segment(self.next_address, want, self.pool)
                self.next_address += want + 2 * MIB
                self.segments.append(segment)
                block = segment.blocks[0]
                if self.recording:
                    self.events.append({"action": "segment_alloc", "addr": segment.address, "size": segment.size, "stream": 0, "frames": []})
            if block.size - size >= 512 and (size <= MIB or block.size - size > MIB):
                rest = Block(block.address + size, block.size - size, block.segment)
                block.segment.blocks.insert(block.segment.blocks.index(block) + 1, rest)
                block.size = size
            block.free = False
            self.by_address[block.address] = block
            self.allocated += block.size
            self.peak = max(self.peak, self.allocated)
            if self.recording:
                self.events.append({"action": "alloc", "addr": block.address, "size": nbytes, "stream": 0, "frames": []})
            return block.address

    def _find(self, size):
        small = size <= MIB
        fitting = [
            block
            for segment in self.segments
            if segment.pool == self.pool and (segment.size <= 2 * MIB) == small
            for block in segment.blocks
            if block.free and block.size >= size
        ]
        return min(fitting, key=lambda block: (block.size, block.address), default=None)

    def free(self, address):
        with self.lock:
            block = self.by_address.pop(address, None)
            if block is None:
                raise AssertionError(f"double free of {address:#x}")
            block.free = True
            self.allocated -= block.size
            if self.recording:
                for action in ("free_requested", "free_completed"):
                    self.events.append({"action": action, "addr": address, "size": block.size, "stream": 0, "frames": []})
            blocks = block.segment.blocks
            index = blocks.index(block)
            if index + 1 < len(blocks) and blocks[index + 1].free:
                block.size += blocks.pop(index + 1).size
            if index > 0 and blocks[index - 1].free:
                blocks[index - 1].size += blocks.pop(index).size

    def empty(self):
        with self.lock:
            self.segments = [
                segment
                for segment in self.segments
                if any(not block.free for block in segment.blocks) or (segment.pool != (0, 0) and segment.pool in self.live_pools)
            ]

    def snapshot(self):
        return [
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": sum(block.size for block in segment.blocks if not block.free),
                "active_size": sum(block.size for block in segment.blocks if not block.free),
                "requested_size": 0,
                "stream": 0,
                "segment_type": "small" if segment.size <= 2 * MIB else "large",
                "segment_pool_id": segment.pool,
                "is_expandable": False,
                "frames": [],
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.size,
                        "state": "inactive" if block.free else "active_allocated",
                        "frames": [],
                    }
                    for block in segment.blocks
                ],
            }
            for segment in self.segments
        ]


DEVICE = Allocator()
HOST = {"next": 0x10000000, "live": 0}
