"""Two processes that pack other documents learn together what one process learns of all."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.contract_oracle import Step, by_document, check_step
from tests.oracle import assert_as_accurate
from tests.patches.distributed_inputs import lora, samples
from tests.patches.distributed_ranks import CASES, KINDS, ONE_LAYER, run_case
from tests.patches.kinds import assert_learned_alone
from tests.tiny_models import batch_of, documents, new_model

DOCUMENTS = [x.tolist() for x in documents()]
LOW = {"fsdp2_bf16", "accelerate_bf16"}


@pytest.fixture(scope="module")
def made(ranks):
    """What a case made on each rank."""
    return lambda case: ranks.run(run_case, case)


def threads_of_the_process_they_are_forked_from():
    return [path.read_text() for path in Path(f"/proc/{os.getppid()}/task").glob("*/comm")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_forked_from_one_thread(ranks):
    """pyarrow's allocator has another, and so has numpy's BLAS on many cores."""
    for threads in ranks.run(threads_of_the_process_they_are_forked_from):
        assert len(threads) == 1, threads


def plain_model(case: str):
    layers = ONE_LAYER if "compiled" in case else {}
    plain = new_model("qwen3_5_text" if "hybrid" in case else "qwen3", **layers)
    return lora(plain) if "peft" in case else plain


def step_of(made, case: str) -> Step:
    """The step, on which the ranks agree."""
    first, second = made(case)
    assert torch.equal(first["loss"], second["loss"])
    for name, gradient in first["gradients"].items():
        assert torch.equal(gradient, second["gradients"][name]), name
    weights = plain_model(case).state_dict()
    gradients = {name: x.float() for name, x in first["gradients"].items()}
    return Step(weights, first["loss"], gradients)


OTHERS = {*LOW, "ddp_unpatched"}
OTHERS |= {name for name in CASES if name.startswith("trainer") or name.endswith(KINDS)}


@pytest.mark.parametrize("case", [x for x in CASES if x not in OTHERS])
def test_gradients_are_those_of_one_process(made, case):
    check_step(step_of(made, case), plain_model(case), samples() if "trees" in case else DOCUMENTS)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_kind_of_model(made, kind, wrapper):
    for rank in made(f"{wrapper} {kind}"):
        assert_learned_alone(kind, rank["loss"], rank["gradients"], times=2)


def test_a_model_that_is_not_patched_fails_the_oracle(made):
    with pytest.raises(AssertionError, match="exceeds"):
        check_step(step_of(made, "ddp_unpatched"), new_model("qwen3"), DOCUMENTS)


def test_gradients_under_autocast(made):
    check_step(step_of(made, "accelerate_bf16"), new_model("qwen3"), DOCUMENTS, autocast=True)


def test_gradients_of_weights_gathered_in_bf16(made):
    step, plain = step_of(made, "fsdp2_bf16"), new_model("qwen3")
    exact = by_document(copy.deepcopy(plain).double(), DOCUMENTS)
    baseline = by_document(plain.bfloat16(), DOCUMENTS)
    assert abs(step.loss - exact.loss) <= 2 * abs(baseline.loss - exact.loss) + 1e-2
    assert step.gradients.keys() == exact.gradients.keys()
    for name, gradient in step.gradients.items():
        low = baseline.gradients[name]
        assert_as_accurate(gradient.to(low.dtype), exact.gradients[name], low, 3, name)


def test_decoding_and_unpatching_of_sharded_weights(made):
    plain = new_model("qwen3")
    prompt = batch_of(((1,),), row_tokens=70).ids[:, :9]
    expected = plain.generate(prompt, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        logits = plain(prompt).logits
    for rank in made("fsdp2_decodes_and_is_unpatched"):
        assert torch.equal(rank["tokens"], expected)
        torch.testing.assert_close(rank["logits"], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["trainer", "trainer_dispatched"])
def test_trainer_on_two_processes(made, case):
    """`dispatch_batches` raised on the first rank, and the other waited for ever."""
    steps, of_other_rank = made(case)
    assert len(steps) == len(of_other_rank) == 2
    for one, ids in steps:
        assert len(ids) >= 5
        check_step(one, new_model("qwen3"), ids)


@pytest.mark.parametrize("case", ["without_a_size", "trees"])
def test_batches_that_cannot_be_sent_raise_on_both_processes(made, case):
    for said in made(f"trainer_dispatched_{case}"):
        assert 'accelerator_config={"dispatch_batches": False}' in said
