"""What all doors are told of the service: where it is, and how it knows the engine. Checked once, at start.

Imports no engine and no torch.
"""

from dataclasses import dataclass, field

from kvservice.client.connectors.option_checks import check_address, secret, why
from kvservice.client.security import TOKEN_FILE, Security
from kvservice.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """The options that every door begins with. Files are read anew whenever a session is opened."""

    address: str = field(
        metadata=why("unix:/path of the service on this host, as `kvservice serve` prints it; or 127.0.0.1:port")
    )
    token: str = field(
        default="",
        repr=False,
        metadata=secret("file:/path of the token that a service's port with an access file asks for"),
    )
    tls_ca: str = field(
        default="", metadata=why("file of the authority that the certificate of a service's port with TLS is of")
    )
    client_cert: str = field(
        default="",
        metadata=why("file of the engine's own certificate, for a service that asks for one (tls_client_ca)"),
    )
    client_key: str = field(default="", metadata=why("file of its key; empty: it is in client_cert"))

    @property
    def security(self) -> Security:
        """What is shown to the service, and whom the engine believes."""
        return Security(self.token, self.tls_ca, self.client_cert, self.client_key)

    def check_service(self, where: str) -> None:
        """Raise ConfigError unless a service could be reached with this. ``where``: what holds the options."""
        check_address(self.address, where)
        if self.token and not self.token.startswith(TOKEN_FILE):
            raise ConfigError(
                f'{where}: token must be "file:/path" of a file that holds it: what stands in an engine\'s '
                "configuration is logged. Exchange the token that stood here, and put the new one into a file"
            )
        given = [name for name in ("token", "tls_ca", "client_cert", "client_key") if getattr(self, name)]
        if given and self.address.startswith("unix:"):
            raise ConfigError(
                f"{where}: {', '.join(given)} would not be looked at: over its unix socket a service knows every "
                "caller as [local] of its access file. Leave it out, or give the service's port as address"
            )
        try:
            self.security.check(self.address)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
