"""What the crash tests store: identities of several shapes, and caches whose bytes follow from a seed."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.geometry import attention_geometry, latent_geometry
from kvservice.model.identity import Identity
from kvservice.storage.record import master_layout, mirror_layout
from tests.server.builders import (
    GEOMETRY,
    TOKENS,
    Planes,
    diff_of,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
)

WIDE = attention_geometry(layers=8, heads=4, head_size=32, dtype="bfloat16")
LATENT = latent_geometry(layers=3, latent_size=32, rotary_size=16, dtype="float32")
SEEDS = 1 << 30
HISTORY_MAX = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """An identity, and how many tokens its segments have."""

    identity: Identity
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A cache to store. ``name``: of its segment. ``runs``: of a mirror."""

    kind: Kind
    name: str
    meta: CacheMeta
    planes: Planes
    runs: Any = None

    @property
    def record_bytes(self) -> int:
        layout = master_layout(self.meta) if self.meta.master is None else mirror_layout(self.meta, self.runs)
        return layout.record_bytes


def kinds_of(writer: int, record_bytes_max: int) -> list[Kind]:
    """The identities of one writer, nobody else uses them; records of 8 KiB to 2 MiB."""
    kinds = [
        Kind(make_identity(GEOMETRY, tenant=f"small-{writer}"), (16, 16, 32, 64, 128)),
        Kind(make_identity(WIDE, tenant=f"wide-{writer}"), (16, 32, 64, 256, 512)),
        Kind(make_identity(GEOMETRY, tenant=f"pinned-{writer}", is_pinned=True), (16, 32)),
        Kind(make_identity(LATENT, tenant=f"latent-{writer}"), (16, 48, 200)),
    ]
    return [replace(kind, tokens=tuple(n for n in kind.tokens if _fits(kind, n, record_bytes_max))) for kind in kinds]


def _fits(kind: Kind, tokens: int, record_bytes_max: int) -> bool:
    return tokens * kind.identity.geometry.token_bytes <= record_bytes_max


def dense_draft(rng: Random, kind: Kind, name: str) -> Draft:
    """A segment that nobody stored before."""
    tokens, length = rng.choice(kind.tokens), rng.randrange(HISTORY_MAX + 1)
    meta = make_meta(kind.identity, name, [f"before {name} {n}" for n in range(length)], tokens=tokens)
    return anew(rng, kind, name, meta)


def anew(rng: Random, kind: Kind, name: str, meta: CacheMeta) -> Draft:
    """Bytes that the key never had."""
    return Draft(kind, name, meta, make_planes(kind.identity.geometry, meta.tokens, rng.randrange(SEEDS)))


def far_draft(rng: Random, base: Draft, number: int) -> Draft:
    """The segment of ``base`` in another context with nothing of its bytes: it never becomes a mirror."""
    return anew(rng, base.kind, base.name, _meta_elsewhere(rng, base, number))


def near_draft(rng: Random, base: Draft, number: int, master: MasterReference | None = None) -> Draft:
    """The segment of ``base`` in another context with nearly its bytes: dense, or a mirror of ``master``."""
    identity, meta = base.kind.identity, _meta_elsewhere(rng, base, number, master)
    rows = rng.sample(range(meta.tokens), rng.randrange(1, meta.tokens // 8 + 1))
    position = base.meta.position
    planes = make_relative(identity, base.planes, position, meta.position, rows=rows, seed=rng.randrange(SEEDS))
    runs = None if master is None else diff_of(identity, base.planes, position, planes, meta.position)
    return Draft(base.kind, base.name, meta, planes, runs)


def _meta_elsewhere(rng: Random, base: Draft, number: int, master: MasterReference | None = None) -> CacheMeta:
    """At a position that ``base`` may be moved to. Refreshed provenance now and then, and where contexts would meet."""
    identity, tokens = base.kind.identity, base.meta.tokens
    is_pinned = bool(identity.pinned_reason)
    length = base.meta.position // TOKENS if is_pinned else rng.randrange(HISTORY_MAX + 1)
    provenance = f"hkvd:{number}" if not length or rng.random() < 0.3 else ""
    history = [f"elsewhere {number} {n}" for n in range(length)]
    return make_meta(identity, base.name, history, tokens=tokens, provenance=provenance, master=master)
