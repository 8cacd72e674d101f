"""Behaviour of other packages that we rely on: each function raises where it no longer holds.

For `tests/private_names/`; each imports what it looks at, so that other names are looked up
where a package is missing.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

# ---- torch ----


def no_forward_mode_by_default():
    assert torch.autograd.forward_ad._current_level < 0


def graph_task_only_in_a_backward():
    x, seen = torch.ones((), requires_grad=True), []
    x.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    (x * 2).backward()
    assert torch._C._current_graph_task_id() == -1
    assert seen[0] != -1


def assert_async_raises():
    torch._assert_async(torch.tensor(True), "a message")
    with pytest.raises(RuntimeError, match="a message"):
        torch._assert_async(torch.tensor(False), "a message")


def sdpa_is_torchs_own():
    """Under torch's context_parallel it is a function of torch.distributed."""
    found = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    assert not found.startswith("torch.distributed.")


_PACKED = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]


def flash_forward_takes_its_arguments_in_our_order():
    arguments = _arguments(torch.ops.aten._flash_attention_forward)
    assert arguments[:10] == ["query", "key", "value", *_PACKED, "return_debug_mask"], arguments
    assert {"scale", "window_size_left", "window_size_right"} <= {*arguments}


def flash_backward_takes_its_arguments_in_our_order():
    arguments = _arguments(torch.ops.aten._flash_attention_backward)
    before = ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert arguments[:14] == [*before, *_PACKED, *arguments[12:14]], arguments
    assert {"scale", "window_size_left", "window_size_right"} <= {*arguments[14:]}


def _arguments(operator):
    return [argument.name for argument in operator.default._schema.arguments]


def block_mask_takes_tables_in_our_order():
    from torch.nn.attention.flex_attention import BlockMask

    from flexvarlen.mask.table_shapes import Tables

    taken = list(inspect.signature(BlockMask).parameters)
    ours = list(Tables._fields[2:])
    assert taken[: len(ours) + 1] == ["seq_lengths", *ours], taken
    assert {"BLOCK_SIZE", "mask_mod"} <= {*taken}


def compile_sets_the_call():
    module = nn.Linear(2, 2)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


def compile_marks_a_function():
    forward = nn.Linear(2, 2).forward
    assert not hasattr(forward, "_torchdynamo_orig_callable")
    assert hasattr(torch.compile(forward, backend="eager"), "_torchdynamo_orig_callable")


# ---- transformers ----


def _llama(**config):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **config)).eval()


def our_functions_get_what_the_model_was_given():
    """A 4D mask is passed on as it is, and a keyword that no model knows reaches the layers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    calls, masks = [], []

    def attention(module, query, key, value, attention_mask, **kwargs):
        calls.append((attention_mask, kwargs))
        return query.transpose(1, 2), None

    def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, **kwargs):
        masks.append(kwargs)

    AttentionInterface.register("tested_alone", attention)
    AttentionMaskInterface.register("tested_alone", mask)
    model, ids, given = _llama(), torch.arange(4)[None], object()
    model.set_attn_implementation("tested_alone")
    placeholder = torch.ones((1, 1, 1, 1), dtype=torch.bool)
    model(input_ids=ids, attention_mask=placeholder, tested_keyword=given, use_cache=False)
    passed_mask, kwargs = calls[0]
    assert passed_mask is placeholder
    assert kwargs["tested_keyword"] is given
    assert "scaling" in kwargs
    assert not kwargs.get("dropout")
    assert masks == [], "a mask is built beside a 4D one"
    model(input_ids=ids, use_cache=False)
    assert {"mask_function", "attention_mask"} <= masks[0].keys()


def overlays_have_the_code_of_or_masks():
    from transformers.masking_utils import causal_mask_function, or_masks

    overlay = or_masks(causal_mask_function, lambda b, h, q, kv: q >= 0)
    assert overlay.__code__ is or_masks(causal_mask_function).__code__
    assert overlay.__code__ is not causal_mask_function.__code__


def longrope_takes_a_length():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert "seq_len" in inspect.signature(ROPE_INIT_FUNCTIONS["longrope"]).parameters


def a_users_loss_is_in_the_dict_of_the_model():
    model = _llama()
    assert "_loss_function" not in model.__dict__
    model.loss_function = max
    assert model.__dict__["_loss_function"] is max


def checkpointing_is_a_partial_with_use_reentrant():
    model = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    found = [x for x in model.modules() if getattr(x, "gradient_checkpointing", False)]
    assert found
    assert all(x._gradient_checkpointing_func.keywords["use_reentrant"] for x in found)


def cached_file_can_say_that_there_is_none():
    from pathlib import Path

    from transformers.utils import cached_file

    quiet = ("gated_repo", "missing_entries", "connection_errors")
    names = {f"_raise_exceptions_for_{name}": False for name in quiet}
    here = str(Path(__file__).parent)
    assert cached_file(here, "no such file", subfolder="", revision=None, **names) is None


def recurrent_functions_are_found_in_the_module_of_the_layer():
    """And below a kernel's wrapper there is plain torch."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    looked_up = inspect.unwrap(modeling.Qwen3_5GatedDeltaNet.forward).__globals__
    assert looked_up is vars(modeling)
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        assert inspect.unwrap(looked_up[name]).__name__ == name


def router_losses_weigh_tokens_by_the_mask() -> None:
    """A mask of 2 counts a token twice, one of 0 leaves it out."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as loss

    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    weighed = loss((logits,), 4, 2, torch.tensor([[2, 0, 1]]))
    torch.testing.assert_close(weighed, loss((logits[[0, 0, 2]],), 4, 2))


# ---- accelerate, PEFT ----


def compile_regions_keeps_attributes_and_wraps_layers():
    from accelerate.utils import compile_regions

    model = _llama()
    model.tested_attribute = 1
    compiled = compile_regions(model, backend="eager")
    assert compiled.tested_attribute == 1
    assert compiled.base_model.layers[0]._modules["_orig_mod"] is model.base_model.layers[0]


def intersection_of_masks_closes_over_them():
    from transformers.masking_utils import and_masks, causal_mask_function

    both = (causal_mask_function, causal_mask_function)
    assert and_masks(*both).__closure__[0].cell_contents == both
