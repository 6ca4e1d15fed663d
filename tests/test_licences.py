"""The licences of everything that is needed at run time, as the installed packages state them."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

VERSIONS = Path(__file__).parents[1] / "docs" / "versions.md"
COMPATIBLE = re.compile(r"Apache|MIT|BSD|MPL|Mozilla|PSF|Python Software Foundation|ISC|Zlib|HPND", re.IGNORECASE)
COPYLEFT = re.compile(r"\b[AL]?GPL|\bGNU\b|Affero", re.IGNORECASE)
OF_A_DEVICE = ("nvidia-", "cuda-")  # CUDA builds of torch bring them, under their maker's terms


def find_needed(name, extras=(), found=None):
    """Names of what a package needs, directly or through others, as far as it is installed, and their metadata."""
    found = {} if found is None else found
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return found
    found[re.sub(r"[-_.]+", "-", name).lower()] = package.metadata
    for requirement in map(Requirement, package.requires or []):
        needed = re.sub(r"[-_.]+", "-", requirement.name).lower()
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if applies and needed not in found and not needed.startswith(OF_A_DEVICE):
            find_needed(requirement.name, requirement.extras, found)
    return found


def licence_of(metadata):
    stated = metadata.get("License-Expression") or (metadata.get("License") or "").splitlines()[:1]
    classifiers = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License")]
    return " ".join([stated if isinstance(stated, str) else "".join(stated), *classifiers])


def test_every_licence_is_compatible():
    needed = find_needed("lightning-gradsim")
    assert {"torch", "lightning", "opacus", "torchmetrics", "tensorboard"} <= set(needed)
    licences = {name: licence_of(metadata) for name, metadata in needed.items()}
    assert {name: text for name, text in licences.items() if not COMPATIBLE.search(text)} == {}
    assert {name: text for name, text in licences.items() if COPYLEFT.search(text)} == {}


def test_every_package_is_listed():
    table = VERSIONS.read_text(encoding="utf-8").split("## Licences")[1]
    listed = set(re.findall(r"[a-z0-9][a-z0-9-]+", table.lower()))
    assert sorted(set(find_needed("lightning-gradsim")) - {"lightning-gradsim"} - listed) == []


def test_a_copyleft_licence_would_be_noticed():
    for text in ("GPL-3.0-or-later", "License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)"):
        assert COPYLEFT.search(text)
    assert not COMPATIBLE.search("Proprietary")


def test_of_the_extras_one_tool_alone_is_copyleft_and_all_are_listed():
    extras = ("dev", "docs", "examples")
    found = find_needed("lightning-gradsim", extras)
    if "codespell" not in found:
        pytest.skip("the extra `dev` is not installed")
    licences = {name: licence_of(metadata) for name, metadata in found.items()}
    assert {name for name, text in licences.items() if COPYLEFT.search(text) or not COMPATIBLE.search(text)} == {
        "codespell"
    }
    page = VERSIONS.read_text(encoding="utf-8")
    own = {Requirement(line).name for line in distribution("lightning-gradsim").requires}
    assert {name for name in own - {"lightning-gradsim"} if not re.search(rf"\b{name}\b", page)} == set()
