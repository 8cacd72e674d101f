"""The names of other packages that may change without notice, and what of ours depends on each.

Private names, and public ones whose parameters, instance attributes or behaviour are not documented
to stay. `tests/test_private_names.py` looks each of them up: the first thing to run against a new
release, `make test-newest` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests import relied_behaviour as behaviour


@dataclass(frozen=True)
class Name:
    """One name.

    Attributes:
        dotted: where it is. "a | b": one of these, as releases differ. An attribute of a class may
            be one that its methods set on `self`.
        used_by: files of ours, below flexvarlen/.
        takes: parameters that we pass, or read, by name; "a|b": one of these.
        says: words that its source must hold, such as keywords that it passes on; "a|b" as above.
        holds: raises AssertionError where it behaves otherwise than we rely on.
    """

    dotted: str
    used_by: str
    takes: str = ""
    says: str = ""
    holds: Callable[[], None] | None = None


_OPERATOR = "attention/backends/cu_seqlens/operator.py"
_BACKEND = "attention/backends/cu_seqlens/backend.py"
_VARLEN = "attention/backends/cu_seqlens/varlen.py"
_FLEX = "attention/backends/compiled_flex.py"
_DELTA = "recurrent/fla_kernels/delta_rules.py"
_SCAN = "recurrent/fla_kernels/decayed_scan.py"
_CONV = "recurrent/fla_kernels/convolution.py"
_FUNCTIONS = "patches/attention/functions.py"
_LAYERS = "patches/models/layers.py"
_RECURRENT = "patches/forward/recurrent_layers.py"
_TOWER = "patches/forward/vision_tower.py"
_TRAINERS = "patches/trainers.py"
_PASS = "packing/loader_pass.py"
_CACHE = "patches/batch/cache.py"
_METRICS = "measure/compilation.py"

TORCH = (
    Name("torch._C._functorch.is_functorch_wrapped_tensor", "attention/api.py"),
    Name(
        "torch.autograd.forward_ad._current_level",
        f"attention/api.py {_FUNCTIONS}",
        holds=behaviour.no_forward_mode_by_default,
    ),
    Name(
        "torch._C._current_graph_task_id",
        "attention/auto/decide.py",
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
    Name(
        "torch._dynamo.config.recompile_limit",
        "verify/compare/compare.py verify/drift/model/run.py",
    ),
    Name("torch._dynamo.backends.registry.lookup_backend", "verify/drift/model/run.py"),
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
        f"{_FLEX} verify/variants.py",
        takes="inner_compile config_patches",
    ),
    Name("torch._inductor.compile_fx.compile_fx_inner", _FLEX),
    Name("torch._guards.TracingContext.fw_metadata", _FLEX),
    Name("torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs", _FLEX),
    Name("torch._inductor.cudagraph_trees.CUDAGraphNode._record", "layout/launch_sizes.py"),
    Name("torch._inductor.utils.fresh_cache", "verify/compare/check.py"),
    Name(
        "torch.distributed._functional_collectives.all_to_all_single_autograd",
        "parallel.py",
        takes="group",
    ),
    Name("torch.distributed._functional_collectives.wait_tensor", "parallel.py"),
    Name("torch.distributed.distributed_c10d._get_default_store", "attention/auto/ranks.py"),
    Name("torch.distributed.distributed_c10d.PrefixStore", "attention/auto/ranks.py"),
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
    Name("torch._library.custom_ops.CustomOpDef._init_fn", "attention/backends/cu_seqlens/fa2.py"),
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
    Name("torch.nn.Module._modules", f"{_LAYERS} {_RECURRENT} reference/model.py patches/api.py"),
    Name("torch.nn.Module._parameters", _LAYERS),
    Name("torch.nn.Module._buffers", "patches/isolation/model_run.py"),
    Name("torch.nn.Module._forward_hooks", "patches/models/rope.py"),
    Name("torch.nn.Module._forward_pre_hooks", _RECURRENT),
    Name("torch.nn.Module._forward_pre_hooks_with_kwargs", _RECURRENT),
    Name("torch.nn.Module._compiled_call_impl", _LAYERS, holds=behaviour.compile_sets_the_call),
    Name("torch._dynamo.eval_frame.OptimizedModule._orig_mod", _LAYERS),
    Name("torch.Tensor._version", "patches/attention/without_patch.py"),
)

_QWEN2_VL = "transformers.models.qwen2_vl.modeling_qwen2_vl"
_QWEN25_VL = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
_QWEN3_VL = "transformers.models.qwen3_vl.modeling_qwen3_vl"
_LLAMA = "transformers.models.llama.modeling_llama"
_LLAMA4 = "transformers.models.llama4.modeling_llama4"
_GEMMA4 = "transformers.models.gemma4.modeling_gemma4"
_AUTO = "transformers.models.auto.modeling_auto"
_SSD = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h")

TRANSFORMERS = (
    Name(
        "transformers.AttentionInterface.register",
        f"{_FUNCTIONS} patches/verification.py",
        holds=behaviour.our_functions_get_what_the_model_was_given,
    ),
    Name("transformers.AttentionMaskInterface.register", _FUNCTIONS),
    Name("transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS", "patches/verification.py"),
    Name(
        "transformers.masking_utils.sdpa_mask",
        _FUNCTIONS,
        takes="batch_size q_length kv_length q_offset kv_offset attention_mask use_vmap "
        "mask_function",
    ),
    Name(
        "transformers.masking_utils.or_masks",
        "patches/models/image_masks.py",
        holds=behaviour.overlays_have_the_code_of_or_masks,
    ),
    Name("transformers.masking_utils.causal_mask_function", "patches/models/image_masks.py"),
    Name(
        "transformers.integrations.sdpa_attention.sdpa_attention_forward",
        "patches/attention/decoding.py",
        takes="scaling is_causal",
    ),
    Name(
        "transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS",
        "patches/models/rope.py",
        holds=behaviour.longrope_takes_a_length,
    ),
    *(
        Name(f"{_LLAMA}.LlamaRotaryEmbedding.{name}", "patches/models/rope.py")
        for name in ("rope_type", "inv_freq", "original_inv_freq", "attention_scaling")
    ),
    *(
        Name(f"transformers.PreTrainedModel.{name}", used_by)
        for name, used_by in {
            "base_model": f"{_LAYERS} patches/forward/heads.py reference/model.py",
            "base_model_prefix": "reference/model.py",
            "set_attn_implementation": "patches/state.py",
            "_can_set_attn_implementation": "patches/verification.py",
            "_can_set_experts_implementation": "patches/verification.py",
            "get_experts_implementation": "patches/verification.py",
            "set_experts_implementation": "patches/verification.py reference/model.py",
            "_supports_sdpa": "reference/model.py",
            "_use_kernels": _RECURRENT,
        }.items()
    ),
    Name(
        "transformers.PreTrainedModel._loss_function",
        "patches/forward/heads.py",
        holds=behaviour.a_users_loss_is_in_the_dict_of_the_model,
    ),
    Name("transformers.quantizers.HfQuantizer.is_trainable", "patches/verification.py"),
    Name("transformers.loss.loss_utils.ForCausalLMLoss", "patches/forward/heads.py", says="kwargs"),
    Name(
        "transformers.PreTrainedModel._gradient_checkpointing_func",
        "patches/models/gemma4.py patches/isolation/model_run.py",
        holds=behaviour.checkpointing_is_a_partial_with_use_reentrant,
    ),
    Name(
        "transformers.modeling_utils.PreTrainedModel.from_pretrained",
        "patches/verification.py",
        says="hf_quantizer",
    ),
    *(
        Name(f"transformers.PreTrainedConfig.{name}", used_by)
        for name, used_by in {
            "_attn_implementation": "patches/state.py patches/forward/steps.py",
            "_attn_implementation_internal": _TOWER,
            "sub_configs": "patches/state.py",
            "get_text_config": "patches/embed.py",
            "name_or_path": "patches/embed.py",
            "return_dict": "patches/forward/padding.py",
        }.items()
    ),
    # from 5.23 on a config does not keep the revision, and `embed` reads the files of main
    Name(
        "transformers.PreTrainedConfig._commit_hash | transformers.utils.hub.resolve_revision",
        "patches/embed.py",
    ),
    Name(
        "transformers.utils.cached_file",
        "patches/sentence_transformers_files.py",
        holds=behaviour.cached_file_can_say_that_there_is_none,
    ),
    *(
        Name(f"{_AUTO}.{name}", "patches/forward/heads.py")
        for name in (
            "MODEL_FOR_CAUSAL_LM_MAPPING",
            "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
            "MODEL_FOR_MULTIPLE_CHOICE_MAPPING",
            "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        )
    ),
    # what layers hold, and are given
    *(
        Name(f"{_LLAMA}.LlamaAttention.{name}", _LAYERS)
        for name in ("is_causal", "layer_idx", "head_dim", "num_key_value_groups", "scaling")
    ),
    Name(f"{_LLAMA}.LlamaAttention.layer_idx", "patches/attention/without_patch.py"),
    Name(f"{_LLAMA}.LlamaDecoderLayer.self_attn", _LAYERS),
    Name(f"{_LLAMA}.LlamaModel.layers", _LAYERS),
    Name(f"{_LLAMA}.LlamaModel.rotary_emb", "patches/models/rope.py"),
    Name(
        f"{_LLAMA}.LlamaModel.forward",
        f"patches/forward/steps.py patches/forward/inputs.py {_CACHE}",
        takes="input_ids attention_mask position_ids past_key_values|cache inputs_embeds use_cache",
    ),
    Name(
        f"{_LLAMA}.LlamaForCausalLM.forward",
        "patches/forward/steps.py patches/forward/sequence_parallel.py",
        takes="labels logits_to_keep",
    ),
    Name(
        "transformers.models.mamba2.modeling_mamba2.Mamba2Model.forward",
        _CACHE,
        takes="cache_params|cache",
    ),
    Name("transformers.models.qwen2.modeling_qwen2.Qwen2Attention.sliding_window", _LAYERS),
    Name(
        "transformers.models.gemma2.modeling_gemma2.Gemma2Attention.attn_logit_softcapping",
        _LAYERS,
    ),
    Name(
        "transformers.models.gemma2.modeling_gemma2.Gemma2Attention.forward",
        _FUNCTIONS,
        says="softcap= sliding_window=",
    ),
    Name("transformers.models.gpt_oss.modeling_gpt_oss.GptOssAttention.sinks", _LAYERS),
    Name(
        "transformers.models.gpt_oss.modeling_gpt_oss.GptOssAttention.forward",
        _FUNCTIONS,
        says="s_aux=",
    ),
    *(
        Name(
            f"transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention.{name}",
            _LAYERS,
        )
        for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim")
    ),
    *(
        Name(f"{_LLAMA4}.Llama4TextAttention.{name}", "patches/models/llama4.py")
        for name in ("floor_scale", "attn_scale", "use_rope")
    ),
    *(
        Name(f"transformers.models.llama4.configuration_llama4.Llama4TextConfig.{name}", used_by)
        for name, used_by in {
            "attention_chunk_size": _LAYERS,
            "attn_temperature_tuning": "patches/models/llama4.py",
            "layer_types": _LAYERS,
            "rope_parameters": "patches/models/rope.py",
        }.items()
    ),
    Name(
        f"{_GEMMA4}.Gemma4TextModel.forward",
        "patches/models/gemma4.py",
        takes="logits_to_keep|kwargs",
    ),
    *(
        Name(
            f"transformers.models.gemma4.configuration_gemma4.Gemma4TextConfig.{name}",
            "patches/models/gemma4.py",
        )
        for name in ("num_kv_shared_layers", "use_bidirectional_attention")
    ),
    Name(
        "transformers.models.roberta.modeling_roberta.RobertaEmbeddings"
        ".create_position_ids_from_input_ids",
        _LAYERS,
    ),
    Name(
        "transformers.models.roberta.modeling_roberta.RobertaEmbeddings.padding_idx",
        _LAYERS,
    ),
    Name("transformers.models.bert.modeling_bert.BertModel.pooler", "patches/forward/padding.py"),
    Name("transformers.models.bert.modeling_bert.BertModel.encoder", _LAYERS),
    Name("transformers.models.bert.modeling_bert.BertEncoder.layer", _LAYERS),
    Name("transformers.models.modernbert.modeling_modernbert.ModernBertEncoderLayer.attn", _LAYERS),
    # configs, of which a field that is missing would count as not set
    *(
        Name(f"transformers.{name}", used_by)
        for name, used_by in {
            "LlamaConfig.use_cache": "patches/forward/steps.py",
            "LlamaConfig.rope_parameters": "patches/models/rope.py",
            "LlamaConfig.max_position_embeddings": "patches/embed.py",
            "LlamaConfig.num_attention_heads": _LAYERS,
            "LlamaConfig.num_key_value_heads": _LAYERS,
            "LlamaConfig.hidden_size": _LAYERS,
            "LlamaConfig.attention_dropout": _FUNCTIONS,
            "LlamaConfig.pad_token_id": "patches/forward/steps.py",
            "BertConfig.attention_probs_dropout_prob": _FUNCTIONS,
            "BertConfig.is_decoder": "patches/forward/heads.py",
            "Qwen2Config.layer_types": f"{_LAYERS} {_RECURRENT}",
            "Qwen2Config.sliding_window": _LAYERS,
            "Gemma2Config.attn_logit_softcapping": "reference/model.py",
            "MixtralConfig.output_router_logits": "patches/forward/padding.py "
            "patches/forward/sequence_parallel.py patches/forward/trees.py",
            "Qwen2VLConfig.text_config": f"{_LAYERS} patches/state.py",
            "Qwen2VLConfig.vision_config": _TOWER,
            "PreTrainedConfig.is_encoder_decoder": "patches/verification.py",
        }.items()
    ),
    # caches
    Name("transformers.Cache.layers", _CACHE),
    Name("transformers.Cache.get_seq_length", _CACHE),
    Name(
        "transformers.cache_utils.DynamicLayer.keys",
        _CACHE,
        holds=behaviour.a_layer_is_given_the_tensor_that_the_cache_keeps,
    ),
    Name("transformers.cache_utils.DynamicLayer.get_mask_sizes", "patches/batch/unpacked_rows.py"),
    Name(
        "transformers.cache_utils.LinearAttentionLayer.has_previous_state",
        "patches/batch/unpacked_rows.py",
    ),
    # images
    Name(f"{_QWEN2_VL}.Qwen2VLModel.visual", _LAYERS),
    Name(f"{_QWEN2_VL}.Qwen2VLModel.language_model", _LAYERS),
    Name(f"{_QWEN2_VL}.Qwen2VLModel.rope_deltas", "patches/models/qwen_vl.py"),
    Name(
        f"{_QWEN2_VL}.Qwen2VLModel.get_rope_index",
        "patches/models/qwen_vl.py",
        takes="input_ids mm_token_type_ids image_grid_thw video_grid_thw attention_mask",
    ),
    Name(
        f"{_QWEN25_VL}.Qwen2_5_VLModel.get_rope_index",
        "patches/models/qwen_vl.py",
        takes="second_per_grid_ts",
    ),
    *(
        Name(f"{_QWEN25_VL}.Qwen2_5_VisionTransformerPretrainedModel.{name}", _TOWER)
        for name in ("spatial_merge_size", "window_size", "patch_size")
    ),
    Name(f"{_QWEN25_VL}.Qwen2_5_VisionTransformerPretrainedModel.blocks", _LAYERS),
    *(
        Name(f"{_QWEN3_VL}.Qwen3VLVisionModel.{name}", _TOWER)
        for name in (
            "num_grid_per_side",
            "interpolation_mode",
            "interpolation_align_corners",
        )
    ),
    Name(
        f"{_QWEN25_VL}.Qwen2_5_VLVisionAttention.forward",
        f"{_FUNCTIONS} {_TOWER}",
        takes="cu_seqlens",
        says="cu_seq_lens_q=",
    ),
    Name(
        f"{_QWEN25_VL}.Qwen2_5_VisionTransformerPretrainedModel.forward",
        _TOWER,
        says="max_window_seqlen",
    ),
    Name(
        "transformers.vision_utils.get_vision_attention_seqlens"
        " | transformers.vision_utils.get_vision_cu_seqlens",
        _TOWER,
        says="cu_seqlens",
    ),
    Name("transformers.vision_utils.get_vision_position_ids", _TOWER, says="position_ids"),
    Name(
        "transformers.vision_utils.get_vision_window_index",
        _TOWER,
        takes="spatial_merge_size window_size patch_size",
        says="window_index cu_window_seqlens",
    ),
    Name(
        "transformers.vision_utils.get_vision_interpolation_indices_and_weights",
        _TOWER,
        takes="num_grid_per_side mode align_corners spatial_merge_size",
        says="interp_indices interp_weights",
    ),
    # recurrent layers look these up in their modules, and hand them seq_idx
    *(
        Name(f"transformers.models.{family}.modeling_{family}.{name}", _RECURRENT)
        for family, name in (
            *((family, "mamba2_chunk_scan") for family in _SSD),
            *((family, "mamba2_split_conv1d_scan_combined") for family in _SSD),
            *((family, "causal_conv1d_fn") for family in (*_SSD, "lfm2", "kimi_linear")),
            *(
                (family, name)
                for family in ("olmo_hybrid", "qwen3_5", "qwen3_next")
                for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
            ),
            ("kimi_linear", "chunk_kimi_delta_attention"),
        )
    ),
    Name(
        "transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule",
        "recurrent/functions.py",
        takes="query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel",
        holds=behaviour.recurrent_functions_are_found_in_the_module_of_the_layer,
    ),
    Name(
        "transformers.models.bamba.modeling_bamba.mamba2_chunk_scan",
        "recurrent/functions.py",
        takes="chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states",
    ),
    Name(
        "transformers.models.bamba.modeling_bamba.causal_conv1d_fn",
        "recurrent/functions.py",
        takes="hidden_states weight bias activation",
    ),
    # Trainer
    Name("transformers.Trainer.model_init", _TRAINERS),
    Name("transformers.Trainer._prepare_inputs", _TRAINERS),
    Name("transformers.Trainer.prediction_step", "patches/forward/predictions.py"),
    Name("transformers.trainer.DEFAULT_CALLBACKS", "patches/trainer_callback.py"),
    Name(
        "transformers.integrations.neftune.neftune_post_forward_hook",
        "patches/forward/neftune.py",
        says="neftune_noise_alpha training",
    ),
    Name(
        "transformers.Trainer._set_signature_columns_if_needed",
        "patches/forward/wrapper.py",
        says="signature",
    ),
    Name(
        "transformers.trainer_callback.CallbackHandler.call_event",
        "verify/isolation/callback.py",
        says="model= train_dataloader=",
    ),
)

ACCELERATE = (
    Name(
        "accelerate.state.AcceleratorState._shared_state",
        "patches/attention/context_parallel.py",
    ),
    Name(
        "accelerate.state.AcceleratorState.parallelism_config",
        "patches/attention/context_parallel.py",
    ),
    Name(
        "accelerate.parallelism_config.ParallelismConfig.cp_enabled",
        "patches/attention/context_parallel.py",
    ),
    Name(
        "accelerate.parallelism_config.ParallelismConfig.sp_enabled",
        "patches/attention/context_parallel.py",
    ),
    Name("accelerate.state.GradientState.dataloader_references", _PASS),
    *(
        Name(f"accelerate.state.GradientState.{name}", "patches/forward/predictions.py")
        for name in ("active_dataloader", "end_of_dataloader", "remainder")
    ),
    *(
        Name(f"accelerate.data_loader.{name}", _PASS)
        for name in (
            "DataLoaderShard.iteration",
            "DataLoaderShard.end_of_dataloader",
            "DataLoaderDispatcher.iteration",
            "DataLoaderDispatcher.slice_fn",
            "DataLoaderDispatcher.split_batches",
            "DataLoaderDispatcher.state",
            "BatchSamplerShard.batch_sampler",
            "BatchSamplerShard.num_processes",
            "BatchSamplerShard.split_batches",
            "SkipBatchSampler.batch_sampler",
            "SkipBatchSampler.skip_batches",
        )
    ),
    Name(
        "accelerate.utils.compile_regions",
        "patches/forward/wrapper.py",
        holds=behaviour.compile_regions_keeps_attributes_and_wraps_layers,
    ),
    Name(
        "accelerate.utils.extract_model_from_parallel",
        "patches/forward/wrapper.py",
        says="__wrapped__",
    ),
    Name(
        "accelerate.hooks.add_hook_to_module",
        "patches/models/rope.py patches/isolation/model_run.py",
        says="_hf_hook _old_forward",
    ),
    Name("accelerate.hooks.AlignDevicesHook.execution_device", "patches/isolation/model_run.py"),
    Name("accelerate.hooks.SequentialHook.hooks", "patches/isolation/model_run.py"),
)

TRL = (
    *(
        Name(f"trl.{name}", _TRAINERS)
        for name in (
            "DPOTrainer.ref_model",
            "DPOTrainer.aux_loss_enabled",
            "KTOTrainer.ref_model",
            "KTOTrainer.aux_loss_enabled",
            "GRPOTrainer.ref_model",
            "GRPOTrainer.aux_loss_enabled",
            "GRPOTrainer.reward_funcs",
            "GRPOTrainer.num_generations",
        )
    ),
    Name("trl.GRPOTrainer._prepare_inputs", _TRAINERS, says="shuffle_sequence_dict"),
    Name("trl.trainer.grpo_trainer.shuffle_sequence_dict", _TRAINERS),
    Name(
        "trl.trainer.utils.add_fused_lm_head | trl.models.utils.add_fused_lm_head"
        " | trl.trainer.grpo_trainer.add_fused_lm_head",
        "patches/forward/wrapper.py",
        says="fused_lm_head:",
    ),
)

_ADAPTERS = "patches/forward/adapters.py"

PEFT = (
    Name("peft.PeftModel.peft_config", _ADAPTERS),
    Name("peft.PeftModel.get_prompt", _ADAPTERS),
    Name("peft.tuners.tuners_utils.BaseTuner.peft_config", _ADAPTERS),
    Name("peft.PeftConfig.peft_type", _ADAPTERS),
    Name("peft.LoraConfig.alora_invocation_tokens", _ADAPTERS),
)

_BOUNDARIES = "cu_seqlens chunk_indices"
_STATES = "initial_state output_final_state"
_FLA_PASSES = {
    "ops.gated_delta_rule.chunk.chunk_gated_delta_rule_fwd": (
        _DELTA,
        f"q k v g beta scale {_STATES}",
    ),
    "ops.gated_delta_rule.chunk.chunk_gated_delta_rule_bwd": (
        _DELTA,
        "q k v g beta A scale initial_state do dht",
    ),
    "ops.kda.chunk_fwd.chunk_kda_fwd": (_DELTA, f"q k v g beta scale {_STATES} chunk_size"),
    "ops.kda.chunk_bwd.chunk_kda_bwd": (
        _DELTA,
        "q k v g beta Aqk Akk scale initial_state do dht chunk_size",
    ),
    "ops.simple_gla.chunk.chunk_simple_gla_fwd": (_SCAN, "q k v g scale"),
    "ops.simple_gla.chunk.chunk_simple_gla_bwd": (
        _SCAN,
        "q k v g g_gamma initial_state do dht scale",
    ),
    "modules.causal_conv1d.ops.causal_conv1d_fwd": (
        _CONV,
        "x weight bias residual activation chunk_size",
    ),
    "modules.causal_conv1d.ops.causal_conv1d_bwd": (
        _CONV,
        "x dy dht weight bias activation chunk_size",
    ),
}

FLA = (
    *(
        Name(f"fla.{name}", used_by, takes=f"{takes} {_BOUNDARIES}")
        for name, (used_by, takes) in _FLA_PASSES.items()
    ),
    Name(
        "fla.ops.common.chunk_o.chunk_bwd_dqkwg",
        "recurrent/fla_kernels/hopper.py",
        takes=f"q k v do h dh g g_gamma scale dv w state_v_first chunk_size {_BOUNDARIES}",
    ),
    Name("fla.modules.norm.l2norm.l2norm_fwd", _DELTA),
    Name("fla.modules.norm.l2norm.l2norm_bwd", _DELTA),
    Name("fla.ops.utils.chunk_local_cumsum", _SCAN),
    Name(
        "fla.ops.utils.cumsum.chunk_local_cumsum",
        _SCAN,
        takes=f"chunk_size reverse scale {_BOUNDARIES}",
    ),
    Name("fla.ops.utils.constant.RCP_LN2", _SCAN),
    Name("fla.ops.utils.index.prepare_chunk_offsets", "recurrent/fla_kernels/arguments.py"),
    *(
        Name(f"fla.{name}", "recurrent/fla_kernels/hopper.py")
        for name in (
            "backends.BaseBackend",
            "backends.register",
            "utils.IS_NVIDIA_HOPPER",
            "utils.TRITON_ABOVE_3_4_0",
            "utils.TRITON_ABOVE_3_7_1",
        )
    ),
)

NAMES = (*TORCH, *TRANSFORMERS, *ACCELERATE, *TRL, *PEFT, *FLA)
