"""The error tree. A miss is a value, a failure is one of these; every code travels over gRPC by name.

Messages say what happened, to which thing, and what to do.
"""

from typing import ClassVar


class KVServiceError(Exception):
    """Root of every error this project raises on purpose. ``code`` is stable and crosses the wire."""

    code: ClassVar[str] = "INTERNAL"


class InvalidInputError(KVServiceError, ValueError):
    """The caller's data breaks a rule; nothing was changed."""

    code = "INVALID_INPUT"


class InvalidIdentityError(InvalidInputError):
    """An identity lacks a field or holds a value that cannot be part of a key."""

    code = "INVALID_IDENTITY"


class GeometryMismatchError(InvalidInputError):
    """Tensors or records do not have the shape that the identity's geometry says."""

    code = "GEOMETRY_MISMATCH"


class UnknownRopeKindError(InvalidInputError):
    """A configuration names a RoPE kind whose frequencies are not known."""

    code = "UNKNOWN_ROPE_KIND"


class TokenCountError(InvalidInputError):
    """Token counts of prompt, slots, segments or records disagree."""

    code = "TOKEN_COUNT"


class SlotError(InvalidInputError):
    """A slot is out of range or would be written twice."""

    code = "SLOT"


class NonFiniteError(InvalidInputError):
    """K or V holds an infinity or a NaN; such a cache is never stored."""

    code = "NON_FINITE"


class ConfigError(InvalidInputError):
    """A setting is unknown, malformed or out of range; the boot stops."""

    code = "CONFIG"


class RecordFormatError(KVServiceError):
    """Bytes are not a record of a version this program reads."""

    code = "RECORD_FORMAT"


class CorruptError(KVServiceError):
    """A checksum differs from the bytes it stands for. Never a hit."""

    code = "CORRUPT"


class ChecksumMismatchError(CorruptError):
    """A commit's checksums differ from the bytes in its extent; nothing was published."""

    code = "CHECKSUM_MISMATCH"


class CapacityError(KVServiceError):
    """No room, and nothing that may be evicted. Retry later or give the tier more bytes."""

    code = "CAPACITY"


class RecordTooLargeError(CapacityError):
    """A record is larger than the tier that should hold it; it will never fit."""

    code = "RECORD_TOO_LARGE"


class DiskError(KVServiceError):
    """The operating system refused to read, write or change a file of the SSD tier. Names the file and the reason."""

    code = "DISK"


class DiskFullError(DiskError):
    """The file system, or the quota on it, has no room left (ENOSPC, EDQUOT)."""

    code = "DISK_FULL"


class LimitError(KVServiceError):
    """A named limit of the service was reached."""

    code = "LIMIT"


class QuotaError(LimitError):
    """A tenant's quota of a tier is full, and nothing of its own may be evicted. Release leases, or raise the quota."""

    code = "QUOTA"


class RateError(LimitError):
    """A caller asks more often, or for more bytes, than it may. Wait a moment, then ask again."""

    code = "RATE"


class UnauthenticatedError(KVServiceError):
    """The caller did not prove who it is: no token or certificate, an unknown one, or one that has expired."""

    code = "UNAUTHENTICATED"


class ForbiddenError(KVServiceError):
    """The caller is known, and may not do this."""

    code = "FORBIDDEN"


class NotOwnedError(KVServiceError):
    """A session named a reservation, lease or extent that is not its own."""

    code = "NOT_OWNED"


class StaleEpochError(KVServiceError):
    """A handle is from before the service's last start. Forget it and look up again."""

    code = "STALE_EPOCH"


class UnknownSessionError(KVServiceError):
    """The session is not open (any more). Open a new one."""

    code = "UNKNOWN_SESSION"


class LeaseExpiredError(KVServiceError):
    """The lease ran out or was released; its records may be gone. Look up again."""

    code = "LEASE_EXPIRED"


class MasterGoneError(KVServiceError):
    """A mirror names a master that is not held, or another generation of it. Store a dense cache instead."""

    code = "MASTER_GONE"


class NotListedError(KVServiceError):
    """A storage cannot say what it holds of a namespace, so that not all of it was deleted there. Delete by keys."""

    code = "NOT_LISTED"


class UnavailableError(KVServiceError):
    """The service cannot be reached or did not answer within the deadline."""

    code = "UNAVAILABLE"


def _tree(kind: type[KVServiceError]) -> list[type[KVServiceError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _tree(child))]


BY_CODE: dict[str, type[KVServiceError]] = {kind.code: kind for kind in _tree(KVServiceError)}


def error_from_code(code: str, message: str) -> KVServiceError:
    """The error that another process named by ``code``; an unknown code gives the root class."""
    return BY_CODE.get(code, KVServiceError)(message)
