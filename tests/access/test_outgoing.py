"""What a node shows others and believes of them, as its files are exchanged."""

from pathlib import Path

import pytest

from kvservice.access.outgoing import Outgoing
from kvservice.access.tls import Certificates
from kvservice.model.errors import ConfigError
from tests.access.certificates import Authority
from tests.client.builders import make_settings


def test_pem_is_read_again_when_a_file_has_changed_and_only_then(tmp_path: Path) -> None:
    ca, other = tmp_path / "peer.pem", Authority(tmp_path / "other")
    own = Authority(tmp_path / "own")
    pair, new = own.issue("node"), own.issue("node", file="new")
    ca.write_bytes(own.cert.read_bytes())
    certificates = Certificates(pair.cert, pair.key)
    outgoing = Outgoing(make_settings(tmp_path, peer_ca=str(ca)), certificates)
    first = outgoing.pem()
    assert first is not None
    assert outgoing.pem() is first
    ca.write_bytes(other.cert.read_bytes() + own.cert.read_bytes())
    second = outgoing.pem()
    assert second is not None
    assert (second.cert, second.ca) == (first.cert, ca.read_bytes())
    for ours, theirs in ((pair.key, new.key), (pair.cert, new.cert)):
        ours.write_bytes(theirs.read_bytes())
    assert outgoing.pem() is second, "own files are looked at by Certificates"
    assert certificates.reload_if_changed()
    third = outgoing.pem()
    assert third is not None
    assert (third.cert, third.key, third.ca) == (new.cert.read_bytes(), new.key.read_bytes(), second.ca)


def test_an_authority_that_is_away_is_named(tmp_path: Path) -> None:
    ca = tmp_path / "peer.pem"
    ca.write_bytes(Authority(tmp_path / "own").cert.read_bytes())
    outgoing = Outgoing(make_settings(tmp_path, peer_ca=str(ca)), None)
    assert outgoing.pem() is not None
    ca.unlink()
    with pytest.raises(ConfigError, match=r"peer\.pem"):
        outgoing.pem()
