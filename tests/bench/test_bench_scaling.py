"""The suite "scaling": standard attention is right; what is wrong or too large is a row too."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flexvarlen.bench.attention import padded, scaling
from flexvarlen.bench.attention.accuracy import alone
from flexvarlen.bench.attention.engine import Inputs, findings_of_all
from flexvarlen.bench.attention.padded import FIXED, eager, fixed_flex, fixed_packaged, standard
from flexvarlen.bench.attention.scaling import SUITE, ScalingCase
from flexvarlen.bench.claims_tables import claims_section
from flexvarlen.bench.suite import Options, suite_of
from flexvarlen.equivalence.variants import Unsupported
from tests.bench.suite_runs import CPU, on_h200, ran, row_of, sizes_of, too_large, wrong

CUDA = Options(torch.device("cuda"))
QUICK = Options(CPU, quick=True)
ONE = "bfloat16-causal-t32"


def inputs_of(lengths=(24, 24, 24), causal=True, dtype=torch.float32, heads=2):
    return Inputs.random(lengths, (heads, heads), 16, dtype, CPU, causal)


def answer(prepare, inputs):
    """Output and gradients `[T, H, D]`."""
    prepared = prepare(inputs, True)
    out = prepared.forward()
    return prepared.answer(out, prepared.backward(out))


def exact(inputs):
    """Every document and head alone, in fp64."""
    parts = []
    for one in inputs.documents():
        for head in range(inputs.q.shape[1]):
            own = slice(head, head + 1)
            qkv = [x[:, own] for x in (one.q, one.k, one.v)]
            parts.append(alone(qkv, one.cotangent[:, own], torch.float64, inputs.causal))
    heads = inputs.q.shape[1]
    documents = [parts[i : i + heads] for i in range(0, len(parts), heads)]
    return [
        torch.cat([torch.cat([each[name] for each in one], dim=1) for one in documents])
        for name in parts[0]
    ]


# --- cases ---------------------------------------------------------------------------------------


def test_cases_are_those_of_the_issue():
    cases = SUITE.cases(CUDA)
    assert suite_of("scaling") is SUITE
    assert len({case.name for case in cases}) == len(cases)
    shapes = {(case.batch, case.num_heads, case.head_dim) for case in cases}
    assert shapes == {(8, 32, 64)}
    bf16 = {(case.tokens, case.causal) for case in cases if case.dtype == "bfloat16"}
    assert bf16 == {(2**n, causal) for n in range(9, 15) for causal in (False, True)}
    fp16 = {(case.tokens, case.causal) for case in cases if case.dtype == "float16"}
    assert fp16 == {(8192, False), (8192, True)}


def test_the_claimed_size_comes_first_and_the_largest_last():
    tokens = [case.tokens for case in SUITE.cases(CUDA)]
    assert tokens[:4] == [8192] * 4
    assert tokens[4:] == sorted(tokens[4:])
    assert tokens[-1] == 16_384


def test_a_gpu_is_asked_for_every_kernel():
    variants = SUITE.variants(SUITE.cases(CUDA)[0], CUDA)
    assert {"standard", "eager", "sdpa:default"} < set(variants)
    assert {"fixed:fa2", "fixed:fa3", "fixed:fa4", "fixed:flex"} < set(variants)
    assert {"flex", "varlen", "fa2", "fa3", "fa4"} < set(variants)


# --- ways ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["standard", "eager", "sdpa:default"])
def test_on_a_batch_as_each_document_alone(name, causal):
    inputs = inputs_of(causal=causal)
    for found, right in zip(answer(FIXED[name], inputs), exact(inputs), strict=True):
        torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)


def scores_kept(prepare):
    """Dtypes of the scores `[B, H, S, S]` that a forward keeps for its backward."""
    prepared = prepare(inputs_of(dtype=torch.bfloat16), True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        prepared.forward()
    return {x.dtype for x in saved if x.shape == (3, 2, 24, 24)}


def test_softmax_is_in_the_inputs_dtype_if_standard_and_in_fp32_if_eager():
    assert scores_kept(standard) == {torch.bfloat16}
    assert torch.float32 in scores_kept(eager)


@pytest.mark.parametrize("causal", [False, True])
def test_eager_is_the_function_that_a_llama_calls_with_the_mask_that_it_is_given(
    monkeypatch, causal
):
    """By a layer of transformers: arguments and mask are those that its model hands over."""
    from transformers import LlamaConfig, LlamaModel
    from transformers.models.llama import modeling_llama

    calls = []
    plain = modeling_llama.eager_attention_forward

    def seen(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        about = (module.num_key_value_groups, module.training, scaling, dropout)
        calls.append((about, attention_mask))
        return plain(module, query, key, value, attention_mask, scaling, dropout, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", seen)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    LlamaModel(config).train()(input_ids=torch.zeros(3, 24, dtype=torch.long))
    inputs = Inputs.random((24,) * 3, (4, 2), 16, torch.float32, CPU, causal)
    eager(inputs, True).forward()
    (theirs, their_mask), (own, own_mask) = calls
    assert own == theirs
    if causal:
        torch.testing.assert_close(own_mask, their_mask, rtol=0, atol=0)
    else:
        assert own_mask is None


def test_eager_takes_grouped_queries():
    inputs = Inputs.random((24,) * 3, (4, 2), 16, torch.float32, CPU, True)
    out, *gradients = answer(eager, inputs)
    torch.testing.assert_close(out, answer(standard, repeated(inputs))[0])
    assert [x.shape for x in gradients] == [x.shape for x in (inputs.q, inputs.k, inputs.v)]


def repeated(inputs):
    """The same with as many KV heads as heads."""
    k, v = (x.repeat_interleave(2, 1) for x in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, k=k, v=v)


@pytest.mark.parametrize("name", ["standard", "eager", "fixed:flex"])
def test_documents_of_two_lengths_are_refused(name):
    with pytest.raises(Unsupported, match="documents of one length"):
        FIXED[name](inputs_of((24, 23)), False)


def test_fixed_flex_is_right_on_the_cpu():
    # At 24 tokens torch 2.13's own kernel is wrong on a CPU with AVX2 alone.
    inputs = inputs_of((48, 48), heads=1)
    prepared = fixed_flex(inputs, False)
    found = prepared.as_THD(prepared.forward())
    torch.testing.assert_close(found.double(), exact(inputs)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(Unsupported, match="no backward"):
        fixed_flex(inputs, True)


def test_a_package_is_called_on_its_layout_with_the_mask(monkeypatch):
    """With a package of the tests: `[B, S, H, D]`, causal by name, maybe an LSE behind."""
    seen = []

    def flash_attn_func(q, k, v, causal=False):
        seen.append((tuple(q.shape), causal))
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*heads_first, is_causal=causal).transpose(1, 2), None

    package = type("Package", (), {"flash_attn_func": staticmethod(flash_attn_func)})
    monkeypatch.setattr(padded.importlib, "import_module", lambda name: package)
    inputs = inputs_of()
    with pytest.raises(Unsupported, match="needs CUDA"):
        fixed_packaged("flash_attn", inputs, True)
    on_cuda = dataclasses.replace(inputs, q=_says_cuda(inputs.q))
    found = answer(lambda i, g: fixed_packaged("flash_attn", i, g), on_cuda)
    assert seen == [((3, 24, 2, 16), True)]
    for one, right in zip(found, exact(inputs), strict=True):
        torch.testing.assert_close(one.double(), right, atol=1e-5, rtol=1e-5)


def _says_cuda(x):
    class Says(torch.Tensor):
        is_cuda = True

    return x.as_subclass(Says)


# --- rows ----------------------------------------------------------------------------------------


def test_a_run_has_a_row_of_every_variant_and_pass(tmp_path):
    rows = ran(SUITE, tmp_path)
    wanted = {
        (case.name, variant, pass_)
        for case in SUITE.cases(QUICK)
        for variant in SUITE.variants(case, QUICK)
        for pass_ in ("forward", "backward")
    }
    names = ("tokens", "causal", "dtype", "batch", "num_heads", "head_dim")
    found = {
        (ScalingCase(**{x: row.case[x] for x in names}).name, row.case["variant"], row.case["pass"])
        for row in rows
    }
    assert found == wanted
    assert len(rows) == len(wanted)
    for row in rows:
        assert row.status in ("ok", "unsupported")
        assert (row.status == "ok") == ("device_ms_p50" in row.measures)
        assert row.status == "ok" or row.reason
    default = row_of(rows, "sdpa:default", tokens=64, causal=False)
    assert default.measures["sdpa_kernel"] == "flash"
    text = SUITE.section(rows)
    assert "hold" not in text  # whether a claim holds is said in one place
    assert "float16 | causal" in text
    (figure,) = SUITE.figures(rows, tmp_path)  # a CPU has no peak of memory
    assert min(sizes_of(figure)) > 500


def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setitem(FIXED, "standard", wrong(standard))
    rows = ran(SUITE, tmp_path, variants=("standard", "sdpa:default"), cases=ONE)
    bad = row_of(rows, "standard")
    assert bad.status == "wrong"
    assert "relative error" in bad.reason
    assert "device_ms_p50" not in bad.measures
    assert row_of(rows, "sdpa:default").status == "ok"


@pytest.mark.parametrize("name", ["standard", "eager"])
def test_out_of_memory_is_a_row_and_a_mark(tmp_path, monkeypatch, name):
    monkeypatch.setitem(FIXED, name, too_large)
    rows = ran(SUITE, tmp_path, variants=(name, "sdpa:default"), cases=ONE)
    assert {row_of(rows, name, x).status for x in ("forward", "backward")} == {"oom"}
    assert row_of(rows, "sdpa:default", "backward").status == "ok"
    text = SUITE.section(rows)
    assert f"`{name}` forward at 32" in text
    assert "137.44 GB" in text
    assert SUITE.figures(rows, tmp_path)[0].is_file()


def test_inputs_that_do_not_fit_are_rows_of_every_variant(tmp_path, monkeypatch):
    monkeypatch.setattr(ScalingCase, "inputs", lambda self, device: too_large(self, device))
    rows = ran(SUITE, tmp_path, cases=ONE)
    assert {row.status for row in rows} == {"oom"}
    assert len(rows) == 2 * len(SUITE.variants(SUITE.cases(QUICK)[0], QUICK))


def test_a_variant_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="variants must be of standard"):
        ran(SUITE, tmp_path, variants=("fa5",), cases=ONE)


# --- tables --------------------------------------------------------------------------------------


def claimed(fa2_ms=10.0, **more):
    """Rows of 8,192 tokens in BF16: standard attention in 32 ms."""
    case = ScalingCase(8192, False)
    ms = {"standard forward": 32.0, "standard backward": 64.0, "fixed:fa2 forward": fa2_ms}
    return on_h200(SUITE, case, ms | {"fixed:fa2 backward": 20.0}, **more)


def test_no_claim_is_judged_beside_the_tables():
    assert "claimed" not in SUITE.section(claimed())


def test_claims_are_judged_against_standard_attention_and_not_against_eager():
    case, ms = ScalingCase(8192, False), {"eager forward": 90.0}
    said = claims_section([*claimed(), *on_h200(SUITE, case, ms)])
    assert "- FA2 over standard attention, claimed 3.2× on H100" in said
    assert "it holds for full, 8,192 tokens (3.20×)" in said
    assert "9.00×" not in said


def test_a_quick_run_s_rows_have_a_header_of_their_own():
    quick = ScalingCase(32, False, batch=2, num_heads=2, head_dim=16)
    text = SUITE.section(on_h200(SUITE, quick, {"standard forward": 7.0}) + claimed())
    whole, small = text.index("Batch 8, 32 heads"), text.index("Batch 2, 2 heads, head_dim 16")
    assert whole < text.index("| 32.0 |") < small < text.index("| **7.00** |")


def test_times_that_are_the_host_s_or_not_interleaved_are_marked():
    bound = {"fixed:fa2 forward": {"host_bound": True}, "standard forward": {"timed_alone": True}}
    text = SUITE.section(claimed(measures=bound))
    assert "| **32.0**‡ | 10.0† |" in text or "| **32.0‡** | 10.0† |" in text
    assert "\n\n† the device waited for the host" in text
    assert "\n\n‡ timed alone" in text
    assert "†" not in SUITE.section(claimed())


def test_time_and_memory_a_token_count_the_whole_batch(tmp_path):
    tokens = 8 * 8192
    peak = {"standard forward": {"peak_mib": tokens / 1024 * 7}}
    rows = claimed(measures=peak)
    text = SUITE.section(rows)
    times, memory = (
        next(part for part in text.split("\n\n") if part.startswith("| pass"))
        for text in (text.split("µs a token, p50:")[1], text.split("KiB a token:")[1])
    )
    assert f"{32e3 / tokens:#.3g}" in times
    assert "| **7.00** |" in memory
    assert [path.name for path in SUITE.figures(rows, tmp_path)] == [
        "scaling-nvidia-h200.png",
        "scaling-memory-nvidia-h200.png",
    ]


def test_a_later_run_replaces_all_rows_of_a_case():
    old, new = claimed(10.0), claimed(16.0)
    later = [
        dataclasses.replace(row, environment=row.environment | {"started_utc": "2026-12-01"})
        for row in new
        if row.case["variant"] == "fixed:fa2"
    ]
    text = SUITE.section(old + later)
    assert "| **16.0** |" in text
    assert "32.0" not in text
    assert "`standard`" not in text.split("\n\n")[2]


def test_all_of_no_status_is_drawn(tmp_path):
    case = ScalingCase(512, True)
    found = findings_of_all(["standard"], ("forward", "backward"), "oom", "no room")
    statuses = {f"{x.variant} {x.pass_}": (x.status, x.reason) for x in found}
    rows = on_h200(SUITE, case, statuses)
    assert SUITE.figures(rows, tmp_path)[0].is_file()
    assert scaling.out_of_memory(scaling.sorted_cases(rows)).endswith(
        "`standard` forward at 512, `standard` backward at 512."
    )
