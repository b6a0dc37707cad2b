"""Opens a remote tier from its URL. The one file that knows all engines."""

from kvservice.model.errors import ConfigError
from kvservice.storage.remote import mooncake, redis, s3
from kvservice.storage.remote.breaker import Breaker
from kvservice.storage.remote.objects import Objects
from kvservice.storage.remote.place_url import PlaceUrl, nearest, parse_place_url
from kvservice.storage.remote.tier import Deadline, ObjectTier

SCHEMES = (*s3.SCHEMES, *redis.SCHEMES, *mooncake.SCHEMES)
_BYTES_S_MIN = 16 << 20


async def open_remote(
    url: str, *, deadline_s: float = 1.0, bytes_s_min: float = _BYTES_S_MIN, breaker: Breaker | None = None
) -> ObjectTier:
    """Open the place that ``url`` names and ask it once; the tier implements contract.RemoteTier.

    A call ends within ``deadline_s``, and one that moves payload within what that takes at ``bytes_s_min`` bytes a
    second more. Raises ConfigError for what a person has to mend: the URL, a library, a bucket, credentials; and its
    kind UnreachableError if the place just does not answer now.
    """
    place = parse_place_url(url)
    if place.scheme not in SCHEMES:
        raise ConfigError(f"unknown storage {place.scheme!r}://{nearest(place.scheme, SCHEMES)}")
    if not (deadline_s > 0 and bytes_s_min > 0):
        raise ConfigError(f"{place}: a deadline of {deadline_s} s at {bytes_s_min} bytes a second; both are above 0")
    return ObjectTier(await _open(place, deadline_s), str(place), Deadline(deadline_s, bytes_s_min), breaker)


async def _open(place: PlaceUrl, deadline_s: float) -> Objects:
    if place.scheme in s3.SCHEMES:
        return await s3.open_object_storage(place, deadline_s)
    if place.scheme in redis.SCHEMES:
        return await redis.open_redis(place, deadline_s)
    return await mooncake.open_mooncake(place, deadline_s)
