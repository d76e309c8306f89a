"""What holds the memory that is left, by name, with the line that lets it go."""

from __future__ import annotations

import bisect
import builtins
import gc
import itertools
import os
import re
import sys
import types
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from . import _driver, _search, _torch
from ._safe import ask, is_a, items, module_of
from ._tables import Table, parse_size, size

#: CPU tensors below this are not looked for: libraries keep many small ones for themselves.
MIN_CPU_BYTES = 1 << 20


def min_cpu_bytes() -> int:
    """The limit for CPU tensors; TARE_NOTEBOOK_MIN_CPU overrides it."""
    text = os.environ.get("TARE_NOTEBOOK_MIN_CPU", "")
    try:
        return parse_size(text) if text else MIN_CPU_BYTES
    except ValueError:
        return MIN_CPU_BYTES


class Holder:
    """One thing that holds memory. Strings and numbers only: a holder itself holds nothing."""

    def __init__(self, kind: str, where: str, release: Optional[str]) -> None:
        #: module global, class attribute, closure, functools cache, hook, logger, exception, generator, coroutine, thread, …
        self.kind = kind
        #: The path from the root, as one would write it.
        self.where = where
        #: Python to run in the notebook; None where no Python can do it.
        self.release = release
        #: Bytes of storages, each counted once over all holders.
        self.nbytes = 0
        self.gpu_bytes = 0
        self.tensors = 0
        #: The largest tensor under it.
        self.example = ""
        self._largest = -1
        self.note = ""
        #: The user asked to keep it.
        self.kept = False
        #: The root is a name of the user's: that name.
        self.name: Optional[str] = None

    def add(self, nbytes: int, on_gpu: bool, example: str) -> None:
        self.nbytes += nbytes
        self.gpu_bytes += nbytes if on_gpu else 0
        self.tensors += 1
        if nbytes > self._largest:
            self._largest, self.example = nbytes, example

    def as_dict(self) -> Dict[str, Any]:
        return {
            "kind": self.kind,
            "where": self.where,
            "release": self.release,
            "bytes": self.nbytes,
            "gpu_bytes": self.gpu_bytes,
            "tensors": self.tensors,
            "example": self.example,
            "note": self.note,
            "kept": self.kept,
        }

    def __repr__(self) -> str:
        return f"<{self.kind} `{self.where}` {size(self.nbytes)}>"


class Holders(list):
    """Holders, largest first; prints as a table."""

    def __init__(self, holders: Iterable[Holder] = (), remarks: Sequence[str] = ()) -> None:
        super().__init__(holders)
        self.remarks = list(remarks)

    @property
    def nbytes(self) -> int:
        return sum(holder.nbytes for holder in self)

    def table(self, limit: int = 20) -> Optional[Table]:
        if not self:
            return None
        rows = []
        for holder in self[:limit]:
            what = holder.where + (f"\n{holder.note}" if holder.note else "")
            rows.append([size(holder.nbytes), holder.kind, what.replace("\n", "; "), holder.release or "–"])
        if len(self) > limit:
            rows.append([size(sum(holder.nbytes for holder in self[limit:])), "", f"{len(self) - limit} more", ""])
        return Table(["held", "by", "where", "let go with"], rows, "holders", right=["held"])

    def text(self) -> str:
        table = self.table()
        return "\n".join(([table.text()] if table else ["nothing holds memory"]) + self.remarks)

    def _repr_html_(self) -> str:
        table = self.table()
        return (table.html() if table else "<div>nothing holds memory</div>") + "".join(f"<div>{remark}</div>" for remark in self.remarks)

    def __repr__(self) -> str:
        return self.text()

    __str__ = __repr__


class Survivor(NamedTuple):
    tensor: Any
    seen: _torch.Seen


def survivors(torch: Any, min_cpu: Optional[int] = None) -> Tuple[List[Survivor], List[Any]]:
    """Tensors that count (all on a GPU, large ones on the CPU), and the small ones that hang on to an autograd graph."""
    limit = min_cpu_bytes() if min_cpu is None else min_cpu
    classes = _torch.tensor_classes(torch)
    everything = gc.get_objects()
    tensors = list(itertools.compress(everything, map(classes.__contains__, map(type, everything))))
    del everything
    found: List[Survivor] = []
    graphs: List[Any] = []
    for tensor in tensors:
        seen = _torch.seen(tensor)
        if seen is not None and (seen.on_gpu or seen.nbytes >= limit):
            found.append(Survivor(tensor, seen))
        if _torch.part(tensor, "grad_fn") is not None:
            graphs.append(tensor)
    return found, graphs


# -- what a path looks like ----------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    node: Any
    text: str
    expr: Optional[str]


#: Libraries that keep what they were given, and how each lets go.
TRACKERS = {
    "matplotlib": "import matplotlib.pyplot; matplotlib.pyplot.close('all')",
    "wandb": "import wandb; wandb.finish()",
    "mlflow": "import mlflow; mlflow.end_run()",
    "tensorboard": None,
    "tensorboardX": None,
    "ipywidgets": "import ipywidgets; ipywidgets.Widget.close_all()",
    "plotly": None,
    "bokeh": "import bokeh.io; bokeh.io.reset_output()",
    "comet_ml": "import comet_ml; comet_ml.end()",
    "neptune": None,
    "clearml": None,
    "aim": None,
    "tqdm": "import tqdm; [bar.close() for bar in list(tqdm.tqdm._instances)]",
}
HOOKS = re.compile(r"^_?(global_)?_?(forward|backward|full_backward|state_dict|load_state_dict|non_full_backward)[a-z_]*hooks?[a-z_]*$")
LAST = ("last_value", "last_traceback", "last_type", "last_exc")
OUTPUT = re.compile(r"^(Out|_oh|_|__|___|_\d+)$")


class Describer:
    """Turns paths of objects into text, expressions and release lines."""

    def __init__(self, search: _search.Search, namespace: Optional[Dict[str, Any]], shell: Any) -> None:
        self.search = search
        self.namespace = namespace
        self.shell = shell
        torch = _torch.module()
        self.modules: Set[type] = _torch.known_classes(torch, "nn.Module") if torch else set()
        self.optimizers: Set[type] = _torch.known_classes(torch, "optim.Optimizer") if torch else set()
        self.tensors: Set[type] = _torch.tensor_classes(torch) if torch else set()
        #: How many different items of a container lead to survivors.
        self.used: Dict[int, Set[int]] = {}

    def note_use(self, nodes: List[Any]) -> None:
        for parent, child in zip(nodes, nodes[1:]):
            if is_a(parent, dict):
                self.used.setdefault(id(parent), set()).add(id(child))

    def steps(self, nodes: List[Any], root: Optional[_search.Root]) -> List[Step]:
        """One step a node, from the root down."""
        first = nodes[0]
        if root is None:
            text, expr = f"a {_search._type_name(type(first))}", None
        else:
            text, expr = root.text, root.expr
        steps = [Step(first, text, expr)]
        for index, (parent, child) in enumerate(zip(nodes, nodes[1:])):
            text, expr = steps[-1].text, steps[-1].expr
            owner = steps[-2] if len(steps) > 1 else None
            if owner is not None and len(steps) > 2 and is_a(owner.node, dict) and self._is_space(steps[-3].node, owner.node):
                # The dict of an instance between the two says nothing.
                owner = steps[-3]
            if root is not None and index == 0 and is_a(parent, dict) and root.kind == "module global":
                one = _search.dict_hop(parent, child, True)
                name = one.text.lstrip(".")
                text = f"{root.text}.{name}" if root.text else name
                if one.suffix is None or (not root.expr and not name.isidentifier()):
                    expr = None
                else:
                    expr = f"{root.expr}.{name}" if root.expr else name
                steps.append(Step(child, text, expr))
                continue
            if is_a(parent, dict) and owner is not None and self._is_module_part(owner.node, parent):
                part = self._module_part(owner.node, parent)
                one = _search.dict_hop(parent, child, False)
                key = next((key for key, value in items(parent) if value is child), None)
                if is_a(key, str) and key.isidentifier():
                    suffix: Optional[str] = f".{key}"
                elif is_a(key, str) and key.isdigit() and hasattr(type(owner.node), "__getitem__"):
                    suffix = f"[{key}]"
                else:
                    suffix = f".{part}{one.suffix}" if one.suffix else None
                steps.append(Step(child, owner.text + (suffix or one.text), owner.expr + suffix if owner.expr is not None and suffix else None))
                continue
            if is_a(parent, dict) and owner is not None and self._is_space(owner.node, parent):
                one = _search.dict_hop(parent, child, True)
                if one.text in (" → an item",):
                    one = _search.hop(owner.node, child)
                base = owner
                steps.append(self._extend(child, base, one))
                continue
            if is_a(child, dict) and self._is_space(parent, child):
                steps.append(Step(child, text, expr))
                continue
            if is_a(child, dict) and self._is_module_part(parent, child):
                steps.append(Step(child, text, expr + "." + self._module_part(parent, child) if expr is not None else None))
                continue
            if is_a(parent, type):
                steps.append(self._extend(child, steps[-1], self._class_hop(parent, child)))
                continue
            if is_a(parent, types.FunctionType) and is_a(child, tuple) and child is parent.__closure__:
                steps.append(Step(child, text, expr + ".__closure__" if expr is not None else None))
                continue
            if is_a(child, types.CellType) and owner is not None and is_a(owner.node, types.FunctionType):
                position = _search._index(parent, child)
                name = owner.node.__code__.co_freevars[position] if position is not None else "?"
                steps.append(Step(child, f"{owner.text} → closure `{name}`", f"{expr}[{position}]" if expr is not None else None))
                continue
            one = _search.hop(parent, child)
            if len(steps) == 1 and root is not None and root.kind == "frame":
                info = self.search.frames[id(parent)][1]
                name = info.names.get(id(child), "?")
                steps.append(Step(child, f"local `{name}` of {root.text}", None))
                continue
            steps.append(self._extend(child, steps[-1], one))
        return steps

    def _extend(self, child: Any, base: Step, one: _search.Hop) -> Step:
        expr: Optional[str] = None
        if base.expr is not None and one.suffix is not None:
            if one.suffix.startswith("|value:"):
                expr = f"list({base.expr}.values())[{one.suffix[7:]}]"
            elif one.suffix.startswith("|key:"):
                expr = f"list({base.expr})[{one.suffix[5:]}]"
            else:
                expr = base.expr + one.suffix
        return Step(child, base.text + one.text, expr)

    def _class_hop(self, parent: type, child: Any) -> _search.Hop:
        for key, value in list(parent.__dict__.items()):
            if value is child:
                return _search.Hop(f".{key}", f".{key}")
        # The dict of a class itself, which Python shows only through a proxy.
        return _search.Hop("", None if not is_a(child, dict) else "")

    def _is_space(self, owner: Any, space: Any) -> bool:
        if is_a(owner, type):
            return is_a(space, dict) and _same(space, dict(owner.__dict__))
        try:
            return object.__getattribute__(owner, "__dict__") is space
        except Exception:
            return False

    def _module_part(self, owner: Any, part: Any) -> str:
        space = owner.__dict__
        return next((name for name in ("_parameters", "_buffers", "_modules") if space.get(name) is part), "")

    def _is_module_part(self, owner: Any, part: Any) -> bool:
        return type(owner) in self.modules and bool(self._module_part(owner, part))

    # -- release lines ----------------------------------------------------------------------------------------------------------------

    def holds_true(self, expr: Optional[str], node: Any) -> bool:
        """Whether the expression really gives the node: a line that is shown has been tried."""
        if expr is None:
            return False
        space = {"sys": sys, "logging": sys.modules.get("logging"), "__builtins__": builtins}
        if self.shell is not None:
            space["get_ipython"] = lambda: self.shell
        head = re.match(r"[A-Za-z_]\w*", expr)
        if head and head.group() in sys.modules:
            space.setdefault(head.group(), sys.modules[head.group()])
        try:
            return eval(expr, space, self.namespace if self.namespace is not None else {}) is node
        except Exception:
            return False

    def needs(self, line: str, root: Optional[_search.Root]) -> str:
        """The line with the imports that it needs."""
        if line.startswith("import "):
            return line
        imports = []
        if "sys.modules[" in line or line.startswith("sys."):
            imports.append("sys")
        if "logging." in line:
            imports.append("logging")
        if root is not None and root.kind == "module global" and root.expr and not root.expr.startswith("sys.modules["):
            imports.append(root.expr)
        if root is not None and root.kind == "class attribute" and root.expr and "." in root.expr:
            parts = root.expr.split(".")
            for count in range(len(parts) - 1, 0, -1):
                name = ".".join(parts[:count])
                if name in sys.modules:
                    imports.append(name)
                    break
        for name in ("traceback", "threading", "asyncio", "multiprocessing", "weakref"):
            if re.search(rf"\b{name}\.", line):
                imports.append(name)
        wanted = list(dict.fromkeys(imports))
        return (f"import {', '.join(wanted)}; " if wanted else "") + line

    def name_of(self, wanted: Any) -> Optional[str]:
        """An expression for an object that some module or the user has a name for."""
        for name, value in list((self.namespace or {}).items()):
            if value is wanted:
                return name
        for name, module in list(sys.modules.items()):
            for key, value in items(ask(module, "__dict__") or {}):
                if value is wanted and is_a(key, str) and key.isidentifier():
                    return f"sys.modules[{name!r}].{key}"
        return None

    def describe(self, nodes: List[Any], root: Optional[_search.Root]) -> Holder:
        try:
            return self._described(nodes, root)
        except KeyboardInterrupt:
            raise
        except BaseException:
            return self._outlined(nodes, root)

    def _outlined(self, nodes: List[Any], root: Optional[_search.Root]) -> Holder:
        """What can be said without asking the objects on the way, one of which answers with an exception."""
        text = root.text if root is not None else f"a {_search._type_name(type(nodes[0]))}"
        name = None
        if root is not None and root.kind == "module global" and len(nodes) > 1 and is_a(nodes[0], dict):
            hop = _search.dict_hop(nodes[0], nodes[1], True).text.lstrip(".")
            text = f"{text}.{hop}" if text else hop
            name = hop if root.rank == 0 else None
        holder = Holder(root.kind if root is not None else "object", text, f"del {name}" if name is not None and name.isidentifier() else None)
        holder.name, holder.example, holder.note = name, text, "an object on the way raises when it is asked"
        return holder

    def _described(self, nodes: List[Any], root: Optional[_search.Root]) -> Holder:
        steps = self.steps(nodes, root)
        text = steps[-1].text
        kind, line, cut, note = self._decide(steps, root)
        where = steps[cut].text if cut is not None else text
        holder = Holder(kind, where, self.needs(line, root) if line else None)
        holder.note = note
        holder.example = text
        if root is not None and root.kind == "module global" and root.rank == 0 and len(steps) > 1:
            holder.name = steps[1].text
        return holder

    def _find(self, steps: List[Step], test: Any) -> Optional[int]:
        """The step nearest to the tensor that passes."""
        for index in range(len(steps) - 1, -1, -1):
            try:
                if test(steps[index].node):
                    return index
            except Exception:
                continue
        return None

    def _decide(self, steps: List[Step], root: Optional[_search.Root]) -> Tuple[str, Optional[str], Optional[int], str]:
        """Kind, release line, index of the step that names the holder, and a remark."""
        isinst = _search.isinstance_of
        user = root is not None and root.kind == "module global" and root.rank == 0
        first = steps[1].text if len(steps) > 1 else ""
        last = len(steps) - 1

        def at(index: int) -> Optional[str]:
            expr = steps[index].expr
            return expr if self.holds_true(expr, steps[index].node) else None

        # The interpreter's and IPython's own memory of the last results and errors.
        if root is not None and root.text == "sys" and any(first == f"sys.{name}" for name in LAST):
            return "exception", "import tare_notebook; tare_notebook.forget_errors()", 1, "the last error keeps the variables of every function it passed"
        if user and OUTPUT.match(first):
            return "output cache", "import tare_notebook; tare_notebook.forget_outputs()", last, "IPython keeps what a cell shows"
        if root is not None and root.text == "builtins" and first == "builtins._":
            return "output cache", "import builtins; builtins._ = None", 1, ""
        if root is not None and (root.kind == "IPython" or self._is_ipython(steps)):
            names = " ".join(step.text for step in steps)
            if self._find(steps, lambda node: is_a(node, (BaseException, types.TracebackType))) is not None:
                return "exception", "import tare_notebook; tare_notebook.forget_errors()", last, "IPython keeps the last traceback"
            if "displayhook" in names or "last_execution_result" in names or "_oh" in names:
                return "output cache", "import tare_notebook; tare_notebook.forget_outputs()", last, "IPython keeps what a cell shows"

        def general(kind: str, cut: Optional[int] = None, note: str = "") -> Tuple[str, Optional[str], Optional[int], str]:
            line, index, remark = self._cut(steps, root)
            return kind, line, cut if cut is not None else index, note or remark

        # Libraries that keep things on purpose have a word of their own for letting go.
        if root is not None and root.kind == "logger" or self._find(steps, lambda node: isinst(node, sys.modules.get("logging"), "Handler")) is not None:
            handler = self._find(steps, lambda node: isinst(node, sys.modules.get("logging"), "Handler"))
            if handler is not None and at(handler) is not None:
                expr = at(handler)
                kept = getattr(steps[handler].node, "buffer", None)
                if is_a(kept, list) and any(step.node is kept for step in steps):
                    return "logger", f"{expr}.buffer.clear()", handler, "the handler keeps records with their arguments"
                if root is not None and root.kind == "logger" and expr and re.search(r"\.handlers\[\d+\]$", expr):
                    return "logger", f"{root.expr}.removeHandler({expr})", handler, ""
            return general("logger")
        for index in range(1, len(steps)):
            package = type(steps[index].node).__module__
            if is_a(steps[index].node, (types.FunctionType, types.MethodType, type)):
                continue
            parts = str(package).split(".")
            tracker = parts[0] if parts[0] in TRACKERS else "tensorboard" if parts[:3] == ["torch", "utils", "tensorboard"] else None
            if tracker is None and root is not None and root.kind == "module global" and root.text.split(".")[0] in TRACKERS:
                tracker = root.text.split(".")[0]
            if tracker is not None:
                line = TRACKERS[tracker]
                if line is not None:
                    return "plotting or tracking", line, index, f"kept by {tracker}"
                return general("plotting or tracking", index, f"kept by {tracker}")
        loader = self._find(steps, lambda node: isinst(node, sys.modules.get("torch.utils.data.dataloader"), "_BaseDataLoaderIter"))
        if loader is not None:
            expr = at(loader)
            line = f"{expr} = None" if expr and re.search(r"\.[A-Za-z_]\w*$", expr) else self._cut(steps[: loader + 1], root)[0]
            stop = f"{expr}._shutdown_workers()" if expr and hasattr(steps[loader].node, "_shutdown_workers") else None
            return "DataLoader workers", "; ".join(part for part in (stop, line) if part) or None, loader, ""
        graph = self._find(steps, lambda node: type(node).__name__ in ("CUDAGraph", "MemPool") and type(node).__module__.startswith("torch"))
        if graph is not None:
            expr = at(graph)
            if expr and hasattr(steps[graph].node, "reset"):
                return "CUDA graph", f"{expr}.reset()", graph, "its private pool stays as long as the graph"
            return general("CUDA graph", graph, "its private pool stays as long as the graph")
        if root is not None and root.kind == "task":
            name = steps[0].node.get_name()
            line = f"import asyncio; [task.cancel() for task in asyncio.all_tasks() if task.get_name() == {name!r}]"
            return "coroutine", line, last, "let the loop run once afterwards: `await asyncio.sleep(0)`"
        # Hooks: the dict that a module keeps them in is on the path.
        for index in range(1, last):
            node = steps[index].node
            if not is_a(node, dict):
                continue
            name = steps[index].text.rsplit(".", 1)[-1]
            if HOOKS.match(name) and (type(steps[index - 1].node) in self.modules or self._owner_is_module(steps, index) or "_global_" in name):
                key = next((key for key, value in items(node) if value is steps[index + 1].node), None)
                expr = at(index)
                kind = "backward hook" if "backward" in name else "forward hook" if "forward" in name else "hook"
                if expr is not None:
                    line = f"{expr}.pop({key!r})" if len(node) > 1 and is_a(key, int) else f"{expr}.clear()"
                    return kind, line, last, ""
                return general(kind, last)
            if name in ("_backward_hooks", "_post_accumulate_grad_hooks") and self._owner_is_tensor(steps, index):
                expr = at(index)
                if expr is not None:
                    return "backward hook", f"{expr}.clear()", last, "a hook on a tensor"
                return general("backward hook", last)
        error = self._find(steps, lambda node: is_a(node, BaseException))
        trace = self._find(steps, lambda node: is_a(node, types.TracebackType))
        if error is not None or trace is not None:
            index = error if error is not None else trace
            note = "a traceback keeps the variables of every function it passed" if trace is not None else ""
            if user and len(steps) > 1 and is_a(steps[1].node, (BaseException, types.TracebackType)):
                return "exception", f"del {first}" if first.isidentifier() else None, last, note
            expr = at(index) if index is not None else None
            if expr is not None and trace is not None:
                inner = f"{expr}.__traceback__" if error is not None else expr
                return "exception", f"traceback.clear_frames({inner})", last, note
            return general("exception", last, note)
        cache = self._find(steps, lambda node: type(node).__name__ == "_lru_cache_wrapper")
        if cache is not None and cache < last and steps[cache + 1].node is not ask(steps[cache].node, "__wrapped__"):
            expr = at(cache) or self.name_of(steps[cache].node)
            if expr is not None:
                return "functools cache", f"{expr}.cache_clear()", cache, ""
            return general("functools cache", cache)
        running = self._find(steps, lambda node: is_a(node, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)))
        if running is not None:
            kind = "coroutine" if is_a(steps[running].node, types.CoroutineType) else "generator"
            expr = at(running)
            if expr is not None and hasattr(steps[running].node, "close"):
                return kind, f"{expr}.close()", last, ""
            return general(kind, last)
        if root is not None and root.kind == "frame":
            info = self.search.frames[id(steps[0].node)][1]
            if info.own_thread:
                name = info.names.get(id(steps[1].node), "?") if last > 0 else "?"
                return "frame", None, last, f"the function still runs: `del {name}` in it, or let it end"
            line = f"import threading; [thread.join(10) for thread in threading.enumerate() if thread.name == {info.thread!r}]"
            return "thread", line, last, f"thread {info.thread!r} still runs"
        thread = self._find(steps, lambda node: isinst(node, sys.modules.get("threading"), "Thread"))
        if thread is not None and not user:
            name = steps[thread].node.name
            line = f"import threading; [thread.join(10) for thread in threading.enumerate() if thread.name == {name!r}]"
            return "thread", line, last, f"thread {name!r} still runs"
        local = self._find(steps, lambda node: isinst(node, sys.modules.get("threading"), "local"))
        if local is not None:
            expr = at(local)
            if not user and expr is not None and any(value is steps[-1].node or value is None for value in steps[local].node.__dict__.values()):
                return "thread local", f"{expr}.__dict__.clear()", last, ""
            return general("thread local", last)
        optimizer = self._find(steps, lambda node: type(node) in self.optimizers)
        if optimizer is not None and any(step.node is steps[optimizer].node.__dict__.get("state") for step in steps):
            expr = at(optimizer)
            if expr is not None:
                return "optimizer state", f"{expr}.state.clear()", optimizer, ""
            return general("optimizer state", optimizer)
        if root is not None and root.text == "weakref.finalize":
            key = next((one for one in steps if type(one.node).__name__ == "_Info"), None)
            if key is not None:
                import weakref

                found = [id(final) for final, info in list(weakref.finalize._registry.items()) if info is key.node]
                if found:
                    line = f"import weakref; [final.detach() for final in list(weakref.finalize._registry) if id(final) == {found[0]}]"
                    return "finalizer", line, last, "a weakref.finalize keeps its arguments"
        if root is not None and root.kind == "context variable":
            for variable, value in list(steps[0].node.items()):
                if any(value is step.node for step in steps):
                    name = self.name_of(variable)
                    current = variable.get(None) is value
                    line = f"{name}.set(None)" if name and current else None
                    return "context variable", line, last, f"contextvars variable {variable.name!r}"
            return "context variable", None, last, ""
        for index in range(1, last):
            if steps[index + 1].text.endswith(" → its graph"):
                line, _, _ = self._cut(steps[: index + 1], root)
                return "autograd graph", line, index, "it keeps what its backward pass would need"
        closure = self._find(steps, lambda node: is_a(node, types.CellType))
        if closure is not None:
            line, index, note = self._cut(steps, root)
            if not user and at(closure) is not None:
                return "closure", f"{at(closure)}.cell_contents = None", last, note
            return "closure", line, last, note
        for index in range(1, last):
            parent = steps[index].node
            if is_a(parent, types.FunctionType) and steps[index + 1].node in (parent.__defaults__, parent.__kwdefaults__):
                return general("default argument", last)
        if root is not None and root.kind == "class attribute":
            return general("class attribute")
        if root is not None and root.kind == "module global":
            return general("module global")
        if root is not None:
            return general(root.kind, last)
        if self.search.truncated:
            return "unknown", None, last, f"not followed to its root: {self.search.truncated}"
        if last > 0:
            return "C++", None, last, f"held by a {_search._type_name(type(steps[0].node))} that no Python object refers to (native code, or atexit)"
        return "C++", None, last, "no Python object refers to it: native code holds it"

    def _is_ipython(self, steps: List[Step]) -> bool:
        return any(module_of(type(step.node)).split(".")[0] in ("IPython", "ipykernel") for step in steps[:-1])

    def _owner_is_module(self, steps: List[Step], index: int) -> bool:
        return any(type(step.node) in self.modules for step in steps[max(0, index - 2) : index])

    def _owner_is_tensor(self, steps: List[Step], index: int) -> bool:
        return any(type(step.node) in self.tensors for step in steps[max(0, index - 2) : index])

    def _cut(self, steps: List[Step], root: Optional[_search.Root]) -> Tuple[Optional[str], Optional[int], str]:
        """The edge to cut where no library has a word for it: line, step, remark."""
        if root is None or len(steps) < 2:
            return None, len(steps) - 1, ""
        if root.kind == "module global" and root.rank == 0:
            name = steps[1].text
            if not name.isidentifier():
                return f"globals().pop({name!r}, None)", 1, ""
            return f"del {name}", 1, ""
        # A container near the root that Python can name: emptied, or only the one item taken out.
        for index in range(1, len(steps) - 1):
            node, expr = steps[index].node, steps[index].expr
            if self._is_space(steps[index - 1].node, node) or self._is_module_part(steps[index - 1].node, node):
                continue
            if is_a(node, dict) and self.holds_true(expr, node):
                key = next((key for key, value in items(node) if value is steps[index + 1].node), None)
                literal = _search._literal(key)
                if len(self.used.get(id(node), ())) == 1 and len(node) > 1 and literal is not None:
                    return f"{expr}.pop({literal})", index, ""
                return f"{expr}.clear()", index, ""
            if (is_a(node, (list, set)) or type(node).__name__ == "deque") and self.holds_true(expr, node):
                return f"{expr}.clear()", index, ""
        # Else the last attribute on the way that can be set.
        for index in range(len(steps) - 1, 0, -1):
            expr = steps[index].expr
            if expr is None or not re.search(r"\.[A-Za-z_]\w*$", expr) or not self.holds_true(expr, steps[index].node):
                continue
            if expr.rsplit(".", 1)[1].startswith("__"):
                continue
            return f"{expr} = None", index, ""
        return None, len(steps) - 1, ""


# -- all of it -----------------------------------------------------------------------------------------------------------------------


class _Graphs:
    """What autograd graphs keep: saved tensors that no Python object names."""

    def __init__(self, torch: Any, owners: List[Any], known: Dict[_torch.StorageKey, int], min_cpu: int, limit: int = 100_000) -> None:
        self.attached: Dict[int, List[_torch.Seen]] = {}
        self.links: List[Tuple[int, int]] = []
        self.owners = owners
        counted: Set[_torch.StorageKey] = set()
        seen_nodes: Dict[int, Any] = {}
        # The end of a graph first: a loss keeps what everything before it keeps.
        inner: Set[int] = set()
        for owner in owners:
            for node in _torch.next_nodes(_torch.part(owner, "grad_fn")):
                inner.add(id(node))
        ordered = sorted(owners, key=lambda owner: id(_torch.part(owner, "grad_fn")) in inner)
        for owner in ordered:
            todo = [_torch.part(owner, "grad_fn")]
            while todo and len(seen_nodes) < limit:
                node = todo.pop()
                if id(node) in seen_nodes:
                    continue
                seen_nodes[id(node)] = node
                self.links.append((id(node), id(owner)))
                for value in _torch.saved(node):
                    seen = _torch.seen(value)
                    if seen is None or not (seen.on_gpu or seen.nbytes >= min_cpu):
                        continue
                    if seen.key in known:
                        self.links.append((id(value), id(owner)))
                    elif seen.key not in counted:
                        counted.add(seen.key)
                        self.attached.setdefault(id(owner), []).append(seen)
                todo.extend(_torch.next_nodes(node))
        self.storages = counted
        seen_nodes.clear()


def _bases(found: List[Survivor], edges: List[Tuple[Any, Any]]) -> None:
    """What a view is a view of is held by it from C++; an object that Python has made for it lives as long as the view."""
    seen = {id(one.tensor) for one in found}
    for one in found:
        base = _torch.part(one.tensor, "_base")
        if base is not None and id(base) in seen:
            edges.append((base, one.tensor))


def _same(one: Dict[Any, Any], other: Dict[Any, Any]) -> bool:
    """Whether two dictionaries hold the very same objects; they are not compared, which could call anything."""
    if len(one) != len(other) or len(one) >= 10_000:
        return False
    return all(key is first and value is second for (key, value), (first, second) in zip(items(one), items(other)))


def _grads(found: List[Survivor], known: Dict[_torch.StorageKey, int], edges: List[Tuple[Any, Any]]) -> Dict[int, List[_torch.Seen]]:
    """Gradients that no Python object names, by the id of the tensor that has them; `edges` takes those that one does."""
    attached: Dict[int, List[_torch.Seen]] = {}
    for one in found:
        grad = _torch.part(one.tensor, "grad") if _torch.part(one.tensor, "is_leaf") else None
        seen = _torch.seen(grad) if grad is not None else None
        if seen is not None:
            edges.append((grad, one.tensor))
        if seen is not None and seen.key not in known:
            known[seen.key] = seen.nbytes
            attached.setdefault(id(one.tensor), []).append(seen)
    return attached


def reachable_from(values: Iterable[Any], limit: int = 1_000_000) -> Set[int]:
    """Ids of what the values lead to, without going through modules, classes and the namespaces of functions."""
    spaces = set(_search.module_roots())
    seen: Set[int] = set()
    todo = list(values)
    while todo and len(seen) < limit:
        batch = [one for one in todo if id(one) not in seen and id(one) not in spaces and not is_a(one, (type, types.ModuleType))]
        seen.update(map(id, batch))
        todo = gc.get_referents(*batch) if batch else []
    return seen


def find(
    namespace: Optional[Dict[str, Any]] = None,
    shell: Any = None,
    keep: Iterable[Any] = (),
    min_cpu: Optional[int] = None,
    budget: float = 10.0,
    only: Optional[int] = None,
    ignore_storages: Optional[Set[_torch.StorageKey]] = None,
) -> Holders:
    """Everything that holds CUDA memory or large CPU tensors. `keep`: objects whose memory is meant to stay.

    `only` looks at so many of the largest tensors; `ignore_storages` leaves out what was there before.
    """
    torch = _torch.module()
    if torch is None:
        remark = [_torch.why_not()] if _torch.state() == "broken" else []
        return Holders(_child_processes([]), remark)
    limit = min_cpu_bytes() if min_cpu is None else min_cpu
    found, graph_owners = survivors(torch, limit)
    found.sort(key=lambda one: -one.seen.nbytes)
    total_known: Dict[_torch.StorageKey, int] = {one.seen.key: one.seen.nbytes for one in found}
    if ignore_storages:
        found = [one for one in found if one.seen.key not in ignore_storages]
    if only is not None:
        found = found[:only]
    edges: List[Tuple[Any, Any]] = []
    grads = _grads(found, total_known, edges)
    _bases(found, edges)
    graphs = _Graphs(torch, graph_owners, total_known, limit)
    kept_ids = reachable_from(keep) if keep else set()

    special = _special_targets(torch)
    targets: List[Any] = [one.tensor for one in found] + [one for one, _ in special]
    own = [id(one) for one in (found, graph_owners, special, targets, keep, edges)] + [id(edge) for edge in edges]
    search = _search.Search(targets, namespace, shell, budget, extra_edges=edges, ignore=own)
    edges.clear()
    try:
        _ignore_rows(search, found, special)
        search.run()
        # What only a graph holds: from the tensor at the end of that graph.
        open_ids = set(search.unresolved())
        owners = {id(owner): owner for owner in graph_owners}
        search.own.add(id(owners))
        extra = [owner for key, owner in owners.items() if key in graphs.attached or any(up == key for child, up in graphs.links if child in open_ids or child in search.nodes)]
        search.own.add(id(extra))
        if extra and (open_ids or graphs.attached) and only is None:
            for owner in extra:
                if id(owner) not in search.targets:
                    search.targets.append(id(owner))
                search._add(owner)
            for child, up in graphs.links:
                if child in search.nodes and child not in search.way and up in search.nodes:
                    search._edge(child, search.nodes[up])
            search.run()
        describer = Describer(search, namespace, shell)
        paths = {id(target): search.path(id(target)) for target in targets}
        for nodes in paths.values():
            describer.note_use(nodes)
        groups: Dict[Tuple[str, str], Holder] = {}
        counted: Set[_torch.StorageKey] = set()

        def group(key: int) -> Tuple[Holder, str]:
            nodes = paths.get(key)
            if nodes is None:
                nodes = paths[key] = search.path(key)
            made = describer.describe(nodes, search.root(key))
            made.kept = key in kept_ids or (made.name is not None and any(id(node) in kept_ids for node in nodes[1:2]))
            same = groups.setdefault((made.kind + str(made.kept), made.release or made.where), made)
            if same is not made and same.where != made.where:
                same.where = _common(same.where, made.where)
            return same, made.example

        for one in found:
            holder, text = group(id(one.tensor))
            if one.seen.key not in counted:
                counted.add(one.seen.key)
                holder.add(one.seen.nbytes, one.seen.on_gpu, f"{text} {_torch.describe(one.tensor)}")
            for seen in grads.get(id(one.tensor), ()):
                if seen.key not in counted:
                    counted.add(seen.key)
                    holder.add(seen.nbytes, seen.on_gpu, f"{text}.grad")
        if only is None:
            for key, parts in graphs.attached.items():
                holder, text = group(key)
                new = [seen for seen in parts if seen.key not in counted]
                for seen in new:
                    counted.add(seen.key)
                    holder.add(seen.nbytes, seen.on_gpu, f"saved for the backward pass of {text}")
                if new:
                    amount = sum(seen.nbytes for seen in new)
                    if amount * 2 > holder.nbytes and holder.kind in ("module global", "C++"):
                        holder.kind = "autograd graph"
                    if holder.note != "it keeps what its backward pass would need":
                        holder.note = (holder.note + "; " if holder.note else "") + f"{text} keeps the graph behind it: {size(amount)}"
            pids: Set[int] = set()
            for target, facts in special:
                holder, text = group(id(target))
                holder.nbytes += facts["bytes"]
                holder.gpu_bytes += facts["gpu_bytes"]
                holder.note = (holder.note + "; " if holder.note else "") + facts["note"]
                holder.example = holder.example or text
                pids.update(facts.get("pids", ()))
                if facts["kind"]:
                    holder.kind = facts["kind"]
            result = list(groups.values()) + _child_processes(sorted(pids))
            result += _native(torch, counted, sum(facts["allocated"] for _, facts in special))
        else:
            result = list(groups.values())
        result.sort(key=lambda holder: -holder.nbytes)
        return Holders([one for one in result if one.nbytes or one.kind == "DataLoader workers"], [search.truncated] if search.truncated else [])
    finally:
        search.release()
        del found, graph_owners, targets, special


def _ignore_rows(search: _search.Search, found: List[Survivor], special: List[Any]) -> None:
    # The rows of our own lists refer to the tensors too.
    search.own.update(map(id, found))
    search.own.update(map(id, special))


def _common(one: str, other: str) -> str:
    """The part of two paths that is the same, cut at a step."""
    shared = os.path.commonprefix([one, other])
    if shared in (one, other):
        return shared
    trimmed = re.sub(r"([.\[]| → )[^.\[→]*$", "", shared)
    return trimmed or one


def _special_targets(torch: Any) -> List[Tuple[Any, Dict[str, Any]]]:
    """Things that hold memory without being tensors: CUDA graphs and data loaders with workers."""
    graphs = _torch.known_classes(torch, "cuda.CUDAGraph") | _torch.known_classes(torch, "cuda.MemPool")
    loaders: Set[type] = set()
    module = sys.modules.get("torch.utils.data.dataloader")
    if module is not None:
        base = getattr(module, "_BaseDataLoaderIter", None)
        loaders = _torch.subclasses(base) if is_a(base, type) else set()
    wanted = graphs | loaders
    if not wanted:
        return []
    everything = gc.get_objects()
    things = list(itertools.compress(everything, map(wanted.__contains__, map(type, everything))))
    del everything
    found: List[Tuple[Any, Dict[str, Any]]] = []
    pools: Dict[Tuple[int, ...], Tuple[int, int]] = {}
    if any(type(thing) in graphs for thing in things):
        for segment in _torch.segments(torch):
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            reserved, allocated = pools.get(pool, (0, 0))
            pools[pool] = (reserved + int(segment.get("total_size", 0)), allocated + int(segment.get("allocated_size", 0)))
    for thing in things:
        if type(thing) in graphs:
            try:
                pool = tuple(thing.pool() if callable(getattr(thing, "pool", None)) else thing.id)
            except Exception:
                continue
            reserved, allocated = pools.pop(pool, (0, 0))
            if reserved:
                note = f"private pool of {size(reserved)}"
                found.append((thing, {"kind": "CUDA graph", "bytes": reserved, "gpu_bytes": reserved, "allocated": allocated, "note": note}))
            continue
        workers = [worker for worker in getattr(thing, "_workers", ()) if getattr(worker, "pid", None) and worker.is_alive()]
        if workers:
            pids = [worker.pid for worker in workers]
            on_gpu = _gpu_bytes(pids)
            host = sum(_driver.private_bytes(pid) for pid in pids)
            note = f"{len(pids)} worker process{'es' if len(pids) > 1 else ''} ({', '.join(map(str, pids))})"
            facts = {"kind": "DataLoader workers", "bytes": host + on_gpu, "gpu_bytes": on_gpu, "allocated": 0, "note": note, "pids": pids}
            found.append((thing, facts))
    return found


def _gpu_bytes(pids: Iterable[int]) -> int:
    wanted = set(pids)
    return sum(process.nbytes or 0 for process in _driver.gpu_processes() or [] if process.pid in wanted)


def _child_processes(known: List[int]) -> List[Holder]:
    """Processes below this one that the driver lists."""
    on_gpu = _driver.gpu_processes()
    if not on_gpu:
        return []
    below = set(_driver.children()) - set(known)
    holders = []
    managed = sys.modules.get("multiprocessing.process")
    for process in on_gpu:
        if process.pid not in below:
            continue
        mine = [child for child in list(getattr(managed, "_children", ())) if getattr(child, "pid", None) == process.pid]
        if mine:
            line = f"import multiprocessing; [(child.terminate(), child.join()) for child in multiprocessing.active_children() if child.pid == {process.pid}]"
        else:
            line = f"import os, signal; os.kill({process.pid}, signal.SIGTERM)"
        name = mine[0].name if mine else process.name
        holder = Holder("child process", f"process {process.pid} ({name}) on GPU {process.device}", line)
        holder.nbytes = holder.gpu_bytes = process.nbytes or 0
        holder.example = "memory of another process: this one cannot free it"
        if process.nbytes is None:
            holder.note = "the driver does not say how much"
            holder.nbytes = holder.gpu_bytes = 1
        holders.append(holder)
    return holders


def _native(torch: Any, counted: Set[_torch.StorageKey], explained: int) -> List[Holder]:
    """What the allocator has handed out beyond every storage that was found."""
    total = _torch.allocated(torch)
    if total == 0:
        return []
    keys = sorted(pointer for device, pointer in counted if not device.startswith("cpu"))
    rest: List[Tuple[int, int]] = []
    for address, nbytes in _torch.active_blocks(torch):
        # By blocks, not by storages: the allocator rounds up.
        at = bisect.bisect_left(keys, address)
        if at == len(keys) or keys[at] >= address + nbytes:
            rest.append((address, nbytes))
    left = sum(nbytes for _, nbytes in rest) - explained
    if left <= 0:
        return []
    sizes = {_torch.cublas_workspace_size(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))} - {None}
    sizes = sizes or set(_torch.CUBLAS_DEFAULTS)
    workspaces = [nbytes for _, nbytes in rest if nbytes in sizes]
    holders = []
    if workspaces:
        holder = Holder("library", "cuBLAS workspaces (by their size)", None)
        holder.nbytes = holder.gpu_bytes = sum(workspaces)
        holder.note = "torch keeps one a stream after the first matrix product; this torch has no call that frees it"
        if callable(_torch.dig(torch, "_C._cuda_clearCublasWorkspaces")):
            holder.release = "import torch; torch._C._cuda_clearCublasWorkspaces()"
            holder.note = "torch keeps one a stream after the first matrix product"
        holders.append(holder)
        left -= holder.nbytes
    if left > 0:
        holder = Holder("C++", "no Python object refers to it", None)
        holder.nbytes = holder.gpu_bytes = left
        holder.note = "native code holds it (an extension, a graph that runs, a communicator); a restart of the kernel frees it: %tare zero --hard"
        holders.append(holder)
    return holders


def name_each(chosen: List[Survivor], found: List[Survivor], namespace: Optional[Dict[str, Any]], shell: Any, budget: float = 3.0) -> List[Holder]:
    """One holder for each tensor of `chosen`, in the order given. `found` are all tensors: a gradient is named by what has it."""
    targets = [one.tensor for one in chosen]
    edges: List[Tuple[Any, Any]] = []
    _grads(found, {}, edges)
    own = [id(chosen), id(found), id(targets), id(edges)] + [id(edge) for edge in edges] + [id(one) for one in found]
    search = _search.Search(targets, namespace, shell, budget, extra_edges=edges, ignore=own)
    edges.clear()
    try:
        search.run()
        describer = Describer(search, namespace, shell)
        result = []
        for one in chosen:
            key = id(one.tensor)
            holder = describer.describe(search.path(key), search.root(key))
            holder.add(one.seen.nbytes, one.seen.on_gpu, f"{holder.example} {_torch.describe(one.tensor)}")
            result.append(holder)
        return result
    finally:
        search.release()
        targets.clear()
