"""`mlp_chunk_tokens` learns what whole MLPs do, and never has the intermediates of all tokens."""

from __future__ import annotations

import copy
import pickle

import peft
import pytest
import torch
from accelerate.utils import send_to_device
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_utils
from transformers.pytorch_utils import Conv1D

import flexvarlen as fv
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.models.layers import dense_mlps
from flexvarlen.patches.parts import ModelParts
from tests.contract_oracle import gradients_of
from tests.patches.forward.test_chunked_loss import padded, rows
from tests.patches.forward.test_chunked_loss_trainers import trainer_of
from tests.patches.kinds import KINDS, assert_learned_alone, row_of
from tests.slow import with_slow
from tests.tiny_models import new_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document"),
    pytest.mark.filterwarnings("ignore:num_items_in_batch counts labels"),
]

CHUNK = 7
TOKENS = 80  # of `rows`
WIDTH = 56  # of intermediates, and of nothing else
ENCODERS = ("bert", "roberta", "modernbert")
NO_MLP = ("mamba2",)
FAST = ("llama", "gemma2", "apertus", "nemotron_h", "falcon_h1", "mixtral", "bert", "mamba2")
FAMILIES = with_slow(BY_TYPE, {*BY_TYPE} - {*FAST})


def learned(model, inputs=None):
    model.zero_grad()
    loss = model(**inputs or rows()).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def assert_same(found, expected, rtol=1e-6):
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        error = (gradient - expected[1][name]).norm()
        assert error <= rtol * expected[1][name].norm() + 1e-9, f"{name} is off by {error}"


@pytest.fixture(autouse=True)
def _without_pinned_memory(monkeypatch):
    """Which `offload` asks for, and a CPU does not have."""
    monkeypatch.setattr(modeling_utils, "save_on_cpu", lambda **_: save_on_cpu())


CHECKPOINTS = {
    "none": None,
    "not_reentrant": {"use_reentrant": False},
    "offload": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


def checkpointing(model, name="not_reentrant"):
    """The model with these checkpoints of its layers."""
    if name != "none":
        model.gradient_checkpointing_enable(CHECKPOINTS[name], offload=name == "offload")
    return model


def patched(model, chunk=CHUNK, **options):
    return fv.patch_model(model, "sdpa", mlp_chunk_tokens=chunk, **options)


def llama(**changes):
    return new_model("llama", intermediate_size=WIDTH, **changes).train()


# ---- what is learned ----


@pytest.fixture
def computed():
    """Sizes of the inputs of the first layer's MLP."""
    sizes = []

    def watch(model):
        mlp = dense_mlps(ModelParts.of(model).text_tower(model))[0]
        linear = next(x for x in mlp.modules() if isinstance(x, (nn.Linear, Conv1D)))
        linear.register_forward_pre_hook(lambda _, x: sizes.append(x[0].shape[:-1].numel()))
        return sizes

    return watch


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, computed):
    backend = "reference" if family in ("gemma2", "gpt_oss") else "sdpa"
    model = checkpointing(new_model(family).double().train())
    mixes_experts = ModelParts.of(model).routers is not None
    if mixes_experts or family in (*ENCODERS, *NO_MLP):
        with pytest.raises(NotImplementedError, match="mlp_chunk_tokens is for decoder layers"):
            patched(model)
        return
    expected = learned(fv.patch_model(model, backend))
    sizes = computed(model)
    found = learned(fv.patch_model(model, backend, mlp_chunk_tokens=CHUNK))
    assert_same(found, expected, 1e-5)  # norms are in float32
    assert max(sizes) == CHUNK


@pytest.mark.parametrize("kind", ["dense", "windows", "longrope", "images", "hybrid"])
def test_each_kind_of_model(kind):
    """Learns what its documents one by one do."""
    model = patched(checkpointing(KINDS[kind].model()))
    assert_learned_alone(kind, *learned(model, row_of(kind)))


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("options", [{}, {"unpad": True}], ids=["rows", "unpadded"])
def test_checkpoints(checkpoints, options):
    inputs = padded() if options else rows()
    model = checkpointing(llama().double(), checkpoints)
    expected = learned(patched(model, None, **options), inputs)
    assert_same(learned(patched(model, **options), inputs), expected)


@pytest.mark.parametrize("checkpoints", ["none", "not_reentrant"])
@pytest.mark.parametrize("layers", [None, [0]], ids=["all", "first"])
def test_adapters(layers, checkpoints):
    """They alone learn; in the first layer the input of an MLP may need no gradients."""
    targets = ["gate_proj", "down_proj"]
    config = peft.LoraConfig(
        target_modules=targets, layers_to_transform=layers, init_lora_weights=False
    )
    model = peft.get_peft_model(llama().double(), config)
    if checkpoints != "none":
        model.base_model.model.gradient_checkpointing_enable(CHECKPOINTS[checkpoints])
        model.disable_input_require_grads()
    expected = learned(patched(model, None))
    assert len(expected[1]) == 4 * (2 if layers is None else 1)
    assert_same(learned(patched(model)), expected)


def test_frozen_weights():
    """Below layers that learn, and above."""
    model = llama().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name and "up_proj" not in name)
    assert_same(learned(patched(model)), learned(patched(model, None)))


def in_pieces(model):
    """Its MLPs run in pieces of the same sizes, whose graphs autograd keeps."""
    for mlp in dense_mlps(model):

        def forward(x, mlp=mlp):
            pieces = x.flatten(0, 1).split(CHUNK)
            return torch.cat([type(mlp).forward(mlp, piece) for piece in pieces]).view_as(x)

        mlp.forward = forward
    return fv.patch_model(model, "sdpa")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("checkpoints", ["none", "not_reentrant", "reentrant"])
def test_dropout_draws_the_same_numbers_again(checkpoints, device):
    found = []
    for change in (in_pieces, patched):
        config = peft.LoraConfig(
            target_modules=["gate_proj", "down_proj"], lora_dropout=0.5, init_lora_weights=False
        )
        model = peft.inject_adapter_in_model(config, llama().double()).to(device)
        change(checkpointing(model, checkpoints))
        torch.manual_seed(3)
        inputs = send_to_device(rows(), device)
        found.append((learned(model, inputs), torch.rand(1, device=device)))
    assert_same(found[1][0], found[0][0])
    assert torch.equal(found[0][1], found[1][1]), "the backward must not use up random numbers"


@pytest.mark.parametrize("checkpoints", ["none", "not_reentrant"])
@pytest.mark.parametrize("around_backward", [False, True])
def test_autocast(around_backward, checkpoints):
    """Also of a forward without gradients, and of a short row, in the same region."""
    found, dtypes = [], set()
    for chunk in (None, CHUNK):
        model = patched(checkpointing(llama(), checkpoints), chunk)
        model.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda *given: dtypes.add((given[1][0].dtype, given[2].dtype))
        )
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(**rows())
            model(
                input_ids=torch.arange(3, 8)[None], labels=torch.arange(3, 8)[None]
            ).loss.backward()
            assert None not in [p.grad for p in model.model.layers[0].mlp.parameters()]
            model.zero_grad()
            loss = model(**rows()).loss
            if around_backward:
                loss.backward()
        if not around_backward:
            loss.backward()
        found.append((loss.detach(), gradients_of(model)))
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}
    assert_same(found[1], found[0], 0.02)  # bfloat16 has 8 bits


def without_parameters(mlp):
    """Plain attributes instead, as FSDP1 makes them."""
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        weight = linear.weight
        del linear.weight
        linear.weight = weight * 1


@pytest.mark.parametrize(
    ("change", "when", "why"),
    [
        (lambda mlp: mlp.up_proj.weight.register_hook(lambda x: x / 2), "before", "no hooks"),
        (lambda mlp: mlp.requires_grad_(False).up_proj.weight.add_(1), "after", "changed in place"),
        (lambda mlp: setattr(mlp, "up_proj", copy.deepcopy(mlp.up_proj)), "after", "has no part"),
        (without_parameters, "before", "use_orig_params"),
    ],
    ids=["hook", "in_place", "replaced", "without_parameters"],
)
def test_gradients_that_would_be_lost(change, when, why):
    model = llama()
    mlp = patched(model).model.layers[0].mlp
    hidden = torch.randn(1, TOKENS, mlp.up_proj.in_features, requires_grad=True)

    def step():
        if when == "before":
            change(mlp)
        loss = mlp(hidden).sum()
        if when == "after":
            change(mlp)
        loss.backward()

    with pytest.raises((NotImplementedError, RuntimeError), match=why):
        step()


def test_gradients_are_not_summed_in_bfloat16():
    """Nor returned in another dtype. 512 chunks of one token."""
    model = llama()
    ids = torch.randint(3, 60, (1, 512), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids}
    exact = learned(patched(copy.deepcopy(model).double(), None), inputs)[1]
    errors = []
    for chunk in (None, 1):
        gradients = learned(patched(copy.deepcopy(model).bfloat16(), chunk), inputs)[1]
        weights = {k: x for k, x in gradients.items() if "layers.1.mlp" in k}
        assert {x.dtype for x in weights.values()} == {torch.bfloat16}
        errors.append(
            sum(((x - exact[k]).norm() / exact[k].norm()).item() for k, x in weights.items())
        )
    assert errors[1] <= 1.2 * errors[0]


# ---- what exists, and what is computed ----


class Largest(TorchDispatchMode):
    """The most rows of any tensor of intermediates."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        weights = (48, WIDTH)  # of down_proj, and of the others, transposed
        if isinstance(out, torch.Tensor) and out.shape[-1:] == weights[1:] and out.shape != weights:
            self.rows = max(self.rows, out.numel() // WIDTH)
        return out


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_intermediates_of_all_tokens_never_exist(checkpoints):
    """Neither in the forward nor in the backward."""
    model = checkpointing(llama(), checkpoints)
    for chunk, most in ((CHUNK, CHUNK), (None, TOKENS)):
        patched(model, chunk)
        with Largest() as seen:
            learned(model)
        assert seen.rows == most
        with Largest() as seen, torch.no_grad():
            model(**rows())
        assert seen.rows == most


@pytest.mark.parametrize(
    ("family", "checkpoints", "times"),
    [
        ("llama", "none", 2),
        ("llama", "not_reentrant", 2),
        ("llama", "offload", 2),
        ("llama", "reentrant", 3),
        ("olmo2", "not_reentrant", 3),  # whose layer ends with a norm of the MLP's output
    ],
)
def test_tokens_are_computed_twice(computed, family, checkpoints, times):
    """In forward and backward; not once more where a checkpoint computes the layer again."""
    model = patched(checkpointing(new_model(family).train(), checkpoints))
    sizes = computed(model)
    learned(model)
    assert sum(sizes) == times * TOKENS
    assert max(sizes) == CHUNK


def test_short_rows_run_whole(computed):
    model = patched(llama(), TOKENS)
    sizes = computed(model)
    expected = learned(model)
    assert sizes == [TOKENS]
    patched(model, None)
    assert_same(learned(model), expected, 0)


@pytest.mark.parametrize("by_layer", [False, True])
def test_compiled_as_without(by_layer):
    """Whole, in one graph, or the layers in one graph for all."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = patched(llama(num_hidden_layers=3))
    expected = learned(model)
    for part in model.model.layers if by_layer else [model]:
        part.compile(backend=counter, fullgraph=True)
    assert_same(learned(model), expected, 1e-4)
    assert counter.frame_count == 1


# ---- patching ----


def forwards(model):
    return [(name, sorted(vars(module))) for name, module in model.named_modules()]


def test_unpatching(computed):
    model = llama()
    before, sizes = forwards(model), computed(model)
    expected = learned(patched(model, None))
    fv.unpatch_model(model)
    logits = model(**rows()).logits
    for chunk in (CHUNK, 11):
        sizes.clear()
        assert_same(learned(patched(model, chunk)), expected, 1e-4)
        assert max(sizes) == chunk
    twin = copy.deepcopy(model)
    fv.unpatch_model(model)
    assert forwards(model) == before
    assert torch.equal(model(**rows()).logits, logits)
    assert_same(learned(twin), expected, 1e-4)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.zero_()
    assert torch.equal(model(**rows()).logits, logits)
    with fv.patched(model, "sdpa", mlp_chunk_tokens=CHUNK):
        sizes.clear()
        learned(model)
        assert max(sizes) == CHUNK
    assert forwards(model) == before
    patched(model, CHUNK)
    patched(model, None)
    assert not any("forward" in vars(mlp) for mlp in dense_mlps(model))


def test_a_pickle():
    """Loads, and chunks again when it is patched."""
    model = patched(llama())
    loaded = pickle.loads(pickle.dumps(model))
    fv.unpatch_model(loaded)
    assert_same(learned(patched(loaded)), learned(model), 0)


def test_a_second_backward():
    model = patched(llama())
    loss = model(**rows()).loss
    loss.backward(retain_graph=True)
    first = gradients_of(model)
    model.zero_grad()
    loss.backward()
    assert_same((loss.detach(), gradients_of(model)), (loss.detach(), first), 0)


REFUSED = {
    "none": ({"mlp_chunk_tokens": 0}, "mlp_chunk_tokens must be a positive number"),
    "no_number": ({"mlp_chunk_tokens": "all"}, "mlp_chunk_tokens must be a positive number"),
    "same_bits": (
        {"mlp_chunk_tokens": 8, "same_bits": 64},
        "mlp_chunk_tokens must not be given with same_bits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_are_refused(case):
    options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        fv.patch_model(new_model("llama"), "sdpa", **options)


# ---- trainers ----


def test_trainer(tmp_path, computed):
    found = []
    for chunk in (None, CHUNK):
        trainer = trainer_of(tmp_path)
        trainer.teacher = nn.ModuleList([new_model("mixtral"), new_model("bert")])
        sizes = computed(trainer.model)
        fv.patch_trainer(trainer, "sdpa", mlp_chunk_tokens=chunk)
        sizes.clear()
        trainer.train()
        losses = [x for log in trainer.state.log_history for k, x in log.items() if "loss" in k]
        found.append((torch.tensor(losses), trainer.learned))
        assert (max(sizes) == CHUNK) == (chunk is not None)
        assert all(map(fv.is_patched, trainer.teacher))
    assert_same(found[1], found[0], 1e-4)
