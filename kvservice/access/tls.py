"""Certificates of the network's ports: for gRPC, for HTTP and for the streams between nodes, and what callers show.

Read again when their files change; connections that are open go on with the old ones. Files that do not fit change
nothing. What is read here goes to no log and no message.
"""

import logging
import ssl
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvservice.model.errors import ConfigError

_LOG = logging.getLogger(__name__)
Stamps = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class PemFiles:
    """What the files hold, for who takes nothing else, as Arrow Flight. ``ca`` None: callers show no certificate."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes | None = None


class Certificates:
    """A certificate with its key, and the authority of callers' certificates, if they must show one.

    Raises ConfigError unless the files are there, are PEM and fit each other.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self.problem = ""
        self.reloads = 0
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamps = self._look()
        self._context = self._new_context()
        self._pem, self._configuration = self._read()
        _warn_of_readers(key)

    @property
    def asks_callers(self) -> bool:
        """Must callers show a certificate?"""
        return self._client_ca is not None

    def server_context(self) -> ssl.SSLContext:
        """The one context of this node's HTTP and peer ports; new connections get what was read last."""
        return self._context

    def client_context(self) -> ssl.SSLContext:
        """For connections to other nodes: shows this node's certificate, and checks theirs, with their host's name,
        against ``client_ca``, or without one against the system's authorities."""
        ca = None if self._client_ca is None else str(self._client_ca)
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
            context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            raise self._refusal(error) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For gRPC ports; every handshake gets what was read last."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration, lambda: self._configuration, require_client_authentication=self.asks_callers
        )

    def pem_files(self) -> PemFiles:
        """What was read last. From any thread: whoever asks again sees whether it is another one."""
        return self._pem

    def reload_if_changed(self) -> bool:
        """Read the files again if one is not what it was. Did something change?"""
        stamps = self._look()
        return stamps != self._stamps and self.reload()

    def reload(self) -> bool:
        """Read the files again, now. False, and all stays as it was, if they do not fit."""
        self._stamps = self._look()
        try:
            self._new_context()  # the one in use would be left half changed by files that do not fit
            pem, configuration = self._read()
            self._load(self._context)
            self._pem, self._configuration = pem, configuration
        except ConfigError as error:
            self.problem = str(error)
            _LOG.error("the old certificate stays in use: %s", error)
            return False
        self.problem = ""
        self.reloads += 1
        _LOG.info("certificate %s: the new one is in use", self._cert)
        return True

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.asks_callers:
            context.verify_mode = ssl.CERT_REQUIRED
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        """An authority that is taken out of its file stays trusted by this context until the node is started anew."""
        try:
            context.load_cert_chain(self._cert, self._key)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
        except (OSError, ssl.SSLError) as error:
            raise self._refusal(error) from error

    def _read(self) -> tuple[PemFiles, grpc.ServerCertificateConfiguration]:
        try:
            root = None if self._client_ca is None else self._client_ca.read_bytes()
            pem = PemFiles(self._cert.read_bytes(), self._key.read_bytes(), root)
        except OSError as error:
            raise self._refusal(error) from error
        return pem, grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root)

    def _refusal(self, error: OSError) -> ConfigError:
        ca = "" if self._client_ca is None else f", tls_client_ca {self._client_ca}"
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        return ConfigError(
            f"tls_cert {self._cert}, tls_key {self._key}{ca} cannot be used: {reason}; give PEM files that can be "
            "read, and the key of that certificate"
        )

    def _look(self) -> Stamps:
        paths = (self._cert, self._key) if self._client_ca is None else (self._cert, self._key, self._client_ca)
        return tuple(map(stamp_of, paths))


def names_in_peercert(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Names in what ``ssl.SSLSocket.getpeercert()`` gives: DNS and URI names, then the common name."""
    if not certificate:
        return ()
    others = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "IP Address")]
    common = [value for parts in certificate.get("subject", ()) for kind, value in parts if kind == "commonName"]
    return tuple(dict.fromkeys([*others, *common]))


def names_in_auth_context(context: Mapping[str, Sequence[bytes]]) -> tuple[str, ...]:
    """The same of what a gRPC server context's ``auth_context()`` gives; empty without a verified certificate."""
    keys = ("x509_subject_alternative_name", "x509_common_name")
    return tuple(dict.fromkeys(name.decode(errors="replace") for key in keys for name in context.get(key, ())))


def _warn_of_readers(key: Path) -> None:
    if key.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        _LOG.warning("the private key %s can be read by others: chmod 600 it", key)


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file's content; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
