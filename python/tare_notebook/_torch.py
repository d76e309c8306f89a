"""torch as the user has it: looked up, never imported, never initialised, every private name guarded."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

#: Key of a storage: device, address. A storage that several tensors view has one key.
StorageKey = Tuple[str, int]


class Seen(NamedTuple):
    """What a tensor uses: its storage, the bytes of the whole storage, and the device type."""

    key: StorageKey
    nbytes: int
    device: str

    @property
    def on_gpu(self) -> bool:
        return self.device.split(":")[0] not in ("cpu", "meta")


def module() -> Optional[Any]:
    """The user's torch, or None. A torch whose import failed half-way counts as none: `state` tells which it is."""
    found = sys.modules.get("torch")
    return found if found is not None and isinstance(getattr(found, "Tensor", None), type) else None


def state() -> str:
    """`ready`, `broken` (an import of torch failed half-way) or `absent`."""
    if module() is not None:
        return "ready"
    if "torch" in sys.modules or any(name.startswith("torch.") for name in list(sys.modules)):
        return "broken"
    return "absent"


def why_not() -> str:
    """One line for a table where there is no torch to look at."""
    if state() == "broken":
        return "torch is only partly imported: its import failed in this process; restart the kernel after mending the environment"
    return "torch is not imported: nothing of it can hold memory"


def dig(root: Any, dotted: str) -> Optional[Any]:
    """`root.a.b.c`, or None where a part is missing: torch's private names come and go between releases."""
    for name in dotted.split("."):
        try:
            root = getattr(root, name)
        except Exception:  # torch raises all sorts from lazy modules
            return None
    return root


def subclasses(base: type) -> Set[type]:
    """`base` and every class below it that is alive."""
    found: Set[type] = set()
    todo = [base]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo.extend(type.__subclasses__(one))
    return found


def tensor_classes(torch: Any) -> Set[type]:
    return subclasses(torch.Tensor)


def known_classes(torch: Any, dotted: str) -> Set[type]:
    base = dig(torch, dotted)
    return subclasses(base) if isinstance(base, type) else set()


def _plain() -> Any:
    """A context in which `__torch_function__` of subclasses is not called, where torch has one."""
    make = dig(module(), "_C.DisableTorchFunctionSubclass")
    return make() if callable(make) else contextlib.nullcontext()


def part(tensor: Any, name: str) -> Any:
    """An attribute or a method as `torch.Tensor` has it, whatever a subclass makes of it; None if it cannot be had."""
    try:
        with _plain():
            found = getattr(module().Tensor, name, None)
            if found is not None:
                return found.__get__(tensor, type(tensor))
            return object.__getattribute__(tensor, name)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None


def seen(tensor: Any) -> Optional[Seen]:
    """The storage behind `tensor`; None for those that have none (meta, fake and wrapper tensors)."""
    try:
        with _plain():
            device = str(part(tensor, "device"))
            if device.startswith("meta"):
                return None
            storage = part(tensor, "untyped_storage" if hasattr(module().Tensor, "untyped_storage") else "storage")()
            nbytes = storage.nbytes()
            pointer = storage.data_ptr()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
    if not isinstance(nbytes, int) or not isinstance(pointer, int) or nbytes == 0 or pointer == 0:
        return None
    return Seen((device, pointer), nbytes, device)


def describe(tensor: Any) -> str:
    """Shape and type in few words: `(64, 3, 7, 7) float32 cuda:0`."""
    try:
        shape = tuple(int(size) for size in part(tensor, "shape"))
        return f"{shape} {str(part(tensor, 'dtype')).replace('torch.', '')} {part(tensor, 'device')}"
    except Exception:
        return "a tensor"


def cuda_ready(torch: Any) -> bool:
    """Whether this process has used CUDA already. Asking anything else of `torch.cuda` could start it."""
    check = dig(torch, "cuda.is_initialized")
    try:
        return bool(check and check())
    except Exception:
        return False


class Books(NamedTuple):
    """The allocator's own figures for one device, in bytes. `used` and `total` are the driver's, over all processes."""

    device: int
    allocated: int
    reserved: int
    peak: int
    used: Optional[int]
    total: Optional[int]


def books(torch: Any) -> List[Books]:
    """One entry a device that this process has memory on; the current device always."""
    if torch is None or not cuda_ready(torch):
        return []
    found = []
    cuda = torch.cuda
    try:
        count, current = cuda.device_count(), cuda.current_device()
    except Exception:
        return []
    for device in range(count):
        try:
            reserved = int(cuda.memory_reserved(device))
            allocated = int(cuda.memory_allocated(device))
            peak = int(cuda.max_memory_allocated(device))
        except Exception:
            continue
        if device != current and reserved == 0:
            continue
        used = total = None
        # mem_get_info makes a context on a device that has none: only where there is memory already, or on the current one.
        ask = dig(cuda, "mem_get_info")
        if ask is not None:
            try:
                free, total = (int(value) for value in ask(device))
                used = total - free
            except Exception:
                used = total = None
        found.append(Books(device, allocated, reserved, peak, used, total))
    return found


def allocated(torch: Any) -> int:
    return sum(one.allocated for one in books(torch))


def reset_peaks(torch: Any) -> None:
    for one in books(torch):
        reset = dig(torch, "cuda.reset_peak_memory_stats")
        if reset is not None:
            try:
                reset(one.device)
            except Exception:
                pass


def segments(torch: Any) -> List[Dict[str, Any]]:
    """The allocator's segments, or nothing where this torch cannot list them."""
    ask = dig(torch, "cuda.memory_snapshot")
    if ask is None or not cuda_ready(torch):
        return []
    try:
        return list(ask())
    except Exception:
        return []


def graph_pool_bytes(torch: Any) -> int:
    """Bytes allocated in private pools (CUDA graphs, MemPool)."""
    total = 0
    for segment in segments(torch):
        try:
            if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
                total += int(segment.get("allocated_size", 0))
        except (AttributeError, TypeError, ValueError):  # another layout than any known
            continue
    return total


def active_blocks(torch: Any) -> List[Tuple[int, int]]:
    """Address and size of every block that is handed out."""
    found = []
    for segment in segments(torch):
        try:
            address = int(segment.get("address", 0))
            for block in segment.get("blocks", []):
                if block.get("state") == "active_allocated":
                    found.append((int(block.get("address", address)), int(block.get("size", 0))))
                address += int(block.get("size", 0))
        except (AttributeError, TypeError, ValueError):  # another layout than any known
            continue
    return found


def cublas_workspace_size(config: Optional[str]) -> Optional[int]:
    """Bytes of one workspace for a CUBLAS_WORKSPACE_CONFIG of the form `:KiB:COUNT[:KiB:COUNT…]`."""
    if not config:
        return None
    parts = [part for part in config.split(":") if part]
    if not parts or len(parts) % 2 or not all(part.isdigit() for part in parts):
        return None
    return sum(int(size) * 1024 * int(count) for size, count in zip(parts[::2], parts[1::2]))


#: Sizes of the workspace that torch gives to cuBLAS: 4096 KiB x 2 + 16 KiB x 8 up to Ampere, 32 MiB on Hopper, 12 MiB on Blackwell
#: (getChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp).
CUBLAS_DEFAULTS = (2 * 4096 * 1024 + 8 * 16 * 1024, 32 * 1024 * 1024, 12 * 1024 * 1024)


def saved(node: Any) -> Iterable[Any]:
    """The tensors that a node of the autograd graph keeps for the backward pass; none once they have been freed."""
    for name in dir(type(node)):
        if not (name.startswith("_saved_") or name == "saved_tensors" or name == "variable"):
            continue
        try:
            value = getattr(node, name)
        except Exception:  # freed by a backward pass
            continue
        if isinstance(value, (tuple, list)):
            for one in value:
                yield one
        else:
            yield value


def next_nodes(node: Any) -> List[Any]:
    try:
        return [pair[0] for pair in node.next_functions if pair and pair[0] is not None]
    except Exception:
        return []


def clear_caches(torch: Any, dry_run: bool = False) -> List[Tuple[str, str]]:
    """Empties what torch keeps on its own account. Returns (what, `cleared` | `would clear` | the error) for those this torch has."""
    if torch is None:
        return []
    steps: List[Tuple[str, Any]] = []

    def step(what: str, dotted: str, root: Any = torch) -> None:
        call = dig(root, dotted)
        if callable(call):
            steps.append((what, call))

    step("autocast cache", "clear_autocast_cache")
    # Looked up in sys.modules: torch loads dynamo when it is asked for, and that takes seconds and memory.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        step("dynamo cache", "reset", dynamo)
    if cuda_ready(torch):
        step("cuBLAS workspaces", "_C._cuda_clearCublasWorkspaces")
        plans = dig(torch, "backends.cuda.cufft_plan_cache")
        if plans is not None:
            def clear_plans() -> None:
                for one in books(torch):
                    try:
                        plans[one.device].clear()
                    except TypeError:
                        plans.clear()
            steps.append(("cuFFT plans", clear_plans))
        step("cached segments", "cuda.empty_cache")
        step("IPC handles", "cuda.ipc_collect")
        step("pinned host memory", "_C._host_emptyCache")
    mps = dig(torch, "mps.empty_cache")
    if mps is not None and "torch.mps" in sys.modules and dig(torch, "backends.mps.is_available") is not None:
        try:
            if torch.backends.mps.is_available():
                steps.append(("cached segments (mps)", mps))
        except Exception:
            pass
    done = []
    for what, call in steps:
        if dry_run:
            done.append((what, "would clear"))
            continue
        try:
            call()
            done.append((what, "cleared"))
        except Exception as error:  # a cache that cannot be emptied must not keep the others from it
            done.append((what, f"{type(error).__name__}: {error}"))
    return done
