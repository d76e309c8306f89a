from .modules import Linear, Module, ModuleList, Sequential
from .parameter import Parameter
