"""A stand-in for torch: tensors without data, on books that are kept as the real allocator keeps them.

Only what a notebook helper can see is here: types, references, the allocator's figures. Shapes are right, numbers are not computed.
"""

import ctypes

from . import _books

__version__ = "2.9.0+standin"


class dtype:
    def __init__(self, name, itemsize):
        self.name, self.itemsize = name, itemsize

    def __repr__(self):
        return f"torch.{self.name}"


float32, float16, int64 = dtype("float32", 4), dtype("float16", 2), dtype("int64", 8)


class UntypedStorage:
    def __init__(self, nbytes, device):
        self._nbytes, self.device = nbytes, device
        if device.startswith("cuda"):
            cuda._start()
            self._address = _books.DEVICE.malloc(nbytes)
        else:
            self._address = _books.HOST["next"]
            _books.HOST["next"] += nbytes + 4096
            _books.HOST["live"] += nbytes

    def nbytes(self):
        return self._nbytes

    def data_ptr(self):
        return self._address

    def __del__(self, _books=_books):
        address = getattr(self, "_address", None)
        if address is None:
            return
        if self.device.startswith("cuda"):
            _books.DEVICE.free(address)
        else:
            _books.HOST["live"] -= self._nbytes


class Node:
    """A step of the autograd graph; what it saved is out of the collector's sight, as in C++."""

    def __init__(self, name, parents, saved=()):
        self._name = name
        self.next_functions = tuple((parent, 0) for parent in parents if parent is not None)
        self._keep = _Hidden(saved)

    @property
    def _saved_self(self):
        value = self._keep.get()
        if value is None:
            raise RuntimeError("Trying to backward through the graph a second time")
        return value

    def release(self):
        self._keep.set(())


class _Hidden:
    """Keeps objects where `gc` does not look: a number stands for them."""

    store = {}

    def __init__(self, values):
        self.key = id(self)
        self.set(values)

    def set(self, values):
        if values:
            _vault.put(self.key, values)
        else:
            _vault.drop(self.key)

    def get(self):
        return _vault.get(self.key)

    def __del__(self):
        _vault.drop(self.key)


class _Vault:
    # A reference count and an address: what is meant is out of the collector's sight, as if C++ held it.
    def __init__(self):
        self.cells = {}

    def put(self, key, values):
        for value in values:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        self.cells[key] = [id(value) for value in values]

    def get(self, key):
        cells = self.cells.get(key)
        return tuple(ctypes.cast(cell, ctypes.py_object).value for cell in cells) if cells else None

    def drop(self, key):
        for cell in self.cells.pop(key, ()):
            ctypes.pythonapi.Py_DecRef(ctypes.cast(cell, ctypes.py_object))


_vault = _Vault()


class Tensor:
    def __init__(self, shape, dtype=float32, device="cpu", requires_grad=False, _storage=None, _grad_fn=None):
        self.shape, self.dtype, self.requires_grad = tuple(shape), dtype, requires_grad
        count = dtype.itemsize
        for size in self.shape:
            count *= size
        self._storage = _storage if _storage is not None else UntypedStorage(count, "cuda:0" if device == "cuda" else device)
        self.grad_fn, self.grad, self._backward_hooks = _grad_fn, None, None
        self._view_of = None

    @property
    def _base(self):
        return self._view_of.get()[0] if self._view_of is not None else None

    @property
    def device(self):
        return self._storage.device

    @property
    def is_cuda(self):
        return self.device.startswith("cuda")

    @property
    def is_leaf(self):
        return self.grad_fn is None

    def untyped_storage(self):
        return self._storage

    def numel(self):
        return self._storage.nbytes() // self.dtype.itemsize

    def view(self, *shape):
        view = Tensor(shape, self.dtype, _storage=self._storage, _grad_fn=self.grad_fn)
        view._view_of = _Hidden((self._base or self,))
        return view

    def detach(self):
        return Tensor(self.shape, self.dtype, _storage=self._storage)

    def to(self, device):
        return self if self.device == ("cuda:0" if device == "cuda" else device) else type(self)._like(self, device)

    @classmethod
    def _like(cls, other, device):
        return Tensor(other.shape, other.dtype, device, other.requires_grad)

    def register_hook(self, hook):
        from .utils.hooks import RemovableHandle

        if self._backward_hooks is None:
            self._backward_hooks = {}
        handle = RemovableHandle(self._backward_hooks)
        self._backward_hooks[handle.id] = hook
        return handle

    def sum(self):
        node = Node("SumBackward0", [self.grad_fn], ()) if self.grad_fn is not None else None
        return Tensor((), self.dtype, self.device, _grad_fn=node)

    def backward(self):
        todo, leaves, seen = [self.grad_fn], [], set()
        while todo:
            node = todo.pop()
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            leaves += getattr(node, "_leaves", ())
            node.release()
            todo += [parent for parent, _ in node.next_functions]
        for leaf in leaves:
            if leaf.grad is None:
                leaf.grad = Tensor(leaf.shape, leaf.dtype, leaf.device)

    def __repr__(self):
        return f"tensor(shape={self.shape}, device='{self.device}')"


def _make(*shape, dtype=float32, device="cpu", requires_grad=False):
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    return Tensor(shape, dtype, device, requires_grad)


zeros = ones = empty = randn = rand = _make


def matmul(left, right):
    if left.is_cuda:
        cuda._first_product()
    node = None
    if left.requires_grad or right.requires_grad or left.grad_fn is not None:
        node = Node("MmBackward0", [left.grad_fn, right.grad_fn], (left,))
        node._leaves = [right] if right.requires_grad else []
    return Tensor(left.shape[:-1] + right.shape[-1:], left.dtype, left.device, _grad_fn=node)


_autocast = []


def clear_autocast_cache():
    _autocast.clear()


from . import _C, backends, cuda, nn, optim, utils, version  # noqa: E402
