"""The one refusal at opening that may go away by itself."""

from kvservice.model.errors import ConfigError


class UnreachableError(ConfigError):
    """The place did not answer when it was opened. Who wants to start without it may open it again later."""
