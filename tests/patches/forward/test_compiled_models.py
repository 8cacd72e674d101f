"""A compiled patched model: one graph without breaks, compiled once for any documents."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.testing import CompileCounterWithBackend

import flexvarlen as fv
from flexvarlen.attention import choose
from flexvarlen.attention.backends import sdpa
from flexvarlen.layout import launch_sizes as launch
from flexvarlen.patches.models import rope as rotary
from tests import forms
from tests.backends import ON_GPU
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.tiny_models import LENGTHS, VOCABULARY, documents, exact_and_baseline, new_model

T, CAPACITY = 256, 16
ORDER = tuple((i, 0) for i in range(len(LENGTHS)))


def packings() -> list[list[int]]:
    """Lengths of 1 to 11 documents, other numbers and longest ones each time; `LENGTHS` last."""
    chance = random.Random(0)
    made = []
    for cut in (0, 2, 4, 7, 10, 1):
        cuts = sorted(chance.sample(range(1, T), cut))
        made.append([end - start for start, end in zip([0, *cuts], [*cuts, T], strict=True)])
    return [*made, list(LENGTHS)]


def inputs_of(form: str, lengths: list[int], device: str) -> dict:
    """The documents as keyword arguments of a forward."""
    if form in ("position_ids", "seq_idx"):
        return forms.given(form, forms.row_of(lengths, device=device))
    if form == "document_ids":  # some of 0, padding, but not in the last packing
        ids = [(i + 1) % (4 if lengths != list(LENGTHS) else 99) for i in range(len(lengths))]
        mask = torch.tensor(ids).repeat_interleave(torch.tensor(lengths))[None]
        return {"attention_mask": mask.to(device)}
    sizes = {"capacity": CAPACITY, "max_seqlen_bound": T, "device": device}
    layout = fv.PackedLayout.from_lengths(lengths, **sizes)
    return {"packed_layout": layout} if form == "layout" else {"cu_seq_lens_q": layout.cu_seqlens}


def apart(ours, theirs) -> float:
    """Distance of two tensors, as a share of the second's norm."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def kept_tables(graphs) -> list:
    """The nodes that keep a rotary table: one for the cosines, one for the sines."""
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    return [x for x in nodes if x.target is torch.ops.flexvarlen.materialize.default]


def check(
    kind,
    backend,
    form,
    compiler,
    *,
    train,
    dtype=torch.float32,
    device="cpu",
    head_dim=16,
    layers=2,
    checkpointing=False,
):
    """Many packings through one graph: each as in the eager model, the last as one by one."""
    torch._dynamo.reset()
    dynamo_utils.clear_compilation_metrics()
    model = new_model(kind, head_dim=head_dim, num_hidden_layers=layers)
    model = model.to(device=device, dtype=dtype).train(train)
    fv.patch_model(model, backend)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    # Two computations of the same in one dtype; a leak moves the logits by a tenth and more.
    limit = 1e-4 if dtype == torch.float32 else 0.05
    generator = torch.Generator().manual_seed(7)
    for lengths in packings():
        ids = torch.randint(3, VOCABULARY, (1, T), generator=generator)
        if lengths == list(LENGTHS):
            ids = torch.cat(documents())[None]
        ids, given = ids.to(device), inputs_of(form, lengths, device)
        results = []
        for run in (compiled, model):
            with torch.set_grad_enabled(train):
                out = run(input_ids=ids, labels=ids, **given)
            if train:
                out.loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if train}
            model.zero_grad()
            results.append((out.logits[0].detach(), out.loss.detach(), gradients))
        (logits, loss, gradients), (eager_logits, eager_loss, eager_gradients) = results
        assert apart(logits, eager_logits) < limit, lengths
        assert apart(loss, eager_loss) < limit, lengths
        for name in gradients:
            assert apart(gradients[name], eager_gradients[name]) < 4 * limit, (lengths, name)
    assert counter.frame_count == 1, f"{counter.frame_count} compilations"
    if layers != 2:  # nor is a hook of ours compiled, whose guards would be checked in each call
        assert len(dynamo_utils.get_compilation_metrics()) == 1
        assert not kept_tables(counter.graphs)  # in short rows a launch more takes longer
        return
    exact, baseline = exact_and_baseline(kind, ORDER, dtype, device, head_dim)
    assert_as_accurate(logits, exact.logits, baseline.logits, 2)
    if train:
        assert_gradients_as_accurate(gradients, exact.gradients, baseline.gradients)


GPU_BACKENDS = (*ON_GPU, "auto")
FORMS = ("position_ids", "document_ids", "layout", "cu_seq_lens", "seq_idx")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "backend", "form", "compiler"),
    [
        ("qwen3_windows", "sdpa", "position_ids", "aot_eager"),
        ("llama", "sdpa", "document_ids", "eager"),
        slow("llama", "sdpa", "seq_idx", "eager"),  # eagerly: batch/test_seq_idx.py
        # Layouts by default: test_compile_regions.py, and test_families.py whole.
        *(slow("qwen3_windows", "sdpa", form, "eager") for form in FORMS[1:]),
        # Its kernel in a graph: attention/test_compiled_attention.py.
        *(slow("qwen3_windows", "flex", form, "eager") for form in FORMS[:2]),
    ],
)
def test_one_graph_for_any_documents(kind, backend, form, compiler):
    """With windows and gradients, or of one layer that is only traced."""
    if kind == "llama":
        check(kind, backend, form, compiler, train=False, layers=1)
    else:
        check(kind, backend, form, compiler, train=backend == "sdpa")


@pytest.mark.parametrize(
    ("backend", "form"), [("sdpa", "position_ids"), slow("flex", "document_ids")]
)
def test_one_graph_for_any_documents_in_inductor(backend, form):
    """The backward of attention in inductor: attention/test_compiled_attention.py."""
    check("llama", backend, form, "inductor", train=False, layers=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "form", "checkpointing"),
    [
        *((backend, form, False) for backend in GPU_BACKENDS for form in FORMS[:2]),
        ("flex", "layout", False),
        ("fa2", "cu_seq_lens", False),
        # Inductor gives tensors that no graph returns strides of its own, which kernels may reject.
        *((backend, "layout", True) for backend in GPU_BACKENDS),
    ],
)
def test_one_graph_for_any_documents_on_a_gpu(backend, form, checkpointing, monkeypatch):
    monkeypatch.setattr(launch, "SHORT_ROW", 0)  # layouts are launched for as in long rows
    where = {"dtype": torch.bfloat16, "device": "cuda", "head_dim": 64}
    call = {"device": "cuda", "dtype": torch.bfloat16, "num_heads": 6, "num_kv_heads": 2}
    reason = None if backend == "auto" else fv.why_not(backend, window=9, **call)
    if reason is not None:
        pytest.skip(reason)
    mode = {"train": True, "checkpointing": checkpointing}
    check("qwen3_windows", backend, form, "inductor", **mode, **where)


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_a_backend_is_asked_about_the_graph(backend, monkeypatch):
    """Training mode makes "auto" assume a backward; a graph under no_grad has none."""
    asked = set()
    monkeypatch.setattr(type(sdpa.BACKEND), "why_not", lambda _, call: asked.add(call.graph))
    model = fv.patch_model(new_model("llama"), backend).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    row = forms.row_of(list(LENGTHS))
    for run, gradients, trainable, graph in (
        (model, True, True, None),
        (compiled, True, True, "training"),
        (compiled, False, True, "inference"),
        (compiled, True, False, "inference"),
    ):
        choose.clear_cache()
        asked.clear()
        model.requires_grad_(trainable)
        with torch.set_grad_enabled(gradients):
            run(row.ids, **forms.given("position_ids", row))
        assert asked == {graph}
    choose.clear_cache()


def test_rotary_tables_are_kept_in_long_rows():
    """Once a forward, not once a layer."""
    torch._dynamo.reset()
    tokens = launch.SHORT_ROW + 1
    model = fv.patch_model(new_model("llama"), "sdpa")
    layout = fv.PackedLayout.from_lengths([tokens // 3, tokens - tokens // 3])
    given = {"input_ids": torch.arange(tokens)[None] % VOCABULARY, "packed_layout": layout}
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=counter)(**given).logits
        torch.testing.assert_close(compiled, model(**given).logits)
    assert len(kept_tables(counter.graphs)) == 2


def test_a_rotary_table_that_is_one_tensor():
    """Llama 4's, complex: kept whole, not row by row."""
    table = torch.randn(2, launch.SHORT_ROW, 8, dtype=torch.complex64)

    def kept(x):
        return rotary._materialize_outputs(None, (), x * 1)

    found = torch.compile(kept, fullgraph=True, backend="aot_eager")(table)
    assert torch.equal(found, table)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "varlen", "fa2", "fa3"])
def test_cuda_graphs_see_other_documents(backend):
    """`mode="reduce-overhead"`: the graph is replayed on rows of other documents."""
    torch._dynamo.reset()
    call = {"device": "cuda", "dtype": torch.bfloat16, "num_heads": 6, "num_kv_heads": 2}
    reason = fv.why_not(backend, window=9, **call)
    if reason is not None:
        pytest.skip(reason)
    model = new_model("qwen3_windows", head_dim=64).to("cuda", torch.bfloat16)
    fv.patch_model(model, backend)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    sizes = {"capacity": CAPACITY, "max_seqlen_bound": T, "device": "cuda", "total_tokens": T}
    ids = torch.cat(documents())[None].cuda()
    before = dynamo_utils.counters["inductor"]["cudagraph_skips"]
    for lengths in [list(LENGTHS)] * 3 + packings()[:6] + [[100, 50]]:  # padding at the end, too
        layout = fv.PackedLayout.from_lengths(lengths, **sizes)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            logits = compiled(input_ids=ids, packed_layout=layout).logits[0].clone()
            eager = model(input_ids=ids, packed_layout=layout).logits[0]
        real = layout.real_tokens()
        assert apart(logits[real], eager[real]) < 0.05, lengths
        assert logits.isfinite().all(), lengths
    assert dynamo_utils.counters["inductor"]["cudagraph_skips"] == before


# What a graph made for documents of at most 200 tokens cannot hold.
TOO_MUCH = {
    # 128 documents of 2 tokens, where default_capacity(256) is 64
    "capacity": "torch.arange(256, device=device)[None] % 2",
    "max_seqlen_bound": "torch.arange(256, device=device)[None]",
}
COMPILED = """
import torch, flexvarlen as fv
from tests.tiny_models import new_model
model = new_model("llama", num_hidden_layers=1).to(device)
fv.patch_model(model, "flex", max_seqlen_bound=200)
run = torch.compile(model, fullgraph=True, backend="aot_eager")
ids = torch.ones(1, 256, dtype=torch.long, device=device)
with torch.no_grad():
    fine = run(input_ids=ids, position_ids=torch.arange(256, device=device)[None] % 64)
assert fine.logits.isfinite().all()
"""


def test_more_than_a_graph_holds_raises():
    torch._dynamo.reset()
    names = {"device": "cpu"}
    exec(COMPILED, names)
    for words, position_ids in TOO_MUCH.items():
        with torch.no_grad(), pytest.raises(RuntimeError, match=f"flexvarlen: .*{words}"):
            names["run"](input_ids=names["ids"], position_ids=eval(position_ids, names))


@pytest.mark.gpu
@pytest.mark.parametrize("words", TOO_MUCH)
def test_more_than_a_graph_holds_raises_on_a_gpu(words):
    """In a process of its own, which a failed assertion on the device ends."""
    wrong = f"""
print("fine", flush=True)
with torch.no_grad():
    print("wrong", run(input_ids=ids, position_ids={TOO_MUCH[words]}).logits.sum().item())
"""
    command = [sys.executable, "-c", 'device = "cuda"' + COMPILED + wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
    assert done.returncode != 0
    # The sentence, or, where the driver swallows it, at least the assertion.
    assert words in done.stderr or "device-side assert" in done.stderr, done.stderr[-2000:]
