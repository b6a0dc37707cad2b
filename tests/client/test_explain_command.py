"""`kvservice explain`: two identities, and a prompt against a running node. Exit status 0 well, 1 not, 2 bad usage."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvservice.__main__ import main
from kvservice.app import Service
from kvservice.client import Client, PartKind, RoundPrompt
from kvservice.client.connectors.vllm.request_extras import request_extra
from kvservice.client.explain_command import Question, read_adapter, read_tokens
from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Identity
from kvservice.model.segment import root_context
from tests.client.builders import Engine, free_port, make_identity, make_settings, make_tokens

IDENTITY = make_identity()
TOKENS = make_tokens(20)


def write(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def identity_file(folder: Path, identity: Identity = IDENTITY, name: str = "a.json") -> str:
    return write(folder, name, identity.canonical_json() + "\n")


# Two identities


def test_equal_identities_are_one_namespace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretty = write(tmp_path, "b.json", json.dumps(json.loads(IDENTITY.canonical_json()), indent=1))
    assert main(["explain", identity_file(tmp_path), pretty]) == 0
    assert capsys.readouterr().out.startswith("same namespace ")


def test_what_differs_is_printed_a_line_a_field_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = identity_file(tmp_path)
    right = identity_file(tmp_path, replace(IDENTITY, weights="r2", tenant="other"), "b.json")
    assert main(["explain", left, right]) == 1
    head, tenant, weights = capsys.readouterr().out.splitlines()
    assert "share nothing" in head
    assert tenant.startswith(f'  tenant: "test" in {left}, "other" in {right}; ')
    assert "the same `weights` option" in weights
    assert main(["explain", left, right, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["is_same"]
    assert [one["field"] for one in document["differences"]] == ["tenant", "weights"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "missing fields"),
        ("no json", "identity is no JSON"),
        ("[1]", "must be an object"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_identity_is_bad_usage(
    content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = str(tmp_path / "b.json") if content is None else write(tmp_path, "b.json", content)
    assert main(["explain", identity_file(tmp_path), wrong]) == 2
    said = capsys.readouterr()
    assert (says in said.err, wrong in said.err, said.out) == (True, True, "")


@pytest.mark.parametrize("arguments", [[], ["{a}"], ["{a}", "{a}", "{a}"], ["--identity", "{a}"], ["--tokens", "{a}"]])
def test_neither_form_is_bad_usage(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = identity_file(tmp_path)
    assert main(["explain", *(one.format(a=file) for one in arguments)]) == 2
    assert "two files of identities; or --identity" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "--socket", "a", "--node", "b"])
    assert stopped.value.code == 2


# A prompt and a node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[list[str]]:
    """Arguments that name a node which holds chunks of 8 of the first 16 tokens."""
    settings = make_settings(tmp_path, grpc_port=free_port())
    with Service(settings):
        with Client.connect(f"unix:{settings.socket}", IDENTITY) as client:
            parts = [(PartKind.PRIVATE, TOKENS[:16])]
            prompt = RoundPrompt.from_parts(IDENTITY.namespace(), parts, chunk_tokens=8)
            engine = Engine(IDENTITY.geometry)
            client.store(prompt, engine.planes, engine.allocate(prompt.token_count))
        yield ["--socket", settings.socket, "--identity", identity_file(tmp_path), "--chunk-tokens", "8"]


def ask(node: list[str], tmp_path: Path, tokens: str, *more: str) -> int:
    return main(["explain", *node, "--tokens", write(tmp_path, "tokens", tokens), *more])


def test_a_prompt_that_is_held_is_found(node: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(node, tmp_path, json.dumps(TOKENS[:16])) == 0
    printed = capsys.readouterr().out
    assert "segments 0-1, tokens 0-16: found exact, in memory, a master" in printed
    assert "exact reuse along the prompt: 16 of 16 tokens" in printed


def test_a_prompt_that_is_held_in_part_says_where_it_ends(
    node: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(node, tmp_path, " ".join(map(str, TOKENS))) == 1
    printed = capsys.readouterr().out
    assert "segment 2, tokens 16-20: never stored, and nothing held has 4 tokens, but 8 tokens (2)" in printed
    assert "16 of 20 tokens; it ends before segment 2" in printed
    assert ask(node, tmp_path, " ".join(map(str, TOKENS)), "--block-size", "8") == 0, "4 tokens are no block"
    assert ask(node, tmp_path, json.dumps(TOKENS), "--json") == 1
    capsys.readouterr()
    ask(node, tmp_path, json.dumps(TOKENS), "--json")
    document = json.loads(capsys.readouterr().out)
    assert (document["is_found"], document["exact_prefix_tokens"], document["tokens"]) == (False, 16, 20)
    assert [one["reason"] for one in document["segments"]] == ["FOUND", "FOUND", "OTHER_LENGTHS"]
    assert document["segments"][0]["found"]["tiers"] == ["HOST"]


def test_tokens_may_come_from_standard_input(
    node: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(",".join(map(str, TOKENS[:8])) + "\n"))
    assert main(["explain", *node, "--tokens", "-"]) == 0
    assert "found exact" in capsys.readouterr().out


def test_a_salt_or_an_adapter_leads_elsewhere(
    node: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (["--salt", "mine"], ["--adapter", "sql=1f"]):
        assert ask(node, tmp_path, json.dumps(TOKENS[:8]), *more) == 1
        assert "at position 0, behind the same segments: what differs is no token" in capsys.readouterr().out


def test_over_loopback_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with Service(make_settings(tmp_path, grpc_port=port)):
        where = ["--node", f"127.0.0.1:{port}", "--identity", identity_file(tmp_path)]
        assert ask(where, tmp_path, "1 2 3") == 1
    assert "nothing is stored for this identity" in capsys.readouterr().out


def test_a_node_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--socket", str(tmp_path / "none"), "--identity", identity_file(tmp_path)]
    assert ask(where, tmp_path, "1") == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "more", "says"),
    [
        ("", [], "there are no token ids"),
        ("1 two", [], "'two' is no token id"),
        ("1 -2", [], "'-2' is no token id"),
        ("[1, 2.5]", [], "'2.5' is no token id"),
        ("1" * 5000, [], "is no token id"),
        (str(1 << 32), [], "token ids must be integers of 0 to"),
        ("1 2", ["--block-size", "4"], "2 tokens make no block of 4"),
        ("1 2", ["--block-size", "3"], "multiple of the block size"),
        ("1 2", ["--chunk-tokens", "0"], "chunks of 0 tokens"),
        ("1 2", ["--adapter", "sql"], "give NAME=DIGEST"),
    ],
)
def test_what_cannot_be_asked_is_bad_usage(
    tokens: str, more: list[str], says: str, node: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(node, tmp_path, tokens, *more) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3\n", "1,2,3,", "[1,\n 2,\n 3]\n"])
def test_tokens_are_read_in_any_usual_form(text: str, tmp_path: Path) -> None:
    assert read_tokens(write(tmp_path, "t", text)) == [1, 2, 3]


def test_an_adapter_is_a_name_and_a_digest() -> None:
    assert read_adapter("") == ()
    assert read_adapter("a=b=1f") == ("a=b", "1f")
    for wrong in ("a", "=1f", "a="):
        with pytest.raises(InvalidInputError):
            read_adapter(wrong)


def test_keys_are_those_that_the_connector_makes() -> None:
    question = Question(IDENTITY, TOKENS, 8, 4, "salt", ("sql", "1f"))
    namespace = IDENTITY.namespace()
    segments = question.queries()[0](namespace).segments
    assert [(one.position, one.tokens) for one in segments] == [(0, 8), (8, 8), (16, 4)]
    root = root_context(namespace, request_extra("salt", "sql", "1f"))
    assert segments[0].accepted_contexts == [root.cache_key(segments[0].segment).context]  # type: ignore[arg-type]
    second = root.extend(segments[0].segment, 8)  # type: ignore[arg-type]
    assert segments[1].accepted_contexts == [second.cache_key(segments[1].segment).context]  # type: ignore[arg-type]


def test_it_needs_no_torch(node: list[str], tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from kvservice.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    tokens = write(tmp_path, "t", json.dumps(TOKENS[:16]))
    command: list[Any] = [sys.executable, "-P", "-c", script, "explain", *node, "--tokens", tokens]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "found exact" in done.stdout
