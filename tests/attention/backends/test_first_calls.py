"""A kernel that must be checked before its first use: where that call is, and on which machine."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexvarlen as fv
from flexvarlen.attention import choose
from flexvarlen.attention.auto import decide
from flexvarlen.attention.backends import registry
from tests.attention.backends.hub_repositories import results, tensors
from tests.planted import plant


@pytest.fixture
def untried(monkeypatch, tmp_path):
    """A machine that nobody of this project has run any backend on."""
    monkeypatch.setenv("FLEXVARLEN_CACHE", str(tmp_path))
    monkeypatch.setattr(registry.machines, "is_tried", lambda name, device: name == "reference")
    choose.clear_cache()
    yield
    choose.clear_cache()


def row():
    layout = fv.PackedLayout.from_lengths([5, 1, 9], total_tokens=18)
    return layout, tensors(layout)


def reentrant(backend):
    """Forward without gradients, and backward: there the first call with gradients is made."""
    layout, leaves = row()

    def attend(q, k, v):
        return fv.packed_attention(q, k, v, layout, backend=backend)

    out = checkpoint(attend, *leaves, use_reentrant=True)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def test_a_pass_on_disk_counts_in_a_backward(local_kernels):
    local_kernels("fa2")
    results("fa2", *row())
    choose.clear_cache()  # another process
    found, expected = reentrant("fa2"), reentrant("reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_no_choice_is_kept_while_a_kernel_waits_for_its_check(local_kernels, monkeypatch):
    """`auto` took the next one for all of the process."""
    monkeypatch.setitem(registry.AUTO_ORDER, "cpu", ("fa3", "sdpa"))
    local_kernels("fa3")
    reentrant("auto")
    layout, leaves = row()
    fv.packed_attention(*leaves, layout)
    taken = {key[1].needs_grad: x.backend for key, x in choose._choices.items() if key[0] == "auto"}
    assert taken == {False: "fa3", True: "fa3"}


def test_a_check_that_could_not_be_made_is_made_later(untried, monkeypatch):
    compared = []
    monkeypatch.setattr(
        decide, "compare_with_reference", lambda name, call, mask: compared.append(call.needs_grad)
    )
    reentrant("sdpa")
    layout, leaves = row()
    fv.packed_attention(*leaves, layout, backend="sdpa").sum().backward()
    assert compared == [False, True]


@pytest.mark.parametrize("right", [True, False])
def test_a_named_backend_is_checked_where_nobody_tried_it(untried, monkeypatch, right):
    """A wrong kernel of such a machine would have trained; float64 has no tolerance of its own."""
    factor = 1 if right else 1.5
    plant(monkeypatch, lambda attend, *args: (attend(*args)[0] * factor, None))
    wrong = pytest.raises(NotImplementedError, match=r"sdpa fails the check .*its output")
    layout, leaves = row()
    for dtype in (torch.float32, torch.float64):
        with nullcontext() if right else wrong:
            results("sdpa", layout, [x.to(dtype) for x in leaves])
    assert len(decide._right if right else decide._failed) == 2
    results("reference", layout, leaves)


@pytest.mark.parametrize("backend", [pytest.param("flex", marks=pytest.mark.slow), "sdpa"])
def test_an_empty_row_is_no_reason_against_a_kernel(untried, backend):
    q = torch.zeros(0, 2, 16)
    assert (
        fv.packed_attention(q, q, q, fv.PackedLayout.from_lengths([0]), backend=backend).numel()
        == 0
    )
    layout, (q, k, v) = row()
    with torch.no_grad():
        assert fv.packed_attention(q, k, v, layout, backend=backend).isfinite().all()


def test_a_machine_without_float64(untried, monkeypatch):
    """As MPS. The check's own arithmetic must run there."""
    on_device = torch.Tensor.to

    def without_float64(x, *args, **kwargs):
        if torch.float64 in (*args, kwargs.get("dtype")):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return on_device(x, *args, **kwargs)

    monkeypatch.setattr("flexvarlen.attention.auto.check_results._HAVE_FLOAT64", ())
    monkeypatch.setattr(torch.Tensor, "to", without_float64)
    layout, leaves = row()
    for backend in ("sdpa", "auto"):
        fv.packed_attention(*leaves, layout, backend=backend)
    assert {key.partition(";")[0] for key in decide._right}
