from .. import Tensor


class Optimizer:
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]
        self.state = {}

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class Adam(Optimizer):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter not in self.state:
                self.state[parameter] = {
                    name: Tensor(parameter.shape, parameter.dtype, parameter.device) for name in ("exp_avg", "exp_avg_sq")
                }


class SGD(Optimizer):
    def step(self):
        pass
