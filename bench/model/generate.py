"""Generation in the suite `model`: prefill and greedy decoding of a batch of prompts.

Prompts are padded on the left, as users of transformers batch them, or generated from one by one:
decoding is not packed. Of a patched model the prefill is ours; decoding is transformers' own with
transformers' own mask (see `patch_model`), eagerly, with the cache that `generate` makes.

Logits are held against each prompt and what was generated after it alone in fp64. Tokens
equal to those of the unpatched model are counted; where they part, logits tie within that error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from flexvarlen.bench.model.accuracy import ORACLE_DTYPE, Answer, errors_of, per_document
from flexvarlen.bench.model.batches import Collection
from flexvarlen.bench.model.cases import SORTED, split_variant
from flexvarlen.bench.model.geometries import new_causal_lm
from flexvarlen.bench.model.measure import Checked, Measurement
from flexvarlen.bench.model.train import named
from flexvarlen.bench.model.utilisation import noting_auto, step_tflop, utilisation
from flexvarlen.bench.model.variants import Sizes, Unsupported, make_variant
from flexvarlen.measure import Timing

PREFILL, DECODE = "prefill", "decode"
REFERENCE = "transformers:sdpa"


class Generation(Measurement):
    """A case of generation; a "decode" is a whole generation, less its prefill when it is told."""

    passes = (PREFILL, DECODE)

    def prepare(self) -> None:
        case = self.case
        torch.manual_seed(case.seed)
        self.lm = new_causal_lm(case.geometry, case.layers, self.dtype, self.device).eval()
        generation = self.lm.generation_config
        assert generation is not None
        generation.eos_token_id = None  # random weights may draw it: all generate equally much
        self.base = self.lm.base_model
        self.head: Tensor = self.lm.get_output_embeddings().weight.detach()
        lengths = case.lengths(self.options.text)
        ids = torch.randint(self.lm.config.vocab_size, (1, case.tokens), device=self.device)
        self.collection = Collection(ids, tuple(lengths))
        self.sizes = Sizes.of(case.tokens, lengths)
        # The unpatched model, each prompt alone: what the others' tokens are counted against.
        unpatched = make_variant(REFERENCE, self.lm, self.sizes, needs_grad=False).model
        self.reference, _ = self.generate(unpatched, self.prompts("serial"), case.new_tokens)
        oracle = self.alone(self.reference, ORACLE_DTYPE)
        self.peer = errors_of(self.alone(self.reference, self.dtype), oracle)

    def alone(self, tokens: Tensor, dtype: torch.dtype) -> Answer:
        """Logits `[prompts · N, V]` from which `tokens [prompts, N]` were chosen."""
        new = tokens.shape[1]
        sequences = self.collection.continued(tokens[:, :-1])
        none = torch.empty(0)  # where a backward would start from
        hidden = per_document(
            self.base, sequences.ids, sequences.lengths, none, dtype=dtype, gradients=False
        ).outputs
        ends = [rows[-new:] for rows in hidden.split(list(sequences.lengths))]
        logits = linear(torch.cat(ends), self.head.to(dtype))
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        return Answer(logits, {}, (new,) * len(ends))

    def modules(self) -> Sequence[nn.Module]:
        return ()

    # --- one variant -----------------------------------------------------------------------------

    def check(self, variant: str) -> Checked:
        """Make a variant, and hold all its logits against the oracle."""
        batching, attention = split_variant(variant)
        if batching == "packed":
            raise Unsupported("generation is not packed: decoding is transformers' own.")
        if batching == SORTED:
            raise Unsupported("generation has one padded batch: its order makes no other pads.")
        model = make_variant(attention, self.lm, self.sizes, needs_grad=False).model
        prompts = self.prompts(batching)
        with noting_auto() as chosen:
            tokens, logits = self.generate(model, prompts, self.case.new_tokens, logits=True)
        assert logits is not None
        oracle = self.alone(tokens, ORACLE_DTYPE)
        error = errors_of(Answer(logits.flatten(0, 1), {}), oracle)
        measures = {
            "attends": ", ".join(dict.fromkeys(chosen)) or named(attention),
            "prompts": len(self.collection.lengths),
            "longest_prompt": max(self.collection.lengths),
            "positions": sum(prompt["input_ids"].numel() for prompt in prompts),
            "error": error.outputs,
            "error_worst_document": error.worst_document,
            "peer_error": self.peer.outputs,
            "peer_error_worst_document": self.peer.worst_document,
            "tokens_equal": float((tokens == self.reference).double().mean()),
        }
        calls = {
            pass_: partial(self.generate, model, prompts, new)
            for pass_, new in ((PREFILL, 1), (DECODE, self.case.new_tokens))
        }
        return Checked({**calls}, measures, error.why_wrong(self.peer, self.dtype))

    def prompts(self, batching: str) -> list[dict[str, Tensor]]:
        """What `generate` is called with, call by call."""
        if batching == "padded":
            return [self.collection.prompts()]
        return [
            {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
            for ids, _ in self.collection.documents()
        ]

    def generate(
        self,
        model: PreTrainedModel,
        prompts: Sequence[dict[str, Tensor]],
        new: int,
        *,
        logits: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Greedy tokens `[prompts, new]`, and the logits `[prompts, new, V]` they came from."""
        tokens, chosen_from = [], []
        for prompt in prompts:
            found: Any = model.generate(  # type: ignore[operator]
                **prompt,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=logits,
            )
            tokens.append(found.sequences[:, -new:])
            if logits:
                chosen_from.append(torch.stack(found.logits, dim=1))
        return torch.cat(tokens), torch.cat(chosen_from) if logits else None

    # --- the clock -------------------------------------------------------------------------------

    def concluded(self, pass_: str, timings: dict[str, Timing]) -> dict[str, Any]:
        """Tokens a second of the prompts, or of what is decoded after the prefill's first token."""
        prompts, prefill = len(self.collection.lengths), timings[PREFILL]
        if pass_ == PREFILL:
            tflop = step_tflop(self.base, self.collection.lengths, backward=False)
            tflop += 2 * prompts * self.head.numel() / 1e12  # of each prompt one token's logits
            return dataclasses.asdict(prefill) | {
                "tokens_per_s": self.case.tokens / (prefill.ms_p50 / 1e3),
                "model_tflop": tflop,
                "peak_tflops": self.peak_tflops,
                "mfu": utilisation(tflop, prefill.ms_p50, self.peak_tflops),
            }
        whole = timings[DECODE]
        decode = {
            name: getattr(whole, name) - prefill.ms_p50 for name in ("ms_p20", "ms_p50", "ms_p80")
        }
        tokens = prompts * (self.case.new_tokens - 1)
        faster = decode["ms_p50"] > 0
        return {
            **decode,
            "generate_ms_p50": whole.ms_p50,
            "repeats": whole.repeats,
            # None: the clock's noise outweighs what there was to decode.
            "tokens_per_s": tokens / (decode["ms_p50"] / 1e3) if faster else None,
        }
