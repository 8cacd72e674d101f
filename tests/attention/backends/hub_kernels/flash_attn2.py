"""The functions of the Hub's flash-attn2, by their names and parameters."""

from . import attention


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
):
    window = (window_size_left, window_size_right)
    kind = (softmax_scale, causal, *window, softcap)
    return *attention.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *kind), None, None


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
):
    window = (window_size_left, window_size_right)
    kind = (softmax_scale, causal, *window, softcap)
    tensors = (dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k)
    for given, found in zip((dq, dk, dv), attention.backward(*tensors, *kind), strict=True):
        given.copy_(found)
