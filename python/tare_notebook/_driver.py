"""The driver's and the system's view: who uses the GPU, and how much memory this process has."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any, Dict, List, NamedTuple, Optional


class GpuProcess(NamedTuple):
    """A process that the driver lists; `nbytes` is None where the driver does not say."""

    pid: int
    nbytes: Optional[int]
    device: int
    name: str


class _ProcessInfo(ctypes.Structure):
    # nvmlProcessInfo_t as of nvmlDeviceGetComputeRunningProcesses_v2 and _v3.
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = 2**64 - 1


def process_name(pid: int) -> str:
    """Name of a process of this machine; `?` for one of another PID namespace (the driver counts as the host does)."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() or "?"
    except OSError:
        return "?"


def _from_nvml() -> Optional[List[GpuProcess]]:
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    try:
        if nvml.nvmlInit_v2() != 0:
            return None
    except AttributeError:
        return None
    try:
        count = ctypes.c_uint(0)
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        ask: Any = None
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
            ask = ask or getattr(nvml, name, None)
        if ask is None:
            return None
        found = []
        for device in range(count.value):
            handle = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(device), ctypes.byref(handle)) != 0:
                continue
            room = 64
            for _ in range(4):
                number = ctypes.c_uint(room)
                table = (_ProcessInfo * room)()
                code = ask(handle, ctypes.byref(number), table)
                if code != _INSUFFICIENT_SIZE:
                    break
                room = number.value + 16
            if code != 0:
                continue
            for entry in table[: number.value]:
                used = None if entry.used == _NOT_AVAILABLE else int(entry.used)
                found.append(GpuProcess(int(entry.pid), used, device, process_name(int(entry.pid))))
        return found
    finally:
        nvml.nvmlShutdown()


def _from_smi() -> Optional[List[GpuProcess]]:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = []
    for line in answer.stdout.decode("utf-8", "replace").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 2 and parts[0].isdigit():
            used = int(parts[1]) * 1024 * 1024 if parts[1].isdigit() else None
            found.append(GpuProcess(int(parts[0]), used, 0, process_name(int(parts[0]))))
    return found


def gpu_processes() -> Optional[List[GpuProcess]]:
    """Every process on a GPU of this machine; None where there is no driver to ask."""
    found = _from_nvml()
    return _from_smi() if found is None else found


def rss() -> Optional[int]:
    """Resident bytes of this process."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    psutil = sys.modules.get("psutil")
    if psutil is not None:
        return int(psutil.Process().memory_info().rss)
    return None


def reset_peak_rss() -> bool:
    """Starts a new high-water mark (Linux: `5` into clear_refs, proc(5)). False where the system cannot."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        return True
    except OSError:
        return False


def peak_rss() -> Optional[int]:
    """The high-water mark of the resident bytes since the start, or since `reset_peak_rss`."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def children() -> List[int]:
    """PIDs of all processes below this one, children of children too (Linux)."""
    below: Dict[int, List[int]] = {}
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    for entry in entries:
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                # The name stands in parentheses and may hold anything: fields count from the last one.
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        below.setdefault(parent, []).append(int(entry))
    found: List[int] = []
    todo = [os.getpid()]
    while todo:
        for child in below.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def private_bytes(pid: int) -> int:
    """Bytes that only this process maps: a forked worker shares most of its parent's pages."""
    total = 0
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("Private_Clean:", "Private_Dirty:")):
                    total += int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
    return total
