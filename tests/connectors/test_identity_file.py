"""An engine's identity in a file: what `kvservice explain` reads again; a file that cannot be written stops nothing."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.client.connectors.vllm.identity_file import identity_path, write_identities
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.explain_command import compare
from kvservice.model.identity import Shard, identity_from_json
from tests.client.builders import make_identity

IDENTITY = make_identity()


def test_every_rank_has_a_file_that_can_be_compared(tmp_path: Path) -> None:
    ranks = [replace(IDENTITY, shard=Shard(rank, 2)) for rank in range(2)]
    file = str(tmp_path / "engine.json")
    write_identities(file, ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.1.json", "engine.json"]
    for rank, identity in enumerate(ranks):
        assert identity_from_json(identity_path(file, rank).read_text()) == identity
    assert compare(file, file, as_json=False)[0] == 0
    status, text = compare(file, str(identity_path(file, 1)), as_json=False)
    assert status == 1
    assert "shard.tp_rank: 0 in" in text


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text("of before")
    write_identities(str(file), [IDENTITY])
    assert file.read_text() == IDENTITY.canonical_json() + "\n"


@pytest.mark.parametrize("file", ["", "{folder}/engine.json", "{folder}/missing/engine.json"])
def test_digests_are_logged_and_an_unwritable_file_raises_nothing(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.kvservice"):
        write_identities(file.format(folder=tmp_path), [IDENTITY])
    assert f"identity of rank 0: namespace {IDENTITY.namespace().hex()}" in caplog.text
    assert ("written to" in caplog.text) == (file == "{folder}/engine.json")
    assert ("cannot be written" in caplog.text) == ("missing" in file)


def test_the_option_names_the_file() -> None:
    address = "unix:/run/kvservice.sock"
    assert ConnectorOptions.of({"address": address}, 16).identity_file == ""
    assert ConnectorOptions.of({"address": address, "identity_file": "/tmp/e.json"}, 16).identity_file == "/tmp/e.json"
