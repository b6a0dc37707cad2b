"""``python -m kvservice.access [NAME]``: a new token for its caller, and the lines that let it in. Keeps neither."""

import secrets
import sys

from blake3 import blake3

TOKEN_BYTES = 32


def new_token() -> tuple[str, str]:
    """A random token, and its digest for the access file."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    return token, blake3(token.encode()).hexdigest()


def main(arguments: list[str]) -> int:
    """The token goes to standard error, so that the output can be appended to an access file as it is."""
    token, digest = new_token()
    name = arguments[0] if arguments else "engine-a"
    sys.stderr.write(f"token of {name}, shown once: {token}\n")
    sys.stdout.write(f'[[principal]]\nname = "{name}"\nrole = "engine"\ntenants = []\n')
    sys.stdout.write(f'tokens = [{{ blake3 = "{digest}" }}]\n')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
