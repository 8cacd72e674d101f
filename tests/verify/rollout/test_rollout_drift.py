"""`flexvarlen drift rollout` names the attention that sampled, and whose the difference is."""

import json
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

from flexvarlen.cli import app
from flexvarlen.report.records import read_records
from flexvarlen.runner.run import records_of
from flexvarlen.runner.suite import Options
from flexvarlen.verify.rollout import report
from flexvarlen.verify.rollout.drift import PASSES, RolloutCase, RolloutDrift
from flexvarlen.verify.rollout.logprobs import rows_of, trainer_logprobs
from tests.verify.rollout.recorded import (
    COMPLETION,
    PROMPTS,
    continuous,
    generated,
    peaked_model,
    sampled,
)

OWN = {"eager": "transformers:eager", "sdpa": "sdpa"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attention", OWN)
@pytest.mark.parametrize("engine", [sampled, continuous])
def test_attention_that_sampled_is_not_named_or_its_part_is_another_s(engine, attention):
    model = peaked_model()
    responses = tuple(engine(model, attention, PROMPTS, COMPLETION))
    case = RolloutCase("m", "bfloat16", "r", 0, 256, responses, model)
    options = Options(torch.device("cpu"), variants=tuple(OWN.values()))
    records = records_of(RolloutDrift([case]), options)
    assert {r.case["pass"] for r in records} == set(PASSES)
    near = report.closest(records)[0]
    assert near.case["variant"] == OWN[attention]
    assert "fp32 model" not in near.case["pass"]
    base, changed = report.causes(records)
    assert base.case["variant"] == "sdpa"
    far = {name: r.measures["log_ratio_rms"] for name, r in changed.items()}
    of_eager = far["transformers:eager attention"]
    mine = base.measures["log_ratio_rms"]
    # The other attention is most of the difference, or doubles it; the batch is none of it.
    assert of_eager < mine / 3 if attention == "eager" else of_eager > 1.3 * mine
    assert far["each alone"] == pytest.approx(mine, rel=0.1)
    moved = {r.case["pass"]: r.measures["moved_rms"] for r in records if "moved_rms" in r.measures}
    assert moved["alone"] < moved["packed, fp32 head"] < moved["packed, fp32 model"]


def test_options_are_lost_or_files_are_not_written(tmp_path):
    folder, out = tmp_path / "model", tmp_path / "out"
    peaked_model().save_pretrained(folder)
    lines = [
        {"prompt_ids": x.prompt, "completion_ids": x.completion, "logprobs": x.logprobs}
        for x in generated("eager", 0.7)
    ]
    file = tmp_path / "eager.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))

    def run(*options):
        arguments = ["drift", "rollout", "--responses", str(file), "--model", str(folder)]
        arguments += ["--dtype", "bf16", "--device", "cpu", "--out", str(out), *options]
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, " ".join(result.output.split())

    backends = ["--backend", "sdpa,transformers:eager", "--tokens", "200"]
    code, said = run("--temperature", "0.7", *backends)
    assert code == 0, said
    assert "eager.jsonl: closest to the engine: transformers:eager" in said
    assert "transformers:eager attention removes" in said
    names = ["records.jsonl", "report.md", "rollout.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    records = read_records([out / "records.jsonl"])
    assert {(r.case["tokens"], r.case["file"]) for r in records} == {(200, "eager.jsonl")}
    assert all(r.case["temperatures"] == [0.7] for r in records)
    code, said = run("--temperature", "0.7", "--fail-above", "outside_0.8_1.2=1e-9", *backends)
    assert (code, "0 cases measured, 1 done before" in said) == (1, True)
    assert run("--temperature", "1.4", *backends)[0] == 2
    code, said = run(*backends)
    assert (code, said[:44]) == (2, "--responses must have a temperature above 0,")


def test_rows_leave_out_or_mix_responses():
    """Packed on any row size, the log-probabilities are those of each response alone."""
    model, responses = peaked_model().float(), generated("sdpa")
    try:
        alone = trainer_logprobs("sdpa", model, responses, 0)
        for tokens in (50, 100, 1000):
            rows = list(rows_of(responses, tokens))
            assert all(row.total_tokens <= tokens or len(group) == 1 for row, group in rows)
            assert [asdict(x) for _, group in rows for x in group] == list(map(asdict, responses))
            packed = trainer_logprobs("sdpa", model, responses, tokens)
            torch.testing.assert_close(packed, alone, rtol=0, atol=1e-4)
        engine = torch.tensor([x for each in responses for x in each.logprobs]).double()
        assert (alone - engine).abs().mean() < 0.05
    finally:
        model.bfloat16()
