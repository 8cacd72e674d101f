"""The cases of the suite "preference"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flexvarlen.bench.suites.model.geometries import GeometryCase


@dataclass(frozen=True, kw_only=True)
class PreferenceCase(GeometryCase):
    """One trainer, model and batch.

    Attributes:
        prompt: tokens of every prompt; 0: a sample is one of Python's help topics.
        shortest, longest: tokens of an answer, uniformly; topics are cut at `longest`.
        samples: of a batch: pairs, completions of GRPO, or texts.
        group: completions of one prompt in GRPO.
        batches: taken in turns; the first is checked.
        micro_batches: that a batch is dealt out to, row by row; their gradients add up.
        step: what is timed.
        checkpointing: whether the backward computes the layers' insides again; the reference then
            runs one group at a time too, of text.
        images: at most of a document, or of each prompt; the texts come after them.
        smallest_image, largest_image: about the tokens of one, uniformly.
    """

    geometry: str = "qwen3-1.7b"
    layers: int = 14
    name: str
    task: str
    mode: str = "eager"
    prompt: int = 1024
    shortest: int = 128
    longest: int = 768
    samples: int = 8
    group: int = 8
    batches: int = 1
    micro_batches: int = 1
    step: str = "forward, backward, AdamW"
    checkpointing: bool = False
    images: int = 0
    smallest_image: int = 256
    largest_image: int = 1500

    def data(self) -> dict[str, Any]:
        hidden = ["name"] if self.micro_batches > 1 else ["name", "micro_batches"]
        if not self.images:
            hidden += ["images", "smallest_image", "largest_image"]
        return {field: value for field, value in super().data().items() if field not in hidden}


DPO = PreferenceCase(name="dpo", task="dpo")
GRPO = PreferenceCase(name="grpo", task="grpo", samples=16)
LONG = replace(GRPO, name="grpo-4096", prompt=4096)
# Without checkpointing the padded batch does not fit.
IMAGES: dict[str, Any] = {"geometry": "qwen3-vl-2b", "layers": 28, "checkpointing": True}
CASES = (
    DPO,
    replace(DPO, name="dpo-4096", samples=2, prompt=4096),  # logits of a token: 152K
    GRPO,
    replace(GRPO, name="grpo-16", group=16),
    LONG,
    replace(LONG, name="grpo-4096-16", group=16),
    replace(
        LONG,
        name="grpo-hybrid-4096",
        geometry="qwen3.5-2b",
        layers=12,
        samples=32,
        shortest=512,
        longest=512,
        checkpointing=True,  # without shared prompts 147,456 tokens
    ),
    replace(LONG, name="grpo-experts-4096", geometry="qwen3-30b-a3b", layers=4),
    replace(
        LONG,
        name="grpo-step",
        geometry="qwen3-0.6b",
        samples=128,
        group=16,
        micro_batches=32,
        shortest=256,
        longest=256,
        checkpointing=True,
    ),
    PreferenceCase(name="reward", task="reward"),
    PreferenceCase(
        name="classification", task="classification", prompt=0, shortest=0, longest=4096
    ),
    PreferenceCase(
        name="images", task="images", prompt=0, shortest=64, longest=512, images=4, **IMAGES
    ),
    PreferenceCase(name="grpo-images", task="grpo", prompt=256, images=3, **IMAGES),
    # Compiling takes longer than all else: few layers.
    replace(DPO, name="dpo-compiled", mode="compiled", layers=2, batches=5),
)
QUICK: dict[str, Any] = {"geometry": "qwen3-tiny", "layers": 1, "batches": 1, "shortest": 3}
QUICK_OTHERS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"samples": 8, "group": 4, "micro_batches": 4},
    "qwen3.5-2b": {"geometry": "qwen3.5-tiny", "layers": 2, "samples": 16},
    "qwen3-30b-a3b": {"geometry": "qwen3-moe-tiny"},
    "qwen3-vl-2b": {
        "geometry": "qwen3-vl-tiny",
        "longest": 40,
        "smallest_image": 4,
        "largest_image": 24,
    },
}


def quick_cases() -> list[PreferenceCase]:
    """The same, small enough for a CPU."""
    pairs: dict[str, Any] = {"prompt": 40, "longest": 20}
    topics: dict[str, Any] = {"longest": 400}
    return [
        replace(
            case,
            **QUICK | (pairs if case.prompt else topics) | QUICK_OTHERS.get(case.geometry, {}),
        )
        for case in CASES
    ]
