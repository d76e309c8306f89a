"""From survivors back to roots: who refers to whom, without a reverse graph of the whole heap.

`gc.get_referrers(*few)` walks the heap once and compares every reference with each of `few`; past about a hundred it is cheaper to walk the heap
ourselves and ask a set. One walk costs the same whatever it finds, so the work is kept down by needing few of them:

* what is known about `nn.Module` and optimizers is written down first, without any walk;
* the user's own names are followed downwards as far as that is cheap;
* of many survivors a few are followed up to a root, and that root's branch is then followed downwards: what hangs there too is found with it.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import gc
import itertools
import os
import sys
import threading
import time
import types
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from . import _torch
from ._safe import ask, each, is_a, items, module_of, mro, name_of

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep

#: Nodes that are looked for in one walk by `gc.get_referrers`.
FEW = 32
#: More than this at once are looked for by walking the heap with a set, once samples have not been enough.
MANY = 96
#: Objects that one look downwards may visit, and the size from which a container is not looked into.
DOWN = 300_000
WIDE = 50_000
#: Holders of one node that are followed, where there are very many.
CROWD = 2_000
#: Objects a walk hands to `gc.get_referents` in one call.
CHUNK = 256


class Root(NamedTuple):
    """Where a path ends: what it is, its text, and a Python expression for it where there is one."""

    kind: str
    text: str
    expr: Optional[str]
    #: Which one is told first when several are equally near: the user's own names before anything else.
    rank: int


class Frame(NamedTuple):
    """A function that runs, by what it is called and by the ids of what its variables hold."""

    thread: str
    where: str
    own_thread: bool
    #: Daemon and executor threads may never end by themselves.
    names: Dict[int, str]


def is_own(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(HERE)


def _locals(frame: types.FrameType) -> Dict[str, Any]:
    """The variables of a frame, in a dict of ours."""
    view = frame.f_locals
    copy = dict(view)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & 1 and is_a(view, dict):
        # Up to 3.12 the frame keeps the dict it made for us, and with it everything in it; the variables themselves are elsewhere.
        view.clear()
    return copy


def live_frames() -> Dict[int, Tuple[types.FrameType, Frame]]:
    """Every function that runs now in any thread, our own left out."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    found: Dict[int, Tuple[types.FrameType, Frame]] = {}
    for ident, top in list(sys._current_frames().items()):
        name = threads.get(ident, f"thread {ident}")
        frame: Optional[types.FrameType] = top
        while frame is not None:
            # A module's code keeps its variables in the module.
            if not is_own(frame) and frame.f_code.co_flags & 1:
                code = frame.f_code
                where = f"`{getattr(code, 'co_qualname', code.co_name)}` ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
                names = {id(value): key for key, value in _locals(frame).items()}
                found[id(frame)] = (frame, Frame(name, where, ident == here, names))
            frame = frame.f_back
    return found


def module_roots() -> Dict[int, Tuple[str, bool]]:
    """Namespaces of modules by id: name, and whether a person works in it."""
    found: Dict[int, Tuple[str, bool]] = {}
    for name, module in list(sys.modules.items()):
        try:
            space = object.__getattribute__(module, "__dict__")
        except Exception:
            continue
        if is_a(space, dict) and id(space) not in found:
            found[id(space)] = (name, name == "__main__")
    return found


def resolve_module(name: str) -> str:
    """Text that evaluates to the module: `a.b` where that is the very module, else through sys.modules."""
    parts = name.split(".")
    found: Any = sys.modules.get(parts[0])
    try:
        for part in parts[1:]:
            found = getattr(found, part, None)
    except Exception:  # a package that imports what it is asked for, and cannot
        found = None
    if found is sys.modules.get(name) and all(part.isidentifier() for part in parts):
        return name
    return f"sys.modules[{name!r}]"


class Search:
    """One search. `release()` it: it holds what it found."""

    def __init__(
        self,
        targets: List[Any],
        namespace: Optional[Dict[str, Any]] = None,
        shell: Any = None,
        budget: float = 10.0,
        max_nodes: int = 200_000,
        extra_edges: Iterable[Tuple[Any, Any]] = (),
        ignore: Iterable[int] = (),
    ) -> None:
        self.deadline = time.monotonic() + budget
        self.max_nodes = max_nodes
        self.truncated: Optional[str] = None
        self.walks = 0
        self.torch = _torch.module()
        self.shell = shell
        self.nodes: Dict[int, Any] = {}
        #: child -> parents, by id.
        self.above: Dict[int, List[int]] = {}
        self.below: Dict[int, List[int]] = {}
        self.roots: Dict[int, Root] = {}
        #: node -> (distance, rank, next node towards the root)
        self.way: Dict[int, Tuple[int, int, int]] = {}
        self.targets = [id(target) for target in targets]
        self.samples = 0
        self.frontier: List[int] = []
        self.deferred: Set[int] = set()
        self.scanned: Set[int] = set()
        #: Containers of ours, which refer to nodes and are nobody's holders.
        self.own: Set[int] = set(ignore)
        self.objects: Optional[List[Any]] = None
        self.spaces = module_roots()
        if namespace is not None:
            self.spaces[id(namespace)] = ("__main__", True)
        self.namespace = namespace
        self.frames = live_frames()
        self.private: Dict[int, int] = {}
        self.member_of: Dict[int, List[int]] = {}
        self._owners: List[Any] = []
        for name in ("nodes", "above", "below", "roots", "way", "frontier", "spaces", "frames", "private", "member_of", "_owners", "targets"):
            self.own.add(id(getattr(self, name)))
        self.own.update((id(self), id(self.__dict__), id(targets)))
        self._by_id: Dict[int, Any] = {}
        self.own.add(id(self._by_id))
        self._learn_structure()
        for target in targets:
            self._add(target)
        for child, parent in extra_edges:
            if id(child) in self.nodes:
                self._edge(id(child), parent)
        self._climb(list(self.nodes))

    # -- what is known without a walk ------------------------------------------------------------------------------------------------

    def _learn_structure(self) -> None:
        """Writes down which dict belongs to which module or optimizer, and which module to which."""
        if self.torch is None:
            return
        modules = _torch.known_classes(self.torch, "nn.Module")
        optimizers = _torch.known_classes(self.torch, "optim.Optimizer")
        wanted = modules | optimizers
        if not wanted:
            return
        everything = gc.get_objects()
        self._owners.extend(itertools.compress(everything, map(wanted.__contains__, map(type, everything))))
        del everything
        for owner in self._owners:
            space = ask(owner, "__dict__")
            if not is_a(space, dict):
                continue
            self._by_id[id(space)] = space
            self.private[id(space)] = id(owner)
            self._by_id[id(owner)] = owner
            if type(owner) in optimizers:
                self._learn_optimizer(owner, space)
                continue
            for name in ("_parameters", "_buffers", "_modules"):
                part = space.get(name)
                if is_a(part, dict):
                    self._by_id[id(part)] = part
                    self.private[id(part)] = id(owner)
                    for value in list(part.values()):
                        if value is not None:
                            self.member_of.setdefault(id(value), []).append(id(part))

    def _learn_optimizer(self, owner: Any, space: Dict[str, Any]) -> None:
        state = space.get("state")
        if not is_a(state, dict):
            return
        self._by_id[id(state)] = state
        self.private[id(state)] = id(owner)
        for part in list(state.values()):
            if is_a(part, dict):
                self._by_id[id(part)] = part
                self.private[id(part)] = id(state)
                for value in list(part.values()):
                    if type(value).__module__.partition(".")[0] == "torch":
                        self.member_of.setdefault(id(value), []).append(id(part))

    # -- the graph -------------------------------------------------------------------------------------------------------------------

    def _add(self, node: Any) -> bool:
        """Takes a node in; whether it is new."""
        key = id(node)
        if key in self.nodes:
            return False
        self.nodes[key] = node
        root = self._root(node, key)
        if root is not None:
            self.roots[key] = root
            self._reach(key, 0, root.rank, key)
            return True
        if key in self.private or key in self.member_of:
            self.deferred.add(key)
        else:
            self.frontier.append(key)
        return True

    def _edge(self, child: int, parent: Any) -> bool:
        """Notes that `parent` refers to `child`; whether the parent is new."""
        key = id(parent)
        parents = self.above.setdefault(child, [])
        if key == child or key in parents:
            return False
        parents.append(key)
        self.below.setdefault(key, []).append(child)
        new = self._add(parent)
        step = self.way.get(key)
        if step is not None:
            self._reach(child, step[0] + 1, step[1], key)
        return new

    def _reach(self, start: int, distance: int, rank: int, towards: int) -> None:
        """Spreads "there is a way to a root" downwards, shortest first."""
        todo = collections.deque([(start, distance, rank, towards)])
        while todo:
            key, distance, rank, towards = todo.popleft()
            known = self.way.get(key)
            if known is not None and (known[0], known[1]) <= (distance, rank):
                continue
            self.way[key] = (distance, rank, towards)
            todo.extend((child, distance + 1, rank, key) for child in self.below.get(key, ()))

    def _climb(self, start: List[int]) -> None:
        """Follows what is known about modules and optimizers upwards."""
        todo = list(start)
        while todo:
            key = todo.pop()
            ups = list(self.member_of.get(key, ()))
            if key in self.private:
                ups.append(self.private[key])
            for up in ups:
                node = self._by_id.get(up)
                if node is not None and self._edge(key, node):
                    todo.append(up)

    def _root(self, node: Any, key: int) -> Optional[Root]:
        space = self.spaces.get(key)
        if space is not None:
            name, person = space
            return Root("module global", "" if person else name, "" if person else resolve_module(name), 0 if person else 2)
        if is_a(node, type):
            return Root("class attribute", _type_name(node), self._type_expr(node), 1)
        if is_a(node, types.ModuleType):
            return Root("module global", ask(node, "__name__", "a module"), None, 3)
        if key in self.frames:
            info = self.frames[key][1]
            return Root("frame", info.where, None, 5)
        if self.shell is not None and node is self.shell:
            return Root("IPython", "get_ipython()", "get_ipython()", 4)
        kind = type(node)
        if "logging" in sys.modules and isinstance_of(node, sys.modules["logging"], "Logger"):
            name = ask(node, "name", "root")
            return Root("logger", f'logging.getLogger({name!r})', f"logging.getLogger({name!r})", 2)
        if isinstance_of(node, asyncio, "Task"):
            try:
                if not node.done():
                    return Root("task", f"the running task {node.get_name()!r}", None, 3)
            except Exception:
                pass
        if isinstance_of(node, asyncio, "AbstractEventLoop"):
            return Root("event loop", "the event loop", None, 4)
        if kind is contextvars.Context:
            return Root("context variable", "a context of contextvars", None, 4)
        return None

    def _type_expr(self, kind: type) -> Optional[str]:
        module, name = module_of(kind), name_of(kind)
        if self.namespace is not None and self.namespace.get(name) is kind:
            return name
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = ask(found, part)
        if found is kind and module:
            return name if module == "__main__" and self.namespace is None else f"{resolve_module(module)}.{name}"
        if self.namespace is not None:
            for key, value in items(self.namespace):
                if value is kind and type(key) is str:
                    return key
        return None

    # -- walks -----------------------------------------------------------------------------------------------------------------------

    def unresolved(self) -> List[int]:
        return [key for key in self.targets if key not in self.way]

    def _needed(self) -> Set[int]:
        """Everything above a target that has no way to a root yet."""
        found: Set[int] = set()
        todo = self.unresolved()
        while todo:
            key = todo.pop()
            if key in found:
                continue
            found.add(key)
            todo.extend(self.above.get(key, ()))
        return found

    def run(self) -> None:
        """Searches until every target has a way to a root, nothing is left to look at, or the time is up."""
        try:
            if self.namespace is not None and self.unresolved():
                self._add(self.namespace)
                self._down([self.namespace])
                classes = [one for one in list(self.namespace.values()) if is_a(one, type) and module_of(one) == self.namespace.get("__name__")]
                self.own.add(id(classes))
                if classes and self.unresolved():
                    self._down(classes)
            while self.unresolved():
                needed = self._needed()
                level = [key for key in self.frontier if key in needed and key not in self.scanned]
                self.frontier.clear()
                if not level:
                    # What is known about modules was not enough: they are looked for as anything else is.
                    level = [key for key in self.deferred if key in needed and key not in self.scanned]
                    self.deferred.clear()
                if not level:
                    return
                if len(self.nodes) > self.max_nodes:
                    self.truncated = f"more than {self.max_nodes:,} objects lead to the survivors"
                    return
                if time.monotonic() > self.deadline:
                    self.truncated = "the time for the search was used up"
                    return
                if len(level) > FEW and (self.samples < 3 or len(level) <= MANY):
                    # A few of them; what they lead to is followed first, the others wait.
                    self.samples += 1
                    level, waiting = level[:FEW], level[FEW:]
                else:
                    waiting = []
                self.scanned.update(level)
                before = set(self.nodes)
                open_before = set(self.unresolved())
                self.own.update((id(before), id(open_before)))
                self._look_in_frames(set(level))
                self._walk(level)
                self._climb([key for key in self.nodes if key not in before])
                self.frontier.extend(waiting)
                self._follow_down(open_before)
        finally:
            self.objects = None

    def _follow_down(self, open_before: Set[int]) -> None:
        """Where a root was met: what else hangs on the same branch."""
        left = set(self.unresolved())
        if not left:
            return
        starts: Dict[int, Any] = {}
        for key in open_before - left:
            chain = [key]
            while self.way[chain[-1]][2] != chain[-1]:
                chain.append(self.way[chain[-1]][2])
            # The nodes below the root: the root itself may be all of a library.
            for one in chain[-2:-5:-1]:
                starts.setdefault(one, self.nodes[one])
        self.own.add(id(starts))
        if starts:
            self._down(list(starts.values()))

    def _down(self, starts: List[Any]) -> None:
        """Follows references downwards from nodes that are known, and writes down the way to each survivor that is met."""
        # Survivors, and what is known to lead to them: a model before each of its parameters.
        wanted = self._needed()
        came: Dict[int, int] = {}
        objects: Dict[int, Any] = {id(one): one for one in starts}
        layer: List[Any] = list(starts)
        self.own.update((id(came), id(objects), id(layer), id(starts), id(wanted)))
        first = set(objects)
        while layer and self.unresolved() and len(came) < DOWN and time.monotonic() < self.deadline:
            following: List[Any] = []
            self.own.add(id(following))
            for parent in layer:
                inside = list(parent.__dict__.values()) if is_a(parent, type) else gc.get_referents(parent)
                self.own.add(id(inside))
                if len(inside) > WIDE and id(parent) not in self.spaces:
                    continue
                for child in inside:
                    key = id(child)
                    if key in came or key in first:
                        continue
                    kind = type(child)
                    if kind in _LEAVES or not gc.is_tracked(child):
                        continue
                    came[key] = id(parent)
                    if key in wanted:
                        objects[key] = child
                        if key not in self.way:
                            self._write_down(key, came, objects)
                        if not _is_tensor(child):
                            following.append(child)
                        continue
                    if key in self.spaces or key in self.own or is_a(child, (type, types.ModuleType)) or self._root(child, key) is not None:
                        continue
                    objects[key] = child
                    following.append(child)
            layer = following
        objects.clear()
        layer = []

    def _write_down(self, key: int, came: Dict[int, int], objects: Dict[int, Any]) -> None:
        chain = [key]
        while chain[-1] in came:
            chain.append(came[chain[-1]])
        # From the top, so that each node that comes in has a way already and need not be looked for.
        for child, parent in reversed(list(zip(chain, chain[1:]))):
            if child not in self.nodes:
                self.nodes[child] = objects[child]
            self._edge(child, objects[parent])

    def _look_in_frames(self, level: Set[int]) -> None:
        # Functions that run are not among the objects that the collector tracks (3.11 and later).
        for frame, info in self.frames.values():
            for key in level.intersection(info.names):
                self._edge(key, frame)

    def _skip(self, node: Any) -> bool:
        if id(node) in self.own:
            return True
        if type(node) is types.FrameType:
            return is_own(node) or id(node) in self.frames
        return False

    def _walk(self, level: List[int]) -> None:
        self.walks += 1
        wanted = set(level)
        self.own.update((id(wanted), id(level)))
        if len(level) <= MANY:
            few = [self.nodes[key] for key in level]
            self.own.add(id(few))
            found = gc.get_referrers(*few)
            del few
        else:
            found = self._containers_of(wanted)
        self.own.add(id(found))
        if len(found) > CROWD:
            # They are one kind of thing that something holds together: roots among them, and a part of the rest.
            step = len(found) // CROWD
            found = [one for one in found if id(one) in self.spaces or is_a(one, type)] + found[::step]
            self.own.add(id(found))
        # Others that wait are found with it.
        known = set(self.nodes)
        self.own.add(id(known))
        for parent in found:
            if self._skip(parent):
                continue
            for key in known.intersection(map(id, gc.get_referents(parent))):
                self._edge(key, parent)

    def _containers_of(self, wanted: Set[int]) -> List[Any]:
        if self.objects is None:
            self.objects = gc.get_objects()
            self.own.add(id(self.objects))
        found: List[Any] = []
        objects, referents, disjoint = self.objects, gc.get_referents, wanted.isdisjoint
        for start in range(0, len(objects), CHUNK):
            part = objects[start : start + CHUNK]
            if disjoint(map(id, referents(*part))):
                continue
            found.extend(one for one in part if not disjoint(map(id, referents(one))))
            if time.monotonic() > self.deadline:
                self.truncated = "the time for the search was used up"
                break
        return found

    # -- answers ---------------------------------------------------------------------------------------------------------------------

    def path(self, key: int) -> List[Any]:
        """The objects from the root down to the target; the nearest known holder first where no root was found."""
        if key in self.way:
            found = [key]
            while self.way[found[-1]][2] != found[-1]:
                found.append(self.way[found[-1]][2])
            return [self.nodes[one] for one in reversed(found)]
        # No way to a root: as far up as it goes.
        seen, best = {key}, [key]
        todo = [[key]]
        while todo:
            chain = todo.pop(0)
            if len(chain) > len(best):
                best = chain
            for up in self.above.get(chain[-1], ()):
                if up not in seen:
                    seen.add(up)
                    todo.append(chain + [up])
        return [self.nodes[one] for one in reversed(best)]

    def root(self, key: int) -> Optional[Root]:
        if key not in self.way:
            return None
        while self.way[key][2] != key:
            key = self.way[key][2]
        return self.roots[key]

    def release(self) -> None:
        for one in (self.nodes, self.above, self.below, self.frames, self._by_id):
            one.clear()
        self._owners.clear()
        self.objects = None


_LEAVES = frozenset((str, int, float, bool, bytes, type(None), types.CodeType, types.BuiltinFunctionType, types.ModuleType))


def isinstance_of(node: Any, module: Any, name: str) -> bool:
    """Whether `node` is of the class of this name in `module`, if there is one."""
    base = getattr(module, name, None)
    return is_a(base, type) and base in mro(type(node))


def _type_name(kind: type) -> str:
    module = module_of(kind)
    name = name_of(kind)
    return name if module in ("__main__", "builtins", "") else f"{module}.{name}"


# -- one step of a path --------------------------------------------------------------------------------------------------------------


class Hop(NamedTuple):
    """How a parent refers to a child: for a person, and as the end of an expression (None where Python has no way to write it)."""

    text: str
    suffix: Optional[str]


def _index(container: Iterable[Any], child: Any, limit: int = 1_000_000) -> Optional[int]:
    for index, value in enumerate(itertools.islice(each(container), limit)):
        if value is child:
            return index
    return None


# Exactly these: a subclass may print itself as anything, or not at all.
_LITERALS = frozenset((str, int, bytes, bool, float, type(None)))


def _literal(key: Any) -> Optional[str]:
    if type(key) in _LITERALS:
        text = repr(key)
        return text if len(text) <= 80 else None
    if type(key) is tuple and all(type(one) in _LITERALS for one in key):
        return repr(key)
    return None


def dict_hop(space: Dict[Any, Any], child: Any, attribute: bool) -> Hop:
    # Values before keys: a parameter is a key of an optimizer's state, and rarely the only thing there.
    for key, value in items(space):
        if value is child:
            if attribute and is_a(key, str) and key.isidentifier():
                return Hop(f".{key}", f".{key}")
            literal = _literal(key)
            if attribute and literal is not None:
                return Hop(f".__dict__[{literal}]", f".__dict__[{literal}]")
            if literal is not None:
                return Hop(f"[{literal}]", f"[{literal}]")
            position = _index(dict.values(space), child)
            return Hop(f"[<{type(key).__name__}>]", f".__dict__[{position}]" if position is None else f"|value:{position}")
    for position, key in enumerate(each(space)):
        if key is child:
            return Hop(" key", f"|key:{position}")
    return Hop(" → an item", None)


def _slot(parent: Any, child: Any) -> Optional[str]:
    for kind in mro(type(parent)):
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if is_a(slots, str) else tuple(slots):
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            try:
                if object.__getattribute__(parent, mangled) is child:
                    return mangled
            except Exception:
                continue
    return None


_FIXED: Dict[str, Tuple[str, ...]] = {
    "function": ("__closure__", "__defaults__", "__kwdefaults__", "__wrapped__", "__annotations__"),
    "method": ("__self__", "__func__"),
    "builtin_function_or_method": ("__self__",),
    "partial": ("func", "args", "keywords"),
    "cell": ("cell_contents",),
    "traceback": ("tb_frame", "tb_next"),
    "generator": ("gi_frame", "gi_yieldfrom"),
    "coroutine": ("cr_frame", "cr_await"),
    "async_generator": ("ag_frame", "ag_await"),
    "property": ("fget", "fset", "fdel"),
    "staticmethod": ("__func__",),
    "classmethod": ("__func__",),
    "mappingproxy": (),
}
_ALWAYS = ("__traceback__", "__cause__", "__context__", "args", "__wrapped__", "_backward_hooks", "__self__", "__dict__")


def _is_tensor(node: Any) -> bool:
    torch = _torch.module()
    return torch is not None and torch.Tensor in mro(type(node))


def hop(parent: Any, child: Any) -> Hop:
    """How `parent` refers to `child`."""
    if _is_tensor(parent) and (_is_tensor(child) or hasattr(type(child), "next_functions")):
        # Held from C++: the gradient, and what the graph saved for the backward pass.
        if _torch.part(parent, "is_leaf") and _torch.part(parent, "grad") is child:
            return Hop(".grad", ".grad")
        if _is_tensor(child) and _torch.part(parent, "_base") is child:
            return Hop("._base", "._base")
        return Hop(" → its graph", None)
    if is_a(parent, types.FrameType):
        for key, value in _locals(parent).items():
            if value is child:
                return Hop(f" → local `{key}`", None)
        return Hop(" → a value at work", None)
    if is_a(parent, dict):
        return dict_hop(parent, child, False)
    if type(parent) in (list, tuple) or is_a(parent, (list, tuple)):
        index = _index(parent, child)
        if index is not None:
            names = ask(type(parent), "_fields")
            if names and index < len(names):
                return Hop(f".{names[index]}", f".{names[index]}")
            return Hop(f"[{index}]", f"[{index}]")
    elif isinstance_of(parent, sys.modules.get("collections"), "deque"):
        index = _index(parent, child)
        if index is not None:
            return Hop(f"[{index}]", f"[{index}]")
    elif is_a(parent, (set, frozenset)):
        return Hop(" → a member", None)
    kind = type(parent).__name__
    if is_a(parent, types.CellType):
        return Hop("", ".cell_contents")
    if kind == "_lru_cache_wrapper":
        if ask(parent, "__wrapped__") is not child:
            return Hop(" → its cache", None)
    if is_a(parent, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        for name in ("gi_frame", "cr_frame", "ag_frame"):
            frame = ask(parent, name)
            if frame is child:
                return Hop("", f".{name}")
            if frame is not None:
                for key, value in _locals(frame).items():
                    if value is child:
                        return Hop(f" → local `{key}`", f".{name}.f_locals[{key!r}]")
    for name in _FIXED.get(kind, ()):
        try:
            if getattr(parent, name) is child:
                return Hop("" if name in ("__closure__", "tb_frame") else f".{name}", f".{name}")
        except Exception:
            continue
    try:
        space = object.__getattribute__(parent, "__dict__")
    except Exception:
        space = None
    if space is not None and space is child:
        return Hop("", ".__dict__")
    if space is not None:
        for key, value in items(space):
            if value is child:
                return Hop(f".{key}", f".{key}" if str(key).isidentifier() else f".__dict__[{key!r}]")
    name = _slot(parent, child)
    if name is not None:
        return Hop(f".{name}", f".{name}")
    for name in _ALWAYS:
        # Asked of the type first: `__getattr__` of a proxy could do anything.
        if any(name in base.__dict__ for base in mro(type(parent))):
            try:
                if object.__getattribute__(parent, name) is child:
                    return Hop(f".{name}", f".{name}")
            except Exception:
                continue
    return Hop(f" → held by a {_type_name(type(parent))}", None)
