"""A tree in parts gives the loss and the gradients of its samples one by one."""

from __future__ import annotations

import copy
import itertools
import warnings
from functools import cache, partial

import pytest
import torch
from accelerate import Accelerator
from torch._dynamo.exc import Unsupported
from torch.nn import Dropout
from torch.nn.parallel import DistributedDataParallel

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from flexvarlen.recurrent import layer_functions
from flexvarlen.reference.model import Float64, float64_model
from flexvarlen.reference.recurrences import plain_recurrences
from flexvarlen.trees.plan import plan_parts, segments_of
from tests.contract_oracle import gradients_of
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.patches.forward.test_trees import samples
from tests.recurrent import plain_fla
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
def test_kernels_in_bf16(backend, family):
    model = new_model(family, head_dim=64).to("cuda", torch.bfloat16).train()
    plain = new_model(family, head_dim=64).to("cuda", torch.bfloat16)
    try:
        assert_parts_as_accurate(fv.patch_model(model, backend), plain)
    except NotImplementedError as why:
        pytest.skip(str(why))


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


def test_a_missing_backward_raises():
    model = new("llama", "sdpa")
    parts = fv.share_prefixes(samples()).parts(model, 25)
    model(**next(parts))
    with pytest.raises(RuntimeError, match="each part of a tree must run backward before the next"):
        next(parts)


def test_a_second_backward_raises():
    model = new("llama", "sdpa")
    parts = fv.share_prefixes(samples()).parts(model, 25)
    loss = model(**next(parts)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="must run backward once"):
        loss.backward()


def test_a_loop_that_ends_early_leaves_nothing():
    model, shared = new("llama", "sdpa"), fv.share_prefixes(samples())
    expected = in_parts(model, shared, 25)
    for part in shared.parts(model, 25):
        model(**part).loss.backward()
        break
    found = in_parts(model, shared, 25)
    assert_equal(found[1], expected[1], 0)


def test_what_does_not_run_in_parts_raises(monkeypatch):
    shared = fv.share_prefixes(samples())
    with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1"):
        shared.parts(new("llama", "sdpa"), 0)
    with pytest.raises(ValueError, match="model must be patched to run a tree in parts"):
        next(shared.parts(new("llama"), 25))
    experts = new("qwen3_moe", "sdpa")
    experts.config.output_router_logits = True
    with pytest.raises(NotImplementedError, match="in parts with output_router_logits"):
        next(shared.parts(experts, 25))
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", object())
    for parts in (shared.parts, partial(fv.tree_logprobs, shared=shared)):
        with pytest.raises(NotImplementedError, match="cannot train in parts inside DDP's forward"):
            parts(new("llama", "sdpa"), max_tokens=25)


@pytest.mark.parametrize("draws", ["dropout", "noise"])
def test_a_model_that_draws_random_numbers_raises(draws):
    """Dropout, also that of functions: a segment would run twice with other numbers."""
    shared, model = fv.share_prefixes(samples()), new("llama", "sdpa")
    layer = Dropout(0.1) if draws == "dropout" else Noise()
    model.model.embed_tokens = torch.nn.Sequential(model.model.embed_tokens, layer)
    with pytest.raises(ValueError, match="dropout must be 0 where a tree runs in parts, as some"):
        next(shared.parts(model.train(), 25))
    with pytest.raises(ValueError, match="dropout must be 0 where a tree runs in parts, as some"):
        fv.tree_logprobs(model, shared, max_tokens=25)
    next(shared.parts(model, 1000))  # one part, which runs once


class Noise(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x) if self.training else x


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_part_without_its_forward_or_backward_raises(reentrant):
    """Also one of a prompt alone, which has no labels."""
    prompt = [*range(5, 45)]
    turns = [
        {"input_ids": [*prompt, *[50 + i] * 6], "labels": [-100] * 40 + [50 + i] * 6}
        for i in range(4)
    ]
    model = new("llama", "sdpa")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    for runs in (False, True):
        with pytest.raises((RuntimeError, ValueError), match=r"must run backward|run each part"):
            train_on_labels(model, fv.share_prefixes(turns).parts(model, 45), runs=runs)


def train_on_labels(model, parts, *, runs):
    """A loop that skips the backward of parts without labels; `runs`: not their forward."""
    for part in parts:
        has_labels = bool((part["shift_labels"] != -100).any())
        if runs or has_labels:
            loss = model(**part).loss
        if has_labels:
            loss.backward()


def test_a_second_forward_raises():
    """Of a reference model's, say: keys above are those of the first."""
    model = new("llama", "sdpa")
    parts = fv.share_prefixes(samples()).parts(model, 25)
    part = next(parts)
    model(**part)
    with torch.no_grad(), pytest.raises(RuntimeError, match="a part of a tree must run once, in"):
        model(**part)
    parts.close()
    with pytest.raises(RuntimeError, match="must run inside its loop"):
        model(**next(fv.share_prefixes(samples()).parts(model, 25)))


def test_autocast_around_the_forward_alone_raises():
    model, shared = new("llama", "sdpa", torch.float32), fv.share_prefixes(samples())
    parts = shared.parts(model, 25)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="in one dtype"):
        model(**next_outside_autocast(parts))


def next_outside_autocast(parts):
    with torch.autocast("cpu", enabled=False):
        return next(parts)


# ---- compiled ----

SIZES = {"capacity": 16, "max_depth": 4}


def trees():
    """Of other shapes; a part of the last one has no padding."""
    texts, full = samples(), [*range(3, 35), *range(3, 35)]
    turns = [[*texts[0][:50], *[turn] * 9, x] for turn in range(8, 12) for x in (3, 4)]
    return [fv.share_prefixes(x, **SIZES) for x in (texts, texts[:3], [*turns, full])]


@pytest.mark.parametrize(
    ("family", "backend", "compiler"),
    [  # the third compiler decides what the backward computes again
        ("qwen3_windows", "sdpa", "eager"),
        pytest.param("qwen3_windows", "sdpa", "aot_eager", marks=pytest.mark.slow),
        pytest.param("lfm2", "sdpa", "aot_eager_decomp_partition", marks=pytest.mark.slow),
        pytest.param("qwen3_windows", "reference", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_one_graph_for_all_parts(family, backend, compiler):
    """One with gradients and one without, which raise as eager parts do; also of convolutions."""
    torch._dynamo.reset()
    model = new(family, backend)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    with watch_compilation() as stats:
        for shared in trees():
            found, expected = in_parts(compiled, shared, 64), in_parts(model, shared, 64)
            assert found[2] == expected[2] > 2
            torch.testing.assert_close(found[0], expected[0], atol=0, rtol=1e-12)
            gradients = {name.removeprefix("_orig_mod."): x for name, x in found[1].items()}
            assert_equal(gradients, expected[1], 1e-12)
    assert (stats.compilations, stats.graph_breaks) == (2, 0)
    parts = shared.parts(compiled, 64)
    part = next(parts)
    assert (part["shift_labels"][0, len(part.tokens) :] == -100).all()
    loss = compiled(**part).loss
    with pytest.raises(RuntimeError, match="a part of a tree must run once, in"):
        compiled(**part)
    with pytest.raises(RuntimeError, match="each part of a tree must run backward before"):
        next(parts)
    with pytest.raises(RuntimeError, match="must run inside its loop"):
        loss.backward()
    with pytest.raises(Unsupported, match="a compiled graph must get parts of one size, got one"):
        compiled(**next(shared.parts(model, 64)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document")
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_a_scan_in_plain_torch_breaks_the_graph(family):
    """As in whole rows; other trees compile nothing again."""
    torch._dynamo.reset()
    model = new(family, "sdpa")
    compiled = torch.compile(model, backend="aot_eager")
    in_parts(compiled, trees()[0], 64)
    with watch_compilation() as stats:
        for shared in trees():
            found, expected = in_parts(compiled, shared, 64), in_parts(model, shared, 64)
            torch.testing.assert_close(found[0], expected[0], atol=0, rtol=1e-6)
            gradients = {name.removeprefix("_orig_mod."): x for name, x in found[1].items()}
            assert_equal(gradients, expected[1], 1e-6)  # norms are in float32
    assert stats.compilations == 0


@pytest.mark.slow
def test_one_graph_of_fla_operators(monkeypatch):
    """Their states are in float32, and so is the loss."""
    plain_fla.run_on_the_cpu(monkeypatch)
    torch._dynamo.reset()
    model = new("mamba2", "sdpa")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with watch_compilation() as stats:
        for shared in trees():
            found, expected = in_parts(compiled, shared, 64), in_parts(model, shared, 64)
            torch.testing.assert_close(found[0], expected[0], atol=0, rtol=1e-6)
            gradients = {name.removeprefix("_orig_mod."): x for name, x in found[1].items()}
            assert_equal(gradients, expected[1], 1e-5)
    assert (stats.compilations, stats.graph_breaks) == (2, 0)


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document")
@pytest.mark.parametrize("changes", [False, True])
def test_fla_operators(changes, monkeypatch):
    """Those of each sample alone, also if plain torch runs some of the parts."""
    plain_fla.run_on_the_cpu(monkeypatch)
    if changes:
        answers = itertools.cycle([None, None, None, "a test"])
        monkeypatch.setattr(layer_functions, "why_wrong", lambda *_: next(answers))
    loss, gradients, _ = in_parts(new("mamba2", "sdpa"), fv.share_prefixes(samples()), 25)
    torch.testing.assert_close(loss.double(), alone("mamba2").loss.detach(), atol=0, rtol=1e-6)
    assert_equal(gradients, alone("mamba2").gradients, 1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:flexvarlen. recurrent layers run")
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "lfm2"])
def test_one_graph_of_recurrent_layers_in_bf16(family):
    if family != "lfm2":
        pytest.importorskip("fla")
    torch._dynamo.reset()
    model = new_model(family, head_dim=64).to("cuda", torch.bfloat16).train()
    plain = new_model(family, head_dim=64).to("cuda", torch.bfloat16)
    compiled = torch.compile(fv.patch_model(model, "auto"), fullgraph=True)
    in_parts(model, fv.share_prefixes(long_texts(), device="cuda"), 256)  # checks the kernels
    assert_parts_as_accurate(compiled, plain, sizes=[256])
    few = fv.share_prefixes(long_texts()[:5], device="cuda", capacity=16, max_depth=4)
    other = fv.share_prefixes(long_texts()[3:], device="cuda", capacity=16, max_depth=4)
    in_parts(compiled, few, 256)
    with watch_compilation() as stats:
        in_parts(compiled, other, 256)
    assert (stats.compilations, stats.graph_breaks) == (0, 0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document")
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "mamba2"])
def test_another_scan_in_the_middle_of_a_loop(family, monkeypatch):
    """All kernels store one state, so it does not matter which of them runs a part."""
    pytest.importorskip("fla")
    # All experts: a router that rounds otherwise would choose others.
    sizes = {"head_dim": 64} | ({"num_experts_per_token": 4} if family == "kimi_linear" else {})
    plain = new_model(family, **sizes).to("cuda", torch.bfloat16)
    model = fv.patch_model(new_model(family, **sizes).to("cuda", torch.bfloat16), "auto")
    calls = itertools.count()
    monkeypatch.setattr(
        layer_functions, "why_wrong", lambda *_: "a test" if next(calls) // 3 % 2 else None
    )
    assert_parts_as_accurate(model.train(), plain)


@pytest.mark.slow
def test_flex_in_a_graph():
    """By inductor, without gradients, which flex has on a GPU alone."""
    torch._dynamo.reset()
    eager, model = new("llama", "sdpa", torch.float32), new("llama", "flex", torch.float32)
    compiled = torch.compile(model, fullgraph=True)
    with watch_compilation() as stats, torch.no_grad():
        for shared in trees():
            whole = eager(**shared.batch()).logits[0]
            for part in shared.parts(compiled, 64):
                logits = compiled(**part).logits[0][: len(part.tokens)]
                torch.testing.assert_close(logits, whole[part.tokens], atol=1e-4, rtol=1e-4)
    assert (stats.compilations, stats.graph_breaks) == (1, 0)


# ---- log-probabilities, for any loss ----


def policy_loss(logprobs, old):
    """That of GRPO, clipped on one side: a mean over samples of a mean over tokens."""
    losses = []
    for index, (own, before) in enumerate(zip(logprobs, old, strict=True)):
        ratio = (own[:-1] - before[:-1]).exp()
        advantage = (-1) ** index * (1 + index)
        losses.append(-torch.minimum(ratio, ratio.clamp(max=1.1)).mean() * advantage)
    return torch.stack(losses).mean()


def kept_after(text, vocabulary):
    """What an engine kept of the vocabulary: some tokens beside each that it sampled."""
    return [[(3 * token + 1) % vocabulary, token, (token + 7) % vocabulary] for token in text[1:]]


def logprobs_alone(model, text, temperature, kept=None):
    ids = torch.tensor(text)
    logits = model(ids[None], use_cache=False).logits[0] / temperature
    if kept is not None:
        cut = torch.full_like(logits[:-1], -torch.inf).scatter(1, torch.tensor(kept), 0)
        logits = torch.cat([logits[:-1] + cut, logits[-1:]])
    own = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([own, own.new_zeros(1)])


@pytest.mark.parametrize(("temperature", "cut"), [(1.0, False), (0.7, False), (0.7, True)])
@pytest.mark.parametrize("max_tokens", [None, 25])
def test_a_policy_loss(max_tokens, temperature, cut):
    """As of each sample alone; `cut`: normalised over the tokens that the engine kept."""
    model, plain, shared = new("llama", "reference"), new("llama"), fv.share_prefixes(samples())
    kept, mask = [None] * len(samples()), None
    if cut:
        kept = [kept_after(text, plain.config.vocab_size) for text in samples()]
        mask = shared.fold(fv.sampling_masks(kept, prompt_tokens=[1] * len(kept)), -1)
    forward = model.model.forward

    def in_float64(*args, **kwargs):
        with Float64():  # also in a backward, which no mode enters
            return forward(*args, **kwargs)

    model.model.forward = in_float64
    with Float64():
        alone = [
            logprobs_alone(plain, text, temperature, ids)
            for text, ids in zip(samples(), kept, strict=True)
        ]
        old = [x.detach() + 0.05 * (index % 3) for index, x in enumerate(alone)]
        expected = policy_loss(alone, old)
        expected.backward()
        found = fv.tree_logprobs(
            model,
            shared,
            max_tokens=max_tokens,
            temperature=temperature,
            sampling_mask=mask,
        )
        loss = policy_loss(shared.unfold(found), old)
        loss.backward()
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-12)
    assert_equal(gradients_of(model), gradients_of(plain), 1e-12)


def test_logprobs_without_gradients():
    model, shared = new("llama", "sdpa"), fv.share_prefixes(samples())
    with torch.no_grad():
        whole = fv.tree_logprobs(model, shared)
        found = fv.tree_logprobs(model, shared, max_tokens=25)
    assert not found.requires_grad
    torch.testing.assert_close(found, whole, atol=1e-10, rtol=1e-10)


def test_what_has_no_logprobs_in_parts_raises():
    shared, model = fv.share_prefixes(samples()), new("llama", "sdpa")
    for temperature in (0, float("inf"), "1"):
        with pytest.raises(ValueError, match="temperature must be a positive number"):
            fv.tree_logprobs(model, shared, temperature=temperature)
    with pytest.raises(ValueError, match=r"shared must be what fv\.share_prefixes returns"):
        fv.tree_logprobs(model, samples())
    for max_tokens in (None, 25):
        with pytest.raises(ValueError, match="model must be patched, got LlamaForCausalLM"):
            fv.tree_logprobs(new("llama"), shared, max_tokens=max_tokens)
    loss = fv.tree_logprobs(model, shared, max_tokens=25).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs backward once"):
        loss.backward()


@pytest.mark.usefixtures("fresh_accelerate")
def test_what_is_around_a_forward_is_not_lost():
    """The base model is called, so what wraps the model's own forward would not run."""
    shared, model = fv.share_prefixes(samples()), new("llama", "sdpa", torch.float32)
    with pytest.raises(NotImplementedError, match=r"compile\(\) on the base model"):
        fv.tree_logprobs(torch.compile(model, backend="eager"), shared)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    with pytest.raises(ValueError, match=r"inside accelerator\.autocast\(\)"):
        fv.tree_logprobs(prepared, shared, max_tokens=25)


def test_an_unpatched_model_raises_without_gradients():
    model, shared = new("llama"), fv.share_prefixes(samples())
    with torch.no_grad():
        parts = shared.parts(model, 25)
        model(input_ids=next(parts)["input_ids"])
        with pytest.raises(ValueError, match="model must be patched to run a tree in parts"):
            next(parts)
