"""Holders to find, each planted by a piece of a notebook: what it is called, where its root is, and how much it holds.

`T(n)` is a tensor of n MiB on the device under test, `M` a fresh module named `planted_mod` that stands for a library.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional

MIB = 1 << 20

PRELUDE = """
import sys, types, functools
# How long a thread runs: long enough for a look at a large heap on a busy machine.
PAUSE = 3.0 if "standin" in torch.__version__ else 8.0
def T(n):
    return torch.zeros(n * 262144, device=DEVICE)
def fresh():
    module = types.ModuleType("planted_mod")
    sys.modules["planted_mod"] = module
    return module
"""


class Planted(NamedTuple):
    name: str
    source: str
    kind: str
    #: Text that `where` must be or begin with.
    where: str
    mib: int
    #: None: every torch; otherwise only the stand-in, or only where IPython runs.
    only: Optional[str] = None
    #: Run after the suggested line, where that line lets go in time (a loop, a thread).
    after: str = ""


def _in_module(body: str) -> str:
    """Code that runs with the library's own globals."""
    return f"M = fresh()\nM.T = T\nM.torch = torch\nM.functools = functools\nexec({body!r}, M.__dict__)\ndel M"


PLANTED: List[Planted] = [
    Planted("a tensor", "kept = T(3)", "module global", "kept", 3),
    Planted("nested containers", "state = {'run': {'acts': [T(2), (T(1),)]}}", "module global", "state", 3),
    Planted("a model", "model = torch.nn.Linear(512, 1024, bias=False).to(DEVICE)", "module global", "model", 2),
    Planted("views of one storage", "a = T(4)\nparts = [a, a.view(-1), a.detach()]\ndel a", "module global", "parts", 4),
    Planted("a library's list", _in_module("CACHE = [T(2)]"), "module global", "planted_mod.CACHE", 2),
    Planted("one item of a library's dict", _in_module("CACHE = {'a': 1, 'b': T(2)}"), "module global", "planted_mod.CACHE", 2),
    Planted("a library's variable", _in_module("LAST = T(2)"), "module global", "planted_mod.LAST", 2),
    Planted("a library's set", _in_module("class H: pass\nh = H()\nh.t = T(1)\nLIVE = {h}\ndel h"), "module global", "planted_mod.LIVE", 1),
    Planted("slots", _in_module("class S:\n    __slots__ = ('t',)\ns = S()\ns.t = T(2)"), "module global", "planted_mod.s", 2),
    Planted("a bound method", _in_module("class B:\n    def go(self): pass\nb = B()\nb.t = T(2)\nCALLBACKS = [b.go]\ndel b"), "module global", "planted_mod.CALLBACKS", 2),
    Planted("a partial", _in_module("STEPS = {'x': functools.partial(print, T(2)), 'y': 2}"), "module global", "planted_mod.STEPS", 2),
    Planted("a queue", _in_module("import queue\nQ = queue.Queue()\nQ.put(T(2))"), "module global", "planted_mod.Q.queue", 2),
    Planted("a class attribute", "class Trainer:\n    history = [T(2)]", "class attribute", "Trainer.history", 2),
    Planted("a library's class attribute", _in_module("class Reg:\n    __module__ = 'planted_mod'\n    last = T(2)"), "class attribute", "planted_mod.Reg.last", 2),
    Planted("a closure", "def make():\n    t = T(2)\n    def f():\n        return t\n    return f\nf = make()\ndel make", "closure", "f → closure `t`", 2),
    Planted("a library's closure", _in_module("def make():\n    t = T(2)\n    def f():\n        return t\n    return f\nhandler = make()"), "closure", "planted_mod.handler → closure `t`", 2),
    Planted("lru_cache", "@functools.lru_cache(maxsize=4)\ndef load(n):\n    return T(n)\nload(3); None", "functools cache", "load", 3),
    Planted("a library's cache", _in_module("@functools.lru_cache(maxsize=None)\ndef load(n):\n    return T(n)\nload(2)"), "functools cache", "planted_mod.load", 2),
    Planted(
        "forward hook",
        "net = torch.nn.Linear(2, 2, bias=False)\ndef add():\n    acts = [T(2)]\n    net.register_forward_hook(lambda m, i, o: acts.append(o))\nadd()\ndel add",
        "forward hook", "net._forward_hooks", 2,
    ),
    Planted(
        "forward hook deep in a model",
        "net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)))\n"
        "def add():\n    acts = {'x': T(2)}\n    net[0][0].register_forward_hook(lambda m, i, o: acts.update(y=o))\nadd()\ndel add",
        "forward hook", "net[0][0]._forward_hooks", 2,
    ),
    Planted(
        "backward hook",
        "net = torch.nn.Linear(2, 2, bias=False)\ndef add():\n    acts = [T(2)]\n    net.register_full_backward_hook(lambda m, i, o: acts and None)\nadd()\ndel add",
        "backward hook", "net._backward_hooks", 2,
    ),
    Planted(
        "hook of a tensor",
        "w = torch.zeros(4, requires_grad=True)\ndef add():\n    big = T(2)\n    w.register_hook(lambda g: big and None)\nadd()\ndel add",
        "backward hook", "w._backward_hooks", 2,
    ),
    Planted(
        "hook on all modules",
        "def add():\n    big = T(2)\n    torch.nn.modules.module._global_forward_hooks[7001] = lambda m, i, o: big and None\nadd()\ndel add",
        "forward hook", "torch.nn.modules.module._global_forward_hooks", 2,
    ),
    Planted(
        "buffering handler",
        "import logging, logging.handlers\nh = logging.handlers.MemoryHandler(1000)\nlogging.getLogger('planted').addHandler(h)\n"
        "logging.getLogger('planted').propagate = False\nlogging.getLogger('planted').warning('out %s', T(2))\ndel h",
        "logger", "logging.getLogger('planted').handlers[0]", 2,
    ),
    Planted(
        "handler with a memory",
        "import logging\nclass Keep(logging.Handler):\n    def emit(self, record):\n        self.last = record.args\n"
        "logging.getLogger('planted2').addHandler(Keep())\nlogging.getLogger('planted2').propagate = False\n"
        "logging.getLogger('planted2').warning('out %s', T(2))",
        "logger", "logging.getLogger('planted2').handlers[0]", 2,
    ),
    Planted("attribute of a logger", "import logging\nlogging.getLogger('planted3').best = T(2)", "logger", "logging.getLogger('planted3').best", 2),
    Planted(
        "an exception",
        "def fail():\n    acts = T(2)\n    raise ValueError('x')\ntry:\n    fail()\nexcept ValueError as e:\n    err = e\ndel fail",
        "exception", "err.__traceback__", 2,
    ),
    Planted(
        "the context of an exception",
        "def fail():\n    acts = T(2)\n    raise ValueError('x')\ndef outer():\n    try:\n        fail()\n    except ValueError:\n        raise KeyError('y')\n"
        "try:\n    outer()\nexcept KeyError as e:\n    err = e\ndel fail, outer",
        "exception", "err.__context__", 2,
    ),
    Planted(
        "a library's list of errors",
        _in_module("ERRORS = []\ndef fail():\n    acts = T(2)\n    raise ValueError('x')\ntry:\n    fail()\nexcept ValueError as e:\n    ERRORS.append(e)"),
        "exception", "planted_mod.ERRORS[0].__traceback__", 2,
    ),
    Planted("a generator", "def batches():\n    t = T(2)\n    yield 1\n    yield t\ngen = batches()\nnext(gen); None", "generator", "gen → local `t`", 2),
    Planted("a library's generator", _in_module("def batches():\n    t = T(2)\n    yield 1\n    yield t\nGEN = [batches()]\nnext(GEN[0])"), "generator", "planted_mod.GEN[0] → local `t`", 2),
    Planted(
        "a coroutine",
        "class Wait:\n    def __await__(self):\n        yield\nasync def work():\n    t = T(2)\n    await Wait()\n    return t\ncoro = work()\ncoro.send(None); None",
        "coroutine", "coro → local `t`", 2,
    ),
    Planted(
        "a thread",
        "import threading, time\ndef work():\n    t = T(2)\n    time.sleep(PAUSE)\n    del t\nthreading.Thread(target=work, name='prefetch').start()\ndel work\ntime.sleep(0.2)",
        "thread", "local `t` of", 2,
    ),
    Planted("thread local", _in_module("import threading\nLOCAL = threading.local()\nLOCAL.t = T(2)"), "thread local", "planted_mod.LOCAL", 2),
    Planted(
        "optimizer state",
        "net = torch.nn.Linear(512, 1024, bias=False).to(DEVICE)\nopt = torch.optim.Adam(net.parameters())\n"
        "net(torch.zeros(2, 512, device=DEVICE)).sum().backward()\nopt.step(); opt.zero_grad()",
        "optimizer state", "opt", 4,
    ),
    Planted("default argument", _in_module("def f(x, seen=[T(2)]):\n    return x"), "default argument", "planted_mod.f", 2),
    Planted("a finalizer", _in_module("import weakref\nclass O: pass\no = O()\nweakref.finalize(o, print, T(2)).atexit = False"), "finalizer", "weakref.finalize._registry", 2),
    Planted(
        "an autograd graph",
        "net = torch.nn.Linear(512, 512, bias=False).to(DEVICE)\nlosses = [net(torch.zeros(1024, 512, device=DEVICE)).sum()]",
        "autograd graph", "losses[0]", 2,
    ),
    Planted(
        "a gradient",
        "p = torch.nn.Linear(512, 1024, bias=False).to(DEVICE)\np(torch.zeros(2, 512, device=DEVICE)).sum().backward()",
        "module global", "p", 4,
    ),
    Planted(
        "a tracker",
        "module = types.ModuleType('wandb')\nsys.modules['wandb'] = module\n"
        "class Run: pass\nRun.__module__ = 'wandb.sdk'\nmodule.run = Run()\nmodule.run.history = [T(2)]\n"
        "exec('def finish():\\n    global run\\n    run = None', module.__dict__)\ndel module, Run",
        "plotting or tracking", "wandb.run", 2,
    ),
    # Several at once: what is told is what its line must break.
    Planted(
        "a record with an error in a handler",
        "import logging, logging.handlers\nh = logging.handlers.MemoryHandler(1000, flushLevel=100)\nlogging.getLogger('planted4').addHandler(h)\n"
        "logging.getLogger('planted4').propagate = False\ndef fail():\n    acts = T(2)\n    raise ValueError('x')\n"
        "try:\n    fail()\nexcept ValueError:\n    logging.getLogger('planted4').exception('it failed')\ndel h, fail",
        "logger", "logging.getLogger('planted4').handlers[0]", 2,
    ),
    Planted(
        "a generator in a class",
        "def batches():\n    t = T(2)\n    yield 1\n    yield t\nclass Loader:\n    it = batches()\nnext(Loader.it)\ndel batches",
        "generator", "Loader.it → local `t`", 2,
    ),
    Planted(
        "a closure in a cache",
        "@functools.lru_cache(maxsize=None)\ndef make(n):\n    t = T(n)\n    return lambda: t\nmake(2); None",
        "functools cache", "make", 2,
    ),
    Planted(
        "a generator in a hook",
        "net = torch.nn.Linear(2, 2, bias=False)\ndef batches():\n    t = T(2)\n    yield 1\n    yield t\n"
        "def add():\n    it = batches()\n    next(it)\n    net.register_forward_hook(lambda m, i, o: it and None)\nadd()\ndel add, batches",
        "forward hook", "net._forward_hooks", 2,
    ),
    Planted("a CUDA graph", "g = torch.cuda.CUDAGraph()\ng.capture_begin()\nt = T(12)\ng.capture_end()\ndel t", "CUDA graph", "g", 12, only="standin"),
    Planted("native code", "torch._C._hold(3 << 20)", "C++", "no Python object refers to it", 3, only="standin", after="torch._C._release_held()"),
    Planted(
        "workers of a DataLoader",
        "import torch.utils.data\nloader = torch.utils.data.DataLoader(lambda: T(2), num_workers=1, persistent_workers=True)\niter(loader); None",
        "DataLoader workers", "loader._iterator", 2, only="standin",
    ),
]
