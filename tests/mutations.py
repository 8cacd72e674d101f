"""`python -m tests.mutations`: the tests still fail when a guarantee is broken.

Each mutation changes one line of the runtime in a copy of the checkout; the test file that it names
must fail then. Takes half a minute each; `--only WORD` runs those whose name has the word in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """`before` becomes `after`, once, in a file of the runtime; `killer` is what pytest gets."""

    name: str
    file: str
    before: str
    after: str
    killer: str


LAYOUT, MASK = "flexvarlen/layout", "flexvarlen/mask"
ATTENTION, BACKENDS = "flexvarlen/attention", "flexvarlen/attention/backends"
CU_SEQLENS = f"{BACKENDS}/cu_seqlens"

MUTATIONS = (
    Mutation(
        "layout: spare slots hold documents",
        f"{LAYOUT}/packed_layout.py",
        "[boundaries[-1]] * spare",
        "[0] * spare",
        "tests/layout/test_packed_layout.py",
    ),
    Mutation(
        "layout: boundaries may decrease",
        f"{LAYOUT}/boundaries.py",
        "if length < 0:",
        "if length < -99:",
        "tests/layout/test_bad_boundaries.py",
    ),
    Mutation(
        "layout: positions begin documents only where they are 0",
        f"{LAYOUT}/boundaries.py",
        "jumps = position_ids_BT.diff(dim=-1) != 1",
        "jumps = position_ids_BT[:, 1:] == 0",
        "tests/layout/test_packed_layout.py",
    ),
    Mutation(
        "layout: kernels are launched for the trees, not for their segments",
        f"{LAYOUT}/packed_layout.py",
        "documents = len(self.segments.lengths)",
        "documents = self.num_docs",
        "tests/attention/backends/test_launch_sizes.py",
    ),
    Mutation(
        "mask: causal sees the next token",
        f"{MASK}/vectors.py",
        "last = position + 1",
        "last = position + 2",
        "tests/mask/test_mask_vectors.py",
    ),
    Mutation(
        "mask: chunks begin at the query",
        f"{MASK}/vectors.py",
        "begin = position - position % mask.chunk",
        "begin = position",
        "tests/mask/test_mask_vectors.py",
    ),
    Mutation(
        "mask: mask_mod of another diagonal",
        f"{MASK}/block_mask.py",
        "(kv >= lo[q]) & (kv <= q)",
        "(kv >= lo[q]) & (kv < q)",
        "tests/mask/test_block_mask.py",
    ),
    Mutation(
        "tables: a partial block counts as full",
        f"{MASK}/tables.py",
        "full_first = -(-lo[bottom] // other_block)",
        "full_first = lo[bottom] // other_block",
        "tests/mask/test_block_mask.py",
    ),
    Mutation(
        "tables: one column too few",
        f"{MASK}/table_shapes.py",
        "return block // other + -(-before // other) + -(-after // other)",
        "return block // other + before // other + after // other",
        "tests/mask/test_block_mask.py",
    ),
    Mutation(
        "chunks: counted from the start of the row",
        f"{MASK}/chunks.py",
        "start = cu_seqlens[document] + number * chunk",
        "start = number * chunk",
        f"{MASK}/chunks.py",
    ),
    Mutation(
        "sdpa: documents are bidirectional",
        f"{BACKENDS}/sdpa.py",
        "is_causal=plainly_causal,",
        "is_causal=False,",
        "tests/attention/backends/test_backend_accuracy.py",
    ),
    Mutation(
        "reference: padding attends",
        f"{BACKENDS}/reference.py",
        "torch.softmax(scores, -1) * seen",
        "torch.softmax(scores, -1)",
        "tests/attention/backends/test_backend_accuracy.py",
    ),
    Mutation(
        "flex: softcap of another size",
        f"{BACKENDS}/compiled_flex.py",
        "return limit * torch.tanh(score / limit)",
        "return torch.tanh(score / limit)",
        "tests/attention/backends/test_backend_accuracy.py",
    ),
    Mutation(
        "cu_seqlens: gradients behind the last boundary are garbage",
        f"{CU_SEQLENS}/kernel.py",
        "        _zero_tail(cu_seqlens_q, dq)",
        "        pass",
        "tests/attention/backends/test_cu_seqlens_operator.py",
    ),
    Mutation(
        "cu_seqlens: the backward forgets the sinks",
        f"{CU_SEQLENS}/kernel.py",
        "lse_HT = torch.logaddexp(lse_HT, sinks_H1)",
        "lse_HT = lse_HT + 0",
        "tests/attention/backends/test_cu_seqlens_operator.py",
    ),
    Mutation(
        "cu_seqlens: launched for one document too few",
        f"{CU_SEQLENS}/kernel.py",
        "ends, longest_q, longest_k = sizes.documents + 1,",
        "ends, longest_q, longest_k = max(2, sizes.documents),",
        "tests/attention/backends/test_launch_sizes.py",
    ),
    Mutation(
        "choose: a named backend is not asked",
        f"{ATTENTION}/choose.py",
        "            _require_usable(backend, call)\n            _remember",
        "            _remember",
        "tests/attention/backends/test_backend_refusals.py",
    ),
    Mutation(
        "auto: wrong results may win",
        f"{ATTENTION}/auto/check_results.py",
        "if not error <= TOLERANCE[candidate.call.dtype] * size:",
        "if not error <= 1e9 * size:",
        "tests/attention/auto/test_checks.py",
    ),
    Mutation(
        "auto: the slowest of the nearest record is taken",
        f"{ATTENTION}/auto/table.py",
        "else times[name].device_ms)",
        "else -times[name].device_ms)",
        "tests/attention/auto/test_choice.py",
    ),
    Mutation(
        "logprobs: first tokens are scored",
        f"{LAYOUT}/logprobs.py",
        "labels.reshape(-1).masked_fill(unpredicted_tokens(layout), IGNORE_INDEX)",
        "labels.reshape(-1)",
        "tests/layout/test_logprobs.py",
    ),
    Mutation(
        "pool: padding runs are documents",
        f"{LAYOUT}/per_document.py",
        "real if layout.padding is None else real & ~layout.padding[layout.first_tokens()]",
        "real",
        "tests/layout/test_per_document.py",
    ),
    Mutation(
        "labels: first tokens are learned",
        "patches/batch/labels.py",
        "return labels.masked_fill(first.view(labels.shape).to(labels.device), IGNORE_INDEX)",
        "return labels",
        "tests/patches/batch/test_labels.py",
    ),
    Mutation(
        "batch: seq_idx is not read",
        "patches/batch/find_layout.py",
        "starts = starts | (changes if padding is None else changes & ~padding)",
        "starts = starts | False",
        "tests/patches/batch/test_seq_idx.py",
    ),
    Mutation(
        "cache: a packed row fills one that is asked for",
        "patches/forward/steps.py",
        "raise_or_assert(one_document_per_row(layout, forward.batch), ONE_DOCUMENT_PER_ROW)",
        "pass",
        "tests/patches/batch/test_caches.py",
    ),
    Mutation(
        "layers: one without its documents attends",
        "patches/attention/functions.py",
        "            _refuse_lost_documents(module)",
        "            pass",
        "tests/patches/test_patch_undo.py",
    ),
    Mutation(
        "heads: one that drops the documents is believed",
        "patches/forward/steps.py",
        "if ATTRIBUTE in base.__dict__ and packed.packs and not packed.reached_base:",
        "if False:",
        "tests/patches/batch/test_batch_refusals.py",
    ),
    Mutation(
        "unpad: labels that padding predicts count",
        "patches/forward/steps.py",
        "mask_labels(module, inputs, padded.unpredicted_tokens())",
        "pass",
        "tests/patches/forward/test_unpad.py",
    ),
    Mutation(
        "unpad: positions do not count padding",
        "patches/batch/padded_batch.py",
        "(self.offsets % self.row_tokens)[None]",
        "self.layout.position_ids()[None]",
        "tests/patches/forward/test_unpad.py",
    ),
    Mutation(
        "unpad: a packed row under a mask is taken for one document",
        "patches/batch/padded_batch.py",
        "several = several | (jumps & real[:, 1:] & real[:, :-1]).any()",
        "pass",
        "tests/patches/forward/test_unpad.py",
    ),
    Mutation(
        "recurrent: a convolution reaches over the start of a document",
        "flexvarlen/recurrent/functions.py",
        "torch.where(offsets[:, None] >= shift, shifted, 0)",
        "shifted",
        "tests/recurrent/test_functions.py",
    ),
    Mutation(
        "recurrent: a scan goes on into the next document",
        "flexvarlen/recurrent/functions.py",
        "for start, end in pairwise(ends)",
        "for start, end in [(0, ends[-1])]",
        "tests/recurrent/test_functions.py",
    ),
    Mutation(
        "recurrent: a layer without documents runs",
        "patches/forward/recurrent_layers.py",
        "    elif not isinstance(context, Unpacked):",
        "    elif False:",
        "tests/patches/forward/test_recurrent_layers.py",
    ),
    Mutation(
        "recurrent: a layer that the search misses",
        "patches/why_not.py",
        "if len(parts.recurrent_classes) != expected:",
        "if False:",
        "tests/patches/forward/test_recurrent_layers.py",
    ),
    Mutation(
        "recurrent: padding is not zeroed",
        "flexvarlen/recurrent/documents.py",
        "        if self.padding is None:\n            return x",
        "        return x",
        "tests/recurrent/test_functions.py",
    ),
    Mutation(
        "verify: wrong outputs of most tokens pass",
        "patches/verification.py",
        "len(errors) - 1 - may_differ",
        "0",
        "tests/patches/test_verify_unknown.py",
    ),
    Mutation(
        "families: BERT by the name alone",
        "patches/models/families.py",
        "by_name_alone=False,  # positions are embedded before any layer sees the documents",
        "by_name_alone=True,",
        "tests/patches/models/test_encoders.py",
    ),
    Mutation(
        "packing: labels at first tokens are learned",
        "flexvarlen/packing/collator.py",
        """each["labels"][0] = IGNORED""",
        "pass",
        "tests/packing/test_collator.py",
    ),
    Mutation(
        "parallel: the last label of a document counts",
        "flexvarlen/parallel.py",
        "shifted = shifted.masked_fill(in_no_loss.to(shifted.device), ignore_index)",
        "shifted = shifted + 0",
        "tests/parallel/test_ulysses.py",
    ),
)


def survives(mutation: Mutation) -> str | None:
    """Why a mutation is not killed, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "results", "__pycache__", ".*")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        file = copy / mutation.file
        text = file.read_text()
        if mutation.before not in text:
            return f"{mutation.file} has no line {mutation.before!r}"
        file.write_text(text.replace(mutation.before, mutation.after, 1))
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, mutation.killer],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    if done.returncode == 1:
        return None
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return f"{mutation.killer} ends with code {done.returncode}: {' '.join(last)}"


def main() -> None:
    """Run them, two at a time; the exit code is the number that survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD")
    only = parser.parse_args().only
    chosen = [mutation for mutation in MUTATIONS if only in mutation.name]
    alive = 0
    with ThreadPoolExecutor(2) as pool:
        for mutation, reason in zip(chosen, pool.map(survives, chosen), strict=True):
            alive += reason is not None
            print(f"{'killed' if reason is None else 'SURVIVES'}  {mutation.name}", flush=True)
            if reason is not None:
                print(f"          {reason}", flush=True)
    sys.exit(alive)


if __name__ == "__main__":
    main()
