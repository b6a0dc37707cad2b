"""The ``authorization`` header of HTTP, and of gRPC's metadata."""

import base64
import binascii

BEARER, BASIC = "bearer ", "basic "


def token_of(authorization: str) -> str:
    """The token: of ``Bearer TOKEN``, or the password of ``Basic``, which is what a browser can send. Empty: none."""
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    if authorization[: len(BASIC)].lower() == BASIC:
        try:
            return base64.b64decode(authorization[len(BASIC) :].strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
