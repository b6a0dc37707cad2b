"""What lies on the slab for caches whose newer form is in memory only. State only.

A fold puts a mirror in the place of a dense cache. Until the mirror is on the slab, the dense record there is what a
crash would leave of the cache, and so is a dense record that other old mirrors stand on: it goes after all of them.
"""

from dataclasses import dataclass

from kvservice.caches import Cache
from kvservice.model.cache import Extent
from kvservice.model.segment import ContextId


@dataclass(slots=True)
class OldForm:
    """``base``: the context of the dense record that the old form, a mirror, stands on. ``is_due``: the new one is
    there, or the cache is gone."""

    cache: Cache
    extent: Extent
    base: ContextId | None
    is_due: bool = False


class Superseded:
    """Old forms by the cache that is the newer one. ``old``: the caches whose records they are."""

    def __init__(self) -> None:
        self.record_bytes = 0
        self.old: set[Cache] = set()
        self._forms: dict[Cache, OldForm] = {}

    def __contains__(self, cache: Cache) -> bool:
        return cache in self._forms

    def __len__(self) -> int:
        return len(self._forms)

    def add(self, new: Cache, old: Cache, extent: Extent, base: ContextId | None) -> None:
        """``new`` takes the place of ``old``, whose record at ``extent`` stays for now."""
        assert new not in self._forms, new
        self._forms[new] = OldForm(old, extent, base)
        self.old.add(old)
        self.record_bytes += extent.length

    def hand_on(self, old: Cache, new: Cache) -> None:
        """``new`` takes the place of ``old``; if that never came to the slab, what it superseded is now ``new``'s."""
        if old in self._forms and not self._forms[old].is_due:
            self._forms[new] = self._forms.pop(old)

    def release(self, new: Cache) -> list[OldForm]:
        """The newer form is on the slab, or gone: the old forms that nobody needs any more, for the caller to erase."""
        if new not in self._forms:
            return []
        self._forms[new].is_due = True
        freed: list[OldForm] = []
        while found := next((one for one, form in self._forms.items() if self._is_free(one, form)), None):
            freed.append(self._forms.pop(found))
            self.record_bytes -= freed[-1].extent.length
            self.old.discard(freed[-1].cache)
        return freed

    def _is_free(self, new: Cache, form: OldForm) -> bool:
        if not form.is_due:
            return False
        return form.base is not None or not any(
            other.base == new.context and cache.family.segment == new.family.segment
            for cache, other in self._forms.items()
        )
