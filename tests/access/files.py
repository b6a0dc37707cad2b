"""Access files of tests, and the tokens that go with them."""

from pathlib import Path

from blake3 import blake3

TOKENS = {"acme": "token of acme", "rival": "token of rival", "boss": "token of boss", "eyes": "token of eyes"}


def digest(token: str) -> str:
    return blake3(token.encode()).hexdigest()


def section(
    name: str, tenants: str, *, role: str = "engine", token: str = "", more: str = "", expires: str = ""
) -> str:
    """One principal with one token."""
    until = f", expires = {expires}" if expires else ""
    proof = f'tokens = [{{ blake3 = "{digest(token or TOKENS[name])}"{until} }}]'
    return f'[[principal]]\nname = "{name}"\nrole = "{role}"\ntenants = [{tenants}]\n{proof}\n{more}\n'


EVERYBODY = "\n".join(
    (
        section("acme", '"acme"'),
        section("rival", '"rival"'),
        section("boss", '"*"', role="admin"),
        section("eyes", "", role="viewer"),
    )
)


def write(path: Path, text: str) -> Path:
    """Replace a file as an editor would."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
    return path
