"""What IPython and the interpreter keep of past cells, and letting go of it."""

from __future__ import annotations

import fnmatch
import re
import sys
import types
from typing import Any, Dict, Iterable, List, Optional

#: Names that stay whatever is cleared: the namespace would not work without them.
_MACHINERY = re.compile(r"^(__.*__|_ih|_oh|_dh|In|Out|get_ipython|exit|quit|_i|_ii|_iii|_i\d+|_exit_code|open)$")
_RESULTS = re.compile(r"^_\d+$")


def shell() -> Optional[Any]:
    """The running IPython shell, without importing IPython."""
    core = sys.modules.get("IPython.core.interactiveshell") or sys.modules.get("IPython")
    if core is None:
        return None
    kind = getattr(core, "InteractiveShell", None)
    try:
        return kind.instance() if kind is not None and kind.initialized() else None
    except Exception:  # a shell of another kind holds the place
        return getattr(kind, "_instance", None)


def namespace() -> Optional[Dict[str, Any]]:
    """Where the user's names are: IPython's, or `__main__` of an interactive Python. A script has names of its own that are not ours to clear."""
    running = shell()
    if running is not None:
        return running.user_ns
    return None


def user_names(space: Dict[str, Any], keep: Iterable[str] = ()) -> List[str]:
    """The names that `%reset -f` would remove: everything but IPython's own. `keep` are names or patterns."""
    patterns = list(keep)
    found = []
    for name in list(space):
        # Whatever else `globals()` holds is no name.
        if type(name) is not str:
            continue
        if _MACHINERY.match(name) or _RESULTS.match(name) or name in ("_", "__", "___"):
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        found.append(name)
    return found


def forget_outputs() -> int:
    """Lets go of what cells have shown: `Out`, `_`, `__`, `___`, `_N`, and the last result. Returns how many there were."""
    count = 0
    running = shell()
    if running is None:
        import builtins

        if getattr(builtins, "_", None) is not None and not callable(getattr(builtins, "_", None)):
            builtins._ = None  # type: ignore[attr-defined]
            count = 1
        return count
    space, hidden = running.user_ns, running.user_ns_hidden
    cache = space.get("_oh")
    if isinstance(cache, dict):
        count = len(cache)
        cache.clear()
    for name in [name for name in list(space) if _RESULTS.match(name)]:
        space.pop(name, None)
        hidden.pop(name, None)
    hook = getattr(running, "displayhook", None)
    for name in ("_", "__", "___"):
        if name in space:
            space[name] = ""
        if name in hidden:
            hidden[name] = ""
        if hook is not None and hasattr(hook, name):
            setattr(hook, name, "")
    for name in ("exec_result", "_exec_result"):
        if hook is not None and getattr(hook, name, None) is not None:
            setattr(hook, name, None)
    result = getattr(running, "last_execution_result", None)
    if result is not None:
        for name in ("result", "error_in_exec", "error_before_exec"):
            if hasattr(result, name):
                setattr(result, name, None)
    return count


def forget_errors() -> int:
    """Lets go of the last error everywhere it is kept. Returns how many places had one."""
    count = 0
    for name in ("last_value", "last_traceback", "last_type", "last_exc"):
        if getattr(sys, name, None) is not None:
            count += 1
        if hasattr(sys, name):
            delattr(sys, name)
    running = shell()
    if running is None:
        return count
    formatters = [getattr(running, name, None) for name in ("InteractiveTB", "SyntaxTB", "sys_excepthook", "CustomTB")]
    for formatter in formatters:
        if formatter is None or isinstance(formatter, (types.FunctionType, types.MethodType)):
            continue
        for name in ("tb", "etype", "evalue", "last_syntax_error", "_last_exc"):
            if getattr(formatter, name, None) is not None:
                try:
                    setattr(formatter, name, None)
                    count += 1
                except Exception:
                    continue
        debugger = getattr(formatter, "pdb", None)
        if debugger is not None and getattr(debugger, "curframe", None) is not None:
            # What `%debug` looked at last.
            for name, empty in (("curframe", None), ("botframe", None), ("stack", []), ("curframe_locals", {})):
                if hasattr(debugger, name):
                    try:
                        setattr(debugger, name, empty)
                    except Exception:
                        continue
            count += 1
    result = getattr(running, "last_execution_result", None)
    if result is not None:
        for name in ("error_in_exec", "error_before_exec"):
            if getattr(result, name, None) is not None:
                setattr(result, name, None)
                count += 1
    if getattr(running, "_last_traceback", None) is not None:
        running._last_traceback = None
    for name in ("last_value", "last_traceback", "last_type"):
        if name in running.user_ns_hidden:
            running.user_ns_hidden.pop(name, None)
    return count


def remove_names(space: Dict[str, Any], names: Iterable[str]) -> None:
    """Removes names from the user's namespace and from IPython's memory of it."""
    running = shell()
    for name in names:
        space.pop(name, None)
        if running is not None:
            running.user_ns_hidden.pop(name, None)
    if running is not None and running.user_ns is space:
        # Modules that %run left behind keep their globals.
        clear = getattr(running, "clear_main_mod_cache", None)
        if clear is not None:
            clear()
        if "_oh" not in space or "Out" not in space:
            running.init_user_ns()


def can_display() -> bool:
    return shell() is not None


def show(thing: Any) -> None:
    """Displays in a notebook, prints elsewhere. The thing has `_repr_html_` and `__str__`."""
    if shell() is not None:
        from IPython.display import display

        display(thing)
    else:
        print(thing)
