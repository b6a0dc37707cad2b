"""What records are called in places that keep objects under text names.

    name := prefix "/" format "/" namespace "/" segment "/" context        digests in hex

``format`` holds the versions of label and record, so that a program never meets objects that it cannot read: fleets of
two versions share a bucket without harm. All contexts of a segment share a prefix, which is what listings ask for.
"""

import re

from kvservice.model.errors import ConfigError
from kvservice.model.identity import Namespace
from kvservice.model.segment import DIGEST_BYTES, ContextId, SegmentId
from kvservice.storage.record import FORMAT_VERSION
from kvservice.storage.remote.contract import RemoteName
from kvservice.storage.remote.label import LABEL_VERSION

FORMAT = f"v{LABEL_VERSION}.{FORMAT_VERSION}"
PREFIX_CHARACTERS_MAX = 256
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


class ObjectNames:
    """Names under one prefix, which may be empty. ``separator``: what the place likes between the parts.

    Raises ConfigError for a prefix that some place would read otherwise than it is written.
    """

    def __init__(self, prefix: str, separator: str = "/") -> None:
        if prefix and (not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
            raise ConfigError(
                f"the prefix {prefix!r} must be parts of letters, digits, '.', '_' and '-' with '/' between them"
            )
        if len(prefix) > PREFIX_CHARACTERS_MAX:
            raise ConfigError(f"the prefix has {len(prefix)} characters, the limit is {PREFIX_CHARACTERS_MAX}")
        self._separator = separator
        self._start = separator.join([*prefix.split("/"), FORMAT] if prefix else [FORMAT])

    @property
    def start(self) -> str:
        """What all names start with, without the last separator."""
        return self._start

    def namespace(self, namespace: Namespace) -> str:
        """What the names of all caches of a namespace start with, without the last separator."""
        assert len(namespace) == DIGEST_BYTES, namespace
        return self._separator.join((self._start, namespace.hex()))

    def is_record(self, text: str, namespace: Namespace) -> bool:
        """Is this the name of a record of the namespace?"""
        start = self.namespace(namespace) + self._separator
        segment, separator, context = text.removeprefix(start).partition(self._separator)
        is_named = context_of(segment) is not None and context_of(context) is not None
        return text.startswith(start) and bool(separator) and is_named

    def segment(self, namespace: Namespace, segment: SegmentId) -> str:
        """What the names of all caches of a segment start with, without the last separator."""
        assert len(segment) == DIGEST_BYTES, segment
        return self._separator.join((self.namespace(namespace), segment.hex()))

    def record(self, name: RemoteName) -> str:
        """A record's name."""
        assert len(name.context) == DIGEST_BYTES, name
        return self._separator.join((self.segment(name.namespace, name.segment), name.context.hex()))


def context_of(last: str) -> ContextId | None:
    """The context that a name's last part says, None if somebody else put it there."""
    try:
        context = bytes.fromhex(last)
    except ValueError:
        return None
    return ContextId(context) if len(context) == DIGEST_BYTES and context.hex() == last else None
