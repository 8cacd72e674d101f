"""Which variants a case of the suite `model` is measured on, if none are named."""

from __future__ import annotations

from flexvarlen.bench.model.cases import WHOLE, ModelCase, parameters_of
from flexvarlen.bench.suite import Options

# With cu_seq_lens transformers' FlashAttention reads nothing back; with position_ids each layer
# does.
PACKED = (
    "auto",
    "fa3",
    "fa2",
    "flex",
    "varlen",
    "fa4",
    "flex_fa4",
    "transformers:flash_attention_2",
    "transformers:flash_attention_2@cu_seq_lens",
    "transformers:flash_attention_3",
    "transformers:flash_attention_3@cu_seq_lens",
    "transformers:flex_attention",
    "transformers:sdpa",
    "transformers:eager",
)
UNPACKED = ("auto", "transformers:sdpa", "transformers:flash_attention_2")
TRAIN = (
    *(f"packed:{name}" for name in PACKED),
    *(f"padded:{name}" for name in UNPACKED),
    "padded:transformers:eager",
    *(f"padded-sorted:{name}" for name in UNPACKED),
    *(f"serial:{name}" for name in UNPACKED),
)
# A compilation each takes most of the time; of padded documents, for any shape, minutes.
COMPILED = (
    "packed:auto",
    "packed:fa3",
    "packed:flex",
    "packed:transformers:flash_attention_2@cu_seq_lens",
    "packed:transformers:flash_attention_3@cu_seq_lens",
    "packed:transformers:flex_attention",
    "packed:transformers:sdpa",
    "padded-sorted:transformers:sdpa",
)
FEWER = (
    "packed:auto",
    "packed:flex",
    "packed:transformers:flex_attention",
    "packed:transformers:flash_attention_2",
    "packed:transformers:flash_attention_2@cu_seq_lens",
    "packed:transformers:flash_attention_3@cu_seq_lens",
    "padded:transformers:sdpa",
    "padded:transformers:flash_attention_2",
    "padded-sorted:transformers:sdpa",
    "padded-sorted:transformers:flash_attention_2",
    "serial:transformers:sdpa",
)
# Of 128K tokens through billions of parameters, where a step takes a quarter of a minute.
FEWEST = (
    "packed:auto",
    "packed:transformers:flash_attention_2@cu_seq_lens",
    "packed:transformers:flash_attention_3@cu_seq_lens",
    "padded-sorted:transformers:sdpa",
)
LONGEST_WHOLE = 32_768  # tokens of a step on all variants
LONGEST_STEP = 2**48  # parameters times tokens of a step on more variants
GENERATE = (
    *(f"padded:{name}" for name in ("auto", "fa3", "fa2", "flex", "varlen")),
    "padded:transformers:sdpa",
    "padded:transformers:flash_attention_2",
    "padded:transformers:flash_attention_3",
    "padded:transformers:eager",
    "serial:transformers:sdpa",
)
ON_A_CPU: dict[str, tuple[str, ...]] = {
    "eager": (
        "packed:auto",
        "packed:transformers:sdpa",
        "packed:transformers:flash_attention_2",
        "padded:sdpa",
        "padded:transformers:sdpa",
        "padded-sorted:transformers:sdpa",
        "serial:transformers:eager",
    ),
    "compiled": ("packed:sdpa", "serial:transformers:sdpa"),
    "generate": ("padded:sdpa", "padded:transformers:sdpa", "serial:transformers:eager"),
}

# Over a packed row transformers' own sdpa multiplies every pair of tokens: minutes a step.
LONGEST_PACKED_SDPA = 32_768


def variants_of(case: ModelCase, options: Options) -> tuple[str, ...]:
    """The variants that a case is measured on, if none are named."""
    if not options.on_gpu:
        return ON_A_CPU["generate" if case.task == "generate" else case.mode]
    if case.task == "generate":
        return GENERATE
    if case.mode == "compiled":
        return COMPILED
    if case.documents == "text" and (case.geometry == WHOLE or options.quick):
        return TRAIN if case.tokens <= LONGEST_WHOLE else (*FEWER, "packed:transformers:sdpa")
    return FEWEST if parameters_of(case.geometry) * case.tokens > LONGEST_STEP else FEWER


def why_not_tried(case: ModelCase, variant: str) -> str | None:
    """Why a run that was told no variants leaves one untried, for its row; None: it is tried."""
    if variant != "packed:transformers:sdpa" or case.tokens <= LONGEST_PACKED_SDPA:
        return None
    return (
        f"not tried above {LONGEST_PACKED_SDPA:,} tokens: over a packed row transformers' sdpa "
        f"multiplies every pair of its {case.tokens:,} tokens, which takes minutes a step; name "
        f"the variant, and it is measured."
    )
