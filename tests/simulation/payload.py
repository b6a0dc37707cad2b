"""What the clients of a simulation store: few keys, and bits that are made once and kept."""

from dataclasses import replace
from functools import cache
from typing import Any

from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.identity import Identity
from tests.server.builders import Planes, diff_of, make_identity, make_meta, make_planes, make_relative

IDENTITIES = (make_identity(), make_identity(tenant="other"))
HISTORIES: tuple[tuple[str, ...], ...] = ((), ("a",), ("b",), ("c",), ("d",), ("a", "b"))
METAS: tuple[CacheMeta, ...] = (
    *(make_meta(IDENTITIES[0], name, history) for name in range(3) for history in HISTORIES),
    *(make_meta(IDENTITIES[1], "of another", history) for history in HISTORIES[:2]),
)
BY_KEY = {meta.key: meta for meta in METAS}
ROWS: tuple[tuple[int, ...], ...] = ((), (3,), (0, 1, 9), tuple(range(12)))
"""What a variant differs in from its base; the last is too much for a mirror."""
VARIANTS = 2 * len(ROWS)

_BY_NAMESPACE = {one.namespace(): one for one in IDENTITIES}


def identity_of(meta: CacheMeta) -> Identity:
    return _BY_NAMESPACE[meta.namespace]


@cache
def dense_planes(number: int, variant: int) -> Planes:
    """Payload of METAS[number] that is near to that of all others of an equal half of the variants."""
    meta, rows = METAS[number], ROWS[variant % len(ROWS)]
    base = make_planes(seed=variant // len(ROWS))
    return make_relative(identity_of(meta), base, 0, meta.position, rows=rows, seed=100 * number + variant)


@cache
def mirror_planes(master: int, variant: int, number: int, rows: int) -> tuple[Planes, Any]:
    """Payload and runs of METAS[number] as a mirror of METAS[master] with dense_planes(master, variant)."""
    base, meta = METAS[master], METAS[number]
    theirs, identity = dense_planes(master, variant), identity_of(meta)
    planes = make_relative(identity, theirs, base.position, meta.position, rows=ROWS[rows], seed=7000 + number)
    return planes, diff_of(identity, theirs, base.position, planes, meta.position)


def as_mirror(number: int, master: CacheMeta, generation: int) -> CacheMeta:
    """METAS[number] as a mirror of ``master``."""
    return replace(METAS[number], master=MasterReference(master.key.context, generation))
