"""Two processes that pack other documents learn together what one process learns of all."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.contract_oracle import Step, by_document, check_step
from tests.contract_training import check_documents
from tests.oracle import assert_as_accurate
from tests.patches import distributed_trainers as trainers
from tests.patches.distributed_inputs import texts_of
from tests.patches.distributed_ranks import (
    CASES,
    KINDS,
    OTHER_CASES,
    WRAPPERS,
    head_in_two_backwards,
    head_refused,
    hooked,
    hooked_backward,
    run_case,
    run_kind,
    unit_inside,
)
from tests.patches.kinds import assert_learned_alone
from tests.tiny_models import batch_of, new_model


def threads_of_the_process_they_are_forked_from():
    return [path.read_text() for path in Path(f"/proc/{os.getppid()}/task").glob("*/comm")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_forked_from_one_thread(ranks):
    """pyarrow's allocator has another, and so has numpy's BLAS on many cores."""
    for threads in ranks.run(threads_of_the_process_they_are_forked_from):
        assert len(threads) == 1, threads


def assert_same(gradients, of_other_rank):
    for name, gradient in gradients.items():
        assert torch.equal(gradient, of_other_rank[name]), name


def learned(ranks, name):
    """The step, on which the ranks agree; its model alone, and its documents."""
    case = (CASES | OTHER_CASES)[name]
    first, second = ranks.run(run_case, name)
    assert torch.equal(first["loss"], second["loss"])
    assert_same(first["gradients"], second["gradients"])
    gradients = {name: x.float() for name, x in first["gradients"].items()}
    step = Step(case.plain().state_dict(), first["loss"], gradients)
    return step, case.plain(), [text.tolist() for text in texts_of(case.form)]


# Dynamo traces FSDP2's hooks; fsdp2_compiled_layers holds what accelerate compiles.
BREADTH = ("fsdp2_compiled",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in BREADTH else ()) for name in CASES],
)
def test_gradients_are_those_of_one_process(ranks, name):
    check_step(*learned(ranks, name))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_kind_of_model(ranks, kind, wrapper):
    for rank in ranks.run(run_kind, kind, wrapper):
        assert_learned_alone(kind, rank["loss"], rank["gradients"], times=2)


def test_a_model_that_is_not_patched_fails_the_oracle(ranks):
    with pytest.raises(AssertionError, match="exceeds"):
        check_step(*learned(ranks, "not patched"))


def test_gradients_under_autocast(ranks):
    check_step(*learned(ranks, "bf16 autocast"), autocast=True)


@pytest.mark.parametrize("name", ["bf16 weights", "bf16 weights, loss in chunks"])
def test_gradients_of_weights_gathered_in_bf16(ranks, name):
    step, plain, documents = learned(ranks, name)
    exact = by_document(copy.deepcopy(plain).double(), documents)
    baseline = by_document(plain.bfloat16(), documents)
    assert abs(step.loss - exact.loss) <= 2 * abs(baseline.loss - exact.loss) + 1e-2
    assert step.gradients.keys() == exact.gradients.keys()
    for parameter, gradient in step.gradients.items():
        low = baseline.gradients[parameter]
        assert_as_accurate(gradient.to(low.dtype), exact.gradients[parameter], low, 3, parameter)


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document")
@pytest.mark.parametrize("kind", ["qwen3", "mamba2"])
def test_a_sharded_head_in_two_backwards(ranks, kind):
    for found in ranks.run(head_in_two_backwards, kind):
        for name, gradient in found["plain"].items():
            torch.testing.assert_close(found["sharded"][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", [hooked, hooked_backward, unit_inside])
def test_what_a_sharded_head_would_leave_out_is_refused(ranks, change):
    for said in ranks.run(head_refused, change):
        assert said.startswith("lm_head runs no hooks of a head that FSDP2 shards as a unit")


def test_decoding_and_unpatching_of_sharded_weights(ranks):
    plain = new_model("qwen3")
    prompt = batch_of(((1,),), row_tokens=70).ids[:, :9]
    expected = plain.generate(prompt, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        logits = plain(prompt).logits
    for rank in ranks.run(run_case, "fsdp2_decodes_and_is_unpatched"):
        assert torch.equal(rank["tokens"], expected)
        torch.testing.assert_close(rank["logits"], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", ["flattened", *trainers.SFT])
def test_trainers_on_two_processes(ranks, run):
    steps, of_other_rank = ranks.run(trainers.trained, run)
    assert len(steps) == len(of_other_rank) == 2
    for (step, documents), (other, _) in zip(steps, of_other_rank, strict=True):
        assert_same(step.gradients, other.gradients)
        assert len(documents) >= 5
        check_documents(step, new_model("qwen3"), documents, autocast="defaults" in run)


@pytest.mark.parametrize("run", trainers.UNSENDABLE)
def test_batches_that_cannot_be_sent_raise_on_both_processes(ranks, run):
    for said in ranks.run(trainers.refused, run):
        assert 'accelerator_config={"dispatch_batches": False}' in said
