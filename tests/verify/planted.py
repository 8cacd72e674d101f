"""Bugs planted in the `reference` backend, and small inputs, for the tests of drift."""

from __future__ import annotations

import torch

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.verify.experiment.batch import PackedBatch

# With a document of one token, which MKL multiplies by a kernel of its own.
LENGTHS = (30, 1, 17, 40, 8)
TOKENS = sum(LENGTHS)


def new_batch(lengths=LENGTHS, vocabulary=1024):
    generator = torch.Generator().manual_seed(0)
    return PackedBatch(torch.randint(vocabulary, (1, sum(lengths)), generator=generator), lengths)


def plant(monkeypatch, change):
    """Replace `reference`'s attention: `change(attend, plan, call)`, where `attend(plan, call)`."""
    real = ReferenceBackend.attend

    def planted(self, q, k, v, sinks, call, mask, plan):
        def attend(plan, call):
            return real(self, q, k, v, sinks, call, mask, plan)

        return change(attend, plan, call)

    monkeypatch.setattr(ReferenceBackend, "attend", planted)


def wrong_scale(attend, plan, call):
    return attend(plan, call._replace(scale=1.5 * call.scale))


def leak(attend, plan, call):
    return attend(torch.ones_like(plan).tril(), call)


def nan(attend, plan, call):
    out, lse = attend(plan, call)
    return out * float("nan"), lse


class KernelError(Exception):
    """As some kernel packages have: no RuntimeError."""


def raising(error):
    def change(attend, plan, call):
        raise error

    return change
