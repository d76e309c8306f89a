import weakref


class RemovableHandle:
    _next = 0

    def __init__(self, where):
        self.where, self.id = weakref.ref(where) if hasattr(where, "__weakref__") else (lambda: where), RemovableHandle._next
        RemovableHandle._next += 1

    def remove(self):
        found = self.where()
        if found is not None:
            found.pop(self.id, None)
