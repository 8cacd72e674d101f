"""The functions of the Hub's flash-attn4, by their names and parameters."""

from . import attention


def _flash_attn_fwd(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    num_splits=1,
    return_lse=False,
):
    window = (side(window_size_left), side(window_size_right))
    kind = (softmax_scale, causal, *window, softcap)
    return attention.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *kind)


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
):
    window = (side(window_size_left), side(window_size_right))
    kind = (softmax_scale, causal, *window, softcap)
    return attention.backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *kind)


def side(keys):
    """One side of a window; -1: no limit."""
    return -1 if keys is None else keys
