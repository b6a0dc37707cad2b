"""What both ends of Arrow Flight between nodes say: the same messages as the streams, in Flight's calls. No I/O.

    DoAction kvservice.VERB   body: a message of peer.proto     one result: the answer's message
        hello PeerHello -> PeerWelcome    find PeerFind -> PeerFound    delete PeerDelete -> PeerCount
        renew PeerRenew -> PeerCount      release PeerRelease -> PeerCount
        ping (empty) -> PeerFacts         bye (empty) -> (empty)
    DoExchange, command: fetch:u8 PeerFetch     -> batches of one uint8 column: the record from the asked byte on
    DoExchange, command: store:u8 PeerStore     -> metadata go:u8, then batches from the caller, then its metadata
                                                   PeerCommit -> metadata stored:u8 PeerStored;  or metadata exists:u8

    header authorization      "Bearer TOKEN", if the caller has one
    header kvservice-session  hex; of all but hello, which answers with it
    header kvservice-lease    hex; the session that leased the record, if that is another one: the one of a stream

An error is a Flight error with PeerError as its extra info.
"""

from kvservice.model.errors import ConfigError

PREFIX = "kvservice."
HELLO, FIND, DELETE, RENEW, RELEASE, PING, BYE = "hello", "find", "delete", "renew", "release", "ping", "bye"
AUTHORIZATION, SESSION, LEASE = "authorization", "kvservice-session", "kvservice-lease"
COLUMN = "bytes"
BATCH_BYTES = 1 << 20
"""One batch of a record: what is told, and may be verified, at once."""
BATCH_BYTES_MAX = 4 << 20
"""A larger one is refused."""
ANSWER_BYTES_MAX = 17 << 20
"""One message that a caller takes: an answer to a question, or a batch."""


def require_flight() -> None:
    """Raise ConfigError without pyarrow's Flight."""
    try:
        import pyarrow.flight  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"Arrow Flight needs pyarrow: pip install 'kvservice[flight]' ({error})") from error
