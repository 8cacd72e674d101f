"""`row_cost` counts what torch counts, and predicts the measured times of rows."""

import numpy as np
import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GEOMETRIES, drawn_lengths, log_normal_lengths
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.patches.models.families import BY_TYPE
from tests.bench.quick import committed
from tests.slow import with_slow
from tests.tiny_models import new_model

TOKENS = 24
FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3", "modernbert")
SHOWN = {  # FLOPs of a pair: 14 x heads x head_dim, in each layer
    "llama": {MaskSpec.of(): 2 * 14 * 6 * 16},
    "modernbert": {
        MaskSpec.of(causal=False): 14 * 6 * 16,
        MaskSpec.of(causal=False, window=9): 14 * 6 * 16,
    },
    "qwen3_5_moe_text": {MaskSpec.of(): 14 * 6 * 16},  # the other layer is recurrent
    "llama4_text": {MaskSpec.of(): 14 * 6 * 16, MaskSpec.of(chunk=16): 14 * 6 * 16},
    "mamba2": {},
}


def products(model):
    """FLOPs of the matrix products of weights, forward and backward."""
    ids = torch.arange(5, 5 + TOKENS)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"].items()
    return sum(flops for name, flops in counts if str(name) in ("aten.mm", "aten.addmm"))


# Each family counts by the same rules, which those of FAMILIES hold. transformers runs all experts
# of Llama 4 for each token.
OTHERS = {*BY_TYPE} - {*FAMILIES, "llama4_text"}


@pytest.mark.parametrize("kind", with_slow(sorted({*FAMILIES} | OTHERS), OTHERS))
def test_tokens_cost_the_products_of_their_weights(kind):
    found = fv.row_cost(new_model(kind)).per_token * TOKENS
    # Short convolutions and a recurrence's own parameters are counted, and are no products.
    assert found == pytest.approx(products(new_model(kind)), rel=0.02)


@pytest.mark.parametrize("kind", SHOWN)
def test_pairs_are_counted_by_mask_and_layer(kind):
    assert fv.row_cost(new_model(kind)).per_pair == SHOWN[kind]


def test_frozen_weights_have_no_gradient():
    model = peft.get_peft_model(new_model("llama"), peft.LoraConfig(r=2))
    model.enable_input_require_grads()
    assert fv.row_cost(model).per_token * TOKENS == products(model)


def test_padded_rows_differ_by_their_pairs():
    cost = fv.row_cost(new_model("llama"), padded=True)
    assert (cost.per_token, cost.per_pair) == (0, SHOWN["llama"])
    assert fv.row_cost(new_model("mamba2"), padded=True).per_token > 0  # it has no pairs


def test_a_sharded_model_is_refused():
    model = new_model("qwen3_moe")
    model.model.layers[0].mlp.experts.down_proj.data = torch.empty(0)  # as ZeRO-3 does
    with pytest.raises(ValueError, match="call row_cost before the model is sharded"):
        fv.row_cost(model)


def test_an_unknown_number_of_experts_is_refused():
    model = new_model("qwen3_moe")
    model.config.__dict__["num_experts_per_tok"] = None
    with pytest.raises(NotImplementedError, match="must say how many experts a token uses"):
        fv.row_cost(model)


# ---- against the clock ----

# FLOP/s of attention relative to those of the other layers
PACKINGS = {"auto": 1.0, "transformers:flex_attention": 0.7, "transformers:flash_attention_2": 0.6}


def on_meta(auto_class, case):
    with torch.device("meta"):
        return auto_class.from_config(GEOMETRIES[case["geometry"]](case["layers"]))


@pytest.mark.parametrize("variant", PACKINGS)
def test_times_of_compiled_rows_are_predicted(variant):
    records = [r for r in committed("packings-qwen3-1.7b") if r.case["variant"] == variant]
    short, long = sorted(records, key=lambda r: r.case["tokens"])
    in_flops = fv.row_cost(on_meta(AutoModel, short.case))
    per_pair = {mask: x / PACKINGS[variant] for mask, x in in_flops.per_pair.items()}
    cost = fv.RowCost(in_flops.per_token, per_pair)
    rows = [
        log_normal_lengths(*(record.case[name] for name in ("tokens", "mean_doc", "sigma", "seed")))
        for record in (short, long)
    ]
    assert [max(row) for row in rows] == [5800, 46_400]
    predicted = np.divide(*cost.of_rows(rows))
    assert predicted == pytest.approx(short.measures["ms_p50"] / long.measures["ms_p50"], rel=0.06)


def test_times_of_eager_rows_are_predicted():
    one, other = (
        next(
            r
            for r in committed("model")
            if r.case["variant"] == "packed:auto" and r.case["documents"] == documents
        )
        for documents in ("uniform", "log-normal")
    )
    cost = fv.row_cost(on_meta(AutoModelForCausalLM, one.case))
    names = ("tokens", "documents", "mean_doc", "seed")
    rows = [drawn_lengths(*(record.case[name] for name in names)) for record in (one, other)]
    predicted = np.divide(*cost.of_rows(rows))
    assert predicted == pytest.approx(one.measures["ms_p50"] / other.measures["ms_p50"], rel=0.03)
