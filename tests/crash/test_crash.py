"""No kill at any moment makes the service give wrong bytes, bring back what was deleted, or lose what was safe."""

from pathlib import Path

import pytest

from tests.crash.campaign import Campaign
from tests.crash.choices import PROFILES, ROOMY, Profile
from tests.crash.report import Report

QUICK_KILLS = 3
QUICK_SEED = 7


def campaign(profile: Profile, seed: int, folder: Path, kills: int) -> Report:
    with Campaign(profile, seed, folder / f"{profile.name}-{seed}") as running:
        return running.run(kills)


@pytest.mark.slow
def test_what_was_on_ssd_is_back_after_a_few_kills(folder: Path) -> None:
    assert campaign(ROOMY, QUICK_SEED, folder / "quick", QUICK_KILLS).kills == QUICK_KILLS


@pytest.mark.crash
@pytest.mark.parametrize("profile", PROFILES, ids=[profile.name for profile in PROFILES])
def test_no_kill_gives_wrong_bytes_or_loses_what_was_safe(
    profile: Profile, folder: Path, kills: int, seed: int, reports: list[Report]
) -> None:
    reports.append(campaign(profile, seed, folder, round(kills * profile.share)))
