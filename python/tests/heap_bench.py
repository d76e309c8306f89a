"""By hand: holders on a heap of five million objects. Prints seconds and extra memory for heaps of several shapes.

    python heap_bench.py [flat|nodes|instances|shared] [COUNT]
"""

import functools
import os
import resource
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE)] + ([os.path.join(HERE, "standin")] if os.environ.get("TARE_TEST_TORCH", "standin") == "standin" else [])

import gc  # noqa: E402

import torch  # noqa: E402

import tare_notebook  # noqa: E402

DEVICE = "cuda" if "standin" in torch.__version__ else "cpu"


class Item:
    pass


def heap(shape, count):
    if shape == "flat":
        return [{"a": i, "b": [i]} for i in range(count // 2)]
    if shape == "instances":
        made = []
        for i in range(count // 2):
            one = Item()
            one.x, one.y = i, [one]
            made.append(one)
        return made
    if shape == "shared":
        # Everything refers to one object, which refers to a tensor.
        hub = {"tensor": torch.zeros(1 << 20, device=DEVICE)}
        return [[hub, i] for i in range(count)]
    chain = None
    for i in range(count // 3):
        chain = [chain, (i, [i])] if i % 1000 else [[chain]]
    return chain


def plant(space):
    exec(
        """
def T(n): return torch.zeros(n * 262144, device=DEVICE)
@functools.lru_cache(None)
def load(n): return T(n)
load(2)
deep = {'a': [{'b': [{'c': (T(2),)}]}]}
class Net(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Net(depth - 1) if depth else torch.nn.Linear(512, 1024)
        self.proj = torch.nn.Linear(512, 1024)
nets = [Net(12).to(DEVICE) for _ in range(12)]
def batches():
    t = T(2)
    yield t
gen = batches(); next(gen)
class Store: items = []
for _ in range(400): Store.items.append({'x': [T(1)]})
""",
        space,
    )


def main():
    shape = sys.argv[1] if len(sys.argv) > 1 else "flat"
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 5_000_000
    gc.disable()
    space = {"torch": torch, "functools": functools, "DEVICE": DEVICE, "__name__": "__main__"}
    space["data"] = heap(shape, count)
    plant(space)
    gc.enable()
    total = len(gc.get_objects())
    from tare_notebook import _driver

    _driver.reset_peak_rss()
    before = _driver.rss()
    collected = time.monotonic()
    gc.collect()
    collected = time.monotonic() - collected
    start = time.monotonic()
    found = tare_notebook.holders(namespace=space)
    seconds = time.monotonic() - start
    extra = (_driver.peak_rss() - before) / 2**20
    print(f"{shape}: {total:,} objects, one gc.collect() {collected:.2f} s, holders {seconds:.2f} s, extra {extra:.0f} MiB, {len(found)} holders")
    print(found)


if __name__ == "__main__":
    main()
