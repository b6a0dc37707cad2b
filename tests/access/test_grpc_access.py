"""gRPC from the network: TLS, tokens, client certificates, tenants, rates; with real sockets and certificates."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvservice.access.principal import LOCAL, Credentials
from kvservice.client.security import NO_SECURITY, Security
from kvservice.model.errors import (
    ConfigError,
    ForbiddenError,
    LimitError,
    RateError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
    UnknownSessionError,
)
from kvservice.network_rpc import NETWORK_MESSAGE_BYTES_MAX
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.wire.v1.cache_pb2_grpc import CacheServiceStub
from tests.access.certificates import Authority
from tests.access.files import EVERYBODY, TOKENS, section
from tests.access.guarded import ACME, RIVAL, Guarded, guarded
from tests.server.builders import encode_key, make_meta

ENDED = (UnknownSessionError, StaleEpochError, UnavailableError)
"""What a client hears of a session that the node has ended: on an open connection, on a new one, on its stream."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Guarded]:
    with guarded(tmp_path) as world:
        yield world


def stub(world: Guarded, security: Security | None = None) -> tuple[Any, Any]:
    """Calls without a session of their own, as a program of another make would: the stub, and its metadata."""
    security = security or world.security()
    channel = security.channel(world.grpc, ())
    return CacheServiceStub(channel), security.metadata()  # type: ignore[no-untyped-call]


def code_of(error: grpc.RpcError) -> str:
    metadata: Any = error.trailing_metadata()
    return next(str(value) for key, value in metadata if key == "kvservice-error")


def reference(session: Any) -> wire.SessionRef:
    return wire.SessionRef(session_id=session.session_id, boot_epoch=session.boot_epoch)


def test_a_caller_with_a_token_works_as_on_the_unix_socket(world: Guarded) -> None:
    with world.session() as session:
        item = wire.ReserveItem(namespace=ACME.namespace(), key=encode_key(make_meta(ACME).key), record_bytes=100)
        (outcome,) = session.reserve([item])
        assert session.abort([outcome.reserved.id]) == 1
        reply, _ = session.lookup([wire.PromptQuery(namespace=ACME.namespace())])
        assert len(reply.prompts) == 1


def test_an_engines_client_takes_the_same_options(world: Guarded) -> None:
    from kvservice.client import Client

    ca = str(world.authority.cert)
    with Client.connect(world.grpc, ACME, token=TOKENS["acme"], tls_ca=ca) as client:
        assert set(client.explain([])) == set()
    with pytest.raises(UnauthenticatedError):
        Client.connect(world.grpc, ACME, tls_ca=ca)


def test_explain_asks_a_node_with_a_token(world: Guarded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvservice.__main__ import main

    for name, text in (("identity", ACME.canonical_json()), ("tokens", "1 2 3"), ("token", TOKENS["acme"])):
        (tmp_path / name).write_text(text)
    question = ["explain", "--identity", str(tmp_path / "identity"), "--tokens", str(tmp_path / "tokens")]
    node = [*question, "--node", world.grpc, "--ca", str(world.authority.cert)]
    assert main([*node, "--token", f"file:{tmp_path / 'token'}", "--chunk-tokens", "2"]) == 1
    assert "0 of 3 tokens" in capsys.readouterr().out
    assert main(node) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().err.upper()
    for wrong, why in (
        ([*question, "--token", f"file:{tmp_path / 'token'}"], "for --node"),
        ([*node, "--token", TOKENS["acme"]], "file:PATH"),
    ):
        assert main(wrong) == 2
        assert why in capsys.readouterr().err


def test_every_call_works_over_the_network_itself(world: Guarded) -> None:
    """The session's own calls take the data socket; these do not."""
    with world.session() as session:
        calls, metadata = stub(world)
        items = [wire.ReserveItem(namespace=ACME.namespace(), key=encode_key(make_meta(ACME).key), record_bytes=100)]
        request = wire.ReserveRequest(session=reference(session), items=items)
        reserved = calls.Reserve(request, metadata=metadata, timeout=5).outcomes[0].reserved
        abort = wire.AbortRequest(session=reference(session), reservation_ids=[reserved.id])
        assert calls.Abort(abort, metadata=metadata, timeout=5).aborted == 1
        lookup = wire.LookupRequest(session=reference(session), prompts=[wire.PromptQuery(namespace=ACME.namespace())])
        assert calls.Lookup(lookup, metadata=metadata, timeout=5).prompts


@pytest.mark.parametrize("token", ["", "wrong", "token of acme "])
def test_who_shows_no_right_token_is_not_let_in(world: Guarded, token: str) -> None:
    stripped = token.strip() == TOKENS["acme"]  # blanks around a token in a header are none of it
    if stripped:
        world.session(world.security(token=token)).close()
        return
    with pytest.raises(UnauthenticatedError, match="not a caller that this node knows"):
        world.session(world.security(token=token))
    calls, metadata = stub(world, world.security(token=token))
    with pytest.raises(grpc.RpcError) as caught:
        calls.Stats(wire.StatsRequest(), metadata=metadata, timeout=5)
    assert (caught.value.code(), code_of(caught.value)) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")


def test_an_expired_token_says_so(world: Guarded) -> None:
    world.allow(section("acme", '"acme"', expires="2020-01-01T00:00:00Z"))
    with pytest.raises(UnauthenticatedError, match="the token of acme has expired"):
        world.session()


def test_a_foreign_tenant_is_refused_whether_it_is_held_or_not(world: Guarded) -> None:
    texts = []
    for _ in range(2):
        with pytest.raises(ForbiddenError, match="acme may name acme in an identity, not tenant 'rival'") as caught:
            world.session(None, RIVAL)
        texts.append(str(caught.value))
        rival = world.session(world.security("rival"), RIVAL)  # from now on the node knows it
    rival.close()
    assert texts[0] == texts[1]
    with world.session() as session, pytest.raises(ForbiddenError):
        session.register(RIVAL)


def test_an_admin_may_name_every_tenant(world: Guarded) -> None:
    with world.session(world.security("boss"), ACME, RIVAL) as session:
        assert session.namespace == ACME.namespace()


def test_a_viewer_opens_no_session_and_sees_the_whole_document(world: Guarded) -> None:
    with pytest.raises(ForbiddenError, match="its role is viewer"):
        world.session(world.security("eyes"))
    calls, metadata = stub(world, world.security("eyes"))
    assert '"handles"' in calls.Stats(wire.StatsRequest(), metadata=metadata, timeout=5).json


def test_anothers_session_is_as_unknown_as_none(world: Guarded) -> None:
    with world.session(world.security("rival"), RIVAL) as rival:
        calls, metadata = stub(world)
        answers = []
        for id_ in (rival.session_id, b"\1" * 16):
            request = wire.ReleaseRequest(session=wire.SessionRef(session_id=id_, boot_epoch=rival.boot_epoch))
            with pytest.raises(grpc.RpcError) as caught:
                calls.Release(request, metadata=metadata, timeout=5)
            answers.append((code_of(caught.value), str(caught.value.details()).replace(id_.hex()[:8], "ID")))
        assert answers[0] == answers[1]
        assert answers[0][0] == UnknownSessionError.code


def test_only_an_admin_deletes_a_whole_namespace(world: Guarded) -> None:
    request = wire.DeleteRequest(namespace=ACME.namespace())
    with world.session() as session, pytest.raises(ForbiddenError, match="deleted by an admin"):
        session.delete(request)
    with world.session(world.security("boss")) as session:
        assert session.delete(request) == 0


@pytest.mark.parametrize("text", [section("acme", '"acme"', token="new"), section("acme", '"acme", "more"')])
def test_a_caller_that_changed_or_went_loses_its_session(world: Guarded, text: str) -> None:
    with world.session() as session:
        world.allow(text)
        with pytest.raises(ENDED):
            session.lookup([wire.PromptQuery(namespace=ACME.namespace())])
    assert world.on_loop(lambda: len(world.node.sessions.open)) == 0


def test_a_token_is_exchanged_without_a_break(world: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKENS["acme"] + "\n")
    with world.session(world.security(token=f"file:{file}")) as session:
        new = section("acme", '"acme"', token="new").partition("tokens = [")[2].rstrip().removesuffix("]")
        both = section("acme", '"acme"').replace("}]", f"}}, {new}]")
        world.allow(both)
        session.lookup([wire.PromptQuery(namespace=ACME.namespace())])
        file.write_text("new\n")
        world.allow(section("acme", '"acme"', token="new"))
        session.reconnect()
        session.lookup([wire.PromptQuery(namespace=ACME.namespace())])


def test_wrong_authority_plaintext_and_a_node_whose_certificate_expired(world: Guarded, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    with pytest.raises(UnavailableError, match="cannot be reached"):
        world.session(world.security(tls_ca=str(other.cert)))
    with pytest.raises(UnavailableError):
        world.session(NO_SECURITY)
    with pytest.raises(UnavailableError):
        world.session(world.security(), address=world.grpc.replace("localhost", "127.0.0.2"))


def test_an_expired_certificate_of_the_node_is_refused_by_its_callers(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "mine")
    with guarded(tmp_path, own=authority.issue("node", is_expired=True)) as world, pytest.raises(UnavailableError):
        world.session(world.security(tls_ca=str(authority.cert)))


def test_certificates_prove_principals_and_nothing_else_gets_a_connection(tmp_path: Path) -> None:
    callers = Authority(tmp_path / "callers", "authority of callers")
    access = EVERYBODY + section("two", '"acme"', token="two", more='certificates = ["two.example"]')
    with guarded(tmp_path, access=access, tls_client_ca=str(callers.cert)) as world:
        good, stranger = callers.issue("two.example"), callers.issue("stranger.example")
        with world.session(world.security(token="", client_cert=str(good.both))) as session:
            assert session.namespace == ACME.namespace()
        with pytest.raises(ForbiddenError, match="two may name"):
            world.session(world.security(token="", client_cert=str(good.both)), RIVAL)
        with pytest.raises(UnauthenticatedError):
            world.session(world.security(token="", client_cert=str(stranger.cert), client_key=str(stranger.key)))
        with world.session(world.security(client_cert=str(stranger.both))):
            pass  # the token says who it is
        for cert in (callers.issue("two.example", is_expired=True, file="old"), world.authority.issue("two.example")):
            with pytest.raises(UnavailableError):
                world.session(world.security(client_cert=str(cert.both)))
        with pytest.raises(UnavailableError):
            world.session(world.security())


def test_a_new_certificate_of_the_node_is_used_from_the_next_connection_on(world: Guarded, tmp_path: Path) -> None:
    before = world.session()
    other = Authority(tmp_path / "other")
    new = other.issue("node")
    own = tmp_path / "ca" / "node.pem"
    own.write_text("no certificate")
    world.on_loop(world.guard.look)
    assert "cannot be used" in world.guard.problem
    world.session().close()  # the old one goes on
    (tmp_path / "ca" / "node.key").write_bytes(new.key.read_bytes())
    own.write_bytes(new.cert.read_bytes())
    world.on_loop(world.guard.look)
    assert not world.guard.problem
    world.session(world.security(tls_ca=str(other.cert))).close()
    with pytest.raises(UnavailableError):
        world.session()
    before.lookup([wire.PromptQuery(namespace=ACME.namespace())])
    before.close()


def test_calls_beyond_the_rate_are_refused_before_their_message_is_read(world: Guarded) -> None:
    world.allow(section("acme", '"acme"', more="calls_per_s = 5") + section("rival", '"rival"'))
    calls, metadata = stub(world)

    def ask_often() -> None:
        for _ in range(20):
            calls.Stats(wire.StatsRequest(), metadata=metadata, timeout=5)

    with pytest.raises(grpc.RpcError) as caught:
        ask_often()
    assert (caught.value.code(), code_of(caught.value)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE")
    other, others = stub(world, world.security("rival"))
    other.Stats(wire.StatsRequest(), metadata=others, timeout=5)


@pytest.mark.parametrize(("token", "code"), [("wrong", "UNAUTHENTICATED"), ("acme", "RATE")])
def test_who_is_refused_is_so_before_a_message_is_taken_in(world: Guarded, token: str, code: str) -> None:
    """A caller that sends its message never: the answer is there all the same."""
    world.allow(section("acme", '"acme"', more="calls_per_s = 0.001"))
    security, never = world.security(token), threading.Event()
    channel: Any = security.channel(world.grpc, ())

    def messages() -> Iterator[bytes]:
        never.wait(30)
        yield b""

    call = channel.stream_unary("/kvservice.wire.v1.CacheService/Lookup")
    for _ in range(2):  # spends what there is, and the debt that one call may make
        with pytest.raises(grpc.RpcError):
            call(iter([b""]), metadata=security.metadata(), timeout=5)
    with pytest.raises(grpc.RpcError) as caught:
        call(messages(), metadata=security.metadata(), timeout=10)
    never.set()
    assert code_of(caught.value) == code


def test_calls_over_the_data_socket_count_too(world: Guarded) -> None:
    world.allow(section("acme", '"acme"', more="calls_per_s = 10"))
    with world.session() as session:

        def ask_often() -> None:
            for _ in range(40):
                session.lookup([wire.PromptQuery(namespace=ACME.namespace())])

        with pytest.raises(RateError):
            ask_often()


def test_sessions_of_one_caller_are_limited(world: Guarded) -> None:
    world.allow(section("acme", '"acme"', more="sessions_max = 2"))
    with world.session(), world.session(), pytest.raises(LimitError, match="the limit is 2"):
        world.session()
    with world.session():
        pass


def test_a_message_that_is_too_large_is_refused(world: Guarded) -> None:
    calls, metadata = stub(world)
    request = wire.LookupRequest(prompts=[wire.PromptQuery(namespace=b"x" * (NETWORK_MESSAGE_BYTES_MAX + 1))])
    with pytest.raises(grpc.RpcError) as caught:
        calls.Lookup(request, metadata=metadata, timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bytes_that_are_no_message_are_named(world: Guarded) -> None:
    channel: Any = world.security().channel(world.grpc, ())
    call = channel.unary_unary("/kvservice.wire.v1.CacheService/Lookup")
    with pytest.raises(grpc.RpcError, match="are no LookupRequest") as caught:
        call(b"\xff\xff", metadata=world.security().metadata(), timeout=5)
    assert code_of(caught.value) == "INVALID_INPUT"


def test_the_unix_socket_asks_nobody_unless_the_file_says_so(world: Guarded) -> None:
    address = f"unix:{world.service.addresses.socket}"
    with world.session(NO_SECURITY, ACME, RIVAL, address=address) as session:
        world.allow(EVERYBODY + '[local]\nrole = "engine"\ntenants = ["acme"]\n')
        with pytest.raises(ENDED):
            session.lookup([])
    with pytest.raises(ForbiddenError, match="local may name acme"):
        world.session(NO_SECURITY, RIVAL, address=address)
    with world.session(NO_SECURITY, ACME, address=address):
        pass


def test_plaintext_on_loopback_needs_no_token_and_takes_one(tmp_path: Path) -> None:
    with guarded(tmp_path, tls_cert="", tls_key="") as world:
        with world.session(NO_SECURITY, RIVAL):
            pass
        with world.session(Security(TOKENS["acme"])):
            pass
        with pytest.raises(ForbiddenError):
            world.session(Security(TOKENS["acme"]), RIVAL)
        with pytest.raises(UnauthenticatedError):
            world.session(Security("wrong"))


def test_peers_on_this_machine_show_something_over_tls_and_need_not_in_plaintext(tmp_path: Path) -> None:
    here, caller = Credentials(is_local=True), Credentials(TOKENS["acme"], is_local=True)
    with guarded(tmp_path) as world:
        assert world.guard.authorize(caller).name == "acme"
        with pytest.raises(UnauthenticatedError):
            world.guard.authorize(here)
    with guarded(tmp_path, tls_cert="", tls_key="") as world:
        assert world.guard.authorize(here) is LOCAL


def test_a_token_never_crosses_a_network_in_the_clear(tmp_path: Path) -> None:
    for address in ("10.0.0.1:50151", "cache.example:50151", "127.evil.example:50151"):
        with pytest.raises(ConfigError, match="in the clear"):
            Security("secret").channel(address, ())
    for values in ({"client_cert": "x"}, {"client_key": "x", "tls_ca": "y"}):
        with pytest.raises(ConfigError):
            Security(**values)
    with pytest.raises(ConfigError, match="cannot read"):
        Security(tls_ca=str(tmp_path / "missing")).channel("localhost:1", ())
    assert "secret" not in repr(Security("secret"))
