"""flexvarlen.bench.training, small on the CPU: verdicts that can fail; runs that go on."""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
import torch
import torch.multiprocessing

import flexvarlen as fv
from flexvarlen.bench.model.accuracy import checkpoint_layers
from flexvarlen.bench.model.geometries import new_causal_lm
from flexvarlen.bench.report import FIGURES, report, section_of
from flexvarlen.bench.training import convergence, end_to_end, texts
from flexvarlen.bench.training.convergence_figure import running_mean
from flexvarlen.bench.training.convergence_tables import BEYOND, NO_VERDICT, WITHIN, judged
from flexvarlen.bench.training.end_to_end_batches import padded_batches, split_evenly
from flexvarlen.bench.training.resumable import ResumableRun
from flexvarlen.drift.training.verdict import NOT_ROUNDING
from flexvarlen.rows import Row, read_rows
from tests.bench.counted_operators import CountedOperators
from tests.bench.few_texts import few_texts

__all__ = ["few_texts"]  # a fixture of each module

SMALL = "--device cpu --tokens 96 --dtype float32"
MODEL = "--longest 48 --vocabulary 300 --hidden 32 --layers 1 --steps 4 --topics-alone"


def train(out, *more):
    arguments = f"{SMALL} {MODEL} --seeds 0 1 2".split()
    return convergence.main([*arguments, *more, "--out", str(out)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The file of rows, of the padded run, ours, and the packed row that is not patched."""
    out = tmp_path_factory.mktemp("convergence") / "rows.jsonl"
    train(out, "--variants", "padded", "sdpa", "unpatched", "flex")
    return out


def statuses(rows, key="variant"):
    found = {}
    for row in rows:
        found.setdefault(row.case[key], set()).add(row.status)
    return found


# ---- convergence ----


def test_a_packed_row_learns_what_the_padded_batch_learns(trained):
    rows = read_rows([trained])
    verdicts = {each.variant: each.verdict for each in judged(rows)}
    assert verdicts["padded"] == "the baseline"
    assert verdicts["sdpa"] == WITHIN
    padded, ours = ([r for r in rows if r.case["variant"] == name] for name in ("padded", "sdpa"))
    for one, other in zip(padded, ours, strict=True):
        assert one.measures["labels"] == other.measures["labels"]
        assert one.measures["losses"] == pytest.approx(other.measures["losses"], abs=2e-4)
        assert one.measures["positions"] >= one.measures["tokens"]


def test_a_packed_row_that_leaks_is_told(trained):
    rows = read_rows([trained])
    assert statuses(rows)["unpatched"] == {"wrong"}
    (leaky,) = (each for each in judged(rows) if each.variant == "unpatched")
    assert leaky.verdict in (NOT_ROUNDING, BEYOND)
    assert "first gradient" in leaky.runs[0].reason
    assert f"**{leaky.verdict}**" in section_of("convergence", rows)


def test_what_cannot_train_here_says_why(trained):
    rows = read_rows([trained])
    assert statuses(rows)["flex"] == {"unsupported"}
    assert "| `flex` | unsupported: " in section_of("convergence", rows)


def test_a_second_call_trains_what_the_file_lacks(trained, tmp_path):
    out = tmp_path / "rows.jsonl"
    lines = trained.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:1]))
    rows = train(out, "--variants", "padded")
    assert [row.case["seed"] for row in rows] == [1, 2]
    again = [r for r in read_rows([trained]) if r.case["variant"] == "padded"]
    assert [r.measures["losses"] for r in read_rows([out])] == [r.measures["losses"] for r in again]
    assert train(out, "--variants", "padded", "sdpa", "--until", "0") == []


def changed(rows, variant, change):
    """Rows with other losses of a variant."""
    found = []
    for row in rows:
        if row.case["variant"] == variant:
            losses = change(row.measures["losses"])
            final = convergence.final_loss(losses)
            measures = row.measures | {"losses": losses, "final_loss": final}
            row = dataclasses.replace(row, measures=measures)
        found.append(row)
    return found


def verdict_of(rows, variant="sdpa"):
    return next(each.verdict for each in judged(rows) if each.variant == variant)


def test_losses_beyond_the_seeds(trained):
    rows = read_rows([trained])
    assert verdict_of(changed(rows, "sdpa", lambda x: [loss + 1 for loss in x])) == BEYOND
    assert verdict_of(changed(rows, "sdpa", lambda x: [*x[:-1], math.nan])) == BEYOND
    assert verdict_of(changed(rows, "sdpa", lambda x: [math.inf, *x[1:]])) == BEYOND


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.09, -0.02, 0.01, -0.05, 0.0), WITHIN),  # 2.3 σ on one of five seeds
        ((0.06, 0.05, 0.06, 0.05, 0.06), BEYOND),  # on none above 1.6 σ, but all one way
        ((0.8, -0.8, 0.0, 0.0, 0.0), BEYOND),  # two that derailed, and a mean of 0
        ((0.16, 0.0, 0.0, 0.0, 0.0), BEYOND),  # 4.2 σ
        ((0.01, 0.0), NO_VERDICT),
        ((0.12,), BEYOND),
    ],
)
def test_the_rule_looks_at_the_mean_over_seeds(differences, verdict):
    padded = (3.96, 3.92, 3.89, 3.97, 3.98)  # σ 0.038

    def row(variant, seed, loss):
        measures = {"losses": [loss], "final_loss": loss}
        return Row("convergence", {"variant": variant, "seed": seed}, "ok", None, measures)

    rows = [row("padded", seed, loss) for seed, loss in enumerate(padded)]
    rows += [row("fa2", seed, padded[seed] + by) for seed, by in enumerate(differences)]
    assert verdict_of(rows, "fa2") == verdict


def test_two_seeds_give_no_verdict(trained):
    rows = [row for row in read_rows([trained]) if row.case["seed"] < 2]
    assert verdict_of(rows) == NO_VERDICT
    assert "σ is the padded runs' standard deviation, not known" in section_of("convergence", rows)


def test_a_seed_that_did_not_end_is_told(trained):
    rows = read_rows([trained])
    lost = next(i for i, row in enumerate(rows) if row.case["variant"] == "sdpa")
    rows[lost] = dataclasses.replace(rows[lost], status="failed", reason="no luck", measures={})
    assert f"| {NO_VERDICT} | 2 of 3 |" in section_of("convergence", rows)


def test_all_kernels_that_auto_took_are_told(trained):
    rows = []
    for row in read_rows([trained]):
        if row.case["variant"] == "sdpa":
            taken = "fa2, fa4" if row.case["seed"] == 1 else "fa2"
            row = dataclasses.replace(row, measures=row.measures | {"attends": taken})
        rows.append(row)
    assert "| `sdpa`, fa2, fa4 in 1 of 3 |" in section_of("convergence", rows)


def test_running_mean():
    assert running_mean([4.0, 2.0, 0.0], 2) == [4.0, 3.0, 1.0]


# ---- end to end ----

TINY = "--geometry qwen3-tiny --longest 40 --warmup 1 --steps 2"


def run_trainer(*more):
    return end_to_end.main([*SMALL.split(), *TINY.split(), *more])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("trainer") / "rows.jsonl"
    names = ["packed:auto", "packed:auto@kept", "packed:transformers:sdpa"]
    names += ["padded:transformers:sdpa"]
    names += ["padded-sorted:transformers:sdpa", "packed:transformers:flash_attention_2"]
    run_trainer("--modes", "eager", "--checkpointing", "--variants", *names, "--out", str(out))
    return out


def test_trainer_gives_each_variant_the_same_documents(measured):
    rows = read_rows([measured])
    done = [row for row in rows if row.status == "ok"]
    assert len(done) == 5
    losses = [row.measures["first_loss"] for row in done]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-5)
    by_name = {row.case["variant"]: row.measures for row in done}
    pads = by_name["padded:transformers:sdpa"]["positions"]
    assert pads >= by_name["padded-sorted:transformers:sdpa"]["positions"] >= 96
    assert by_name["packed:auto"]["positions"] == 96
    table = section_of("end-to-end", rows)
    assert "packed, `transformers flash_attention_2` | unsupported: " in table
    assert "3×: " in table
    assert "packed, `auto`, attention's outputs kept | " in table


def test_what_checkpointed_layers_keep_is_computed_once():
    ids, layout = torch.arange(12)[None], fv.PackedLayout.from_lengths([5, 7])
    found = []
    for keep in ((), end_to_end.ATTENTION):
        torch.manual_seed(0)
        model = new_causal_lm("qwen3-tiny", 2, torch.float32, torch.device("cpu")).train()
        checkpoint_layers(fv.patch_model(model, "sdpa"), keep)
        with CountedOperators() as seen:
            loss = model(input_ids=ids, labels=ids, packed_layout=layout).loss
            loss.backward()
        gradient = model.get_input_embeddings().weight.grad
        calls = seen.calls[torch.ops.flexvarlen.sdpa_forward.default]
        found.append((calls, loss.item(), gradient))
    (twice, loss, gradient), (once, same_loss, same_gradient) = found
    assert (once, twice) == (2, 4)  # layers
    assert same_loss == loss
    torch.testing.assert_close(same_gradient, gradient)


def test_kept_is_for_ours_alone(capsys):
    with pytest.raises(SystemExit):
        run_trainer("--variants", "packed:transformers:sdpa@kept")
    assert "must not end in @kept" in capsys.readouterr().err


def test_trainer_goes_on(measured):
    before = measured.read_text()
    names = ["packed:auto", "padded:transformers:sdpa"]
    rows = run_trainer(
        "--modes", "eager", "--checkpointing", "--variants", *names, "--out", str(measured)
    )
    assert rows == []
    assert measured.read_text() == before


def test_trainer_compiled():
    (row,) = run_trainer("--modes", "compiled", "--compiler", "eager", "--variants", "packed:auto")
    assert (row.status, row.measures["graph_breaks"]) == ("ok", 0)
    assert row.measures["steps_compiling"] == 0
    assert "ACCELERATE_DYNAMO_BACKEND" not in os.environ


def test_steps_that_compile_are_not_timed():
    clock = end_to_end.Clock(torch.device("cpu"), 2)
    clock.ends = [(60.0, 1), (61.0, 1), (62.0, 1), (92.0, 3), (94.0, 3)]
    assert clock.steady() == ({2: 1.0, 4: 2.0}, 1)
    clock.ends = [(60.0, 1), (61.0, 1), (92.0, 2)]
    assert clock.steady() == ({2: 31.0}, 1)  # there is no other


def test_trainer_of_new_lengths_tells_what_compiled():
    compiled = ["--modes", "compiled", "--compiler", "eager"]
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # a graph for each length
        (row,) = run_trainer(*compiled, "--variants", "padded:transformers:sdpa")
    assert row.status == "ok"
    assert 0 < row.measures["steps_compiling"] <= 2
    assert f"| {row.measures['steps_compiling']} of 2 |" in section_of("end-to-end", [row])


def test_trainer_without_a_warm_up(capsys):
    with pytest.raises(SystemExit):
        run_trainer("--warmup", "0")
    assert "must be at least 1, got 0 and 2" in capsys.readouterr().err


def test_a_trainer_whose_documents_see_each_other_is_wrong(monkeypatch):
    flatten = end_to_end.Flatten.__call__

    def without_positions(self, groups):
        batch = flatten(self, groups)
        del batch["position_ids"]
        return batch

    monkeypatch.setattr(end_to_end.Flatten, "__call__", without_positions)
    (row,) = run_trainer("--modes", "eager", "--variants", "packed:transformers:sdpa")
    assert row.status == "wrong"
    assert "tokens_per_s" not in row.measures
    assert "of the first" in row.reason


def test_padded_batches_hold_each_document_once():
    steps = [[[1] * n for n in lengths] for lengths in ((3, 9, 2, 4), (8, 1, 1, 7, 2))]
    found = padded_batches(steps, 21)
    assert {len(batches) for batches in found} == {2}
    assert [[ids for batch in batches for ids in batch] for batches in found] == steps
    assert [len(part) for part in split_evenly(steps[1], 3)] == [2, 1, 2]
    assert len(padded_batches(steps, 1)[0]) == 4  # no fewer: one document a batch


# ---- texts ----


def test_rows_are_whole_documents_or_full():
    documents = texts.document_ids(300, library=False, longest=20)
    assert max(map(len, documents)) == 20
    rows = texts.packed_rows(documents, 50)
    assert all(sum(map(len, row)) <= 50 for row in rows)
    assert all(ids in documents for row in rows for ids in row)
    full = texts.full_rows(documents, 50, 40)
    assert [sum(map(len, row)) for row in full] == [50] * 40
    assert texts.crc_of(full) != texts.crc_of(texts.full_rows(documents, 50, 40, seed=1))


def test_docstrings_of_a_module_and_what_is_in_it(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""One."""\nclass A:\n    """Two."""\n    def f(self):\n        "Three."\n')
    assert list(texts._docstrings(file)) == ["One.", "Two.", "Three."]
    file.write_text("def :")
    assert list(texts._docstrings(file)) == []


# ---- what they share ----


def test_what_raises_is_a_row(tmp_path):
    args = convergence.parse(["--device", "cpu", "--out", str(tmp_path / "rows.jsonl")])
    run = ResumableRun("convergence", args)

    def fails():
        raise RuntimeError("no luck")

    run.measure({"variant": "x"}, fails)
    assert [(row.status, row.reason) for row in read_rows([args.out])] == [
        ("failed", "RuntimeError: no luck")
    ]
    assert not ResumableRun("convergence", args).is_todo({"variant": "x"})
    assert ResumableRun("other", args).is_todo({"variant": "x"})


def test_a_report_of_both(trained, measured, tmp_path):
    page = tmp_path / "page.md"
    names = ("convergence", "end-to-end")
    page.write_text(
        "".join(
            f"<!-- bench:{name}{more} begin -->\n<!-- bench:{name}{more} end -->\n"
            for name in names
            for more in ("", "-figures")
        )
    )
    report([trained, measured], pages=[page], figures=tmp_path / "figures")
    assert set(FIGURES) > set(names)
    assert len(list((tmp_path / "figures").glob("*.png"))) == 2
    assert page.read_text().count(".png)") == 2
