"""Mutations of recurrent layers: `flexvarlen/recurrent/` and its hooks in `patches/`."""

from tests.mutations.mutation import Mutation

RECURRENT, TESTS = "flexvarlen/recurrent", "tests/recurrent"
HOOKS = "patches/forward/recurrent_layers.py"
TESTS_OF_HOOKS = "tests/patches/forward/test_recurrent_layers.py"

MUTATIONS = (
    Mutation(
        "recurrent: a convolution reaches over the start of a document",
        f"{RECURRENT}/documents.py",
        "torch.where(tokens == starts[slots], first, tokens - 1)",
        "tokens - 1",
        f"{TESTS}/test_documents.py",
    ),
    Mutation(
        "recurrent: a convolution stops at the start of a segment",
        f"{RECURRENT}/documents.py",
        "first = -1 if segments is None else segments.by_level.table[2][slots]",
        "first = -1",
        f"{TESTS}/test_documents.py",
    ),
    Mutation(
        "recurrent: a convolution loses its parent behind an empty segment",
        "flexvarlen/layout/level_order.py",
        "before[parent] if parent >= 0 and not has_tokens else last",
        "last",
        f"{TESTS}/test_documents.py",
    ),
    Mutation(
        "recurrent: a gradient of the convolution misses other segments",
        f"{RECURRENT}/documents.py",
        "(tokens - index != distance)",
        "(index < 0)",
        f"{TESTS}/test_documents.py",
    ),
    Mutation(
        "recurrent: gradients are in the order of the levels",
        f"{RECURRENT}/documents.py",
        "ctx.save_for_backward(inputs[2])",
        "ctx.save_for_backward(inputs[1])",
        f"{TESTS}/test_documents.py",
    ),
    Mutation(
        "recurrent: chunks are counted from the start of the row",
        f"{RECURRENT}/documents.py",
        "index - (ends - chunks)[slot]",
        "index",
        f"{TESTS}/test_documents.py",
    ),
    Mutation(
        "recurrent: padding is not zeroed",
        f"{RECURRENT}/documents.py",
        "        if self.padding is None:\n            return x",
        "        return x",
        f"{TESTS}/test_functions.py",
    ),
    Mutation(
        "recurrent: a kernel is given one document",
        f"{RECURRENT}/documents.py",
        "self.seq_idx = slots[None] if segments is None else None",
        "self.seq_idx = torch.zeros_like(slots)[None]",
        f"{TESTS}/test_functions.py",
    ),
    Mutation(
        "recurrent: a scan goes on into the next document",
        f"{RECURRENT}/functions.py",
        "state = states[parents[slot]] if parents and parents[slot] >= 0 else None",
        "state = states[-1] if states else None",
        f"{TESTS}/test_functions.py",
    ),
    Mutation(
        "recurrent: a segment starts from an empty state",
        f"{RECURRENT}/functions.py",
        "state = states[parents[slot]] if parents and parents[slot] >= 0 else None",
        "state = None",
        f"{TESTS}/test_functions.py",
    ),
    Mutation(
        "recurrent: a state ends at an empty segment",
        f"{RECURRENT}/functions.py",
        "        states.append(state)",
        "        states.append(state if end > start else None)",
        f"{TESTS}/test_functions.py",
    ),
    Mutation(
        "recurrent: a state that is asked for is not made",
        f"{RECURRENT}/functions.py",
        "if initial is not None or final:",
        "if initial is not None:",
        f"{TESTS}/test_functions.py",
    ),
    Mutation(
        "recurrent: a level starts from the states of the roots",
        f"{RECURRENT}/fla_kernels/states.py",
        "        above = start",
        "        above = 0",
        f"{TESTS}/test_states.py",
    ),
    Mutation(
        "recurrent: the gradient of a state comes from one segment",
        f"{RECURRENT}/fla_kernels/states.py",
        'torch.segment_reduce(grads, "sum"',
        'torch.segment_reduce(grads, "max"',
        f"{TESTS}/test_states.py",
    ),
    Mutation(
        "recurrent: a wrong kernel passes its check",
        f"{RECURRENT}/fla_kernels/check.py",
        "if not error <= TOLERANCE[scan.dtype]:",
        "if error > 1:",
        f"{TESTS}/test_check.py",
    ),
    Mutation(
        "recurrent: a wrong kernel runs",
        f"{RECURRENT}/fla_kernels/check.py",
        "_known[key] = why and f",
        "_known[key] = None and f",
        f"{TESTS}/test_check.py",
    ),
    Mutation(
        "recurrent: the check waits for torch.compile",
        f"{RECURRENT}/fla_kernels/check.py",
        'set_stance("force_eager")',
        'set_stance("default")',
        f"{TESTS}/test_check.py",
    ),
    Mutation(
        "recurrent: a layer without documents runs",
        HOOKS,
        "    if not isinstance(context, PackedForward):\n        raise ValueError(LOST_DOCUMENTS)",
        "    if not isinstance(context, PackedForward):\n        return args, kwargs",
        TESTS_OF_HOOKS,
    ),
    Mutation(
        "recurrent: a layer that the search misses",
        "patches/why_not.py",
        "if len(parts.recurrent_classes) != expected:",
        "if False:",
        TESTS_OF_HOOKS,
    ),
    Mutation(
        "recurrent: the hook passes no documents on",
        HOOKS,
        "kwargs |= {DOCUMENTS: documents,",
        "kwargs |= {DOCUMENTS: None,",
        TESTS_OF_HOOKS,
    ),
    Mutation(
        "recurrent: an output stays in the order of the levels",
        HOOKS,
        "return output if documents is None else documents.to_row(output)",
        "return output",
        TESTS_OF_HOOKS,
    ),
    Mutation(
        "recurrent: an unpatched layer keeps its hooks",
        HOOKS,
        "if hook is ours]",
        "if hook is None]",
        TESTS_OF_HOOKS,
    ),
)
