"""Deleting all of a namespace: as far as a place can list, and nothing of anybody else's."""

import asyncio
import dataclasses

import pytest

from kvservice.model.errors import NotListedError, UnavailableError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import RemoteName
from kvservice.storage.remote.object_names import ObjectNames
from kvservice.storage.remote.tier import Deadline, ObjectTier
from tests.remote.naive import DictObjects
from tests.remote.places import Place
from tests.remote.records import find_one, make_record
from tests.storage.conftest import RecordBuilder

OTHER = Namespace(b"o" * 32)


def make_foreign() -> tuple[RemoteName, Bytes]:
    """A record of another namespace."""
    build = RecordBuilder()
    meta = dataclasses.replace(build.meta(), namespace=OTHER, key=CacheKey(SegmentId(b"s" * 32), ContextId(b"c" * 32)))
    return RemoteName(OTHER, meta.key.segment, meta.key.context), build.master(meta)


async def test_delete_all_forgets_a_namespace_and_leaves_the_others(place: Place) -> None:
    tier = await place.open()
    if not tier.features.lists_segments:
        pytest.skip("this place cannot list")
    names = [make_record(segment, context) for segment in (1, 2, 3) for context in (0, 1)]
    foreign = make_foreign()
    for name, record in (*names, foreign):
        assert await tier.store(name, record, 0.0)
    assert await tier.delete_all(names[0][0].namespace) == len(names)
    assert [await find_one(tier, name) for name, _ in names] == [None] * len(names)
    assert await find_one(tier, foreign[0]) is not None
    assert await tier.delete_all(names[0][0].namespace) == 0
    assert await tier.store(*names[0], 0.0)


async def test_delete_all_of_many_is_done_in_batches(place: Place) -> None:
    tier = await place.open()
    if not tier.features.lists_segments:
        pytest.skip("this place cannot list")
    count = 1100
    names = [make_record(context=context) for context in range(count)]
    for at in range(0, count, 50):
        await asyncio.gather(*(tier.store(name, record, 0.0) for name, record in names[at : at + 50]))
    assert await tier.delete_all(names[0][0].namespace) == count
    assert await find_one(tier, names[-1][0]) is None


async def test_a_place_that_cannot_list_says_so_and_deletes_nothing(place: Place) -> None:
    tier = await place.open()
    if tier.features.lists_segments:
        pytest.skip("this place can list")
    name, record = make_record()
    await tier.store(name, record, 0.0)
    with pytest.raises(NotListedError, match="keeps what else it has"):
        await tier.delete_all(name.namespace)
    assert await find_one(tier, name) is not None


async def test_every_batch_of_a_delete_has_a_deadline() -> None:
    objects = DictObjects()
    tier = ObjectTier(objects, "dict://here", Deadline(0.05, 1e9))
    name, record = make_record()
    await tier.store(name, record, 0.0)
    objects.hangs = True
    with pytest.raises(UnavailableError, match="delete"):
        await tier.delete_all(name.namespace)
    assert tier.counts.timed_out == 1


def test_what_somebody_else_put_there_is_no_record_of_ours() -> None:
    names, (name, _) = ObjectNames("p/q"), make_record()
    text = names.record(name)
    assert names.is_record(text, name.namespace)
    for other in (text + "/x", text[:-1], text.replace("/q/", "/r/"), text.rpartition("/")[0], f"{text}.part"):
        assert not names.is_record(other, name.namespace)
    assert not names.is_record(text, OTHER)
