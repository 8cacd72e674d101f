"""`verify_isolation` over trees: each segment reaches itself and what is below it, and no other."""

import pytest
import torch
from hypothesis import given

import flexvarlen as fv
from flexvarlen.patches.isolation.documents import units_of
from flexvarlen.patches.isolation.report import IsolationError
from flexvarlen.patches.isolation.tokens import halves_of
from flexvarlen.patches.isolation.verify import verify_isolation
from tests.planted import ignore_branches, replace_output, with_gradient
from tests.tiny_models import VOCABULARY, new_model
from tests.trees import EXAMPLES, Tree, trees

GROUP = EXAMPLES["group"]  # segments of tokens 0 to 39, 40 to 48, 49 to 78, and 79


@pytest.fixture
def model():
    return fv.patch_model(new_model("llama"), "sdpa")


def without_branches(monkeypatch):
    """A model whose kernel lets a token see all that stands before it in its tree."""
    ignore_branches(monkeypatch)
    return fv.patch_model(new_model("llama"), "reference")


def leak_of(model, batch, **options):
    with pytest.raises(IsolationError) as caught:
        verify_isolation(model, batch, **options)
    return caught.value


@given(trees(most_tokens=12))
def test_every_segment_is_separated_from_all_that_must_not_see_it(tree):
    layout = tree.layout(max_depth=8)
    units = units_of(layout)
    sees = tree.dense()
    hidden = {
        (a, b)
        for a, source in enumerate(units)
        for b, target in enumerate(units)
        if not sees[target.end - 1, source.start]
    }
    separated = set()
    for replaced, watched in halves_of(range(len(units)), units):
        separated |= {(a, b) for a in replaced for b in watched}
    assert separated == hidden


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    ("family", "backend"), [("llama", "reference"), ("llama", "sdpa"), ("qwen3_5_text", "sdpa")]
)
def test_right_model_passes(family, backend, name):
    model = fv.patch_model(new_model(family), backend)
    tree = EXAMPLES[name]
    report = verify_isolation(model, tree.batch(VOCABULARY))
    segments = sum(length > 0 for length in tree.lengths)
    assert (report.gradients, report.num_docs, report.unit) == ("bits", segments, "segment")
    assert f"No bit of {segments} segments reached a token that must not see it" in str(report)


def test_cost_is_one_search_for_each_depth(model):
    """The root is watched by nobody; three siblings take two digits, each twice."""
    batch = GROUP.batch(VOCABULARY)
    assert verify_isolation(model, batch, gradients=False).forwards == 2 + 4
    assert verify_isolation(model, batch).forwards == 2 + 4 * 2


def test_batch_of_shared_prefixes_passes(model):
    samples = [[5, 6, 7, 8, 9], [5, 6, 7, 9], [5, 6, 7, 8, 4, 4], [3, 3]]
    shared = fv.share_prefixes(samples, total_tokens=16)
    assert verify_isolation(model.train(), shared.batch()).gradients == "bits"


def test_kernel_that_ignores_branches_is_caught(monkeypatch):
    error = leak_of(without_branches(monkeypatch), GROUP.batch(VOCABULARY))
    assert (error.direction, error.layer, error.kind) == ("forward", 0, "attention")
    assert (error.source, error.target) in {(1, 2), (1, 3), (2, 3)}
    tokens = {1: "40 to 48", 2: "49 to 78", 3: "79 to 79"}
    source, target = (f"segment {n} of tree 0" for n in (error.source, error.target))
    assert f"{source} (tokens {tokens[error.source]}) leaks into {target}" in str(error)
    assert f"(tokens {tokens[error.target]}) in the forward" in str(error)
    assert f"with other tokens in {source}, the output" in str(error)


def test_unpatched_model_is_caught_between_trees():
    tree = Tree((4, 3, 5, 2), (-1, 0, -1, 2))
    error = leak_of(new_model("llama"), tree.batch(VOCABULARY))
    assert "of tree 0" in str(error)
    assert "call flexvarlen.patch_model" in str(error)


def test_answer_that_reaches_its_prompt_is_caught(model):
    """What is below is no neighbour, but the prompt must not see it either."""
    replace_output(
        model.model.embed_tokens, lambda x: x.index_add(1, torch.tensor([7]), x[:, 45:46])
    )
    error = leak_of(model, GROUP.batch(VOCABULARY))
    assert (error.source, error.target, error.kind) == (1, 0, "embeddings")
    assert "leaks into segment 0 of tree 0 (tokens 0 to 39)" in str(error)


def loss_reaches_sibling(gradient, x):
    """The gradient of token 41 has some of token 50's."""
    gradient[:, 41] += gradient[:, 50]
    return gradient


def gradient_of_prompt_depends_on_answer(gradient, x):
    """That of token 7 is scaled by token 50: zero stays zero."""
    gradient[:, 7] *= x[:, 50].mean()
    return gradient


@pytest.mark.parametrize(
    ("change", "pair", "cause"),
    [
        (loss_reaches_sibling, (2, 1), "a loss in segment 2 of tree 0"),
        (gradient_of_prompt_depends_on_answer, (2, 0), "other tokens in segment 2 of tree 0"),
    ],
)
def test_leak_in_the_backward_alone_is_caught(model, change, pair, cause):
    replace_output(model.model.layers[1].mlp.up_proj, with_gradient(change))
    error = leak_of(model, GROUP.batch(VOCABULARY))
    assert (error.direction, error.module) == ("backward", "model.layers.1.mlp.up_proj")
    assert (error.source, error.target) == pair
    assert f"with {cause} alone" in str(error)
    assert not verify_isolation(model, GROUP.batch(VOCABULARY), gradients=False).gradients


def test_named_segments_are_replaced_and_all_others_watched(monkeypatch):
    model = without_branches(monkeypatch)
    assert verify_isolation(model, GROUP.batch(VOCABULARY), documents=[3]).documents == (3,)
    error = leak_of(model, GROUP.batch(VOCABULARY), documents=[2])
    assert (error.source, error.target) == (2, 3)
