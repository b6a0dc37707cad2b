"""Old forms on the slab go once, and not before what stands on them."""

from types import SimpleNamespace
from typing import Any

from kvservice.model.cache import Extent
from kvservice.model.segment import ContextId
from kvservice.superseded import Superseded


def cache(context: bytes) -> Any:
    """As much of a cache as this needs; each is one of its own."""
    space = SimpleNamespace(identity=SimpleNamespace(tenant="test"))
    return _Cache(SimpleNamespace(segment=b"s", space=space), ContextId(context))


class _Cache:
    def __init__(self, family: SimpleNamespace, context: ContextId) -> None:
        self.family, self.context = family, context


def test_a_form_that_waits_for_an_old_mirror_goes_once_however_often_it_is_released() -> None:
    forms, (old_a, new_a, old_b, new_b) = Superseded(), (cache(b"a"), cache(b"a"), cache(b"b"), cache(b"b"))
    forms.add(new_a, old_a, Extent(0, 10), None)
    forms.add(new_b, old_b, Extent(4096, 10), ContextId(b"a"))
    assert forms.release(new_a) == []
    assert forms.release(new_a) == []
    assert [one.cache for one in forms.release(new_b)] == [old_b, old_a]
    assert not forms.old
    assert len(forms) == forms.record_bytes == 0
