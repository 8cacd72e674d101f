"""`attribute`: whose fault is it that a packed row differs from its documents alone.

The packed row runs with each class of operations either over the whole row at once or document by
document, in the shapes of a document alone:

| what | over the whole row | document by document |
|---|---|---|
| all | everything | |
| attention | attention | matmuls, norms |
| matmuls | linear layers | attention, norms |
| norms | norms | attention, matmuls |
| none | | everything: bit-equal to documents alone |
| invariant | everything, batch invariant: attention by its promise, the rest in fixed shapes | |

A class's share is its run's relative difference of the logits over that of "all". Shares need not
add up to 1: the classes' errors meet in every layer, and partly cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from flexvarlen.drift.model.fixed_shapes import GPU_PIECE_TOKENS, PIECE_TOKENS, fixed_shapes
from flexvarlen.drift.model.invariance import (
    differences,
    invariance,
    invariant_variant,
    why_not_equal,
)
from flexvarlen.drift.model.run import ModelRun, run_alone, run_packed
from flexvarlen.drift.model.serial import CLASSES, serial
from flexvarlen.drift.model.setting import (
    LEAN_LEFT_OUT,
    Broken,
    ModelSetting,
    Progress,
    Shared,
    caught,
    is_lean,
    left_out,
)
from flexvarlen.drift.op.failures import DeviceLostError
from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.truth import clean
from flexvarlen.equivalence.variants import THEIRS, Variant, counted_labels, variant_names
from flexvarlen.measure import time_interleaved
from flexvarlen.rows import Row, Status

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SUITE = "drift-attribution"

INVARIANT = "invariant"
WHAT = ("all", *CLASSES, "none", INVARIANT)
"""What a run leaves over the whole row; see the table above."""


def attribute(
    model: PreTrainedModel,
    batch: PackedBatch | Mapping[str, Any] | None = None,
    backends: str | Sequence[str] = "all",
    *,
    what: Sequence[str] = WHAT,
    sample: int = 4,
    piece: int | None = None,
    repeats: int | None = None,
    lean: bool | None = None,
    append: Callable[[Row], None] | None = None,
    progress: Progress | None = None,
    **shared: Unpack[Shared],
) -> list[Row]:
    """Measure what share of the drift each class of operations causes, and what it costs to have
    none.

    The model is not changed; its device is where all runs, eagerly.

    Args:
        model: a transformers model of a verified family, dense, with a head for causal language
            modelling.
        batch, lean, append, progress: as in `model_drift`.
        backends: "all" (flexvarlen's), or names; "auto" is none.
        what: of `WHAT`; "all" is always run, as the others are held against it.
        sample: so many documents' own gradients are compared in "invariant".
        piece: tokens of a piece there; default 512, on the CPU 128.
        repeats: timed steps of each run, interleaved; default 5, on the CPU 2.
        **shared: dtype, train, tokens, seed, name, commit; see `Shared`.

    Returns:
        A row for each of `what` of each backend; the truth is each document alone on the same
        backend, in "invariant" also batch invariant. "none" and "invariant" are "wrong" where they
        are not its bits, all where something is not finite.

    Raises:
        ValueError: an unknown backend or `what`, "auto", or a batch that breaks the contract.
        NotImplementedError: the model type is not verified.
        DeviceLostError: a backend broke the device, after its rows.
    """
    asked = _what_names(what)
    names = [n for n in variant_names(backends, model.device) if not n.startswith(THEIRS)]
    if "auto" in names:
        raise ValueError(
            "backends must be all, or names of backends, got 'auto'; name the backend whose "
            "operations are to be run apart."
        )
    setting = ModelSetting.of(model, batch, **shared)
    if lean is None:
        lean = is_lean(backends, model.device)
    if piece is None:
        piece = PIECE_TOKENS if model.device.type == "cpu" else GPU_PIECE_TOKENS
    if repeats is None:
        repeats = 2 if model.device.type == "cpu" else 5
    rows: list[Row] = []
    for done, backend in enumerate(names):

        def say(text: str, done: int = done, backend: str = backend) -> None:
            if progress is not None:
                progress(done, len(names), f"{backend}: {text}")

        runs = _Attribution(setting, backend, asked, sample, piece, repeats, say)
        skipped = lean and backend in LEAN_LEFT_OUT
        for row in runs.skipped() if skipped else runs.rows():
            rows.append(row)
            if append is not None:
                append(row)
        clean(setting.base)
    if progress is not None:
        progress(len(names), len(names), "")
    return rows


def _what_names(what: Sequence[str]) -> list[str]:
    asked = [what] if isinstance(what, str) else list(what)
    for name in asked:
        if name not in WHAT:
            raise ValueError(
                f"what must be of {', '.join(WHAT)}, got {name!r}; choose among these."
            )
    return [name for name in WHAT if name in asked or name == "all"]


@dataclass(frozen=True)
class _Attribution:
    """The runs of one backend."""

    setting: ModelSetting
    backend: str
    what: Sequence[str]
    sample: int
    piece: int
    repeats: int
    say: Callable[[str], None]

    def skipped(self) -> list[Row]:
        """Rows that say that they were left out."""
        why = Broken("skipped", left_out(self.backend))
        return [self._row(name, None, why) for name in self.what]

    def rows(self) -> Iterator[Row]:
        """One of each run, in order; of those that were run, if the device is lost."""
        measures: dict[str, dict[str, Any]] = {}
        refused: dict[str, Broken] = {}
        try:
            self._run(measures, refused)
        except DeviceLostError:
            self._add_shares(measures)
            known = [name for name in self.what if name in measures or name in refused]
            yield from (self._row(n, measures.get(n), refused.get(n)) for n in known)
            raise
        yield from (self._row(n, measures.get(n), refused.get(n)) for n in self.what)

    def _run(self, measures: dict[str, dict[str, Any]], refused: dict[str, Broken]) -> None:
        """Fill in what each run gave, or why it did not."""
        variants: dict[str, Variant] = {}
        plain: list[Broken] = []
        self.say("each document alone")
        with caught(plain, self.device):
            variant = self.setting.variant(self.backend)
            truth = run_alone(variant, self.setting.batch)
            for name in self.what:
                if name != INVARIANT:
                    self.say(name)
                    self._one(name, variant, truth, measures, refused)
                    variants[name] = variant
            del truth
        if plain:
            short = [name for name in self.what if name != INVARIANT]
            refused |= dict.fromkeys(short if plain[0].lost is None else short[:1], plain[0])
            self._end_if_lost(plain[0])
        if INVARIANT in self.what:
            self.say(INVARIANT)
            broken: list[Broken] = []
            with caught(broken, self.device):
                variant = invariant_variant(self.setting, self.backend)
                measures[INVARIANT] = invariance(self.setting, variant, self.piece, self.sample)
                variants[INVARIANT] = variant
            if broken:
                refused[INVARIANT] = broken[0]
                self._end_if_lost(broken[0])
        clean(self.setting.base)
        self._add_shares(measures)
        self.say("speed of all, in turns")
        self._add_times({name: variants[name] for name in measures}, measures, refused)

    @property
    def device(self) -> torch.device:
        """Where all runs."""
        device: torch.device = self.setting.base.device
        return device

    def _end_if_lost(self, broken: Broken) -> None:
        broken.end_if_lost(f"{self.backend}, attribution, of {self.setting.label}")

    def _one(
        self,
        name: str,
        variant: Variant,
        truth: ModelRun,
        measures: dict[str, dict[str, Any]],
        refused: dict[str, Broken],
    ) -> None:
        broken: list[Broken] = []
        with caught(broken, self.device), self._placed(name, variant):
            run = run_packed(variant, self.setting.batch)
            measures[name] = differences(run, truth, variant)
        if broken:
            refused[name] = broken[0]
            self._end_if_lost(broken[0])

    @contextmanager
    def _placed(self, name: str, variant: Variant) -> Iterator[None]:
        """The variant's operations where `name` says: whole, by document or in fixed shapes."""
        lengths = self.setting.batch.lengths
        if name == "all":
            yield
        elif name == INVARIANT:
            with fixed_shapes(variant.model, lengths, self.piece):
                yield
        else:
            with serial(variant.model, self.backend, lengths, set(CLASSES) - {name}):
                yield

    # ---- rows ----

    def _add_shares(self, measures: dict[str, dict[str, Any]]) -> None:
        total = measures.get("all", {}).get("logits_relative")
        for name, own in measures.items():
            if name != INVARIANT:
                own["share"] = own["logits_relative"] / total if total else None

    def _add_times(
        self,
        variants: Mapping[str, Variant],
        measures: dict[str, dict[str, Any]],
        refused: dict[str, Broken],
    ) -> None:
        """Milliseconds of a step, and how many times those of "all"."""
        batch = self.setting.batch
        labels = batch.labels()
        counted = counted_labels(labels)

        running: list[str] = []

        def step_of(name: str, variant: Variant) -> Callable[[], None]:
            def step() -> None:
                running[:] = [name]
                with self._placed(name, variant):
                    variant.step(batch, labels, counted)

            return step

        broken: list[Broken] = []
        with caught(broken, self.device):
            timings = time_interleaved(
                {name: step_of(name, variant) for name, variant in variants.items()},
                device=self.device,
                warmup=1,
                repeats=self.repeats,
                flush_l2=False,  # a model's step evicts it by itself
            )
            for name, timing in timings.items():
                measures[name]["ms_p50"] = timing.ms_p50
                same_passes = variants[name].train == variants.get("all", variants[name]).train
                if "all" in timings and same_passes:
                    measures[name]["cost"] = timing.ms_p50 / timings["all"].ms_p50
        if broken:
            for own in measures.values():
                own["why_not_timed"] = broken[0].reason
            if broken[0].lost is not None:
                refused |= dict.fromkeys(running, broken[0])
            self._end_if_lost(broken[0])

    def _row(self, what: str, measures: dict[str, Any] | None, refused: Broken | None) -> Row:
        case = self.setting.case(backend=self.backend, what=what)
        if measures is None or refused is not None:
            broken = refused or Broken("failed", "it was not run.")
            found = (measures or {}) | broken.measures
            return Row(SUITE, case, broken.status, broken.reason, found, self.setting.environment)
        why = measures.pop("why_wrong", None)
        if why is None and what in ("none", INVARIANT):
            why = why_not_equal(measures, len(self.setting.batch.lengths))
        judged: Status = "wrong" if why else "ok"
        return Row(SUITE, case, judged, why, measures, self.setting.environment)
