"""One version: of the code, of what is built, and of the changelog's newest section."""

import re
from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from flexvarlen._version import __version__

ROOT = Path(__file__).parents[1]


def test_what_is_built_has_the_version_of_the_code():
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    assert metadata.version == __version__
    metadata.validate_fields()  # classifiers too


def test_newest_section_of_the_changelog_is_of_this_version():
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert __version__ in heading[1]
