"""What public sources claimed of attention, beside what rows say: for a page of documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexvarlen.bench.claims import RESOLUTION, SLACK, Claim, Cost, Found, Within, bullets
from flexvarlen.bench.series import PASSES, Measured, measured_cases
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row

MOST_LISTED = 8  # cases of a claim that a sentence names one by one

Find = Callable[[Sequence[Measured]], Iterator[Found]]
"""What the cases of one suite on one machine say of a claim; none where they hold no such case."""


@dataclass(frozen=True)
class Published:
    """A claim, and where the rows speak of it.

    Attributes:
        suite: that measures it.
        link: to the source; empty where none is known.
        find: how its ratio is computed.
    """

    suite: str
    claim: Claim
    link: str
    find: Find


def mask_of(each: Measured) -> str:
    return "causal" if each.case.get("causal") else "full"


# --- where rows speak of claims ------------------------------------------------------------------


def study(lengths: Sequence[int], slow: str, fast: str) -> Find:
    """In batch, forward, by what the kernels take and by what a call takes."""

    def find(cases: Sequence[Measured]) -> Iterator[Found]:
        from flexvarlen.bench.attention.varlen_study import CLOCKS, ratio_of

        for each in cases:
            if list(each.case["lengths"]) == list(lengths):
                for clock in CLOCKS:
                    ratio = ratio_of(each, slow, fast, "forward", clock)
                    why = each.why_none((slow, fast), "forward")
                    yield Found(f"{clock} time", ratio, why, _alone(each, (slow, fast), "forward"))

    return find


def same_case(slow: str, fast: str, passes: Sequence[str], said: str, **case: Any) -> Find:
    """How many times as long `slow` takes as `fast`, in each case with these fields.

    Args:
        case: fields, and the values (several in a tuple) that they have where the claim is meant.
        said: what tells cases apart, of their fields, `mask` and `pass`: "{tokens} tokens, {pass}".
    """

    def find(cases: Sequence[Measured]) -> Iterator[Found]:
        for each in cases:
            if not _is(each, case):
                continue
            if not {slow, fast} <= set(each.variants()):
                continue
            for pass_ in passes:
                where = said.format(**{**each.case, "mask": mask_of(each), "pass": pass_})
                why = each.why_none((slow, fast), pass_)
                note = _alone(each, (slow, fast), pass_)
                yield Found(where, each.ratio(slow, fast, pass_), why, note)

    return find


def _alone(each: Measured, variants: Sequence[str], pass_: str) -> str:
    """What of a ratio was not interleaved with the rest."""
    alone = each.timed_alone(variants, pass_)
    return f"{', '.join(f'`{name}`' for name in alone)} timed alone" if alone else ""


def _is(each: Measured, case: Mapping[str, Any]) -> bool:
    return all(
        each.case.get(name) in (wanted if isinstance(wanted, tuple) else (wanted,))
        for name, wanted in case.items()
    )


def padding(part: str, padded: str, varlen: str, max_length: int) -> Find:
    """Documents padded to lines over the same packed; without a mask, over lines that are full.

    SDPA without a mask attends to padding, is wrong, and not timed: the very same call is timed on
    documents as long as a line.
    """
    lines = "full-length" if padded == "padded:unmasked" else "multiples"

    def find(cases: Sequence[Measured]) -> Iterator[Found]:
        meant = {"part": part, "causal": False, "max_length": max_length}
        own = [each for each in cases if _is(each, meant)]
        packed = [each for each in own if each.case["documents"] == "multiples"]
        full = [each for each in own if each.case["documents"] == lines]
        for one, other in zip(packed, full, strict=False):
            varlen_ms, padded_ms = one.ms(varlen, "forward"), other.ms(padded, "forward")
            bound = one.host_bound(varlen, "forward") or other.host_bound(padded, "forward")
            ratio = None if padded_ms is None or not varlen_ms else padded_ms / varlen_ms
            why = (one.why_none([varlen], "forward"), other.why_none([padded], "forward"))
            alone = (_alone(one, [varlen], "forward"), _alone(other, [padded], "forward"))
            where = f"{part}, {padded.partition(':')[2]} SDPA"
            said = ("; ".join(x for x in parts if x) for parts in (why, alone))
            yield Found(where, None if bound else ratio, *said)

    return find


def joined(*finds: Find) -> Find:
    def find(cases: Sequence[Measured]) -> Iterator[Found]:
        for each in finds:
            yield from each(cases)

    return find


CLAIM_SUITES = ("varlen-study", "varlen-overhead", "scaling", "padding", "sdpa-backends")
"""The suites that measure what was claimed."""

SKILL = "https://github.com/NousResearch/hermes-agent"
PULL = "https://github.com/pytorch/pytorch/pull/164502"


def published() -> list[Published]:
    """All claims; each suite knows what was claimed of what it measures."""
    from flexvarlen.bench.attention import padding_tables as report_padding
    from flexvarlen.bench.attention import scaling, varlen_overhead, varlen_study
    from flexvarlen.bench.attention.padding import PaddingCase
    from flexvarlen.bench.attention.sdpa_backends import CLAIMED_WITHIN, DEFAULT, FA2
    from flexvarlen.bench.attention.varlen_forms import KERNELS

    found = [
        Published("varlen-study", claim, varlen_study.SOURCE, study(lengths, slow, fast))
        for lengths, slow, fast, claim in varlen_study.CLAIMS
    ]
    claimed = varlen_overhead.CLAIMED_KERNEL
    seqlen = varlen_overhead.OverheadCase(causal=True).seqlen
    for kernel, forms in sorted(KERNELS.items(), key=lambda item: item[0] != claimed):
        if forms.varlen is None:
            continue
        same = "" if kernel == claimed else ", claimed of FA4"
        cost = Cost(
            f"varlen costs over fixed lengths, `{kernel}`{same}",
            1 + varlen_overhead.CLAIMED_COST,
            varlen_overhead.CLAIMED_ON,
            varlen_overhead.SOURCE,
        )
        find = same_case(forms.varlen, forms.fixed, PASSES, "{mask}, {pass}", seqlen=seqlen)
        found.append(Published("varlen-overhead", cost, varlen_overhead.SOURCE, find))
    for dtype, variant, claim in scaling.CLAIMS:
        only = {"dtype": dtype, "tokens": scaling.CLAIMED_TOKENS}
        find = same_case("standard", variant, ("forward",), "{mask}, {tokens:,} tokens", **only)
        found.append(Published("scaling", claim, SKILL, find))
    both = [
        padding(part, padded, varlen, PaddingCase("multiples", causal=False).max_length)
        for part, varlen in report_padding.VARLEN.items()
        for padded in ("padded:masked", "padded:unmasked")
    ]
    found.append(Published("padding", report_padding.CLAIM, PULL, joined(*both)))
    within = Within("SDPA's time over FA2's", 1 + CLAIMED_WITHIN, "", "no source was found")
    where = "head_dim {head_dim}, {mask}, {batch} × {tokens:,} tokens, {pass}"
    find = same_case(DEFAULT, FA2, PASSES, where, head_dim=(64, 128))
    return [*found, Published("sdpa-backends", within, "", find)]


# --- the page ------------------------------------------------------------------------------------


def claims_section(rows: Sequence[Row]) -> str:
    """A table of all claims, and a sentence of each for each GPU that it was measured on.

    Rows of a CPU say nothing of claims about GPUs; what no row speaks of is "not measured yet".
    """
    machines = _machines(rows)
    lines: list[list[str]] = []
    sentences: list[str] = []
    for each in published():
        claim = each.claim
        source = f"[{_name_of(each.link)}]({each.link})" if each.link else claim.source
        known = [claim.what, _claimed(claim), claim.gpu or "–", source, f"`{each.suite}`"]
        before = len(sentences)
        for machine, own in machines.items():
            cases = measured_cases([row for row in own if row.suite == each.suite])
            found = list(each.find(cases))
            if found:
                lines.append([*known, f"{_range(found)}, {machine}", claim.verdict(found)])
                sentences.append(sentence(claim, found, machine))
        if len(sentences) == before:
            lines.append([*known, "not measured yet", ""])
    header = ["claim", "claimed", "on", "source", "suite", "measured", "the claim"]
    rule = (
        f"A speed-up holds if at least {1 - SLACK:.0%} of it was measured; a cost, if it is no "
        f"more than {RESOLUTION:.0%} of the time above what was claimed. Ratios are of medians of "
        "one run, forward where nothing else is said."
    )
    table = f"{rule}\n\n{markdown(header, lines)}"
    return f"{table}\n\n{bullets(sentences)}" if sentences else table


def sentence(claim: Claim, found: Sequence[Found], machine: str) -> str:
    """Where a claim holds on a machine, and where it does not.

    >>> claim = Claim("FA2 over eager", 3.0, "H100", "a blog")
    >>> sentence(claim, [Found("causal", 6.0), Found("full", 2.0), Found("x", None, "oom")], "H200")
    'FA2 over eager, claimed 3× on H100: on H200 it holds for causal (6.00×); it does not for full \
(2.00×); nothing is known of x (oom).'
    """
    shown = [
        (
            claim.holds(each.ratio),
            each.ratio,
            f"{each.where} ({each.ratio:.2f}×{', ' * bool(each.note)}{each.note})",
        )
        for each in found
        if each.ratio is not None
    ]
    parts = []
    if len(shown) > MOST_LISTED:
        good, (_, _, low), (_, _, high) = (
            sum(holds for holds, _, _ in shown),
            min(shown, key=lambda x: x[1]),
            max(shown, key=lambda x: x[1]),
        )
        parts.append(f"it holds in {good} of {len(shown)}, from {low} to {high}")
    else:
        for wanted, said in ((True, "it holds for"), (False, "it does not for")):
            own = [text for holds, _, text in shown if holds == wanted]
            parts += [f"{said} {', '.join(own)}"] if own else []
    missing = [f"{each.where} ({each.why_none})" for each in found if each.ratio is None]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > MOST_LISTED else ""
        listed = missing[:1] if more else missing
        parts.append(f"nothing is known of {', '.join(listed)}{more}")
    where = f" on {claim.gpu}" if claim.gpu else ""
    what = claim.what[:1].upper() + claim.what[1:]
    return f"{what}, claimed {_claimed(claim)}{where}: on {machine} {'; '.join(parts)}."


def _machines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    machines: dict[str, list[Row]] = {}
    for row in rows:
        gpu = row.environment.get("gpu")
        if gpu:
            machines.setdefault(str(gpu), []).append(row)
    return machines


def _claimed(claim: Claim) -> str:
    if isinstance(claim, Cost | Within):
        return f"{'within ' if isinstance(claim, Within) else ''}{claim.ratio - 1:.0%}"
    return f"{claim.ratio:.3g}×"


def _name_of(link: str) -> str:
    """What a link to GitHub is of.

    >>> _name_of("https://github.com/pytorch/pytorch/pull/1"), _name_of("https://github.com/a/b")
    ('pytorch/pytorch#1', 'a/b')
    """
    parts = link.removeprefix("https://github.com/").split("/")
    return "/".join(parts[:2]) + (f"#{parts[3]}" if len(parts) > 3 else "")


def _range(found: Sequence[Found]) -> str:
    known = [one.ratio for one in found if one.ratio is not None]
    if not known:
        return "–"
    low, high = f"{min(known):.2f}×", f"{max(known):.2f}×"
    return low if low == high else f"{low} to {high}"
