"""`same_bits` in TRL's trainers, whose fused head calls the base model by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flexvarlen as fv
from tests.patches.padded_trainers import DPO, GRPO
from tests.patches.test_same_bits import ByRows
from tests.sentences import failed_refusals

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def scores(trainer, completion=24):
    """Log-probabilities of eight samples in micro-batches of 1, 2, 4 and 8."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (8, 40 + completion), generator=rng)
    mask = torch.ones_like(ids)
    for row in range(8):
        mask[row, : row * 3] = 0
        mask[row, 64 - row % 5 :] = 0
    counted = mask[:, -completion:].bool()
    found = {}
    for batch in (1, 2, 4, 8):
        with torch.no_grad():
            logps = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids * mask, mask, completion, batch_size=batch
            )[0]
        found[batch] = logps[counted]
    return found


@pytest.fixture
def tiles_by_rows(monkeypatch):
    """TRL's fused head, whose tiles depend on their number of rows."""
    module = pytest.importorskip("trl.kernels.chunked_logprob")
    own = module._forward_tile

    def by_rows(tile, *args, **kwargs):
        own(tile.mul_(1 + len(tile) / 1e4), *args, **kwargs)

    monkeypatch.setattr(module, "_forward_tile", by_rows)


def test_grpo_scores_a_sample_alone_as_among_eight(tmp_path, tiles_by_rows):
    differ = {}
    for same_bits in (None, 512):
        trainer = GRPO.make(tmp_path)
        for layer in trainer.model.model.layers:
            layer.mlp.down_proj.__class__ = ByRows
        fv.patch_trainer(trainer, "sdpa", same_bits=same_bits)
        found = scores(trainer)
        differ[same_bits] = [int((x != found[1]).sum()) for x in found.values()]
        trainer.train()
    assert min(differ[None][1:]) > 0
    assert differ[512] == [0, 0, 0, 0]


def test_sizes_of_trainers(tmp_path):
    dpo = DPO.make(tmp_path, max_length=64)
    fv.patch_trainer(dpo, same_bits=True)
    assert {x.__dict__["_flexvarlen_patch"].same_bits for x in (dpo.model, dpo.ref_model)} == {1024}
    grpo = GRPO.make(tmp_path)
    unknown = "same_bits=True needs a trainer that limits the tokens of a row"
    cases = [
        (unknown, (grpo, {"same_bits": True})),
        ("same_bits, which is for", (grpo, {"same_bits": 64, "context_parallel": 2})),
        (
            "same_bits, which is for",
            (grpo, {"same_bits": 64, "share_prefixes": True, "tokens_per_part": 9}),
        ),
    ]
    assert failed_refusals(cases, lambda given: fv.patch_trainer(given[0], **given[1])) == []


def test_patched_before_the_trainer_was_made(tmp_path):
    """TRL's fused head then calls the base model by itself, in tiles of any size."""
    made = replace(GRPO, model=lambda **_: fv.patch_model(GRPO.model(), "sdpa", same_bits=512))
    trainer = made.make(tmp_path)
    with pytest.raises(ValueError, match="same_bits must be set after TRL's trainer was made"):
        scores(trainer)
