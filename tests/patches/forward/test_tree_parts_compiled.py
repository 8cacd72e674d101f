"""Parts of trees in compiled graphs, and with states that other kernels stored."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.exc import Unsupported

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from flexvarlen.recurrent import layer_functions
from tests.patches.forward.test_tree_parts import (
    alone,
    assert_equal,
    assert_parts_as_accurate,
    in_parts,
    long_texts,
    new,
)
from tests.patches.forward.test_trees import samples
from tests.recurrent import plain_fla
from tests.tiny_models import new_model

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
