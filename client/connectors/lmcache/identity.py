"""Whose chunks these are: the identity of LMCache's objects, from its keys and layouts and from what the user adds.

LMCache names a chunk by a hash of its tokens, a model's name and ranks. Weights, RoPE and the order of bytes inside a
chunk are not in its keys; without them engines that differ would read each other's chunks. So they are in ours.
Imports no LMCache and no torch.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvservice.client.connectors.lmcache.options import LMCacheOptions
from kvservice.client.connectors.vllm.weights_digest import model_name, weights_digest
from kvservice.model.errors import ConfigError, InvalidIdentityError, InvalidInputError
from kvservice.model.geometry import opaque_geometry
from kvservice.model.identity import Identity, Shard
from kvservice.model.rope import opaque_rope
from kvservice.model.segment import digest

SMALL_TYPES = ("float8", "fp8", "int8", "uint8", "int4")
"""Element types that mean nothing without scales."""


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """What LMCache says of an object besides its content. Objects of different kinds never answer for each other.

    ``layout``: (element type, shape) of each tensor in it. ``form``: LMCache's mode, and what else its keys hold.
    """

    model: str
    world_size: int
    rank: int
    layout: tuple[tuple[str, tuple[int, ...]], ...]
    row_bytes: int
    form: str


@dataclass(frozen=True, slots=True)
class Owner:
    """What the user says of all objects. Made by ``of``."""

    options: LMCacheOptions
    weights: str
    config: str

    @classmethod
    def of(cls, options: LMCacheOptions, where: str) -> "Owner":
        """Reads the model's files if the options name them. Raises ConfigError when they cannot be read."""
        if not options.is_shared:
            return cls(options, f"private:{secrets.token_hex(16)}", options.config)
        weights, config = options.weights, options.config
        if options.model_path and not (weights and config):
            try:
                files = f"files:{weights_digest(Path(options.model_path))}"
            except InvalidInputError as error:
                raise ConfigError(f'{where}: model_path: {error}; or give "weights" and "config"') from error
            weights, config = weights or files, config or files
        return cls(options, weights, config)

    def identity(self, kind: ObjectKind) -> Identity:
        """Identity of a kind's objects. Raises InvalidIdentityError when its bytes need more to be understood."""
        options = self.options
        if options.is_shared and not options.kv_scales and any(name.startswith(SMALL_TYPES) for name, _ in kind.layout):
            raise InvalidIdentityError(
                f'chunks of {kind.layout[0][0]} mean nothing without scales; give "kv_scales": where they come from'
            )
        ranks = (kind.rank, kind.world_size)
        return Identity(
            tenant=options.tenant,
            model=options.model or model_name(kind.model),
            weights=self.weights,
            geometry=opaque_geometry(kind.row_bytes),
            rope=(opaque_rope(),),
            kv_scales=options.kv_scales or "none",
            shard=Shard(*ranks) if 0 <= kind.rank < kind.world_size else Shard(),
            salt=json.dumps(
                {
                    "cache": "lmcache",
                    "form": kind.form,
                    "ranks": ranks,
                    "layout": kind.layout,
                    "config": self.config,
                    "kv_format": options.kv_format,
                },
                sort_keys=True,
                separators=(",", ":"),
            ),
        )

    def identity_of(self, kind: ObjectKind) -> Callable[[int], Identity]:
        """For an OpaqueStore of this kind's objects, which have one size."""

        def of_size(row_bytes: int) -> Identity:
            if row_bytes != kind.row_bytes:
                raise InvalidInputError(f"a chunk of {row_bytes} bytes, its layout says {kind.row_bytes}")
            return self.identity(kind)

        return of_size


def object_key(*parts: bytes) -> bytes:
    """Our name of an object inside its kind: LMCache's hash of the tokens and whatever else separates requests."""
    return digest(b"kvservice lmcache\0", *parts)
