"""flexvarlen.bench.summary: the front page's table says what the rows say, and no more."""

from __future__ import annotations

from flexvarlen.bench.mask_build.tables import BASELINES, COMPARED
from flexvarlen.bench.summary import summary_section
from flexvarlen.rows import Row

GPU = {"gpu": "NVIDIA H200"}
PACKING = {"geometry": "qwen3-1.7b", "layers": 14, "tokens": 32_768, "mean_doc": 2048}
TRAINER = {"geometry": "qwen3-1.7b", "layers": 28, "tokens": 32_768, "mode": "eager"}
SMALL = {"geometry": "qwen3-1.7b", "layers": 14, "documents": [128, 64]}


def a_row(suite, case, status="ok", **measures):
    return Row(suite, case, status, None if status == "ok" else "why", measures, dict(GPU))


def packing(variant, ms, status="ok"):
    return a_row("packings", PACKING | {"variant": variant}, status, ms_p50=ms)


def trainer(variant, speed):
    return a_row("end-to-end", TRAINER | {"variant": variant}, tokens_per_s=speed)


def line(rows, begin):
    (found,) = [x for x in summary_section(rows).splitlines() if x.startswith(f"| {begin}")]
    return found


def test_the_best_of_the_others_stands_first_and_what_failed_nowhere():
    rows = [
        packing("transformers:flash_attention_2", 300.0),
        packing("transformers:flash_attention_3@cu_seq_lens", 220.0),
        packing("transformers:sdpa", 1.0, "wrong"),
        packing("flex", 210.0),
        packing("auto", 200.0),
    ]
    assert line(rows, "forward and backward").endswith(
        "| 200 | transformers flash_attention_3 told cu_seq_lens 220 (1.10×); "
        "transformers flash_attention_2 300 (1.50×) |"
    )


def test_more_tokens_a_second_are_better():
    rows = [
        trainer("padded:transformers:sdpa", 10.0),
        trainer("packed:transformers:flash_attention_3", 240.0),
        trainer("packed:auto", 200.0),
        trainer("packed:auto@kept", 999.0),
    ]
    assert line(rows, "Trainer, eager").endswith(
        "| 200 | packed transformers flash_attention_3 240 (0.83×); "
        "padded transformers sdpa 10 (20×) |"
    )


def ranks(variant, order, count, speed):
    case = {"variant": variant, "order": order, "ranks": count}
    return a_row("scaling-ranks", TRAINER | case, tokens_per_s_rank=speed)


def test_the_most_gpus_are_held_against_one():
    rows = [
        ranks("ddp", "shuffled", 1, 100.0),
        ranks("ddp", "balanced", 4, 97.0),
        ranks("fsdp2", "balanced", 4, 96.5),
        ranks("ddp", "shuffled", 4, 90.0),
        ranks("ulysses", "", 4, 1.0),
        ranks("ddp", "balanced", 2, 99.0),  # of fewer GPUs, after those of the most
        ranks("fsdp2", "shuffled", 2, 80.0),
    ]
    assert line(rows, "training on 4 GPUs").endswith(
        "| `BalancedSampler`: DDP 97.0%, FSDP2 96.5% | rows in random order: DDP 90.0% |"
    )
    assert "GPUs" not in summary_section(rows[1:])  # nothing to hold them against


def test_one_gpu_or_one_order_gives_no_line_of_gpus():
    one = [ranks("ddp", order, 1, 100.0) for order in ("shuffled", "balanced")]
    assert "GPUs" not in summary_section(one)
    for order in ("shuffled", "balanced"):
        assert "GPUs" not in summary_section([*one, ranks("ddp", order, 4, 97.0)])


def test_cuda_graphs_alone_of_small_rows():
    rows = [
        a_row("small-inference", SMALL | {"variant": variant, "mode": mode}, ms_p50=ms)
        for variant, mode, ms in [
            ("auto", "cuda graphs", 2.0),
            ("auto", "eager", 20.0),
            ("transformers:sdpa", "cuda graphs", 3.0),
            ("transformers:sdpa", "eager", 1.0),
        ]
    ]
    found = line(rows, "forward in CUDA")
    assert found.endswith(" 192 tokens, ms | 2.00 | transformers sdpa 3.00 (1.50×) |")


def test_small_rows_of_two_models_are_two_lines():
    """One model's time is never held against another's."""
    rows = [
        a_row(
            "small-inference",
            SMALL | {"geometry": geometry, "variant": variant, "mode": "cuda graphs"},
            ms_p50=ms,
        )
        for geometry, variant, ms in [
            ("llama-tiny", "auto", 2.0),
            ("qwen3-tiny", "auto", 9.0),
            ("qwen3-tiny", "transformers:sdpa", 3.0),
        ]
    ]
    assert line(rows, "forward in CUDA").endswith("| 9.00 | transformers sdpa 3.00 (0.33×) |")
    assert "llama-tiny" not in summary_section(rows)


def test_masks_of_the_longest_usual_row_that_all_have_built():
    def built(variant, tokens, us, status="ok"):
        case = {"part": "build", "variant": variant, "tokens": tokens}
        return a_row("mask-build", case, status, wall_us_p50=us)

    names = [COMPARED, *BASELINES]
    rows = [built(name, 4096, us) for name, us in zip(names, (10.0, 100.0, 200.0), strict=True)]
    rows += [built(COMPARED, 8192, 11.0), built(names[1], 8192, 400.0, "oom")]
    rows += [built(name, 2**20, 1.0) for name in names]
    found = line(rows, "a BlockMask of 4,096 tokens")
    assert f"| 10 | {names[1]} 100 (10×); " in found


def test_forms_that_leak_are_counted_once_for_all_models():
    def form(name, implementation, model, status):
        case = {"form": name, "implementation": implementation, "model": model}
        return a_row("leaks", case, status)

    rows = [
        form(name, implementation, model, status)
        for model in ("llama", "qwen3")
        for name, implementation, status in [
            ("a", "transformers:sdpa", "wrong"),
            ("b", "transformers:sdpa", "ok"),
            ("a", "flexvarlen:flex", "ok"),
            ("b", "flexvarlen:flex", "ok"),
            ("b", "flexvarlen:fa2", "unsupported"),
        ]
    ]
    assert line(rows, "of 2 forms").endswith("| 0 | transformers sdpa 1 |")
    rows.append(form("b", "flexvarlen:fa2", "llama", "wrong"))
    assert line(rows, "of 2 forms").endswith("| 1 | transformers sdpa 1 |")


def test_losses_are_told_by_their_verdicts():
    def trained(variant, seed, loss):
        measures = {"final_loss": loss, "losses": [loss]}
        return a_row("convergence", {"variant": variant, "seed": seed}, **measures)

    rows = [trained("padded", seed, 4.0 + seed / 100) for seed in range(3)]
    rows += [trained("fa2", seed, 4.0 + seed / 100) for seed in range(3)]
    rows += [trained("unpatched", 0, 9.0), trained("fa3", 0, 4.0)]
    assert line(rows, "final loss").endswith(
        "| within seed noise: `fa2` | beyond seed noise: `unpatched` |"
    )


def test_rows_of_no_gpu_and_lines_without_ours_are_left_out():
    on_a_cpu = Row("packings", PACKING | {"variant": "auto"}, "ok", None, {"ms_p50": 1.0}, {})
    assert summary_section([on_a_cpu]) == ""
    assert "forward and backward" not in summary_section(
        [packing("transformers:sdpa", 1.0), packing("flex", 1.0)]
    )
