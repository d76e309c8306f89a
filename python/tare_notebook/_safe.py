"""Looking at objects without asking them: proxies lie about their class, and some objects answer a question with an exception."""

import collections
from typing import Any, Iterator, List, Tuple, Union

Kinds = Union[type, Tuple[type, ...]]


def mro(kind: type) -> Tuple[type, ...]:
    """The classes of a class, past whatever its metaclass has to say."""
    try:
        return type.__getattribute__(kind, "__mro__")
    except Exception:
        return (kind,)


def is_a(node: Any, kinds: Kinds) -> bool:
    """`isinstance` by the real type. `__class__` is not asked: that of a dead `weakref.proxy` raises."""
    of = mro(type(node))
    return any(kind in of for kind in kinds) if type(kinds) is tuple else kinds in of


def module_of(kind: type) -> str:
    """Where a class says that it comes from; empty where that is no text."""
    try:
        found = type.__getattribute__(kind, "__module__")
    except Exception:
        return ""
    return found if type(found) is str else ""


def name_of(kind: type) -> str:
    """What a class calls itself, with the classes and functions around it."""
    try:
        found = type.__getattribute__(kind, "__qualname__")
    except Exception:
        return "?"
    return found if type(found) is str else "?"


def ask(node: Any, name: str, default: Any = None) -> Any:
    """`getattr` of something whose answer may be any exception."""
    try:
        return getattr(node, name, default)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return default


def items(space: Any) -> List[Tuple[Any, Any]]:
    """The pairs of a dictionary, whatever its class makes of `items`."""
    return list(dict.items(space) if is_a(space, dict) else space.items())


_BUILT_IN = (list, tuple, set, frozenset, dict, collections.deque)


def each(container: Any) -> Iterator[Any]:
    """What is in a built-in container, whatever its class makes of `__iter__`."""
    for kind in _BUILT_IN:
        if is_a(container, kind):
            return kind.__iter__(container)
    return iter(container)
