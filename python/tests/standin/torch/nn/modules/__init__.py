from .module import Linear, Module, ModuleList, Sequential
