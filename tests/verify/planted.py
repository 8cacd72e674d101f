"""Bugs for `tests.planted.plant`, and small inputs, for the tests of what compares backends."""

from __future__ import annotations

import torch

import flexvarlen as fv
from flexvarlen.verify.experiment.batch import PackedBatch

# With a document of one token, which MKL multiplies by a kernel of its own.
LENGTHS = (30, 1, 17, 40, 8)
TOKENS = sum(LENGTHS)


def new_batch(lengths=LENGTHS, vocabulary=1024):
    generator = torch.Generator().manual_seed(0)
    return PackedBatch(torch.randint(vocabulary, (1, sum(lengths)), generator=generator), lengths)


PROMPT = list(range(3, 23))
SAMPLES = [[*PROMPT, 50, 51, 52], [*PROMPT, 50, 61], [*PROMPT, *range(70, 90)], [90, 91, 92]]
SAMPLES += [SAMPLES[1]]
"""Three answers to a prompt, two of them alike at first; another prompt; a twin."""


def trees():
    return fv.share_prefixes(SAMPLES, total_tokens=80).batch()


def wrong_scale(attend, q, *rest):
    return attend(1.5 * q, *rest)


def leak(attend, q, k, v, *rest):
    out, lse = attend(q, k, v, *rest)
    return out + v[:1].mean(), lse


def nan(attend, *args):
    out, lse = attend(*args)
    return out * float("nan"), lse


def larger_gradient(attend, q, k, *rest):
    return attend(q, k + (k - k.detach()) * 1e-3, *rest)  # the same value


class KernelError(Exception):
    """As some kernel packages have: no RuntimeError."""


def raising(error):
    def change(*args, **options):
        raise error

    return change
