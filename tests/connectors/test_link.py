"""A link whose session cannot be opened: one kind of error for those who use it, whatever the reason is."""

from pathlib import Path

import pytest

from kvservice.app import Service
from kvservice.client.connectors.breaker import Breaker, BreakerState
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.errors import (
    ConfigError,
    ForbiddenError,
    KVServiceError,
    LimitError,
    UnauthenticatedError,
    UnavailableError,
)
from tests.client.builders import make_identity, make_settings


@pytest.mark.parametrize("kind", [UnauthenticatedError, ForbiddenError, ConfigError, LimitError, UnavailableError])
def test_a_session_that_cannot_be_opened_is_a_service_that_is_away(kind: type[KVServiceError]) -> None:
    def refuse() -> Session:
        raise kind("the reason")

    link = Link(refuse, Breaker(lambda: 0.0, failures_max=2))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the reason"):
            link.run(lambda session: session.lookup([]))
    assert link.breaker.state is BreakerState.OPEN


def test_a_caller_that_is_not_known_any_more_needs_a_new_session(tmp_path: Path) -> None:
    """Its token was shown when the session was opened, and stays that of the session's calls over gRPC."""
    with Service(make_settings(tmp_path)) as service:
        address = f"unix:{service.addresses.socket}"
        link = Link(lambda: Session(SharedMemoryTransport(address), [make_identity()]), Breaker(lambda: 0.0))
        used: list[Session] = []

        def work(session: Session) -> None:
            used.append(session)
            if len(used) == 2:
                raise UnauthenticatedError("the reason")
            session.lookup([])

        link.run(work)
        link.run(work)
        assert used[0] is used[1]
        assert used[1] is not used[2]
        assert link.is_current(used[2])
        link.close()
