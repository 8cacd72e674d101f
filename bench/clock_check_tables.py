"""The table of the suite "clock-check", from its rows."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of

WITHIN = 0.05  # the issue's: timings agree with an independent trace within 5%


def clock_section(rows: Sequence[Row]) -> str:
    """A table a machine, and how many agree."""
    machines: dict[str, list[Row]] = {}
    for row in rows:
        machines.setdefault(str(row.environment.get("gpu") or "CPU"), []).append(row)
    return "\n\n".join(_table(machine, own) for machine, own in machines.items())


def _table(machine: str, rows: Sequence[Row]) -> str:
    timed = [row for row in rows if "ratio" in row.measures]
    notes: dict[str, int] = {}
    lines = []
    for row in rows:
        m, case = row.measures, row.case
        line = [case["title"], case["pass"], f"`{case['variant']}`"]
        if "ratio" in m:
            line += [
                *(f"{m[f'{clock}_p50']:.4g}" for clock in ("device_ms", "trace_ms", "span_ms")),
                str(m["kernels"]),
                f"{m['ratio'] - 1:+.2%}",
                f"{m['ratio_of_sum'] - 1:+.2%}" if "ratio_of_sum" in m else "–",
                "agree" if row.status == "ok" else "**disagree**",
            ]
        else:
            number = notes.setdefault(row.reason or "", len(notes) + 1)
            line += ["–", "–", "–", "–", "–", "–", f"{row.status} ({number})"]
        lines.append(line)
    agree = [row for row in timed if row.status == "ok"]
    cases = {row.case["title"] for row in timed}
    said = "Nothing was timed."
    if timed:
        apart = max(abs(row.measures["ratio"] - 1) for row in timed)
        said = (
            f"{len(agree)} of {len(timed)} timings, of {len(cases)} cases, agree with a trace of "
            f"the same calls within {WITHIN:.0%}; the largest difference is {apart:.2%}."
        )
    where = rows[0].environment
    header = ["case", "pass", "kernel", "clock ms", "trace ms, sum", "trace ms, span", "kernels"]
    header += ["clock ÷ span", "clock ÷ sum", ""]
    reasons = "".join(f"\n\n({number}) {why}" for why, number in notes.items())
    return (
        f"{said} Medians; {machine}, torch {where.get('torch')}{commit_of(where)}:\n\n"
        f"{markdown(header, lines)}{reasons}"
    )
