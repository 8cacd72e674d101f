"""Models that transformers' DistributedConfig shards learn what one process learns."""

from __future__ import annotations

from dataclasses import fields
from functools import cache, partial

import pytest
import torch
from transformers.distributed import DistributedConfig

from flexvarlen.reference.recurrences import plain_recurrences
from tests.patches import mesh_ranks as cases
from tests.patches.distributed_inputs import DOCS
from tests.patches.forward import test_router_logits as router
from tests.ranks import Ranks
from tests.tiny_models import LENGTHS, batch_of, texts_alone

ON_FOUR = ("fsdp x tp", "fsdp x tp, ep", "hsdp", "fully_shard over two dimensions")
SLOW = ("windows", "hybrid, trees", "experts, padded", "experts, trees")


@pytest.fixture(scope="module")
def four_ranks():
    with Ranks(4) as ranks:
        yield ranks


def require_sizes(*names):
    absent = sorted({*names} - {field.name for field in fields(DistributedConfig)})
    if absent:
        pytest.skip(f"this transformers has no {', '.join(absent)} in DistributedConfig")


@cache
def alone(kind, replica):
    """Loss and gradients of one process, each document in a forward of its own."""
    case = cases.CASES[kind]
    if "output_router_logits" in case.config:
        docs = DOCS[replica]
        row = batch_of((docs,), row_tokens=sum(LENGTHS[i] for i in docs))
        loss, _, gradients = router.apart(case.family, row)
        return loss, gradients
    plain = case.plain()
    with plain_recurrences(plain):
        made = texts_alone(plain, [(text, 0) for text in case.texts(replica)])
    return made.loss, made.gradients


def check(every, kind):
    """Each rank's loss is that of its documents; the gradients are the mean over the batches."""
    replicas = sorted({each["replica"] for each in every})
    expected = [alone(kind, replica)[1] for replica in replicas]
    for rank in every:
        loss, _ = alone(kind, rank["replica"])
        torch.testing.assert_close(rank["loss"].double(), loss.double(), rtol=1e-5, atol=0)
        assert rank["gradients"].keys() == expected[0].keys()
        for name, gradient in rank["gradients"].items():
            mean = torch.stack([each[name] for each in expected]).mean(0)
            error = (gradient - mean).norm()
            assert error <= 1e-4 * mean.norm() + 1e-7, f"{name} is off by {error}"


def combinations(meshes):
    """Experts alone have a plan for expert parallelism; parts do not train under tensor's."""
    return [
        pytest.param(mesh, kind, marks=[pytest.mark.slow] * (kind in SLOW))
        for mesh in meshes
        for kind, case in cases.CASES.items()
        if ("ep" not in mesh or case.family == "qwen3_moe")
        and ("tp" not in mesh or case.max_tokens is None)
    ]


@pytest.mark.parametrize(
    ("mesh", "kind"), combinations([x for x in cases.MESHES if x not in ON_FOUR])
)
def test_two_ranks(ranks, mesh, kind):
    require_sizes(*cases.MESHES[mesh])
    check(ranks.run(cases.learned, kind, mesh), kind)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), combinations(ON_FOUR))
def test_four_ranks(four_ranks, mesh, kind):
    require_sizes(*cases.MESHES[mesh])
    check(four_ranks.run(cases.learned, kind, mesh), kind)


def test_parts_train_on_no_tensor_parallel_ranks(ranks):
    """But run without gradients."""
    require_sizes(*cases.MESHES["tp"])
    for said, losses in ranks.run(cases.refused_in_parts, "tp"):
        assert "under tensor parallelism" in said
        assert len(losses) > 1
        assert sum(losses) == pytest.approx(alone("parts", 0)[0].item(), rel=1e-6)


def test_a_stage_of_a_pipeline_is_not_patched(ranks):
    require_sizes("pp_size")
    for said in ranks.run(cases.refused, {"pp_size": 2}):
        assert "pp_size must be 1" in said


def test_tied_embeddings_that_are_sharded_without_the_head_are_not_patched(ranks):
    """transformers' `from_pretrained` does so: an optimizer then never changes the head."""
    tied = partial(cases.refused, tie_word_embeddings=True)
    require_sizes(*cases.MESHES["fsdp"])
    for said in ranks.run(tied, cases.MESHES["fsdp"]):
        assert "does not support tied embeddings with DistributedConfig(fsdp_size=...)" in said
    for said in ranks.run(tied, cases.MESHES["tp"]):
        assert said == "nothing"


@pytest.mark.parametrize("leaks", [False, True])
def test_isolation_is_verified_on_tensor_parallel_ranks(ranks, leaks):
    require_sizes(*cases.MESHES["tp"])
    first, second = ranks.run(cases.verified, "tp", leaks)
    assert first == second
    assert ("leak" in first) == leaks, first


@pytest.mark.parametrize(
    ("run", "mesh"),
    [
        ("Trainer", "tp"),
        ("packing", "fsdp"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in [("Trainer", "fsdp"), ("packing", "tp")]
            + [("padding_free", mesh) for mesh in ("tp", "fsdp")]
        ),
    ],
)
@pytest.mark.usefixtures("fresh_accelerate")
def test_trainers(ranks, run, mesh):
    """Tensor-parallel ranks get the same rows, others share them out."""
    require_sizes(*cases.MESHES[mesh])
    losses, weights = cases.trained(run, {})
    for found, after in ranks.run(cases.trained, run, cases.MESHES[mesh]):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, x in after.items():
            torch.testing.assert_close(x, weights[name], rtol=1e-5, atol=1e-6, msg=name)
