"""Bounds that both sides of the wire share."""

MESSAGE_BYTES_MAX = 32 << 20
"""One control message. The largest is a lookup of 65,536 segments with two accepted contexts each: 7 MiB."""

IDENTITIES_PER_SESSION_MAX = 256
"""A node ends a session that registers more: a client must not ask for it."""

GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)
