"""The ring of what went lately: the newest is told, the oldest forgotten, and its memory is fixed."""

from kvservice.caches import Cache, Family, Space
from kvservice.departures import CODES, Departures, Gone
from kvservice.limits import NodeLimits
from kvservice.model.errors import BY_CODE
from tests.server.builders import TOKENS, FakeClock, make_identity, make_meta

IDENTITY = make_identity()


def test_the_ring_forgets_the_oldest_and_says_how_far_back_it_remembers() -> None:
    clock = FakeClock()
    ring = Departures(clock, 3)
    caches = [fake_cache(number) for number in range(5)]
    clock.now_s += 10
    assert ring.remembered_s == 10, "since the start"
    for cache in caches:
        ring.note_gone(cache, Gone.DELETED)
        clock.now_s += 1
    assert len(ring) == 3
    assert ring.remembered_s == 3
    namespace = IDENTITY.namespace()
    found = [ring.of_key(namespace, cache.family.segment, cache.context) for cache in caches]
    assert [one is not None for one in found] == [False, False, True, True, True]
    assert ring.of_segment(namespace, caches[4].family.segment) == (Gone.DELETED, 0, 1.0)
    ring.note_gone(caches[4], Gone.QUARANTINED)
    newest = ring.of_key(namespace, caches[4].family.segment, caches[4].context)
    assert newest is not None
    assert newest.why is Gone.QUARANTINED


def test_the_rings_memory_is_fixed() -> None:
    assert Departures(FakeClock(), NodeLimits().departures_max).nbytes == 34 * 65536


def fake_cache(number: int) -> Cache:
    space = Space(IDENTITY.namespace(), IDENTITY)
    meta = make_meta(IDENTITY, number)
    return Cache(Family(space, meta.key.segment, TOKENS), meta, 4096, 1, 0.0)


def test_every_error_has_a_place_among_the_codes() -> None:
    ring, meta = Departures(FakeClock(), len(BY_CODE)), make_meta(IDENTITY)
    for kind in BY_CODE.values():
        ring.note_refused(IDENTITY.namespace(), meta.key, kind("for a test"))
        found = ring.of_key(IDENTITY.namespace(), meta.key.segment, meta.key.context)
        assert found is not None
        assert (found.why, CODES[found.detail]) == (Gone.REFUSED, kind.code)


def test_a_key_of_another_namespace_is_not_found() -> None:
    ring, cache = Departures(FakeClock(), 4), fake_cache(1)
    ring.note_gone(cache, Gone.DELETED)
    stranger = make_identity(tenant="stranger").namespace()
    assert ring.of_key(stranger, cache.family.segment, cache.context) is None
    assert ring.of_segment(stranger, cache.family.segment) is None
