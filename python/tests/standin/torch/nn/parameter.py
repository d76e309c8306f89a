from .. import Tensor, float32


class Parameter(Tensor):
    def __init__(self, shape, dtype=float32, device="cpu"):
        super().__init__(shape, dtype, device, requires_grad=True)

    # As in torch: equality by identity, so that optimizers can key on it.
    __hash__ = object.__hash__
