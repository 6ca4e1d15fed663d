"""What is installed along with the package may be used and passed on as freely as the package itself."""

import re
from importlib import metadata
from pathlib import Path

import pytest

requirements = pytest.importorskip("packaging.requirements")
ROOT = Path(__file__).parents[1]
NAME = "lightning-gradsim"
EXTRAS = ("dev", "docs", "examples")
PERMISSIVE = {
    "Apache": r"apache",
    "BSD": r"\b(0?bsd)",
    "Boost": r"\bbsl-1\.0",
    "CC0": r"\bcc0",
    "HPND": r"\bhpnd\b",
    "ISC": r"\bisc\b",
    "MIT": r"\bmit\b|mit-cmu",
    "PSF": r"\bpsf\b|python software foundation",
    "Zlib": r"\bzlib",
}
WEAK = {"MPL": r"\bmpl\b|mozilla public"}
"""Bind changes to the package itself only."""
COPYLEFT = {"codespell"}
"""Tools of the developers, of which nothing is imported, linked or passed on."""


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name, extras=()):
    """All distributions that installing one brings along on this machine, itself included, by name."""
    found, open_ = {}, [(normal(name), tuple(extras))]
    while open_:
        name, extras = open_.pop()
        if extras in found.setdefault(name, set()):
            continue
        found[name].add(extras)
        for line in metadata.requires(name) or []:
            each = requirements.Requirement(line)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                open_.append((normal(each.name), tuple(sorted(each.extras))))
    return set(found)


def words_of(name):
    """The licenses that a distribution names, as it writes them."""
    fields = metadata.metadata(name)
    if expression := fields.get("License-Expression"):
        return re.split(r" AND | OR | WITH |[()]", expression)
    classifiers = [each for each in fields.get_all("Classifier") or [] if each.startswith("License ::")]
    text = (fields.get("License") or "").strip()
    first = [] if text in {"", "UNKNOWN"} or len(text.splitlines()) > 1 else re.split(r" AND | OR ", text)
    return [*first, *classifiers]


def unknown(words, known):
    return [
        word
        for word in words
        if word.strip() and not any(re.search(pattern, word, re.IGNORECASE) for pattern in known.values())
    ]


def refused(names, known):
    """Distributions with a license that is not among the known ones, or with none."""
    found = {name: words_of(name) for name in names if not name.startswith(("nvidia-", "cuda-"))}
    exceptions = {"LLVM-exception"}  # adds rights
    return {
        name: words
        for name, words in found.items()
        if not words or [word for word in unknown(words, known) if word.strip() not in exceptions]
    }


def test_nothing_at_run_time_binds_the_user():
    names = required(NAME)
    assert {"torch", "lightning", "opacus", "numpy"} < names
    assert refused(names, PERMISSIVE | WEAK) == {}


def test_nothing_of_the_extras_does_either():
    try:
        names = required(NAME, EXTRAS)
    except metadata.PackageNotFoundError as error:
        pytest.skip(f"not all extras are here: {error}")
    assert set(refused(names, PERMISSIVE | WEAK)) == COPYLEFT


@pytest.mark.parametrize(
    "word", ["GPL-3.0-only", "GNU General Public License v3", "LGPL-2.1", "AGPL-3.0", "Proprietary"]
)
def test_such_a_license_would_be_noticed(word):
    assert unknown([word], PERMISSIVE | WEAK) == [word]


def test_the_page_names_every_requirement_of_our_own():
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").partition("## Licenses")[2]
    own = {normal(requirements.Requirement(line).name) for line in metadata.requires(NAME)} - {NAME}
    missing = {name for name in own if not re.search(rf"\b{name}\b", page, re.IGNORECASE)}
    assert missing == set()
