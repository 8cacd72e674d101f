"""Pages: what stands between markers is replaced, and nothing else."""

from __future__ import annotations

import pytest

from flexvarlen.report.figure import chart, save
from flexvarlen.report.page import image_links, replace_between_markers, rewrite

TEXT = "head\n<!-- bench:x begin -->\nold\n<!-- bench:x end -->\ntail\n"


def test_only_what_stands_between_the_markers_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    rewrite(page, {"x": "new", "y": "not on this page"})
    assert page.read_text() == TEXT.replace("old", "new")


def test_a_page_without_any_of_the_markers_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    with pytest.raises(ValueError, match=r"page\.md must contain the markers of one of y"):
        rewrite(page, {"y": "new"})
    assert page.read_text() == TEXT


@pytest.mark.parametrize(
    "text",
    [
        "<!-- bench:x begin -->",
        "<!-- bench:x end --> <!-- bench:x begin -->",
        "<!-- bench:x begin --> <!-- bench:x begin --> <!-- bench:x end -->",
    ],
)
def test_markers_must_be_there_once_and_in_order(text):
    with pytest.raises(ValueError, match="once each"):
        replace_between_markers(text, "x", "new")


def test_charts_are_linked_from_where_the_page_stands(tmp_path):
    figure, _ = chart("fa3 is the fastest, and " + "long " * 20 + "titles break", "a caption")
    path = save(figure, tmp_path / "bench" / "a.png")
    links = image_links([path], tmp_path / "docs" / "page.md")
    assert links == f"![fa3 is the fastest, and {'long ' * 20}titles break.](../bench/a.png)"
