"""Fifty notebooks that leave nothing behind once their names are gone: after each, `%tare zero` must say ZERO.

Every one is a list of cells; `torch` and `DEVICE` are set up by the first.
"""

from __future__ import annotations

from typing import List

FIRST = "import torch\nDEVICE = {device!r}"


def _train(model: str, optimizer: str, steps: int, extra: str = "") -> List[str]:
    return [
        f"net = {model}.to(DEVICE)",
        f"opt = torch.optim.{optimizer}\ndata = [torch.randn(256, 512, device=DEVICE) for _ in range(4)]",
        f"losses = []\nfor step in range({steps}):\n    for x in data:\n        loss = net(x).sum()\n        loss.backward()\n        opt.step()\n"
        f"        opt.zero_grad()\n        losses.append(loss){extra}",
    ]


def notebooks() -> List[List[str]]:
    """Fifty, from few parts in different hands."""
    small = "torch.nn.Sequential(torch.nn.Linear(512, 1024, bias=False), torch.nn.Linear(1024, 512, bias=False))"
    deep = "torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(6)])"
    shown = [["x = torch.zeros(1 << 20, device=DEVICE)", "x", "x.view(-1)", "_", "Out"]]
    kinds: List[List[str]] = []
    for model in (small, deep):
        for optimizer in ("Adam(net.parameters())", "Adam(list(net.parameters()))"):
            for steps in (1, 3):
                kinds.append(_train(model, optimizer, steps))
    kinds += shown
    kinds.append(["def f():\n    big = torch.zeros(1 << 20, device=DEVICE)\n    raise ValueError('x')", "f()"])
    kinds.append(["def f(n):\n    big = torch.zeros(1 << 19, device=DEVICE)\n    return f(n - 1) if n else 1 / 0", "f(5)", "f(2)"])
    kinds.append(["try:\n    big = torch.zeros(1 << 20, device=DEVICE)\n    raise KeyError('k')\nexcept KeyError as e:\n    kept = e"])
    kinds.append(["class Node:\n    pass\na, b = Node(), Node()\na.other, b.other = b, a\na.t = torch.zeros(1 << 20, device=DEVICE)"])
    kinds.append(["import functools\n@functools.lru_cache(None)\ndef load(n):\n    return torch.zeros(n << 19, device=DEVICE)", "[load(n) for n in (1, 2, 3)]"])
    kinds.append(["def batches():\n    for n in range(9):\n        yield torch.zeros(1 << 19, device=DEVICE)", "it = batches()\nnext(it)", "next(it); None"])
    kinds.append([f"net = {small}.to(DEVICE)", "acts = []\nh = net.register_forward_hook(lambda m, i, o: acts.append(o))", "net(torch.randn(64, 512, device=DEVICE)); None"])
    kinds.append(["class Trainer:\n    best = []\n    def __init__(self):\n        self.me = self\n        self.t = torch.zeros(1 << 20, device=DEVICE)\nt = Trainer()\nTrainer.best.append(t)"])
    kinds.append(["async def work():\n    t = torch.zeros(1 << 20, device=DEVICE)\n    return t", "r = await work()", "r"])
    kinds.append(["import threading\nout = []\nt = threading.Thread(target=lambda: out.append(torch.zeros(1 << 20, device=DEVICE)))\nt.start(); t.join()"])
    kinds.append(["from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool:\n    got = list(pool.map(lambda n: torch.zeros(n << 19, device=DEVICE), [1, 2]))"])
    kinds.append(["import weakref\nx = torch.zeros(1 << 20, device=DEVICE)\nw = weakref.ref(x)", "w()"])
    kinds.append(["state = {('a', n): [torch.zeros(1 << 19, device=DEVICE)] for n in range(5)}", "state"])
    kinds.append(["x = torch.zeros(1 << 20, device=DEVICE, requires_grad=True)\nx.register_hook(lambda g: g)\ny = x.sum()", "y"])
    kinds.append(["%%time\nbig = torch.zeros(1 << 20, device=DEVICE)", "%timeit -n1 -r1 torch.zeros(1 << 19, device=DEVICE)"])
    found = []
    while len(found) < 50:
        one = kinds[len(found) % len(kinds)]
        # Later rounds put an error and an output behind what came before.
        round_ = len(found) // len(kinds)
        found.append(one + ["1 / 0"] * round_ + (["torch.zeros(1 << 19, device=DEVICE)"] if round_ else []))
    return found
