"""Looking at objects without asking them: proxies lie about their class, and some objects answer a question with an exception."""

from typing import Any, Tuple, Union

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
