"""Routers replay an engine's experts: the log-probabilities are those of the rollout."""

from __future__ import annotations

import copy
import gc
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

import flexvarlen as fv
from flexvarlen.patches.forward import replay
from tests.contract_oracle import gradients_of
from tests.patches.forward import replay_runs as runs
from tests.patches.forward.replay_runs import FORMS, RULES, alone, loss_of, rollouts, samples
from tests.slow import with_slow
from tests.tiny_models import new_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:flexvarlen. recurrent layers run one document after another",
    "ignore:`gradient_checkpointing_enable`",
)
LEAST = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text")  # a rule each, and a hybrid
REFUSED = {"llama4_text": "Llama4Router", "minimax_m2": "MiniMaxM2TopKRouter"}


def check(found, model, kind):
    """As the rollout, in fp32; gradients as of each sample alone with forced routing."""
    expected, gradients = alone(kind)
    for each, of_alone, of_rollout in zip(found, expected, rollouts(kind), strict=True):
        tokens = len(each)  # of the unpadded batch's first sample two fewer
        for other in (of_alone, of_rollout.logprobs):
            torch.testing.assert_close(each, other[:tokens], atol=2e-5, rtol=0)
    if sum(map(len, found)) == sum(map(len, expected)):
        loss_of(found).backward()
        for name, gradient in gradients_of(model).items():
            norm = gradients[name].norm()
            assert (gradient - gradients[name]).norm() <= 1e-4 * norm + 1e-6, name


def without_routes(kind):
    names = ("input_ids", "labels")
    return [{name: x[name] for name in names} for x in samples(kind)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", with_slow(RULES, set(RULES) - set(LEAST)))  # rules of LEAST
def test_log_probabilities_and_gradients_are_those_of_the_rollout(kind, form):
    check(*FORMS[form](kind, samples(kind)), kind)


@pytest.mark.parametrize("kind", LEAST)
def test_without_replay_they_differ(kind):
    found, _ = runs.packed(kind, without_routes(kind))
    expected, _ = alone(kind)
    assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) > 0.1


@pytest.mark.parametrize("form", with_slow(FORMS, ["unpadded", "sharing", "parts"]))
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text"])
def test_recomputed_layers_replay_too(kind, form):
    check(*FORMS[form](kind, samples(kind), checkpoints=True), kind)


def test_reentrant_checkpoints():
    model = runs.patched("qwen3_moe").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    check(*runs.packed("qwen3_moe", samples("qwen3_moe"), model=model), "qwen3_moe")


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", with_slow(["qwen3_moe", "gpt_oss"], ["gpt_oss"]))
def test_implementations_of_experts(kind, experts):
    check(*runs.packed(kind, samples(kind), experts=experts), kind)


# ---- trees ----


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_samples_share_tokens_whose_experts_agree(kind):
    """The prompts of the first two; the third has the same tokens and other experts."""
    given = samples(kind)
    lengths = [len(x["input_ids"]) for x in given]
    shared = fv.share_prefixes(given)
    apart = fv.share_prefixes(without_routes(kind))
    common = int((given[0]["input_ids"] != given[1]["input_ids"]).nonzero()[0, 0])
    assert common >= runs.PROMPT - 1
    assert shared.layout.total_tokens == sum(lengths) - min(common, runs.PROMPT - 1)
    assert apart.layout.total_tokens < shared.layout.total_tokens
    for found, sample in zip(shared.unfold(shared.routed_experts), given, strict=True):
        assert torch.equal(found, sample["routed_experts"])
    own = shared.of_rank(1, 2)
    for found, index in zip(own.unfold(own.routed_experts), own.samples, strict=True):
        assert torch.equal(found, given[index]["routed_experts"])


def test_rows_share_tokens_whose_experts_agree():
    totals = []
    model = runs.patched("qwen3_moe", unpad=True, share_prefixes=True)
    model.model.layers[0].mlp.gate.register_forward_hook(
        lambda _, args, __: totals.append(args[0].numel() // args[0].shape[-1])
    )
    batch = runs.padded(samples("qwen3_moe"), "right")
    lengths = int(batch["attention_mask"].sum())
    model(**batch, use_cache=False)
    del batch["routed_experts"]
    model(**batch, use_cache=False)
    with_routes, without = totals
    assert without < with_routes < lengths


# ---- one graph ----


@pytest.mark.parametrize("checkpoints", with_slow([False, True], [False]))  # which True holds
@pytest.mark.parametrize("kind", with_slow(["qwen3_moe", "gpt_oss"], ["gpt_oss"]))
def test_in_one_graph(kind, checkpoints):
    torch._dynamo.reset()
    model = runs.prepared(runs.patched(kind), checkpoints=checkpoints, experts="batched_mm").train()
    counter = CompileCounterWithBackend("eager")
    batch = runs.row_of(kind, total_tokens=190)
    batch["packed_layout"] = fv.PackedLayout.from_lengths(
        [len(x["input_ids"]) for x in samples(kind)], total_tokens=190
    )
    eager = copy.deepcopy(model)
    loss = eager(**batch).loss
    loss.backward()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    compiled(**batch | {"routed_experts": torch.full_like(batch["routed_experts"], -1)})
    found = compiled(**batch).loss
    found.backward()
    assert counter.frame_count == 1
    torch.testing.assert_close(found, loss)
    for (name, x), y in zip(model.named_parameters(), eager.parameters(), strict=True):
        if y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert vars(model.model)[replay._REPLAY].routes is None
    torch._dynamo.reset()


@pytest.mark.slow  # each layer's hooks are those of test_in_one_graph
@pytest.mark.parametrize("checkpoints", [False, True])
def test_layers_compiled_one_by_one(checkpoints):
    torch._dynamo.reset()
    model = runs.patched("qwen3_moe")
    for layer in model.model.layers:
        layer.compile(backend="eager")
    settings = {"checkpoints": checkpoints, "experts": "batched_mm"}
    check(*runs.packed("qwen3_moe", samples("qwen3_moe"), model=model, **settings), "qwen3_moe")
    torch._dynamo.reset()


# ---- the router's loss ----


@pytest.mark.parametrize("kind", with_slow(["qwen3_moe", "mixtral", "gpt_oss"], ["mixtral"]))
@pytest.mark.parametrize("form", ["packed", "tree", "unpadded", "sharing"])
def test_the_loss_of_routers_counts_the_experts_of_the_engine(kind, form):
    given = samples(kind)
    settings = {"unpad": form != "packed" and form != "tree", "share_prefixes": form == "sharing"}
    model = runs.patched(kind, **settings)
    if settings["unpad"]:
        batch = runs.padded(given, "right") | {"use_cache": False}
    elif form == "packed":
        batch = runs.row_of(kind, total_tokens=190)
    else:
        batch = fv.share_prefixes(given, total_tokens=190).batch()
    out = model(**batch, output_router_logits=True)
    logits = [torch.cat(x) for x in zip(*(runs.logits_alone(kind)), strict=True)]
    routes = torch.cat([x["routed_experts"] for x in given]).long()
    experts, top_k = logits[0].shape[1], routes.shape[2]
    probabilities = torch.stack([x.softmax(-1) for x in logits])  # [M, T, E]
    own = torch.stack([x.topk(top_k).indices for x in logits])
    chosen = torch.where(routes.movedim(1, 0) < 0, own, routes.movedim(1, 0))
    frequency = torch.nn.functional.one_hot(chosen, experts).sum(2).double().mean((0, 1))
    expected = experts * (frequency * probabilities.double().mean((0, 1))).sum()
    torch.testing.assert_close(out.aux_loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", with_slow(LEAST, LEAST[1:3]))
def test_two_ranks_learn_as_one_process(ranks, kind):
    balances = kind in ("qwen3_moe", "gpt_oss")
    found = ranks.run(runs.of_rank, kind, balances)
    model = runs.patched(kind).train()
    inputs = {"output_router_logits": True} if balances else {}
    out = model(**runs.row_of(kind, total_tokens=184), **inputs)
    out.loss.backward()
    torch.testing.assert_close(sum(x["loss"] for x in found), out.loss.detach())
    for name, gradient in gradients_of(model).items():
        total = sum(x["gradients"][name] for x in found)
        assert (total - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


# ---- nothing is left behind ----


def test_nothing_is_replayed_after_an_error(monkeypatch):
    model = runs.patched("qwen3_moe")
    batch = runs.row_of("qwen3_moe", total_tokens=184)
    expected = model(**batch | {"routed_experts": None}).logits

    def fail(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.experts.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(**batch)
    handle.remove()
    gc.collect()
    gate, x = model.model.layers[1].mlp.gate, torch.randn(5, 48)
    logits, _, indices = gate(x)
    assert torch.equal(indices, logits.topk(2).indices)
    assert torch.equal(model(**batch | {"routed_experts": None}).logits, expected)


def test_unpatched_models_and_copies():
    model = runs.patched("qwen3_moe")
    batch = runs.row_of("qwen3_moe", total_tokens=184)
    expected = model(**batch).logits
    assert torch.equal(copy.deepcopy(model)(**batch).logits, expected)
    fv.unpatch_model(model)
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        assert replay._replay not in hooks
        assert replay._pass_on not in hooks
        assert replay._REPLAY not in vars(module)


# ---- refusals ----


def rows(kind="qwen3_moe", **changes):
    return runs.row_of(kind, total_tokens=184) | changes


def routes(change):
    found = rows()["routed_experts"].clone()
    change(found)
    return {"routed_experts": found}


REFUSALS = [
    ("routed_experts must be an integer tensor, got list", lambda: {"routed_experts": [1]}),
    (
        "routed_experts must be an integer tensor, got torch.float32",
        lambda: {"routed_experts": rows()["routed_experts"].float()},
    ),
    (
        "routed_experts must have shape [1, 184, 2, 2]",
        lambda: {"routed_experts": rows()["routed_experts"][:, 1:]},
    ),
    (
        "routed_experts must have shape [1, 184, 2, 2]",
        lambda: {"routed_experts": rows()["routed_experts"][:, :, :1]},
    ),
    ("routed_experts must be from 0 to 3", lambda: routes(lambda x: x[0, 3].fill_(4))),
    ("routed_experts must be from 0 to 3", lambda: routes(lambda x: x[0, 3, 0, 0].fill_(-1))),
    ("routed_experts must be from 0 to 3", lambda: routes(lambda x: x[0, 3].fill_(-2))),
    ("and different experts of a token", lambda: routes(lambda x: x[0, 3].fill_(1))),
    (
        "routed_experts must come with packed rows",
        lambda: {"packed_layout": None, "attention_mask": torch.ones(1, 1, 184, 184).bool()},
    ),
]


@pytest.mark.parametrize(("words", "changes"), REFUSALS)
def test_refused(words, changes):
    model = runs.patched("qwen3_moe")
    with pytest.raises(ValueError, match=re.escape(words)):
        model(**rows(**changes()))


def test_rows_of_a_padded_batch_share_no_routes():
    """Of one row for several."""
    model = fv.patch_model(new_model("qwen3_moe"), "reference", unpad=True)
    ids, mask = torch.arange(3, 21).view(3, 6), torch.ones(3, 6).long()
    mask[0, 4:] = 0
    with pytest.raises(ValueError, match=re.escape("must have shape [3, 6, 2, 2]")):
        model(ids, mask, routed_experts=torch.zeros(1, 6, 2, 2).long())


def test_a_checkpoint_around_a_mixture_alone():
    """It computes the router again without the attention that hands it the engine's experts."""
    model = runs.patched("qwen3_moe").train()
    layer = model.model.layers[0]
    layer.mlp = checkpoint_wrapper(layer.mlp, CheckpointImpl.REENTRANT)
    loss = model(**rows()).logits.sum()
    with pytest.raises(NotImplementedError, match="checkpoints of whole layers"):
        loss.backward()


def test_a_rule_computes_in_the_dtype_of_the_router():
    """Also under autocast, which changes that of logits."""
    model = fv.patch_model(new_model("deepseek_v3"), "reference")
    gates = [x for name, x in model.named_modules() if name.endswith("mlp.gate")]
    found = []
    gates[0].register_forward_hook(lambda _, args, out: found.append(out))
    ids = torch.arange(3, 23)[None]
    with torch.autocast("cpu", torch.bfloat16):
        model(ids)
        routes = found[0][2][None, :, None].expand(-1, -1, len(gates), -1)
        model(ids, routed_experts=routes)
    assert torch.equal(found[0][1], found[1][1])


def test_a_model_without_experts():
    model = fv.patch_model(new_model("llama"), "reference")
    with pytest.raises(ValueError, match="routed_experts must be given to a model with experts"):
        model(torch.arange(3, 9)[None], routed_experts=torch.zeros(1, 6, 2, 2).long())


@pytest.mark.parametrize("kind", REFUSED)
def test_routers_of_no_known_rule(kind):
    model = fv.patch_model(new_model(kind), "reference")
    ids = torch.arange(3, 9)[None]
    with pytest.raises(NotImplementedError, match=f"routers of class {REFUSED[kind]}, whose"):
        model(ids, routed_experts=torch.zeros(1, 6, 2, 2).long())
    model(ids)


def test_routes_that_do_not_reach_a_router():
    model = runs.patched("qwen3_moe")
    vars(model.model.layers[1].self_attn)["_forward_pre_hooks"].clear()
    with pytest.raises(NotImplementedError, match="got 1 of 2 routers of Qwen3MoeModel"):
        model(**rows())
