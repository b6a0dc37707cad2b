"""The directory's states: who is there, who is only away, who owns what meanwhile, and who is refused."""

import random

import pytest

from kvservice.model.errors import ConfigError, StaleEpochError
from kvservice.peers.directory import Directory, DirectoryLimits, Owners
from kvservice.peers.member import MemberState, SourceState
from tests.peers.members import (
    EMPTY,
    GRACE_S,
    LIMITS,
    UNREACHABLE,
    WARM_S,
    ManualClock,
    etcd_directory,
    facts,
    names,
    node_id,
    node_uuid,
    place,
    roll,
    segment,
    static_directory,
)

LIVE, DRAINING, DISCONNECTED, LEFT = MemberState


def state_of(directory: Directory, number: int) -> MemberState:
    member = directory.get(node_uuid(number))
    return LEFT if member is None else member.state


def owned_by(directory: Directory, number: int, count: int = 400) -> list[bytes]:
    """Segments that the node comes first for."""
    keys = [segment(one) for one in range(count)]
    return [key for key in keys if names(directory.owners(key).write) == [f"n{number}"]]


def answers(directory: Directory, keys: list[bytes]) -> list[Owners]:
    return [directory.owners(key) for key in keys]


# Static lists and DNS: a greeting says who is there


def test_an_address_is_nobody_until_it_greets() -> None:
    directory = Directory(ManualClock(), knows_liveness=False, limits=LIMITS)
    directory.apply(roll(1, 2))
    assert directory.owners(segment(1)) == Owners((), ())
    assert directory.to_greet() == [place(1), place(2)]
    (change,) = directory.heard(place(1), facts(1))
    assert (change.before, change.after) == (None, LIVE)
    assert names(directory.owners(segment(1)).read) == ["n1"]
    assert directory.to_greet() == [place(2)]


def test_a_greeting_from_an_address_that_is_not_listed_is_nobody() -> None:
    directory = static_directory(ManualClock(), 1)
    assert directory.heard(place(5), facts(5)) == []
    assert state_of(directory, 5) is LEFT


def test_who_is_lost_is_not_forgotten_for_a_grace_time() -> None:
    clock = ManualClock()
    directory = static_directory(clock, 1, 2, 3)
    keys = owned_by(directory, 2)
    before = {key: names(directory.owners(key).write) for key in map(segment, range(400))}
    (change,) = directory.lost(node_id(2))
    assert (change.before, change.after) == (LIVE, DISCONNECTED)
    clock.pass_(GRACE_S - 1)
    assert directory.advance() == []
    assert answers(directory, keys) == [Owners((), ())] * len(keys)
    for key, owner in before.items():
        if key not in keys:
            assert names(directory.owners(key).write) == owner
    clock.pass_(2)
    (change,) = directory.advance()
    assert change.after is LEFT
    for key, owner in before.items():
        assert names(directory.owners(key).write) == (owner if key not in keys else names(directory.owners(key).read))
    assert all(directory.owners(key).write for key in keys)


def test_who_answers_again_within_the_grace_time_has_all_its_segments_at_once() -> None:
    clock = ManualClock()
    directory = static_directory(clock, 1, 2, 3)
    keys = owned_by(directory, 2)
    directory.lost(node_id(2))
    clock.pass_(GRACE_S - 1)
    directory.heard(place(2), facts(2))
    assert owned_by(directory, 2) == keys
    clock.pass_(GRACE_S)
    assert directory.advance() == []


def test_replicas_are_asked_while_the_owner_is_away() -> None:
    clock = ManualClock()
    directory = static_directory(clock, 1, 2, 3, limits=DirectoryLimits(GRACE_S, LIMITS.ramp, replicas=2))
    two = {key: names(directory.owners(key).read) for key in map(segment, range(200))}
    assert all(names(directory.owners(key).write) == owners for key, owners in two.items())
    directory.lost(node_id(1))
    for key, owners in two.items():
        assert names(directory.owners(key).read) == [one for one in owners if one != "n1"]
    hot = directory.owners(segment(1), replicas=3)
    assert len(hot.write) == 2
    assert directory.owners(segment(1), replicas=9).write == hot.write


def test_news_of_a_broken_link_to_an_earlier_boot_changes_nothing() -> None:
    directory = static_directory(ManualClock(), 1)
    directory.heard(place(1), facts(1, epoch=2))
    assert directory.lost(node_id(1, epoch=1)) == []
    assert state_of(directory, 1) is LIVE


# Warming


def test_who_comes_back_after_it_left_is_warmed_slowly_and_the_owner_before_is_asked_second() -> None:
    clock = ManualClock()
    directory = static_directory(clock, 1, 2)
    keys = owned_by(directory, 2)
    directory.lost(node_id(2))
    clock.pass_(GRACE_S)
    directory.advance()
    directory.heard(place(2), facts(2, empty_s=1e6))  # whatever it holds: others had its segments meanwhile
    shares = []
    for _ in range(17):
        owned = owned_by(directory, 2)
        shares.append(len(owned))
        assert set(owned) <= set(keys)
        reads = [names(directory.owners(key).read) for key in owned]
        assert all(read == (["n2"] if len(owned) == len(keys) else ["n2", "n1"]) for read in reads)
        assert all(names(directory.owners(key).read) == ["n1"] for key in keys if key not in owned)
        clock.pass_(WARM_S / 16)
    assert shares[0] < len(keys) / 6
    assert shares == sorted(shares)
    assert shares[-1] == len(keys)


def test_nodes_that_are_there_from_the_start_are_warm() -> None:
    directory = static_directory(ManualClock(), 1, 2, 3)
    assert [one["warmth"] for one in directory.document()] == [1.0] * 3


def test_a_node_that_comes_later_is_warmed_and_one_that_says_how_long_it_has_been_filling_from_then() -> None:
    clock = ManualClock()
    directory = etcd_directory(clock, facts(1))
    clock.pass_(GRACE_S)
    directory.apply(roll(facts(1), facts(2), facts(3, empty_s=WARM_S / 2), facts(4, empty_s=1e9)))
    warmths = {one["name"]: one["warmth"] for one in directory.document()}
    assert warmths == {"n1": 1.0, "n2": 1 / 16, "n3": 9 / 16, "n4": 1.0}


def test_a_boot_that_lost_its_caches_is_warmed_and_one_that_kept_them_is_not() -> None:
    clock = ManualClock()
    directory = static_directory(clock, 1, 2)
    clock.pass_(1000)
    (change,) = directory.heard(place(1), facts(1, epoch=2))
    assert change.has_rebooted
    directory.heard(place(2), facts(2, epoch=2, empty_s=1e6))
    assert [one["warmth"] for one in directory.document()] == [1 / 16, 1.0]
    assert directory.heard(place(1), facts(1, epoch=2)) == []


def test_a_weight_that_changes_changes_the_share() -> None:
    directory = static_directory(ManualClock(), 1, 2)
    few = len(owned_by(directory, 2))
    directory.heard(place(2), facts(2, weight=8.0))
    assert len(owned_by(directory, 2)) > 1.5 * few


# Draining


def test_who_drains_is_read_but_not_written_and_leaves_without_a_grace_time() -> None:
    directory = static_directory(ManualClock(), 1, 2, 3)
    keys = owned_by(directory, 2)
    directory.heard(place(2), facts(2, is_draining=True))
    assert state_of(directory, 2) is DRAINING
    for owners in answers(directory, keys):
        assert names(owners.read)[0] == "n2"
        assert names(owners.write) == names(owners.read)[1:]
        assert len(owners.write) == 1
    (change,) = directory.lost(node_id(2))
    assert (change.before, change.after) == (DRAINING, LEFT)
    assert all(names(owners.write) != ["n2"] for owners in answers(directory, keys))


def test_a_drain_may_be_called_off() -> None:
    directory = static_directory(ManualClock(), 1, 2)
    keys = owned_by(directory, 2)
    directory.heard(place(2), facts(2, is_draining=True))
    directory.heard(place(2), facts(2))
    assert owned_by(directory, 2) == keys


# Twins, zombies, other addresses


def test_a_twin_of_a_live_node_is_refused_with_what_to_do() -> None:
    directory = Directory(ManualClock(), knows_liveness=False, limits=LIMITS)
    directory.apply(roll(1, 2))
    directory.heard(place(1), facts(1, epoch=5))
    for epoch in (4, 6):
        with pytest.raises(ConfigError, match=r"same uuid.*was copied.*remove node\.json from the copy"):
            directory.heard(place(2), facts(1, epoch=epoch))
    assert [one.node.epoch for one in directory.members] == [5]
    assert list(directory.refused) == [place(2)]
    assert directory.to_greet() == [place(2)]


def test_a_twin_may_take_over_once_the_first_is_lost() -> None:
    directory = Directory(ManualClock(), knows_liveness=False, limits=LIMITS)
    directory.apply(roll(1, 2))
    directory.heard(place(1), facts(1, epoch=5))
    directory.lost(node_id(1, epoch=5))
    changes = directory.heard(place(2), facts(1, epoch=6))
    assert [one.after for one in changes][-1] is LIVE
    assert [(one.node.epoch, one.address) for one in directory.members] == [(6, place(2))]
    assert not directory.refused


def test_a_zombie_is_refused_while_its_node_is_known_and_after_it_left() -> None:
    clock = ManualClock()
    directory = static_directory(clock, 1, 2)
    directory.heard(place(1), facts(1, epoch=2))
    with pytest.raises(StaleEpochError, match="booted again since"):
        directory.heard(place(1), facts(1, epoch=1))
    directory.lost(node_id(1, epoch=2))
    clock.pass_(GRACE_S)
    directory.advance()
    assert state_of(directory, 1) is LEFT
    with pytest.raises(StaleEpochError, match="booted again since"):
        directory.heard(place(1), facts(1, epoch=1))
    directory.heard(place(1), facts(1, epoch=2))
    assert state_of(directory, 1) is LIVE


def test_one_boot_under_two_addresses_is_one_member() -> None:
    directory = static_directory(ManualClock(), 1, 2)
    directory.apply(roll(1, 2, 3))
    assert directory.heard(place(3), facts(1)) == []
    assert len(directory.members) == 2
    directory.apply(roll(2, 3))
    assert state_of(directory, 1) is LIVE
    assert [one.address for one in directory.members if one.node == node_id(1)] == [place(1)]
    directory.heard(place(3), facts(1))
    assert [one.address for one in directory.members if one.node == node_id(1)] == [place(3)]


def test_another_node_at_an_address_takes_it_from_the_one_before() -> None:
    clock = ManualClock()
    directory = static_directory(clock, 1, 2)
    directory.heard(place(1), facts(3))
    assert state_of(directory, 3) is LIVE
    assert state_of(directory, 1) is DISCONNECTED
    clock.pass_(GRACE_S)
    directory.advance()
    assert state_of(directory, 1) is LEFT


# The source


def test_a_source_that_names_nobody_changes_nothing_for_a_grace_time() -> None:
    clock = ManualClock()
    directory = static_directory(clock, 1, 2)
    assert directory.apply(EMPTY) == []
    assert directory.source_state is SourceState.EMPTY
    assert directory.source_reason
    clock.pass_(GRACE_S - 1)
    assert directory.apply(EMPTY) == []
    clock.pass_(2)
    assert {change.after for change in directory.advance()} == {LEFT}
    directory.apply(roll(1, 2))
    directory.heard(place(1), facts(1))
    assert state_of(directory, 1) is LIVE


def test_a_source_that_does_not_answer_changes_nothing_ever() -> None:
    clock = ManualClock()
    directory = etcd_directory(clock, facts(1), facts(2))
    directory.apply(UNREACHABLE)
    clock.pass_(100 * GRACE_S)
    assert directory.advance() == []
    assert directory.source_state is SourceState.UNREACHABLE
    assert names(directory.owners(segment(1)).read)


def test_who_is_not_listed_any_more_is_away_and_then_gone() -> None:
    clock = ManualClock()
    directory = etcd_directory(clock, facts(1), facts(2))
    (change,) = directory.apply(roll(facts(1)))
    assert (change.member.name, change.after) == ("n2", DISCONNECTED)
    clock.pass_(GRACE_S / 2)
    assert [one.after for one in directory.apply(roll(facts(1), facts(2)))] == [LIVE]
    directory.apply(roll(facts(1)))
    clock.pass_(GRACE_S / 2 + 1)
    assert directory.advance() == []
    clock.pass_(GRACE_S / 2)
    assert [one.after for one in directory.advance()] == [LEFT]


def test_who_is_listed_as_alive_but_cannot_be_reached_from_here_never_leaves() -> None:
    clock = ManualClock()
    directory = etcd_directory(clock, facts(1), facts(2))
    directory.lost(node_id(2))
    clock.pass_(100 * GRACE_S)
    assert directory.apply(roll(facts(1), facts(2))) == []
    assert state_of(directory, 2) is DISCONNECTED
    assert directory.to_greet() == [place(2)]
    assert [one.after for one in directory.heard(place(2), facts(2))] == [LIVE]
    directory.lost(node_id(2))
    directory.apply(roll(facts(1)))
    clock.pass_(GRACE_S)
    assert [one.after for one in directory.advance()] == [LEFT]


def test_a_listed_boot_follows_another_wherever_it_is_and_a_listed_zombie_is_refused() -> None:
    directory = etcd_directory(ManualClock(), facts(1, epoch=5))
    moved = roll(facts(1, epoch=6))
    directory.apply(moved)
    directory.apply(roll(facts(1, epoch=4)))
    assert [one.node.epoch for one in directory.members] == [6]
    assert "booted again since" in directory.refused[place(1)]


def test_members_beyond_the_limit_are_refused_by_name() -> None:
    directory = etcd_directory(ManualClock(), facts(1), facts(2), facts(3), limits=DirectoryLimits(members_max=2))
    assert len(directory.members) == 2
    assert list(directory.refused) == [place(3)]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_no_segment_moves_between_members_that_stay(seed: int) -> None:
    """Random lives of five nodes: owners only change with somebody's state, and never to who is away or drains."""
    draw, clock = random.Random(seed), ManualClock()
    directory = static_directory(clock, 0, 1, 2, 3, 4)
    epochs = [1] * 5
    keys = [segment(number) for number in range(60)]
    for _ in range(80):
        number, what = draw.randrange(5), draw.randrange(5)
        if what == 0:
            directory.lost(node_id(number, epochs[number]))
        elif what == 1:
            epochs[number] += draw.randrange(2)
            directory.heard(place(number), facts(number, epochs[number], is_draining=draw.random() < 0.2))
        elif what == 2:
            directory.apply(draw.choice([EMPTY, UNREACHABLE, roll(0, 1, 2, 3, 4), roll(0, 1, 2)]))
        else:
            clock.pass_(draw.choice([0.1, 5, 30, 70]))
            directory.advance()
        for owners in answers(directory, keys):
            assert all(one.state is LIVE for one in owners.write), f"seed {seed}"
            assert all(one.state in (LIVE, DRAINING) for one in owners.read), f"seed {seed}"
            assert len(set(owners.read)) == len(owners.read) <= 3, f"seed {seed}"
            assert len(owners.write) <= 1, f"seed {seed}"
    directory.apply(roll(0, 1, 2, 3, 4))
    for number in range(5):
        epochs[number] += 1
        directory.lost(node_id(number, epochs[number] - 1))
        directory.heard(place(number), facts(number, epochs[number], empty_s=1e9))
    clock.pass_(WARM_S)
    fresh = static_directory(ManualClock(), 0, 1, 2, 3, 4)
    for key in keys:
        assert names(directory.owners(key).write) == names(fresh.owners(key).write), f"seed {seed}"
