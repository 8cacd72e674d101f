"""`why_not` refuses what `packed_attention` refuses, with the same sentence, and nothing else."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention import api
from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.backends import flex_fa4, registry
from flexvarlen.attention.backends.cu_seqlens import fa3
from flexvarlen.attention.backends.registry import BACKENDS, get_backend, refusal
from flexvarlen.attention.call import AttentionCall
from tests.pairwise import pairwise

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
MASKS = (
    {},
    {"causal": False},
    {"window": 3},
    {"chunk": 4},
    {"softcap": 5.0},
    {"prefix": 2},
    {"deterministic": True},
    {"batch_invariant": True},
    {"return_lse": True},
)
LENGTHS = ((1,), (8,), (3, 5))
ALIGN = ("bottom_right", "top_left")
KEYS = ("none", "the same object", "an equal layout", "another layout")


def disagreement(name, device, dtype, needs_grad, lengths, keys, align, options):
    layout = fv.PackedLayout.from_lengths(lengths, device=device)
    longer = [n + 1 for n in lengths] if keys == KEYS[3] else lengths
    another = fv.PackedLayout.from_lengths(longer, device=device)
    layout_k = {KEYS[0]: None, KEYS[1]: layout}.get(keys, another)
    tokens_k = layout.total_tokens if layout_k is None else layout_k.total_tokens
    q, k, v = (
        torch.randn(n, heads, 64, device=device, dtype=dtype, requires_grad=needs_grad)
        for n, heads in ((layout.total_tokens, 4), (tokens_k, 2), (tokens_k, 2))
    )
    asked = {name: True if name == "prefix" else value for name, value in options.items()}
    reason = fv.why_not(
        name,
        device=device,
        dtype=dtype,
        needs_grad=needs_grad,
        cross=layout_k is not None,
        align=align,
        **HEADS,
        **asked,
    )
    raised = None
    try:
        out = fv.packed_attention(
            q, k, v, layout, layout_k=layout_k, align=align, backend=name, **options
        )
        if needs_grad:
            out = out[0] if isinstance(out, tuple) else out
            torch.autograd.grad(out.sum(), (q, k, v))
    except NotImplementedError as error:
        raised = str(error)
    return None if raised == reason else (options, lengths, keys, align, reason, raised)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x == "flex" else x for x in BACKENDS]
)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_refused_and_run(name, device, dtype, needs_grad):
    """fa3 with align="top_left" on the layout itself ran, and why_not refused it."""
    if name in ("flex", "flex_fa4"):
        lengths, keys = LENGTHS[1:2], KEYS[:2]  # each shape is compiled
    else:
        lengths, keys = LENGTHS, KEYS
    cases = product(lengths, keys, ALIGN, MASKS)
    found = [disagreement(name, device, dtype, needs_grad, *case) for case in cases]
    assert [x for x in found if x is not None] == []


FORMS = ("plain", "cross", "tree")
WINDOWS = (None, 1, 3, (2, 0), (2, 2), (-1, 2), (-1, -1), 2**31)
OPTIONS = (
    {},
    {"softcap": 5.0},
    {"return_lse": True},
    {"deterministic": True},
    {"batch_invariant": True},
)
FACTORS = {
    "form, causal, prefix, align": [*product(FORMS, (True, False), (None, 2), ALIGN)],
    "window, chunk": [*product(WINDOWS, (None, 4))],
    "options, needs_grad": [*product(OPTIONS, (True, False))],
}


class Chosen(Exception):
    """Instead of a kernel."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_why_not_equals_the_call(monkeypatch, request, name, dtype):
    """As of a GPU with every package: what a call asks its backend, why_not asks too."""
    backend = get_backend(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flex_fa4, "package_refusal", lambda *_: None)
    monkeypatch.setattr(fa3, "_built_with_softcap", lambda *_: True)
    for asks_the_package in ("why_missing", "why_lacking"):
        monkeypatch.setattr(type(backend), asks_the_package, lambda *_: None, raising=False)

    def chosen(of, call, mask):
        raise Chosen(of, call)

    asked = []

    def asking(of, call):
        asked.append(call._replace(device=cuda))
        return refusal(of, call)

    monkeypatch.setattr(api, "choose", chosen)
    monkeypatch.setattr(registry, "refusal", asking)
    cuda = torch.device("cuda")
    plain = fv.PackedLayout.from_lengths([3, 5])
    tree = fv.PackedLayout.from_tree([4, 2, 2], [-1, 0, 0])
    layouts = {"plain": (plain, None), "cross": (plain, plain), "tree": (tree, None)}
    whole = request.config.getoption("--all-forms")
    served = 0
    for case in product(*FACTORS.values()) if whole else pairwise(FACTORS):
        (form, causal, prefix, align), (window, chunk), (options, needs_grad) = case
        (layout, layout_k), mask = layouts[form], {"window": window, "chunk": chunk}
        mask |= {"causal": causal, "align": align} | options
        q, k = (torch.randn(8, h, 64, dtype=dtype, requires_grad=needs_grad) for h in (4, 2))
        kind = HEADS | mask | {"device": cuda, "dtype": dtype, "prefix": prefix is not None}
        kind |= {"cross": layout_k is not None, "tree": form == "tree", "needs_grad": needs_grad}
        asked.clear()
        answers = (
            answer(why_not_of, q, k, layout, layout_k, name, cuda, prefix=prefix, **mask),
            answer(fv.why_not, name, **kind),
        )
        assert answers[0] == answers[1], case
        assert len(set(asked)) == len(asked) / 2, (case, asked)
        served += answers[0] is None
    assert served > 0 or dtype == torch.float32


def answer(ask, *args, **options):
    """What `ask` returns, or the sentence that it raises."""
    try:
        return ask(*args, **options)
    except (ValueError, NotImplementedError) as error:
        return str(error)


def why_not_of(q, k, layout, layout_k, name, device, **options):
    """What the backend answers to the call that packed_attention asks it about."""
    try:
        fv.packed_attention(q, k, k, layout, layout_k=layout_k, backend=name, **options)
    except Chosen as caught:
        _, call = caught.args
        return registry.refusal(name, call._replace(device=device))


@pytest.mark.parametrize(
    "bad", [{"softcap": 0.0}, {"softcap": float("nan")}, {"num_kv_heads": 3}, {"num_kv_heads": 0}]
)
def test_what_the_call_refuses_as_wrong(bad):
    """Without these checks, why_not would say that it runs, and explain would name a backend."""
    layout, wrong = fv.PackedLayout.from_lengths([3]), HEADS | bad
    sentence = "softcap must be above 0|a multiple of num_kv_heads"
    with pytest.raises(ValueError, match=sentence):
        fv.why_not("reference", **wrong)
    with pytest.raises(ValueError, match=sentence):
        fv.explain(layout, dtype=torch.float32, **wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["varlen", "nested", "cudnn"])
def test_wrong_past_32_bit_offsets(name):
    """With 2.3e9 elements of q, varlen's dq was off by 69% in the last documents, nested crashed,
    and cudnn's outputs were off by 140% and more."""
    tokens, documents = 1_114_112, 272
    layout = fv.PackedLayout.from_lengths([tokens // documents] * documents, device="cuda")
    q, k = (torch.zeros(tokens, h, 128, device="cuda", dtype=torch.bfloat16) for h in (16, 8))
    q.requires_grad_(name != "cudnn")
    call = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": q.dtype}
    call["needs_grad"] = q.requires_grad
    reason = fv.why_not(name, device="cuda", total_tokens=tokens, **call)
    assert "2**31 elements" in reason
    with pytest.raises(NotImplementedError, match=r"2\*\*31 elements"):
        fv.packed_attention(q, k, k, layout, backend=name)
    kind = {"needs_grad": q.requires_grad, "past_int32": True}
    request = AttentionCall(q.device, q.dtype, 16, 8, 128, **kind)
    assert name not in auto.candidates(request)
    assert fv.why_not(name, device="cuda", total_tokens=tokens // 2, **call) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa3", "fa2", "fa4", "flex"])
def test_gradients_of_the_last_document_past_32_bit_offsets(name):
    if (reason := fv.why_not(name, device="cuda", dtype=torch.bfloat16, head_dim=128)) is not None:
        pytest.skip(reason)
    length = 4096
    tokens = 272 * length
    layout = fv.PackedLayout.from_lengths([length] * 272, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(tokens, h, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for h in (16, 8, 8, 16)
    )
    last = [x[-length:].double().requires_grad_() for x in (q, k, v)]
    alone = fv.PackedLayout.from_lengths([length], device="cuda")
    out = fv.packed_attention(*last, alone, backend="reference")
    expected = torch.autograd.grad(out, last, grad[-length:].double())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(fv.packed_attention(*leaves, layout, backend=name), leaves, grad)
    for x, y in zip(found, expected, strict=True):
        assert (x[-length:].double() - y).norm() < 0.02 * y.norm()  # 0.003 on an H200; the bug 0.69
