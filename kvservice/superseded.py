"""What lies on the slab for caches whose newer form is in memory only. State only.

A fold puts a mirror in the place of a dense cache. Until the mirror is on the slab, the dense record there is what a
crash would leave of the cache, and so is a dense record that other old mirrors stand on: it goes after all of them.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from kvservice.caches import Cache
from kvservice.model.cache import Extent
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.slab_format import taken_bytes


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
        self.taken = Counter[str]()
        """Bytes of the slab by tenant."""
        self.old: set[Cache] = set()
        self._forms: dict[Cache, OldForm] = {}
        self._old_mirrors = Counter[tuple[SegmentId, ContextId]]()  # by the dense record that they stand on
        self._waiting = defaultdict[tuple[SegmentId, ContextId], list[Cache]](list)  # due, but for such mirrors

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
        self.taken[old.family.space.identity.tenant] += taken_bytes(extent.length)
        if base is not None:
            self._old_mirrors[new.family.segment, base] += 1

    def hand_on(self, old: Cache, new: Cache) -> None:
        """``new`` takes the place of ``old``; if that never came to the slab, what it superseded is now ``new``'s."""
        if old in self._forms and not self._forms[old].is_due:
            self._forms[new] = self._forms.pop(old)

    def release(self, new: Cache) -> list[OldForm]:
        """The newer form is on the slab, or gone: the old forms that nobody needs any more, for the caller to erase."""
        if new not in self._forms or self._forms[new].is_due:
            return []  # what is due waits, and goes once, with the last old mirror
        self._forms[new].is_due = True
        freed, due = list[OldForm](), [new]
        while due:
            one = due.pop()
            form, key = self._forms[one], (one.family.segment, one.context)
            if form.base is None and self._old_mirrors[key]:
                self._waiting[key].append(one)
                continue
            del self._forms[one]
            self.record_bytes -= form.extent.length
            self.taken[form.cache.family.space.identity.tenant] -= taken_bytes(form.extent.length)
            self.old.discard(form.cache)
            freed.append(form)
            if form.base is not None:
                due += self._drop_old_mirror((one.family.segment, form.base))
        return freed

    def _drop_old_mirror(self, base: tuple[SegmentId, ContextId]) -> list[Cache]:
        """Those that may go since no old mirror stands on their old form any more."""
        self._old_mirrors[base] -= 1
        if self._old_mirrors[base]:
            return []
        del self._old_mirrors[base]
        return self._waiting.pop(base, [])
