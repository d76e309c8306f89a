from collections import OrderedDict

from ... import matmul
from ...utils.hooks import RemovableHandle
from ..parameter import Parameter

_global_forward_hooks = OrderedDict()  # of all modules


class Module:
    def __init__(self):
        for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            self.__dict__[name] = OrderedDict() if "hooks" in name else {}

    def __setattr__(self, name, value):
        if isinstance(value, Parameter):
            self._parameters[name] = value
        elif isinstance(value, Module):
            self._modules[name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name):
        for part in ("_parameters", "_buffers", "_modules"):
            found = self.__dict__.get(part, {})
            if name in found:
                return found[name]
        raise AttributeError(name)

    def register_buffer(self, name, tensor):
        self._buffers[name] = tensor

    def parameters(self):
        yield from self._parameters.values()
        for module in self._modules.values():
            yield from module.parameters()

    def _register(self, where, hook):
        handle = RemovableHandle(where)
        where[handle.id] = hook
        return handle

    def register_forward_hook(self, hook):
        return self._register(self._forward_hooks, hook)

    def register_forward_pre_hook(self, hook):
        return self._register(self._forward_pre_hooks, hook)

    def register_full_backward_hook(self, hook):
        return self._register(self._backward_hooks, hook)

    def __call__(self, *inputs):
        output = self.forward(*inputs)
        for hook in list(_global_forward_hooks.values()) + list(self._forward_hooks.values()):
            hook(self, inputs, output)
        return output

    def to(self, device):
        for name, value in list(self._parameters.items()):
            if value.device != device:
                self._parameters[name] = Parameter(value.shape, value.dtype, device)
        for module in self._modules.values():
            module.to(device)
        return self


class Linear(Module):
    def __init__(self, inputs, outputs, bias=True, device="cpu"):
        super().__init__()
        self.weight = Parameter((inputs, outputs), device=device)

    def forward(self, value):
        return matmul(value, self.weight)


class Sequential(Module):
    def __init__(self, *modules):
        super().__init__()
        for index, module in enumerate(modules):
            self._modules[str(index)] = module

    def __getitem__(self, index):
        return self._modules[str(index)]

    def forward(self, value):
        for module in self._modules.values():
            value = module(value)
        return value


class ModuleList(Sequential):
    pass
