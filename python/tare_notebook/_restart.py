"""`%tare zero --hard`: a new kernel by way of the Jupyter server, and the setup cells run again in it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any, List, Optional, Tuple

PRESS = (
    "restart the kernel by hand: JupyterLab: Kernel > Restart Kernel (or 0, 0 in command mode); VS Code: Restart in the notebook's toolbar; "
    "the cells marked `%%tare setup` run again with `%load_ext tare_notebook`"
)


def connection_file() -> Optional[str]:
    """The file that says how clients reach this kernel."""
    application = sys.modules.get("ipykernel.kernelapp")
    kind = getattr(application, "IPKernelApp", None)
    try:
        running = kind.instance() if kind is not None and kind.initialized() else None
    except Exception:
        running = None
    path = getattr(running, "abs_connection_file", None) or getattr(running, "connection_file", None)
    return path if isinstance(path, str) else None


def kernel_id(path: Optional[str]) -> Optional[str]:
    """The server's name for the kernel: part of the connection file's name."""
    found = re.search(r"kernel-(.+)\.json$", os.path.basename(path)) if path else None
    return found.group(1) if found else None


def runtime_dirs(path: Optional[str]) -> List[str]:
    found = [os.path.dirname(path)] if path and os.path.dirname(path) else []
    if os.environ.get("JUPYTER_RUNTIME_DIR"):
        found.append(os.environ["JUPYTER_RUNTIME_DIR"])
    data = os.environ.get("JUPYTER_DATA_DIR") or os.path.join(
        os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share"), "jupyter"
    )
    found.append(os.path.join(data, "runtime"))
    return list(dict.fromkeys(found))


def servers(path: Optional[str]) -> List[Tuple[str, str]]:
    """URL and token of every Jupyter server of this user, the one that started this kernel first."""
    parent = os.environ.get("JPY_PARENT_PID", "")
    found: List[Tuple[bool, str, str]] = []
    for folder in runtime_dirs(path):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if not re.match(r"(jpserver|nbserver)-\d+\.json$", name):
                continue
            try:
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    facts = json.load(file)
            except (OSError, ValueError):
                continue
            if isinstance(facts, dict) and isinstance(facts.get("url"), str):
                found.append((name.split("-")[1] != f"{parent}.json", facts["url"], str(facts.get("token") or "")))
    return [(url, token) for _, url, token in sorted(found)]


def _ask(url: str, token: str, method: str = "GET", timeout: float = 10.0) -> Any:
    request = urllib.request.Request(url, method=method, data=b"" if method == "POST" else None)
    if token:
        request.add_header("Authorization", f"token {token}")
    # The server is on this machine: a proxy has no part in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as answer:
        body = answer.read()
    return json.loads(body) if body else None


def server_of(kernel: str, path: Optional[str]) -> Optional[Tuple[str, str]]:
    """The server that knows this kernel."""
    for url, token in servers(path):
        try:
            answer = _ask(f"{url.rstrip('/')}/api/kernels/{kernel}", token)
        except (OSError, ValueError):
            continue
        if isinstance(answer, dict) and answer.get("id") == kernel:
            return url.rstrip("/"), token
    return None


def setup_file(path: Optional[str]) -> Optional[str]:
    """Where the setup cells of this kernel wait for the next one: a file of this user's that no one else can read."""
    if path is None:
        return None
    name = hashlib.sha256(os.path.abspath(path).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    folder = os.path.join(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"tare-notebook-{os.getuid() if hasattr(os, 'getuid') else 0}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        facts = os.lstat(folder)
        if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or facts.st_mode & 0o077):
            return None
    except OSError:
        return None
    return os.path.join(folder, f"{name}.json")


def save(path: Optional[str], cells: List[str]) -> bool:
    """Writes down the cells that the next kernel is to run."""
    target = setup_file(path)
    if target is None:
        return False
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"cells": cells}, file)
    return True


def take(path: Optional[str]) -> List[str]:
    """The cells that wait for this kernel; they wait no longer."""
    target = setup_file(path)
    if target is None or not os.path.exists(target):
        return []
    try:
        with open(target, encoding="utf-8") as file:
            cells = json.load(file).get("cells", [])
    except (OSError, ValueError, AttributeError):
        cells = []
    try:
        os.unlink(target)
    except OSError:
        pass
    return [cell for cell in cells if isinstance(cell, str)]


def restart(cells: List[str]) -> Tuple[bool, str]:
    """Asks the server for a new kernel. Returns whether that is under way, and what to tell the user."""
    path = connection_file()
    kernel = kernel_id(path)
    if kernel is None or path is None:
        return False, f"this is no Jupyter kernel: {PRESS}" if path is None else f"this kernel was not started by a Jupyter server: {PRESS}"
    found = server_of(kernel, path)
    saved = save(path, cells) if cells else True
    if found is None:
        return False, f"no Jupyter server was found that knows this kernel: {PRESS}"
    url, token = found
    # A process of its own: it outlives this kernel, waits for the next one, and has it take up the setup cells.
    env = dict(os.environ, TARE_RESTART_TOKEN=token)
    arguments = [sys.executable, "-m", "tare_notebook._restart", url, kernel, path, "setup" if cells and saved else "bare"]
    subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, start_new_session=True, cwd=os.sep
    )
    count = f"; {len(cells)} setup cell{'s run' if len(cells) != 1 else ' runs'} again in the new one" if cells else ""
    return True, f"the kernel restarts{count}"


def _main(arguments: List[str]) -> int:
    url, kernel, path, mode = arguments
    token = os.environ.pop("TARE_RESTART_TOKEN", "")
    try:
        _ask(f"{url}/api/kernels/{kernel}/restart", token, "POST", timeout=120.0)
    except (OSError, ValueError, urllib.error.URLError):
        return 1
    if mode != "setup":
        return 0
    try:
        from jupyter_client import BlockingKernelClient
    except ImportError:
        # The cells wait in their file: `%load_ext tare_notebook` takes them up.
        return 1
    # Without the heartbeat, which takes a kernel that is only starting for dead.
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        client = BlockingKernelClient(connection_file=path)
        try:
            client.load_connection_file()
            client.start_channels(hb=False)
            client.wait_for_ready(timeout=30)
            client.execute("get_ipython().extension_manager.load_extension('tare_notebook')", silent=False, store_history=False)
            client.get_shell_msg(timeout=600)
            return 0
        except Exception:
            time.sleep(0.5)
        finally:
            client.stop_channels()
    return 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
