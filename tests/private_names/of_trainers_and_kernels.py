"""Of accelerate, TRL, PEFT and fla."""

from __future__ import annotations

from tests import relied_behaviour as behaviour
from tests.private_names.name import Name

_DELTA = "recurrent/fla_kernels/delta_rules.py"
_SCAN = "recurrent/fla_kernels/decayed_scan.py"
_TRAINERS = "patches/trainers.py"
_PASS = "packing/loader_pass.py"
_SHARES = "patches/context_parallel_trainer.py"

ACCELERATE = (
    Name(
        "accelerate.state.AcceleratorState._shared_state",
        "patches/attention/context_parallel.py",
    ),
    Name("accelerate.state.GradientState.dataloader_references", _PASS),
    *(
        Name(f"accelerate.state.GradientState.{name}", "patches/forward/guards.py")
        for name in ("active_dataloader", "end_of_dataloader", "remainder")
    ),
    *(
        Name(f"accelerate.data_loader.{name}", _PASS)
        for name in (
            "DataLoaderShard.end_of_dataloader",
            "DataLoaderDispatcher.state",
            "BatchSamplerShard.batch_sampler",
            "SkipBatchSampler.batch_sampler",
        )
    ),
    Name(
        "accelerate.data_loader.prepare_data_loader",
        _SHARES,
        takes="num_processes process_index split_batches put_on_device rng_types dispatch_batches "
        "even_batches use_seedable_sampler data_seed non_blocking use_stateful_dataloader",
    ),
    Name("accelerate.Accelerator._prepare_one", _SHARES, says="self.prepare_data_loader"),
    *(
        Name(f"accelerate.Accelerator.{name}", _SHARES)
        for name in ("device_placement", "rng_types")
    ),
    Name(
        "accelerate.Accelerator.gather_for_metrics", _SHARES, says="self.gradient_state.remainder"
    ),
    Name("accelerate.state.GradientState.active_dataloader", _SHARES),
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
            "GRPOTrainer.num_generations",
            "RLOOTrainer.num_generations",
            "trainer.grpo_trainer.shuffle_sequence_dict",
            "trainer.rloo_trainer.shuffle_sequence_dict",
        )
    ),
    *(
        Name(f"trl.{name}._prepare_inputs", _TRAINERS, says="shuffle_sequence_dict")
        for name in ("GRPOTrainer", "RLOOTrainer")
    ),
    Name("trl.SFTTrainer.compute_loss", _SHARES, says="num_items_in_batch gather_for_metrics"),
    Name(
        "trl.trainer.utils.add_fused_lm_head | trl.models.utils.add_fused_lm_head"
        " | trl.trainer.grpo_trainer.add_fused_lm_head",
        "patches/forward/wrapper.py",
        says="fused_lm_head:",
    ),
)

_ADAPTERS = "patches/adapters.py"

PEFT = (
    Name("peft.PeftModel.peft_config", _ADAPTERS),
    Name("peft.PeftModel.get_prompt", "patches/forward/guards.py"),
    Name("peft.PeftConfig.peft_type", _ADAPTERS),
)

_BOUNDARIES = "cu_seqlens chunk_indices"
_FLA_STEPS = {
    "ops.common.chunk_o.chunk_fwd_o": (_DELTA, "q k v h g scale"),
    "ops.common.chunk_o.chunk_bwd_dv_local": (_DELTA, "q k g do scale"),
    "ops.common.chunk_o.chunk_bwd_dv": (_SCAN, "q k g do dh scale"),
    "ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_intra": (_DELTA, "k v g beta"),
    "ops.gated_delta_rule.wy_fast.recompute_w_u_fwd": (_DELTA, "k v beta A g"),
    "ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd": (_DELTA, "k v beta g A dw du"),
    "ops.kda.chunk_intra.chunk_kda_fwd_intra": (
        _DELTA,
        "q k v gk beta scale disable_recompute",
    ),
    "ops.kda.chunk_intra.chunk_kda_bwd_intra": (_DELTA, "q k g beta dAqk dAkk dq dk db dg"),
    "ops.kda.chunk_bwd.chunk_kda_bwd_dAv": (_DELTA, "q k v do A scale"),
    "ops.kda.chunk_bwd.chunk_kda_bwd_wy_dqkg_fused": (
        _DELTA,
        "q k v v_new g beta A h do dh dv scale",
    ),
    "ops.kda.wy_fast.recompute_w_u_fwd": (_DELTA, "q k v beta A gk"),
    "ops.gla.chunk.chunk_gla_fwd_o_gk": (_DELTA, "q v g A h scale"),
}

FLA = (
    *(
        Name(f"fla.{name}", used_by, takes=f"{takes} {_BOUNDARIES}")
        for name, (used_by, takes) in _FLA_STEPS.items()
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
    Name("fla.ops.utils.index.prepare_chunk_offsets", "recurrent/fla_kernels/levels.py"),
    *(
        Name(f"fla.{name}", "recurrent/fla_kernels/states.py")
        for name in (
            "ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
            "ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
            "ops.common.chunk_h.chunk_fwd_kernel_h",
            "ops.common.chunk_h.chunk_bwd_kernel_dh",
        )
    ),
    *(
        Name(f"fla.{name}", "recurrent/fla_kernels/hopper.py")
        for name in (
            "ops.common.chunk_o.chunk_bwd_kernel_dqkwg",
            "ops.utils.prepare_chunk_indices",
            "backends.BaseBackend",
            "backends.register",
            "utils.IS_NVIDIA_HOPPER",
            "utils.TRITON_ABOVE_3_4_0",
            "utils.TRITON_ABOVE_3_7_1",
        )
    ),
    *(
        Name(f"fla.ops.utils.cache.{name}", "recurrent/fla_configs/__init__.py")
        for name in ("CachedAutotuner", "FLA_CACHE_MODE", "FlaCacheMode", "get_fla_config_dir")
    ),
)
