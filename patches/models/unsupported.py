"""Model types that are refused because of state across the row or their own mask in every batch.

A state, a convolution or a transform runs over the whole row, independent of the attention mask,
so packed documents leak, which no attention function can prevent. Some of these models
take `seq_idx` or `cu_seq_lens_q` for kernels of other packages, which keep documents apart; none
of that is verified here.

They were identified on transformers 5.23 and 5.24 in two ways: changing the first document of a
tiny model changed the later ones; or its modeling file runs such a layer over the sequence.
"""

from __future__ import annotations

_SCAN = "a state-space scan and a convolution"
_GATED_DELTA = "a gated delta rule and a convolution"
_DELTA = "a delta rule and a convolution"
_CONVOLUTION = "a convolution"

_TYPES_BY_STATE: dict[str, tuple[str, ...]] = {
    _SCAN: (
        "mamba",
        "falcon_mamba",
        "jamba",
        "zamba",
        "zamba2",
        "nemotron_h_omni",  # its text model is a nemotron_h
    ),
    "a linear recurrence and a convolution": ("recurrent_gemma",),
    _GATED_DELTA: (
        # their text model is a qwen3_5_text
        "minicpmv4_6",
        "minicpmv4_7",
        "minicpm_ocr",
        "jev",
        "lara_mini",
    ),
    "a gated delta rule, a convolution and n-grams": ("qwen4_exp", "qwen4_exp_text"),
    _DELTA: ("bailing_hybrid", "glm5_next", "glm5_next_text"),
    _CONVOLUTION: (
        "lfm3",
        "lfm3_vl",
        "inkling_mm_model",
        "inkling_text",
        "inkling2",
        "inkling2_text",
        "inkling2_loop",
        "inkling2_loop_text",
        "convbert",
        "canine",
    ),
    "convolutions over queries and keys, and delayed values": ("zaya",),
    "lightning attention, a running sum of keys and values,": ("minimax",),
    "a recurrence": ("rwkv", "xlstm"),
    "a Fourier transform": ("fnet",),
}

STATEFUL: dict[str, str] = {
    model_type: state for state, types in _TYPES_BY_STATE.items() for model_type in types
}
"""For each of these model types, what runs over the row besides attention."""


_PREFIXES = ("paligemma",)  # image and prompt see one another; no use without an image


def why_not_supported(model_type: str) -> str | None:
    """Why documents leak outside attention, or get a mask of the model's own; None if neither."""
    state = STATEFUL.get(model_type)
    if state is not None:
        return (
            f"model_type must be one whose layers mix tokens only in attention, got "
            f"{model_type!r}, which runs {state} over the whole row, through which packed "
            "documents leak into one another; use the model's own implementation, one document per "
            "row."
        )
    if model_type in _PREFIXES:
        return (
            f"model_type must be one of causal or bidirectional documents, got {model_type!r}, "
            "whose token_type_ids define their own mask over image and prefix (bidirectional "
            "attention), which is not supported; use the model's own attention, one document per "
            "row."
        )
    return None
