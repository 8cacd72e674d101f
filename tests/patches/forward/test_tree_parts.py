"""A tree in parts gives the loss and the gradients of its samples one by one."""

from __future__ import annotations

import copy
import warnings
from functools import cache

import pytest
import torch

import flexvarlen as fv
from flexvarlen.reference.model import Float64, float64_model
from flexvarlen.reference.recurrences import plain_recurrences
from flexvarlen.trees.plan import plan_parts, segments_of
from tests.backends import skip_if_refused
from tests.contract_oracle import gradients_of
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.patches.forward.test_trees import samples
from tests.slow import with_slow
from tests.tiny_models import VOCABULARY, lora, new_model, shared_model, texts_alone

FAMILIES = (
    "llama",
    "qwen3_windows",
    "gemma2",
    "gpt_oss",
    "llama4_text",
    "deepseek_v3",
    "qwen3_moe",
    "ministral3",
    "qwen3_5_text",
    "kimi_linear",
    "granitemoehybrid",
    "lfm2",
    "mamba2",
)
"""Windows, chunks, soft caps, sinks, layers without RoPE, latent attention, experts, positions, and
the convolutions and scans."""
BUDGETS = (1000, 60, 25, 7, 1)
IN_ALL_BUDGETS = ("qwen3_windows", "lfm2")


@cache
def alone(family):
    """Loss and gradients of the samples one by one, all of it in float64."""
    plain = float64_model(shared_model(family))
    with Float64():
        return texts_alone(plain, [(torch.tensor(text), 0) for text in samples()])


def new(family, backend=None, dtype=torch.float64, **changes):
    model = new_model(family, **changes)
    model = float64_model(model).train() if dtype == torch.float64 else model.train()
    return model if backend is None else fv.patch_model(model, backend)


def in_parts(model, shared, max_tokens):
    """Loss, gradients and the number of parts."""
    model.zero_grad()
    losses = []
    for part in shared.parts(model, max_tokens):
        loss = model(**part).loss
        loss.backward()
        losses.append(loss.detach())
    return sum(losses), gradients_of(model), len(losses)


def assert_equal(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        norm = float(expected[name].norm())
        assert float((gradient - expected[name]).norm()) <= tolerance * norm, name


@pytest.mark.parametrize(
    ("family", "max_tokens"),
    [
        pytest.param(
            family,
            budget,
            marks=[pytest.mark.slow]
            * (budget == 1 or (budget != 25 and family not in IN_ALL_BUDGETS)),
        )
        for family in FAMILIES
        for budget in BUDGETS
    ],
)
def test_each_sample_alone(family, max_tokens):
    shared = fv.share_prefixes(samples())
    with Float64():
        loss, gradients, parts = in_parts(new(family, "reference"), shared, max_tokens)
    assert parts >= shared.layout.total_tokens / max_tokens
    tolerance = 1e-6 if family == "llama4_text" else 1e-12  # it scales queries in float32
    torch.testing.assert_close(loss, alone(family).loss.detach(), atol=0, rtol=tolerance)
    assert_equal(gradients, alone(family).gradients, tolerance)


@pytest.mark.parametrize("max_tokens", [25, 4])
@pytest.mark.parametrize("window", with_slow([1, 2, 6, 30], [1, 2, 30]))
def test_windows_shorter_and_longer_than_segments(window, max_tokens):
    """Of prompts cut into chains, and of a chain of short turns."""
    changes = {"sliding_window": window}
    turns = [[*samples()[0][:end], 1, 2] for end in (3, 5, 6, 11, 14, 20, 33)]
    for texts in (samples(), turns):
        with Float64():
            expected = texts_alone(
                new("qwen3_windows", **changes), [(torch.tensor(text), 0) for text in texts]
            )
            model = new("qwen3_windows", "reference", **changes)
            loss, gradients, _ = in_parts(model, fv.share_prefixes(texts), max_tokens)
        torch.testing.assert_close(loss, expected.loss.detach(), atol=0, rtol=1e-12)
        assert_equal(gradients, expected.gradients, 1e-12)


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document")
def test_states_in_the_order_of_levels():
    """A segment that goes on in other parts, after deeper ones of its own part."""
    prompt, branches = [5, 6, 7, 8, 9], ([10, 11], [20, 21, 22])
    ends = [[12, 13], [14, 15, 16]], [[x, *range(30, 52)] for x in (23, 24)]
    texts = [[*prompt, *b, *end] for b, each in zip(branches, ends, strict=True) for end in each]
    model, shared = new("mamba2", "sdpa"), fv.share_prefixes(texts)
    (part, *_) = plan_parts(*segments_of(shared.layout), 25).roots
    assert (part.segments, part.continued) == ((0, 1, 2, 3, 4), (0, 4))
    expected, found = in_parts(model, shared, 1000), in_parts(model, shared, 25)
    torch.testing.assert_close(found[0], expected[0], atol=0, rtol=1e-6)
    assert_equal(found[1], expected[1], 1e-6)


@pytest.mark.parametrize("family", ["qwen3_windows", "llama4_text"])
def test_sdpa(family):
    model, shared = new(family, "sdpa"), fv.share_prefixes(samples())
    loss, gradients, _ = in_parts(model, shared, 25)
    torch.testing.assert_close(loss, alone(family).loss.detach(), atol=0, rtol=1e-6)
    assert_equal(gradients, alone(family).gradients, 1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    model = new("qwen3_windows", "sdpa")
    expected = in_parts(model, fv.share_prefixes(samples()), 25)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss, gradients, _ = in_parts(model, fv.share_prefixes(samples()), 25)
    torch.testing.assert_close(loss, expected[0], atol=0, rtol=1e-12)
    assert_equal(gradients, expected[1], 1e-12)


def test_lora():
    pytest.importorskip("peft")
    model = lora(new("qwen3_windows"))
    fv.patch_model(model, "sdpa")
    shared = fv.share_prefixes(samples())
    expected = in_parts(model, shared, 1000)
    loss, gradients, _ = in_parts(model, shared, 25)
    torch.testing.assert_close(loss, expected[0], atol=0, rtol=1e-12)
    assert_equal(gradients, expected[1], 1e-12)


def test_under_autocast():
    model, shared = new("llama", "sdpa", torch.float32), fv.share_prefixes(samples())
    exact = in_parts(model, shared, 1000)[1]
    with torch.autocast("cpu", torch.bfloat16):
        whole = in_parts(model, shared, 1000)[1]
        found = in_parts(model, shared, 25)[1]
    for name, gradient in found.items():
        norm = exact[name].norm()
        allowed = 3 * (whole[name] - exact[name]).norm() + 1e-3 * norm
        assert (gradient - exact[name]).norm() <= allowed, name


def long_texts():
    """Prompts of several blocks and chunks, so that parts begin in the middle of one."""
    generator = torch.Generator().manual_seed(3)
    draws = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in (300, 90, 7, 200, 40)]
    prompt, *ends = draws
    texts = [torch.cat([prompt, *ends[:i], x]).tolist() for i, x in enumerate(ends) for _ in (0, 1)]
    return texts + [[*text[:-1], text[-2]] for text in texts[2:4]]


def assert_parts_as_accurate(model, plain, sizes=(256, 100)):
    """The logits and gradients of a patched model in bf16, next to those of the plain one."""
    texts = long_texts()
    given = [(torch.tensor(text), 0) for text in texts]
    with plain_recurrences(plain):
        baseline = texts_alone(plain, given)
        with Float64():
            exact = texts_alone(float64_model(plain), given)
    shared = fv.share_prefixes(texts, device="cuda")
    logits = baseline.logits.new_zeros(shared.layout.total_tokens, baseline.logits.shape[-1])
    for max_tokens in sizes:
        model.zero_grad()
        for part in shared.parts(model, max_tokens):
            out = model(**part)
            out.loss.backward()
            logits[part.tokens] = out.logits[0, : len(part.tokens)].detach()
        found = torch.cat(shared.unfold(logits))
        assert_as_accurate(found, exact.logits, baseline.logits, 2, "logits")
        gradients = {name.removeprefix("_orig_mod."): x for name, x in gradients_of(model).items()}
        assert_gradients_as_accurate(gradients, exact.gradients, baseline.gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3_windows"])
@pytest.mark.parametrize("backend", ["flex", "flex_fa4", "varlen", "fa2", "fa3", "fa4", "sdpa"])
@skip_if_refused
def test_kernels_in_bf16(backend, family):
    model = new_model(family, head_dim=64).to("cuda", torch.bfloat16).train()
    plain = new_model(family, head_dim=64).to("cuda", torch.bfloat16)
    assert_parts_as_accurate(fv.patch_model(model, backend), plain)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "mamba2", "lfm2"]
)
def test_scans_and_convolutions_in_bf16(family):
    """fla's kernels from the states above, and the gradients of these."""
    if family != "lfm2":
        pytest.importorskip("fla")
    plain = copy.deepcopy(shared_model(family, torch.bfloat16, "cuda", 64))
    plain.set_attn_implementation("eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "flexvarlen: recurrent layers run")
        assert_parts_as_accurate(fv.patch_model(copy.deepcopy(plain).train(), "auto"), plain)


def test_logits_without_gradients():
    """Each part runs once, and its tokens say where its logits belong."""
    model, shared = new("llama", "sdpa"), fv.share_prefixes(samples())
    with torch.no_grad():
        whole = model(**shared.batch()).logits[0]
        found = torch.full_like(whole, float("nan"))
        for part in shared.parts(model, 25):
            found[part.tokens] = model(**part).logits[0]
    torch.testing.assert_close(found, whole, atol=1e-10, rtol=1e-10)


def test_keys_of_one_path_are_kept():
    """Never those of all segments, and none after the loop."""
    model = new("llama", "sdpa")
    samples_of_turns = [[5, 6, 7] * 4 + [turn] * 9 + [x] for turn in range(8, 20) for x in (3, 4)]
    shared = fv.share_prefixes(samples_of_turns)
    most, steps = 0, set()
    for part in shared.parts(model, 12):
        step = part["packed_layout"].shard.states
        most = max(most, len({segment for _, segment in step._stored}))
        steps.add(step)
        model(**part).loss.backward()
    (step,) = steps
    assert most <= 3
    assert not step._stored
    assert not step._gradients


def test_a_window_bounds_what_is_kept_and_read():
    """Of each segment and of each path at most a window of keys, and of their gradients."""
    window, read = 4, []
    model = new("qwen3_windows", "sdpa", sliding_window=window)
    full, sliding = 0, 1  # layers
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    kept = {full: 0, sliding: 0}
    for part in fv.share_prefixes(samples()).parts(model, 25):
        shard = part["packed_layout"].shard
        model(**part).loss.backward()
        for tensors in (shard.states._stored, shard.states._gradients):
            for ((layer, _), _), (k, v) in tensors.items():
                assert len(k) == len(v)
                assert k.untyped_storage().nbytes() == k.nbytes
                kept[layer] = max(kept[layer], len(k))
        read.append(shard.keys(window, None, None).keys_above)
    assert kept == {full: 25, sliding: window}
    assert set(read) == {0, window}


def test_a_loop_that_ends_early_leaves_nothing():
    model, shared = new("llama", "sdpa"), fv.share_prefixes(samples())
    expected = in_parts(model, shared, 25)
    for part in shared.parts(model, 25):
        model(**part).loss.backward()
        break
    found = in_parts(model, shared, 25)
    assert_equal(found[1], expected[1], 0)
