from . import data, hooks
