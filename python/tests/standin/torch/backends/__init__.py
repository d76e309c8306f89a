class _Plans(list):
    cleared = 0

    def __getitem__(self, device):
        return self

    def clear(self):
        _Plans.cleared += 1
        super().clear()


class cuda:
    cufft_plan_cache = _Plans()
