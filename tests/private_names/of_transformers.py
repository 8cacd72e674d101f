"""Of transformers: its interfaces, and what its models, layers, configs and caches hold."""

from __future__ import annotations

from tests import relied_behaviour as behaviour
from tests.private_names.name import Name

_FUNCTIONS = "patches/attention/functions.py"
_LAYERS = "patches/models/layers.py"
_RECURRENT = "patches/forward/recurrent_layers.py"
_TOWER = "patches/forward/vision_tower.py"
_SHARES = "patches/context_parallel_trainer.py"
_TRAINERS = "patches/trainers.py"
_INPUTS = "patches/batch/given.py"
_HEADS = "patches/forward/head_checks.py"
_ROUTER = "patches/forward/router.py"

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
        "transformers.masking_utils.or_masks",
        "patches/models/image_masks.py",
        holds=behaviour.overlays_have_the_code_of_or_masks,
    ),
    Name("transformers.masking_utils.causal_mask_function", "patches/models/image_masks.py"),
    Name(
        "transformers.masking_utils.and_masks",
        "patches/models/image_masks.py",
        holds=behaviour.intersection_of_masks_closes_over_them,
    ),
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
            "base_model": "patches/parts.py patches/forward/head_checks.py reference/model.py",
            "base_model_prefix": "reference/model.py",
            "set_attn_implementation": "patches/state.py",
            "_can_set_attn_implementation": "patches/why_not.py",
            "_can_set_experts_implementation": "patches/verification.py",
            "get_experts_implementation": "patches/verification.py",
            "set_experts_implementation": "patches/verification.py reference/model.py",
            "_supports_sdpa": "reference/model.py",
        }.items()
    ),
    Name(
        "transformers.PreTrainedModel._loss_function",
        _HEADS,
        holds=behaviour.a_users_loss_is_in_the_dict_of_the_model,
    ),
    Name("transformers.quantizers.HfQuantizer.is_trainable", "patches/verification.py"),
    Name("transformers.loss.loss_utils.ForCausalLMLoss", _HEADS, says="kwargs"),
    Name(
        "transformers.PreTrainedModel._gradient_checkpointing_func",
        "patches/forward/refusals.py patches/isolation/model_run.py",
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
            "_attn_implementation": "patches/state.py patches/forward/refusals.py",
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
        "patches/embedding_settings.py",
        holds=behaviour.cached_file_can_say_that_there_is_none,
    ),
    *(
        Name(f"{_AUTO}.{name}", _HEADS)
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
        for name in ("head_dim", "num_key_value_groups")
    ),
    Name(f"{_LLAMA}.LlamaDecoderLayer.self_attn", _LAYERS),
    Name(f"{_LLAMA}.LlamaModel.layers", _LAYERS),
    Name(
        f"{_LLAMA}.LlamaForCausalLM.forward",
        "patches/forward/refusals.py patches/forward/sequence_parallel.py",
        takes="logits_to_keep",
    ),
    *(
        Name(
            f"transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention.{name}",
            _LAYERS,
        )
        for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim")
    ),
    Name(
        f"{_GEMMA4}.Gemma4TextModel.forward",
        "patches/forward/refusals.py",
        takes="logits_to_keep|kwargs",
    ),
    Name("transformers.models.bert.modeling_bert.BertModel.encoder", _LAYERS),
    Name("transformers.models.bert.modeling_bert.BertEncoder.layer", _LAYERS),
    Name("transformers.models.modernbert.modeling_modernbert.ModernBertEncoderLayer.attn", _LAYERS),
    # mixtures of experts
    Name(
        "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func",
        _ROUTER,
        holds=behaviour.router_losses_weigh_tokens_by_the_mask,
    ),
    Name(
        "transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM.router_aux_loss_coef",
        _ROUTER,
    ),
    # configs, of which a field that is missing would count as not set
    *(
        Name(f"transformers.{name}", used_by)
        for name, used_by in {
            "LlamaConfig.max_position_embeddings": "patches/embed.py",
            "LlamaConfig.num_key_value_heads": _LAYERS,
            "LlamaConfig.hidden_size": _LAYERS,
            "LlamaConfig.attention_dropout": _FUNCTIONS,
            "LlamaConfig.pad_token_id": "patches/forward/pooling.py",
            "BertConfig.attention_probs_dropout_prob": _FUNCTIONS,
            "Gemma2Config.attn_logit_softcapping": "reference/model.py",
            "Qwen3VLMoeTextConfig.router_aux_loss_coef": _ROUTER,
            "Qwen2VLConfig.vision_config": _TOWER,
        }.items()
    ),
    # caches
    Name("transformers.Cache.layers", "patches/forward/steps.py"),
    Name("transformers.Cache.get_seq_length", "patches/forward/steps.py"),
    Name("transformers.cache_utils.DynamicLayer.get_mask_sizes", "patches/batch/unpacked_rows.py"),
    Name(
        "transformers.cache_utils.LinearAttentionLayer.has_previous_state",
        "patches/batch/unpacked_rows.py",
    ),
    # images
    Name(f"{_QWEN2_VL}.Qwen2VLModel.rope_deltas", "patches/batch/positions.py"),
    Name(
        f"{_QWEN2_VL}.Qwen2VLModel.get_rope_index",
        "patches/batch/positions.py",
        takes="input_ids mm_token_type_ids image_grid_thw video_grid_thw attention_mask",
    ),
    Name(
        f"{_QWEN25_VL}.Qwen2_5_VLModel.get_rope_index",
        "patches/batch/positions.py",
        takes="second_per_grid_ts",
    ),
    *(
        Name(f"{_QWEN25_VL}.Qwen2_5_VisionTransformerPretrainedModel.{name}", _TOWER)
        for name in ("patch_size",)
    ),
    Name(f"{_QWEN25_VL}.Qwen2_5_VisionTransformerPretrainedModel.blocks", _LAYERS),
    *(
        Name(f"{_QWEN3_VL}.Qwen3VLVisionModel.{name}", _TOWER)
        for name in (
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
        for family, name in ((family, "mamba2_split_conv1d_scan_combined") for family in _SSD)
    ),
    Name(
        "transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule",
        "recurrent/layer_functions.py",
        takes="query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel",
        holds=behaviour.recurrent_functions_are_found_in_the_module_of_the_layer,
    ),
    Name(
        "transformers.models.bamba.modeling_bamba.mamba2_chunk_scan",
        "recurrent/layer_functions.py",
        takes="chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states",
    ),
    Name(
        "transformers.models.bamba.modeling_bamba.causal_conv1d_fn",
        "recurrent/layer_functions.py",
        takes="hidden_states weight bias activation",
    ),
    # Trainer
    Name("transformers.Trainer.model_init", _TRAINERS),
    Name("transformers.Trainer._prepare_inputs", _TRAINERS),
    Name("transformers.Trainer.get_total_train_batch_size", _SHARES),
    Name("transformers.Trainer.gather_function", _SHARES),
    Name("transformers.Trainer.get_batch_samples", _SHARES),
    *(Name(f"transformers.Trainer.get_{name}_size", _SHARES) for name in ("tp", "cp", "sp")),
    Name("transformers.Trainer.model_accepts_loss_kwargs", _SHARES),
    Name("transformers.Trainer.is_deepspeed_enabled", _SHARES),
    Name("transformers.Trainer.compute_loss", _SHARES, says="num_items_in_batch num_processes"),
    Name(
        "transformers.Trainer._get_num_items_in_batch",
        _SHARES,
        says="shift_labels average_tokens_across_devices",
    ),
    Name(
        "transformers.Trainer._get_dataloader", _SHARES, says="worker_init_fn accelerator.prepare"
    ),
    Name("transformers.trainer_utils.seed_worker", _SHARES, takes="rank"),
    Name("transformers.Trainer.prediction_step", "patches/forward/guards.py"),
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
