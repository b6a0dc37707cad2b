"""Certificates for one test, made by ``openssl`` on the command line: an authority, and what it signs."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, and both in one file."""

    cert: Path
    key: Path

    @property
    def both(self) -> Path:
        path = self.cert.with_suffix(".both.pem")
        path.write_bytes(self.cert.read_bytes() + self.key.read_bytes())
        return path


class Authority:
    """A certificate authority in a folder of its own."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.cert, self._key = folder / "ca.pem", folder / "ca.key"
        days = ("-days", "2")
        openssl("req", "-x509", *KEY, "-keyout", self._key, "-out", self.cert, "-subj", f"/CN={name}", *days)

    def issue(self, name: str, *, is_expired: bool = False, file: str = "", is_client: bool = False) -> Pair:
        """A certificate for this machine's loopback names, with ``name`` as its common name and a DNS name.

        ``is_client``: that is its only DNS name.
        """
        stem = file or name
        cert, key, request = (self._folder / f"{stem}.{end}" for end in ("pem", "key", "csr"))
        extensions = self._folder / f"{stem}.ext"
        others = "" if is_client else "DNS:localhost,IP:127.0.0.1,"
        extensions.write_text(f"subjectAltName={others}DNS:{name}\n")
        openssl("req", "-new", *KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        if is_expired:
            self._sign_expired(request, extensions, cert)
        else:
            signer = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", "2")
            openssl("x509", "-req", "-in", request, "-out", cert, "-extfile", extensions, *signer)
        key.chmod(0o600)
        return Pair(cert, key)

    def _sign_expired(self, request: Path, extensions: Path, cert: Path) -> None:
        """``openssl x509`` knows no dates in the past, ``openssl ca`` does."""
        place = self._folder / "expired"
        place.mkdir(exist_ok=True)
        (place / "index").write_text("")
        (place / "serial").write_text("04D2\n")
        (place / "ca.cnf").write_text(
            f"[ca]\ndefault_ca=own\n[own]\ndatabase={place}/index\nserial={place}/serial\nnew_certs_dir={place}\n"
            f"certificate={self.cert}\nprivate_key={self._key}\ndefault_md=sha256\npolicy=any\n[any]\ncommonName=supplied\n"
        )
        dates = ("-startdate", "20200101000000Z", "-enddate", "20200201000000Z")
        files = ("-in", request, "-out", cert, "-extfile", extensions, "-notext")
        openssl("ca", "-batch", "-config", place / "ca.cnf", *dates, *files)


def openssl(*arguments: "str | Path") -> None:
    """Run it; the test is skipped where it is not installed."""
    try:
        done = subprocess.run(
            ["openssl", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert not done.returncode, done.stderr
