"""The documents name what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document):
    text = document.read_text()
    for name in re.findall(r"`((?:frontend|runtime|targets|docs|rewrites|scripts)/[\w/.]+\.(?:py|md))`", text):
        base = ROOT / "frontend" if name.startswith("rewrites/") else ROOT
        assert (base / name).is_file(), name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests" / name).is_file(), name


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([\w/.]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
