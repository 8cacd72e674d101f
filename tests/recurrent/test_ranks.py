"""A row over ranks: convolutions and scans continue on the next rank as in one piece.

The ranks run one after another in this process, forward from the first and backward from the last,
and what one sends waits for the other in a mailbox.
"""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout
from flexvarlen.recurrent import adjacent_ranks, fla_kernels
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla_kernels import levels
from flexvarlen.recurrent.fla_kernels.check import OPERATORS
from flexvarlen.recurrent.fla_kernels.levels import Boundaries
from flexvarlen.recurrent.layer_functions import _loop_over_documents
from flexvarlen.reference.model import Float64
from tests.recurrent.cases import CASES, chunk_offsets, randn, stand_in_for_fla

pytestmark = pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document")


class Mailbox:
    """In the place of `send` and `receive`; a rank's group is named by its number."""

    def __init__(self):
        self.letters = defaultdict(deque)
        self.log = []

    def send(self, x, step, group):
        assert x.is_contiguous()
        rank = int(group)
        self.letters[rank, rank + step].append(x.clone())
        self.log.append("send")
        return self

    def receive(self, x, step, group):
        assert x.is_contiguous()
        rank = int(group)
        x.copy_(self.letters[rank + step, rank].popleft())
        self.log.append("receive")
        return self

    def wait(self):
        pass

    def is_empty(self):
        return not any(self.letters.values())


@pytest.fixture
def mailbox(monkeypatch):
    return installed(monkeypatch)


def installed(patch):
    mailbox = Mailbox()
    for module in (adjacent_ranks, levels):
        patch.setattr(module, "send", mailbox.send)
        patch.setattr(module, "receive", mailbox.receive)
    return mailbox


def shards(lengths, ranks, total_tokens, device="cpu"):
    """The documents of each rank, and how they are cut."""
    plan = plan_row(lengths, ranks, total_tokens=total_tokens, contiguous=True)
    made = [sharded_layout(plan, rank, device=device) for rank in range(ranks)]
    return [RecurrentDocuments(each, group=str(rank)) for rank, each in enumerate(made)], plan


ROWS = {
    "one document": ((120,), 4),
    "one token before the end of a rank": ((59, 30, 31), 2),
    "one token after it": ((61, 1, 40, 3), 2),
    "many ranks": ((20, 70, 1, 9), 8),
    "padding alone": ((50, 30), 4),
}


def run_in_shards(case, row, device, dtype):
    """Output and gradients of each rank one after another, and of all ranks' shared tensors."""
    run, _, by_token, shared = case
    docs, _ = shards(*ROWS[row], 120, device)
    tokens = 120 // len(docs)

    def leaves_of(rank):
        own = [x[:, rank * tokens : (rank + 1) * tokens] for x in by_token]
        return [x.to(device, dtype).requires_grad_() for x in (*own, *shared)]

    leaves = [leaves_of(rank) for rank in range(len(docs))]
    outs = [run(each, *own) for each, own in zip(docs, leaves, strict=True)]
    cotangent = randn(1, 120, *outs[0].shape[2:], seed=9).to(device, dtype).split(tokens, 1)
    found = [
        torch.autograd.grad(out, own, grad, allow_unused=True)
        for out, own, grad in reversed([*zip(outs, leaves, cotangent, strict=True)])
    ][::-1]
    by_tensor = list(zip(*found, strict=True))
    count = len(by_token)
    together = [torch.cat(x, 1) for x in by_tensor[:count]] + [sum(x) for x in by_tensor[count:]]
    return [torch.cat(outs, 1).detach(), *together]


def run_whole(case, row):
    run, _, by_token, shared = case
    leaves = [x.clone().requires_grad_() for x in (*by_token, *shared)]
    layout = PackedLayout.from_lengths(ROWS[row][0], total_tokens=120)
    with Float64():
        out = run(RecurrentDocuments(layout), *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, randn(*out.shape, seed=9))]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_does(name, row, mailbox):
    case = CASES[name](120)
    expected = run_whole(case, row)
    with Float64():
        found = run_in_shards(case, row, "cpu", torch.float64)
    assert mailbox.log
    assert mailbox.is_empty()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_of_one_tensor_alone(name, mailbox):
    """Both ranks run the backward of what passes, or neither: else one would wait for ever."""
    run, _, by_token, shared = CASES[name](120)
    docs, _ = shards(*ROWS["one token after it"], 120)
    for index in range(len(by_token) + len(shared)):
        parts = [[x[:, half] for x in by_token] + shared for half in (slice(60), slice(60, None))]
        for own in parts:
            own[index] = own[index].clone().requires_grad_()
        outs = [run(each, *own) for each, own in zip(docs, parts, strict=True)]
        for out, own in reversed([*zip(outs, parts, strict=True)]):
            torch.autograd.grad(out.sum(), own[index])
        assert mailbox.is_empty()


@pytest.mark.parametrize("name", CASES)
def test_frozen_layers_need_no_gradient_on_any_rank(name, mailbox):
    """Else the backward of some ranks alone would run, and wait for the others in attention."""
    run, _, by_token, shared = CASES[name](120)
    docs, _ = shards((60, 20, 40), 3, 120)
    for rank, each in enumerate(docs):
        own = [x[:, 40 * rank : 40 * (rank + 1)] for x in by_token]
        assert not run(each, *own, *shared).requires_grad
    assert mailbox.is_empty()


def test_plain_torch_is_refused_over_gpus():
    docs, _ = shards((60, 20, 40), 3, 120)
    with FakeTensorMode(allow_non_fake_inputs=True):
        row = torch.empty(1, 40, 2, 8, device="cuda")
        with pytest.raises(
            NotImplementedError, match="ranks need fla's kernels on a GPU, as ranks"
        ):
            _loop_over_documents(None, docs[0], [row], row, None, why="a reason")


def test_nothing_passes_where_no_document_is_cut():
    docs, _ = shards((30, 20, 10, 50), 2, 120)
    for each in docs:
        assert each.links is None
        assert len(each.previous) == 60
        assert not Boundaries.of(each).pass_states


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_does_on_a_gpu(name, row, mailbox):
    """Within bfloat16's eps, of the same rounded inputs."""
    reason = fla_kernels.why_not(torch.zeros(1, device="cuda", dtype=torch.bfloat16))
    if reason is not None:
        pytest.skip(reason)
    run, alone, by_token, shared = CASES[name](120)
    rounded = [[x.bfloat16().double() for x in tensors] for tensors in (by_token, shared)]
    expected = run_whole((run, alone, *rounded), row)
    found = run_in_shards((run, alone, *rounded), row, "cuda", torch.bfloat16)
    assert mailbox.is_empty()
    for x, y in zip(found, expected, strict=True):
        error = (x.cpu().double() - y).norm() / y.norm()
        assert error < torch.finfo(torch.bfloat16).eps


# ---- fla's kernels, by stand-ins ----


rows_of_ranks = st.tuples(st.lists(st.integers(0, 90), max_size=8), st.integers(1, 6)).map(
    lambda drawn: (drawn[0], drawn[1], max(3, -(-sum(drawn[0]) // drawn[1])))
)


@given(rows_of_ranks)
def test_states_pass_from_rank_to_rank(drawn):
    """By a kernel that adds a slot's tokens to its state; what needs no other rank runs first."""
    lengths, ranks, tokens = drawn
    docs, plan = shards(lengths, ranks, ranks * tokens)
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_fla(patch)
        mailbox = installed(patch)
        for walk, order in ((levels.run_levels_forward, 1), (levels.run_levels_backward, -1)):
            for rank in range(ranks)[::order]:
                found = states_of(walk, docs[rank], mailbox)
                for slot, (document, start, stop) in enumerate(plan.pieces[rank]):
                    whole = lengths[document]
                    assert found[slot] == (stop if order == 1 else whole - start)
            assert mailbox.is_empty()


def states_of(walk, docs, mailbox):
    """What the kernel writes for each slot."""
    ends, found = docs.cu_seqlens.tolist(), {}
    mailbox.log.clear()
    at = {}

    def run(level, read, out):
        if read is None:  # no document of the row is cut
            read = torch.zeros(level.slots, 1, 1, 1)
            out = torch.empty_like(read)
        torch.add(read, level.cu_seqlens.diff().view(-1, 1, 1, 1), out=out)
        chunks = chunk_offsets(docs.cu_seqlens, 64)
        begin = level.cu_seqlens.data_ptr() - docs.cu_seqlens.data_ptr()
        first = begin // docs.cu_seqlens.element_size()
        assert torch.equal(level.chunk_offsets, chunks[first : first + level.slots + 1])
        for slot, state in enumerate(out.flatten().tolist(), first):
            assert slot not in found
            found[slot], at[slot] = state, "receive" in mailbox.log

    received = walk(Boundaries.of(docs), torch.zeros(1, 1, 1, 1, 1), run)
    assert sorted(found) == list(range(len(ends) - 1))
    waited = [slot for slot in at if at[slot] and ends[slot] < ends[slot + 1]]
    if docs.links is not None:
        receives, sends, last = docs.links.tolist()
        if walk is levels.run_levels_forward:
            assert waited == [0] * receives
            first = found.copy()
            found.clear()
            mailbox.log.clear()
            walk(Boundaries.of(docs), torch.zeros(1, 1, 1, 1, 1), run, received)
            assert found == first
            assert not mailbox.log, "as in the backward, which waits for no rank before"
        else:
            padded = int(docs.layout.cu_seqlens[-1]) < docs.layout.total_tokens
            assert waited[:1] == [last] * sends
            assert len(waited) <= 1 + padded
    return found


def test_a_convolution_of_a_short_rank():
    for lengths in ((8,), (2, 2, 2, 2)):  # also where none is cut, so that no row raises alone
        with pytest.raises(ValueError, match="at least the 3 tokens that a convolution reaches ba"):
            shards(lengths, 4, 8)


@pytest.mark.parametrize("lengths", [(8,), (4, 4)])
def test_a_wide_convolution(lengths, mailbox):
    docs, _ = shards(lengths, 2, 8)
    x, weight = randn(1, 4, 6), randn(6, 5)
    with pytest.raises(NotImplementedError, match="width of at most 4, got 5"):
        CASES["convolution"](8)[0](docs[0], x, weight, None)


@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_trace(kind):
    """Their fake outputs and gradients, with what passes between ranks."""
    docs, _ = shards((120,), 2, 120)
    with FakeTensorMode(allow_non_fake_inputs=True):
        heads = {"Kimi's delta rule": (4, 4)}.get(kind, (2, 4))
        q, k = (torch.randn(1, 60, heads[0], 8, requires_grad=True) for _ in "qk")
        v = torch.randn(1, 60, heads[1], 16, requires_grad=True)
        g = torch.randn(1, 60, heads[1], *([8] if "Kimi" in kind else []), requires_grad=True)
        beta = [torch.randn(1, 60, heads[1], requires_grad=True)] if "delta" in kind else []
        inputs = [q, k, v, g, *beta]
        out = OPERATORS[kind](*inputs, *Boundaries.of(docs[1]))[0]
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert out.shape == v.shape
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


def test_documents_on_another_device_keep_their_ranks():
    docs, _ = shards((120,), 2, 120)
    moved = docs[1].to("meta")
    assert (moved.group, moved.links.tolist()) == ("1", [1, 0, 0])
