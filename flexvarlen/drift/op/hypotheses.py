"""What a wrong kernel may have computed instead: other masks, other boundaries, other heads.

Shapes: T = tokens of the row, H = num_heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from flexvarlen.drift.op.exact import Sight
from flexvarlen.drift.op.judge import Truth


@dataclass(frozen=True)
class Hypothesis:
    """Attention that differs from the truth in one thing.

    Attributes:
        sentence: what it means if it fits.
        lengths: the documents as the kernel would see them; their sum is T.
        sight: which keys of its document a query sees.
        scale: factor on the scores.
        k_heads, v_heads: the KV head of each query head, `H` numbers each.
    """

    sentence: str
    lengths: tuple[int, ...]
    sight: Sight
    scale: float
    k_heads: tuple[int, ...]
    v_heads: tuple[int, ...]

    def same_as(self, other: Hypothesis) -> bool:
        """Whether both compute the same."""
        return replace(self, sentence="") == replace(other, sentence="")


def truth_hypothesis(truth: Truth) -> Hypothesis:
    """What the kernel ought to compute."""
    case = truth.case
    repeats = case.num_heads // case.num_kv_heads
    own = tuple(head // repeats for head in range(case.num_heads))
    sight = Sight.of(causal=case.causal, window=case.window)
    return Hypothesis("right", case.lengths, sight, case.scale, own, own)


# --- the hypotheses ------------------------------------------------------------------------------


def structural_hypotheses(truth: Truth, document: int) -> list[Hypothesis]:
    """Wrong masks, boundaries and heads; none that computes the truth, and none twice.

    Args:
        document: one that is wrong.
    """
    right = truth_hypothesis(truth)
    made: list[Hypothesis] = []
    for make in (_masks, _boundaries, _heads):
        for hypothesis in make(right, document, truth):
            known = hypothesis.same_as(right) or any(hypothesis.same_as(x) for x in made)
            if not known:
                made.append(hypothesis)
    return made


def _masks(right: Hypothesis, document: int, truth: Truth) -> Iterator[Hypothesis]:
    least, most = right.sight.least, right.sight.most
    causal, window = truth.case.causal, truth.case.window
    if causal:
        yield replace(
            right,
            sentence="mask off by one: the causal diagonal is one too far left, a query does not "
            "see its own token",
            sight=Sight(1, most),
        )
        yield replace(
            right,
            sentence="mask off by one: the causal diagonal is one too far right, a query sees the "
            "token after it",
            sight=Sight(-1, most),
        )
        ahead = None if window is None else 1 - window
        yield replace(
            right,
            sentence="the causal mask is missing: a query sees the tokens after it",
            sight=Sight(ahead, most),
        )
    else:
        yield replace(
            right,
            sentence="a causal mask is added: a query does not see the tokens after it",
            sight=Sight(0, most),
        )
    if window is None:
        return
    sentence = "the window is missing: a query sees its whole document"
    yield replace(right, sentence=sentence, sight=Sight(0 if causal else None, None))
    for change in (1, -1):
        text = f"mask off by one: the window is {window + change} in place of {window} tokens"
        wider = None if most is None else most + change
        ahead = least if causal or least is None else least - change
        yield replace(right, sentence=f"{text}, looking back", sight=Sight(least, wider))
        if not causal:
            yield replace(right, sentence=f"{text}, looking ahead", sight=Sight(ahead, most))
            yield replace(right, sentence=f"{text}, both ways", sight=Sight(ahead, wider))


def _boundaries(right: Hypothesis, document: int, truth: Truth) -> Iterator[Hypothesis]:
    lengths = right.lengths
    if len(lengths) == 1:
        return
    flipped = Sight.of(causal=not truth.case.causal, window=truth.case.window)
    also = "the causal mask is missing" if truth.case.causal else "a causal mask is added"
    for first in (document - 1, document):
        if 0 <= first < len(lengths) - 1:
            joined = (*lengths[:first], sum(lengths[first : first + 2]), *lengths[first + 2 :])
            text = f"a boundary is ignored: documents {first} and {first + 1} see each other"
            yield replace(right, sentence=text, lengths=joined)
    whole = (sum(lengths),)
    text = "boundaries are ignored: all documents see each other"
    yield replace(right, sentence=text, lengths=whole)
    yield replace(right, sentence=f"{text}, and {also}", lengths=whole, sight=flipped)
    for shift in (1, -1):
        moved = (lengths[0] + shift, *lengths[1:-1], lengths[-1] - shift)
        if min(moved) > 0:
            late = "late" if shift > 0 else "early"
            text = f"boundaries are off by one: every document begins one token too {late}"
            yield replace(right, sentence=text, lengths=moved)


def _heads(right: Hypothesis, document: int, truth: Truth) -> Iterator[Hypothesis]:
    heads, kv_heads = truth.case.num_heads, truth.case.num_kv_heads
    repeats = heads // kv_heads
    maps: dict[str, Callable[[int], int]] = {
        f"interleaved, h % {kv_heads} in place of h // {repeats}": lambda h: h % kv_heads,
        "in reverse order": lambda h: kv_heads - 1 - h // repeats,
        "all to KV head 0": lambda h: 0,
        "all to the last KV head": lambda h: kv_heads - 1,
        "one KV head too far": lambda h: (h // repeats + 1) % kv_heads,
    }
    for name, mapping in maps.items():
        wrong = tuple(mapping(head) for head in range(heads))
        text = f"heads are mapped wrongly: query heads to those of {{}} {name}"
        yield replace(right, sentence=text.format("K and V"), k_heads=wrong, v_heads=wrong)
        yield replace(right, sentence=text.format("K"), k_heads=wrong)
        yield replace(right, sentence=text.format("V"), v_heads=wrong)
