"""How often each operator is called."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function] += 1
        return function(*args, **(kwargs or {}))
