"""Few texts in place of all: a BPE of them is trained in no time."""

import pytest

from flexvarlen.bench.training import texts


@pytest.fixture(scope="module", autouse=True)
def few_texts():
    """Twelve topics: a BPE of them is trained in no time."""
    with pytest.MonkeyPatch.context() as patch:
        read_few(patch)
        yield


def read_few(patch):
    some = texts.read_documents()
    some = tuple(sorted(some, key=len)[:12])
    patch.setattr(texts, "read_documents", lambda: some)
