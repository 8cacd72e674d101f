"""Of torch."""

from __future__ import annotations

from tests import relied_behaviour as behaviour
from tests.private_names.name import Name

_OPERATOR = "attention/backends/cu_seqlens/operator.py"
_BACKEND = "attention/backends/cu_seqlens/backend.py"
_VARLEN = "attention/backends/cu_seqlens/varlen.py"
_FLEX = "attention/backends/compiled_flex.py"
_LAYERS = "patches/models/layers.py"
_RECURRENT = "patches/forward/recurrent_layers.py"
_METRICS = "measure/compilation.py"

TORCH = (
    Name("torch._C._functorch.is_functorch_wrapped_tensor", "attention/api.py"),
    Name(
        "torch.autograd.forward_ad._current_level",
        "attention/api.py patches/attention/packed_forward.py",
        holds=behaviour.no_forward_mode_by_default,
    ),
    Name(
        "torch._C._current_graph_task_id",
        "attention/auto/candidate_call.py",
        holds=behaviour.graph_task_only_in_a_backward,
    ),
    Name("torch._subclasses.fake_tensor.is_fake", "attention/backends/cu_seqlens/lse.py"),
    Name(
        "torch._assert_async",
        "attention/backends/cu_seqlens/lse.py layout/boundaries.py mask/tables.py "
        "mask/tree_tables.py patches/batch/checks.py",
        holds=behaviour.assert_async_raises,
    ),
    Name("torch._C._TorchDispatchModeKey.PROXY", _BACKEND),
    Name("torch._C._get_dispatch_mode", _BACKEND),
    Name("torch.compiler._is_exporting_flag", _BACKEND),
    Name("torch._C._len_torch_dispatch_stack", "layout/boundaries.py"),
    Name("torch._C._are_functorch_transforms_active", _OPERATOR),
    Name("torch._C._AutoDispatchBelowAutograd", _OPERATOR),
    Name("torch._C._after_ADInplaceOrView_keyset", _OPERATOR),
    Name("torch._C._any_requires_grad", _OPERATOR),
    Name("torch._C.DispatchKeySet", _OPERATOR),
    Name("torch._C.DispatchKey.CUDA", _OPERATOR),
    Name("torch._dynamo.exc.FailOnRecompileLimitHit", _FLEX),
    Name("torch._dynamo.maybe_mark_dynamic", f"{_FLEX} layout/launch_sizes.py"),
    Name("torch._dynamo.config.recompile_limit", "verify/experiment/measure.py"),
    Name("torch._dynamo.backends.registry.lookup_backend", "verify/experiment/variant.py"),
    Name("torch._dynamo.utils.counters", _METRICS),
    Name("torch._dynamo.utils.get_compilation_metrics", _METRICS),
    Name("torch._dynamo.utils.set_compilation_metrics_limit", _METRICS),
    *(
        Name(f"torch._dynamo.utils.CompilationMetrics.{field}", _METRICS)
        for field in ("compile_id", "is_forward", "start_time_us", "end_time_us")
    ),
    Name("torch._functorch.config.donated_buffer", _FLEX),
    Name("torch._inductor.config.max_autotune", _FLEX),
    Name("torch._inductor.config.deterministic", _FLEX),
    Name(
        "torch._inductor.compile_fx.compile_fx",
        f"{_FLEX} verify/experiment/variant.py",
        takes="inner_compile config_patches",
    ),
    Name("torch._inductor.compile_fx.compile_fx_inner", _FLEX),
    Name("torch._guards.TracingContext.fw_metadata", _FLEX),
    Name("torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs", _FLEX),
    Name("torch._inductor.cudagraph_trees.CUDAGraphNode._record", "layout/launch_sizes.py"),
    Name("torch._inductor.utils.fresh_cache", "verify/compare/check.py"),
    Name("torch.distributed._functional_collectives.wait_tensor", "parallel/gather_keys.py"),
    Name(
        "torch.distributed.distributed_c10d._resolve_process_group", "recurrent/adjacent_ranks.py"
    ),
    Name(
        "torch.distributed._functional_collectives.all_to_all_single",
        "parallel/gather_keys.py",
        takes="output_split_sizes input_split_sizes group",
    ),
    Name(
        "torch.nn.functional.scaled_dot_product_attention",
        "patches/attention/context_parallel.py",
        holds=behaviour.sdpa_is_torchs_own,
    ),
    Name(
        "torch.ops.aten._flash_attention_forward",
        _VARLEN,
        holds=behaviour.flash_forward_takes_its_arguments_in_our_order,
    ),
    Name(
        "torch.ops.aten._flash_attention_backward",
        _VARLEN,
        holds=behaviour.flash_backward_takes_its_arguments_in_our_order,
    ),
    Name("torch._ops.OpOverload._schema", _VARLEN),
    Name(
        "torch._library.custom_ops.CustomOpDef._init_fn",
        "attention/backends/cu_seqlens/flash_attention.py",
    ),
    Name("torch.ops.aten._cudnn_attention_forward", "attention/backends/cu_seqlens/cudnn.py"),
    Name("torch.nn.attention.current_flash_attention_impl", "env.py"),
    Name(
        "torch.nn.attention.flex_attention.BlockMask",
        "mask/block_mask.py",
        holds=behaviour.block_mask_takes_tables_in_our_order,
    ),
    Name(
        "torch.nn.attention.flex_attention.flex_attention",
        _FLEX,
        takes="score_mod block_mask scale enable_gqa kernel_options return_aux",
    ),
    Name("torch.nn.attention.flex_attention.AuxRequest", _FLEX, takes="lse"),
    Name("torch.nn.Module._modules", f"{_LAYERS} patches/parts.py reference/model.py"),
    Name("torch.nn.Module._parameters", _LAYERS),
    Name("torch.nn.Module._buffers", "patches/isolation/model_run.py"),
    Name("torch.nn.Module._forward_hooks", "patches/models/rope.py"),
    Name("torch.nn.Module._forward_pre_hooks", _RECURRENT),
    Name("torch.nn.Module._forward_pre_hooks_with_kwargs", _RECURRENT),
    Name("torch.nn.Module._forward_hooks_with_kwargs", _RECURRENT),
    Name("torch.nn.Module._compiled_call_impl", _LAYERS, holds=behaviour.compile_sets_the_call),
    Name("torch._dynamo.eval_frame.OptimizedModule._orig_mod", _LAYERS),
    Name("torch.Tensor._version", "patches/attention/without_patch.py"),
)
