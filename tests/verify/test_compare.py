"""`compare` finds what is wrong, calls right what is right, and leaves the model alone."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.equivalence import PackedBatch, Report
from flexvarlen.equivalence import compare as run_compare
from flexvarlen.equivalence.accuracy import Errors, Gap, judge
from flexvarlen.equivalence.batch import recut
from flexvarlen.equivalence.models import GEOMETRIES, build_model, parse_model
from flexvarlen.equivalence.oracle import oracle_answer, own_parameters, peer_answer
from flexvarlen.equivalence.report import PEER, read_rows
from flexvarlen.equivalence.variants import Sizes
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask

LENGTHS = (30, 1, 17, 40, 8)
TOKENS = sum(LENGTHS)


def new_batch(lengths=LENGTHS, vocabulary=1024):
    generator = torch.Generator().manual_seed(0)
    return PackedBatch(torch.randint(vocabulary, (1, sum(lengths)), generator=generator), lengths)


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")[0]


@pytest.fixture(scope="module")
def report(llama):
    return run_compare(llama, new_batch(), packings=2, name="llama tiny")


def compare_sdpa(model, **options):
    """The row of the backend that bugs are planted in."""
    found = run_compare(model, new_batch(), "sdpa", **{"packings": 0, **options})
    return found.rows[1]


# ---- what is right ----


def test_every_backend_has_its_row(report):
    names = [row.backend for row in report.rows]
    assert names == [PEER, *fv.BACKENDS, "transformers:sdpa"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU more is usable")
def test_missing_backends_say_what_to_do(report):
    rows = {row.backend: row for row in report.rows}
    for name in ("varlen", "fa2"):
        assert rows[name].status == "unsupported"
        assert rows[name].reason == fv.why_not(name, needs_grad=False)
        assert rows[name].tokens_per_s is None
        assert rows[name].verdict is None
    assert rows["flex"].status == "forward only"
    assert "backward" in rows["flex"].reason
    assert rows["flex"].verdict == "right"
    assert rows["flex"].gradient_max is None


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_right_backend_is_right_in_all_measures(report, name):
    row = next(row for row in report.rows if row.backend == name)
    assert (row.status, row.verdict, row.why) == ("ok", "right", None)
    assert 0 < row.logits_max <= row.logits_limit < 1e-3
    assert row.loss_error <= row.loss_limit
    assert row.gradient_max < 1e-4
    assert row.worst_gradient_share <= 1
    assert row.leaked_documents == row.leaked_outputs == row.leaked_gradients == 0
    assert row.backward_repeats
    assert row.argmax_agreement == 1
    assert 0 < row.repacked_logits_max <= row.repacked_logits_limit
    assert (row.graph_breaks, row.recompiles, row.other_packings) == (0, 0, 2)
    assert row.ms_p20 <= row.ms_p50 <= row.ms_p80
    assert row.tokens_per_s == pytest.approx(TOKENS / row.ms_p50 * 1e3)
    assert row.environment["torch"] == torch.__version__


def test_plain_transformers_with_its_default_cache_is_shown_to_leak(report):
    row = report.rows[-1]
    assert row.verdict == "leaks"
    assert row.leaked_outputs == len(LENGTHS) - 1  # all but the first
    assert row.leaked_gradients >= row.leaked_outputs - 1
    assert row.logits_max > 1
    assert report.passed  # theirs is not ours to fail


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_other_families_are_right(name):
    row = compare_sdpa(build_model(name)[0], packings=1)
    assert (row.verdict, row.why) == ("right", None)


def test_low_precision_is_held_against_a_peer_of_its_own(llama):
    row = compare_sdpa(llama, dtype=torch.bfloat16)
    assert (row.dtype, row.verdict, row.why) == ("bfloat16", "right", None)
    assert row.logits_max > 1e-3
    assert llama.dtype == torch.float32


def test_forward_alone_measures_no_gradients(llama):
    row = compare_sdpa(llama, train=False)
    assert (row.passes, row.verdict) == ("forward", "right")
    assert row.gradient_max is None
    assert row.leaked_gradients is None


def test_row_of_one_document_cannot_leak(llama):
    rows = run_compare(llama, new_batch((12,)), "sdpa", packings=1).rows
    assert rows[1].verdict == "right"


# ---- what is wrong ----


def plant(monkeypatch, change):
    """Make the `sdpa` backend call `change(attend, q, k, v, sinks, call, mask, plan)`."""
    attend = SdpaBackend.attend

    def wrong(self, q, k, v, sinks, call, mask, plan):
        return change(lambda *args: attend(self, *args), q, k, v, sinks, call, mask, plan)

    monkeypatch.setattr(SdpaBackend, "attend", wrong)


def other_boundaries(boundaries):
    """Attention under boundaries that `boundaries(lengths)` makes of the right ones."""

    def change(attend, q, k, v, sinks, call, mask, plan):
        layout = PackedLayout.from_lengths(boundaries(list(mask.layout.lengths)))
        wrong = DocumentMask(layout, mask.spec)
        return attend(q, k, v, sinks, call, wrong, SdpaBackend().plan(wrong))

    return change


def one_token_late(lengths):
    return [lengths[0] + 1, *lengths[1:-1], lengths[-1] - 1]


def last_two_joined(lengths):
    return [*lengths[:-2], lengths[-2] + lengths[-1]]


@pytest.mark.parametrize(
    ("boundaries", "leaked"),
    [
        (lambda lengths: [sum(lengths)], set(range(1, len(LENGTHS)))),
        (one_token_late, None),
        (last_two_joined, {4}),
    ],
    ids=["boundaries_ignored", "boundary_off_by_one", "last_boundary_lost"],
)
def test_leak_is_reported(llama, monkeypatch, boundaries, leaked):
    plant(monkeypatch, other_boundaries(boundaries))
    row = compare_sdpa(llama)
    assert row.verdict == "leaks"
    assert row.leaked_outputs > 0
    assert leaked is None or row.leaked_outputs == len(leaked)
    assert "change with other documents' tokens" in row.why
    assert not row.passed


def test_leak_below_rounding_is_reported(llama, monkeypatch):
    """A bit is enough: what drowns in the tolerance of the errors is still a leak."""

    def change(attend, q, k, v, sinks, call, mask, plan):
        out, lse = attend(q, k, v, sinks, call, mask, plan)
        return out + v[:1].repeat_interleave(q.shape[1] // v.shape[1], 1) * 1e-6, lse

    plant(monkeypatch, change)
    row = compare_sdpa(llama, train=False)
    assert row.verdict == "leaks"


def test_leak_in_the_backward_alone_is_reported(llama, monkeypatch):
    class Leaky(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            grad[0] += grad[-2] * 1e-3  # the last token has no loss
            return grad

    def change(attend, *args):
        out, lse = attend(*args)
        return Leaky.apply(out), lse

    plant(monkeypatch, change)
    row = compare_sdpa(llama)
    assert row.verdict == "leaks"
    assert (row.leaked_outputs, row.leaked_gradients) == (0, 1)
    assert "token gradients" in row.why


def test_wrong_scale_is_wrong_but_no_leak(llama, monkeypatch):
    plant(
        monkeypatch,
        lambda attend, q, *rest: attend(q * 1.001, *rest),
    )
    row = compare_sdpa(llama)
    assert (row.verdict, row.leaked_documents) == ("wrong", 0)
    assert "error of the logits" in row.why
    assert not row.passed


def test_wrong_gradient_alone_is_wrong(llama, monkeypatch):
    def change(attend, q, k, *rest):
        k = k + (k - k.detach()) * 1e-3  # the same value, a slightly larger gradient
        return attend(q, k, *rest)

    plant(monkeypatch, change)
    row = compare_sdpa(llama)
    assert row.verdict == "wrong"
    assert "gradient of" in row.why
    assert row.worst_gradient_share > 1
    assert compare_sdpa(llama, train=False).verdict == "right"


def test_boundaries_kept_from_the_first_batch_are_found_on_another_packing(llama, monkeypatch):
    kept = []

    def change(attend, q, k, v, sinks, call, mask, plan):
        kept.append(plan)
        return attend(q, k, v, sinks, call, mask, kept[0])

    plant(monkeypatch, change)
    row = compare_sdpa(llama, packings=1)
    assert row.verdict == "wrong"
    assert row.why.startswith("on another packing")


@pytest.mark.parametrize(
    ("error", "status", "passed"),
    [
        (RuntimeError("kernel died"), "failed", False),
        (NotImplementedError("no such head_dim"), "unsupported", True),
        (torch.OutOfMemoryError("no room"), "oom", True),
    ],
)
def test_backend_that_raises_has_a_row_and_the_others_theirs(
    llama, monkeypatch, error, status, passed
):
    def change(*args):
        raise error

    plant(monkeypatch, change)
    found = run_compare(llama, new_batch((6, 4)), "sdpa,reference", packings=0, train=False)
    assert (found.rows[1].status, found.rows[1].reason) == (status, str(error))
    assert found.rows[2].verdict == "right"
    assert found.passed == passed


def test_nan_is_wrong(llama, monkeypatch):
    def change(attend, *args):
        out, lse = attend(*args)
        return out * float("nan"), lse

    plant(monkeypatch, change)
    row = compare_sdpa(llama, train=False)
    assert row.verdict == "wrong"
    assert math.isnan(row.logits_max)


def test_rule_names_what_is_too_far_off():
    peer = Errors(Gap(1e-5, 1e-6, 1.0, 0.5), 1e-6, 5.0, 1.0, {"w": Gap(1e-5, 1e-6, 1.0, 0.5)})
    good = judge(peer, peer, torch.float32)
    assert good.why_wrong is None
    assert good.worst_share < 1 / 3
    for wrong, words in (
        (replace(peer, logits=Gap(3e-5, 1e-6, 1.0, 0.5)), "largest error of the logits"),
        (replace(peer, logits=Gap(1e-5, 3e-6, 1.0, 0.5)), "mean error of the logits"),
        (replace(peer, loss=1e-5), "error of the loss"),
        (replace(peer, gradients={"w": Gap(4e-5, 1e-6, 1.0, 0.5)}), "gradient of w"),
        (replace(peer, gradients={"w": Gap(float("nan"), 0.0, 1.0, 0.5)}), "gradient of w"),
    ):
        assert words in judge(wrong, peer, torch.float32).why_wrong


# ---- the oracle ----


def test_oracle_is_exact_far_beyond_the_peer(llama):
    """A model that is fp64 by name alone has norms and a softmax in fp32."""
    batch = new_batch((30, 10))
    oracle = oracle_answer(own_parameters(llama, torch.float32), batch, [0, 1], train=False)
    again = oracle_answer(llama, batch, [1], train=False)
    peer = peer_answer(llama, batch, [0, 1], train=False)
    assert oracle.hidden[0].dtype == torch.float64
    torch.testing.assert_close(oracle.hidden[1], again.hidden[0], rtol=0, atol=1e-13)
    fp32 = (oracle.hidden[0].float().double() - oracle.hidden[0]).abs().max()
    assert 0 < fp32 < (peer.hidden[0] - oracle.hidden[0]).abs().max()


def test_oracle_gradient_is_the_slope_of_its_loss(llama):
    batch = new_batch((9, 4))
    base = own_parameters(llama, torch.float64)
    name = "model.layers.0.self_attn.k_proj.weight"
    gradient = oracle_answer(base, batch, [0, 1], train=True).gradients[name]
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(2)).double()
    losses = []
    for step in (1e-5, -1e-5):
        moved = copy.deepcopy(base)
        moved.get_parameter(name).data += step * direction
        losses.append(oracle_answer(moved, batch, [0, 1], train=False).loss)
    slope = (losses[0] - losses[1]) / 2e-5
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6)


# ---- the model, the batch, the options ----


@pytest.mark.parametrize("patch", [None, "reference"])
def test_model_is_left_as_it_was(patch):
    model = build_model("qwen3")[0].eval()
    if patch:
        fv.patch_model(model, patch)
    before = copy.deepcopy(model.state_dict())
    implementation = model.config._attn_implementation
    compare_sdpa(model)
    assert model.config._attn_implementation == implementation
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ("forward" in model.__dict__) == bool(patch)


def test_batch_of_keyword_arguments_is_compared_by_its_boundaries(llama):
    batch = new_batch()
    inputs = batch.inputs() | {"labels": batch.input_ids}
    row = run_compare(llama, inputs, "sdpa", packings=0).rows[1]
    assert (row.documents, row.verdict) == (len(LENGTHS), "right")


def test_unknown_backend_is_one_sentence(llama):
    with pytest.raises(ValueError, match="backends must be all, reference"):
        run_compare(llama, new_batch(), "falsh")


def test_unverified_model_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(NotImplementedError, match="gpt2"):
        run_compare(model, new_batch((4, 4), 16), "sdpa")


def test_other_packings_fit_the_shapes_of_the_first():
    batch = new_batch()
    sizes = Sizes.of(batch)
    for seed in range(30):
        other = recut(batch, seed, capacity=sizes.capacity, longest=sizes.max_seqlen_bound)
        PackedLayout.from_lengths(
            other.lengths, capacity=sizes.capacity, max_seqlen_bound=sizes.max_seqlen_bound
        )


def test_progress_reaches_its_end(llama):
    seen = []
    run_compare(
        llama,
        new_batch(),
        "sdpa,fa2",
        packings=1,
        progress=lambda done, total, what: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama", "model must be"),
        ("llama:9b", "size of llama"),
        ("qwen3:1.7b@0", "at least 1"),
        ("no/such/folder", "model must be"),
    ],
)
def test_bad_model_name_is_one_sentence(name, words):
    with pytest.raises(ValueError, match=words):
        parse_model(name)


def test_every_geometry_is_a_valid_configuration():
    from transformers import AutoConfig

    for family, sizes in GEOMETRIES.items():
        for geometry in sizes.values():
            config = AutoConfig.for_model(family, **geometry)
            assert config.num_attention_heads % config.num_key_value_heads == 0


def test_local_folder_is_loaded(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    model, tokenizer = build_model(str(tmp_path))
    assert tokenizer is None
    ids = new_batch().input_ids
    assert torch.equal(model(ids).logits, llama.eval()(ids).logits)


# ---- the report ----


def test_saved_report_is_read_back(report, tmp_path):
    paths = report.save(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["rows.jsonl", "table.md", "compare.png"]
    assert read_rows(paths[0]) == report
    assert all(json.loads(line)["environment"] for line in paths[0].read_text().splitlines())
    for row in report.rows:
        if row.status == "unsupported":
            assert row.reason in paths[1].read_text()
    assert paths[2].stat().st_size > 10_000


def test_narrow_table_says_what_it_leaves_out(report):
    assert report.table().caption is None
    narrow = report.table(80)
    assert "argmax" in narrow.caption
    assert [column.header for column in narrow.columns][:4] == [
        "backend",
        "verdict",
        "leak",
        "logits max",
    ]


def test_failure_is_in_the_verdict_and_in_passed(report):
    rows = [replace(r, verdict="leaks") if r.backend == "sdpa" else r for r in report.rows]
    failed = Report(tuple(rows))
    assert not failed.passed
    assert "not right: sdpa (leaks)" in failed.verdicts()["llama tiny"]
    assert "right, no leak" in report.verdicts()["llama tiny"]


def test_figure_of_nothing_that_ran_is_still_drawn(report, tmp_path):
    rows = tuple(row for row in report.rows if row.status == "unsupported")
    if rows:
        Report(rows).save(tmp_path)


def test_figure_has_room_for_errors_without_a_place_on_a_log_axis(report, tmp_path):
    for error in (0.0, math.nan, math.inf):
        rows = tuple(replace(row, logits_max=error) for row in report.rows)
        Report(rows).save(tmp_path)
