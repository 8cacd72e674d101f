"""Leaks planted in a model that has none: each is found, and blamed on where it was planted."""

import itertools

import pytest
import torch
from torch import nn

import flexvarlen as fv
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.isolation.report import IsolationError
from flexvarlen.patches.isolation.verify import verify_isolation
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.models import build_model
from tests.planted import replace_output, with_gradient

LENGTHS = (5, 11, 1, 8, 7)


@pytest.fixture
def model():
    return fv.patch_model(build_model("llama")[0].eval(), "sdpa")


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    return PackedBatch(torch.randint(3, 1024, (1, sum(LENGTHS)), generator=generator), LENGTHS)


def blamed(model, batch, **options):
    with pytest.raises(IsolationError) as caught:
        verify_isolation(model, batch, **options)
    error = caught.value
    return error, (error.direction, error.layer, error.module, error.kind)


def test_boundary_off_by_one(model, batch):
    """The first token of a document sees the one before it; the layout said is another."""
    position_ids = batch.inputs()["position_ids"]
    off = PackedLayout.from_lengths([5, 12, 1, 7, 7])
    inputs = {"input_ids": batch.input_ids, "position_ids": position_ids, "packed_layout": off}
    layout = PackedLayout.from_lengths(LENGTHS)
    error, where = blamed(model, inputs, layout=layout)
    assert where == ("forward", 0, "model.layers.0.self_attn", "attention")
    assert (error.source, error.target) in {(1, 2), (2, 3)}
    assert error.change > 1e-3


def test_convolution_over_the_row(model, batch):
    class ShortConv(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.conv1d = nn.Conv1d(channels, channels, 3, groups=channels, padding=2)

        def forward(self, x):
            return x + self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)

    layer = model.model.layers[1]
    layer.mlp = nn.Sequential(layer.mlp, ShortConv(96))
    error, where = blamed(model, batch)
    assert where == ("forward", 1, "model.layers.1.mlp.1.conv1d", "convolution")
    assert error.target == error.source + 1  # it reaches two tokens


def first_logits(out):
    """In the model's own forward, which is no layer's."""
    return out.__class__(logits=out.logits + out.logits[:, :1])


def leak(gradient, x):
    """The gradient of token 4 has some of token 17's."""
    gradient[:, 4] += gradient[:, 17]
    return gradient


def scale(gradient, x):
    """By what stands in the row: zero stays zero."""
    return gradient * x[:, 4].mean()


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("change", "direction", "layer", "module", "kind", "source"),
    [
        (lambda x: x + x[:, -1:], "forward", 0, "model.embed_tokens", "embeddings", 4),
        (lambda x: x + x[:, :1], "forward", None, "lm_head", "linear", 0),
        (first_logits, "forward", None, "", "module", 0),
        (with_gradient(leak), "backward", 1, f"{LAYER}.self_attn.q_proj", "linear", 3),
        (with_gradient(leak), "backward", 1, f"{LAYER}.input_layernorm", "norm", 3),
        (with_gradient(leak), "backward", 1, f"{LAYER}.mlp", "MLP", 3),
        (with_gradient(scale), "backward", 1, f"{LAYER}.mlp.up_proj", "linear", 0),
    ],
)
def test_the_module_that_leaks_is_named(
    model, batch, change, direction, layer, module, kind, source
):
    replace_output(model.get_submodule(module), change)
    error, where = blamed(model, batch)
    assert where == (direction, layer, module, kind)
    assert error.source == source
    if direction == "backward":
        assert not verify_isolation(model, batch, gradients=False).gradients


@pytest.mark.parametrize("other", [range(1, 99), [1], [3], [4]], ids=["every", "1", "3", "4"])
def test_backward_that_does_not_repeat_is_tested_for_zeros(model, batch, other):
    calls = itertools.count(1)
    # In some of its calls the gradients differ by a bit, as atomic additions make them
    shaky = with_gradient(
        lambda gradient, x: gradient * (1 + (call := next(calls)) * (call in other) * 2**-20)
    )
    replace_output(model.model.norm, shaky)
    assert verify_isolation(model, batch).gradients == "zeros"
    replace_output(model.model.layers[1].mlp, with_gradient(leak))
    _, where = blamed(model, batch)
    assert where == ("backward", 1, "model.layers.1.mlp", "MLP")


def test_a_leak_beside_gradients_that_do_not_repeat(model, batch):
    """Document 2's differ by a bit from the third backward on; document 0 reaches document 1's."""
    calls = itertools.count(1)

    def change(gradient, x):
        gradient[:, 5:16] *= x[:, 4].mean()
        gradient[:, 16:17] *= 1 + 2**-20 * max(0, next(calls) - 2)
        return gradient

    replace_output(model.model.layers[0].mlp.up_proj, with_gradient(change))
    error, _ = blamed(model, batch)
    assert (error.source, error.target) == (0, 1)


def test_forward_that_does_not_repeat_is_no_leak(model, batch):
    calls = []
    replace_output(model.model.layers[1].mlp, lambda x: calls.append(1) or x + len(calls))
    with pytest.raises(ValueError, match=r"same bits for the same batch.*layer 1"):
        verify_isolation(model, batch)


def test_outputs_that_are_not_finite_hide_a_leak(model, batch):
    overflows = with_gradient(lambda gradient, x: gradient * float("inf"))
    replace_output(model.model.norm, overflows)
    with pytest.raises(ValueError, match="gradients must be finite"):
        verify_isolation(model, batch)
    replace_output(model.lm_head, lambda x: x * float("nan"))
    with pytest.raises(ValueError, match="outputs must be finite"):
        verify_isolation(model, batch)


def test_model_that_ignores_its_tokens_is_refused(model, batch):
    replace_output(model.model.embed_tokens, torch.zeros_like)
    with pytest.raises(ValueError, match="must change with their tokens"):
        verify_isolation(model, batch)


def test_end_of_document_tokens_stay(model):
    """A stack may find its documents by them."""
    model.config.eos_token_id = 2
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    ids = torch.tensor([[7, 8, 2, 9, 2, 2]])
    verify_isolation(model, PackedBatch(ids, (3, 2, 1)))
    assert all(row[2] == row[4] == 2 for row in seen)
    assert not any(2 in (row[0], row[1], row[3]) for row in seen)
    assert {row[5] for row in seen} > {2}  # nothing else is there to replace


# ---- what it leaves behind; modes and random states: test_isolation_trainer.py ----


def test_cache_in_the_batch_stays_empty(batch):
    from transformers import DynamicCache

    model = build_model("llama")[0].eval()
    cache = DynamicCache()
    with pytest.raises(IsolationError):
        verify_isolation(model, batch.inputs() | {"past_key_values": cache})
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(model, batch, reentrant):
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    report = verify_isolation(model, batch)
    assert report.gradients == (None if reentrant else "bits")
    assert report.layers == 2  # not those that run again in the backward
    if reentrant:
        assert "reentrant" in report.why_no_gradients
        with pytest.raises(NotImplementedError, match="use_reentrant=False"):
            verify_isolation(model, batch, gradients=True)
    else:
        replace_output(model.model.layers[1].mlp, with_gradient(leak))
        _, where = blamed(model, batch)
        assert where == ("backward", 1, "model.layers.1.mlp", "MLP")


def test_frozen_model_with_adapters_is_tested_inside_peft(batch):
    from peft import LoraConfig, get_peft_model

    base, _ = build_model("llama")
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    _, where = blamed(model.eval(), batch)
    assert where == ("forward", 0, "model.layers.0.self_attn", "attention")
    fv.patch_model(model, "sdpa")
    report = verify_isolation(model, batch)
    assert (report.layers, report.gradients) == (2, "bits")


@pytest.mark.usefixtures("process_group")
def test_ddp_trains_on_afterwards(model, batch):
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model.train())
    calls = []
    parallel.register_forward_pre_hook(lambda *_: calls.append(1))
    assert verify_isolation(parallel, batch).gradients == "bits"
    assert not calls  # each would send buffers to processes that wait elsewhere
    for _ in range(2):
        parallel(**batch.inputs(), labels=batch.input_ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_compiled_graph_is_tested_by_its_outputs(batch):
    """It finds a leak: the next test."""
    model = fv.patch_model(build_model("llama@1")[0].eval(), "sdpa")  # Dynamo traces it many times
    compiled = torch.compile(model, backend="eager")
    compiled(**batch.inputs())  # hooks that come later are not seen
    assert verify_isolation(compiled, batch).num_docs == 5


def test_leak_in_a_compiled_graph(batch):
    model = build_model("llama@1")[0].eval()
    with pytest.raises(IsolationError):
        verify_isolation(torch.compile(model, backend="eager"), batch, gradients=False)
