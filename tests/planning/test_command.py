"""GET /plan, GET /curves and `kvservice plan`."""

import io
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from kvservice.__main__ import main
from kvservice.app import Service
from kvservice.config import Settings
from kvservice.planning.document import PlanDocument
from kvservice.planning.measuring import CurvesDocument
from kvservice.planning.planner import make_plan
from kvservice.planning.report import print_plan
from kvservice.planning.request import parse_request
from kvservice.stats.asking import message_of
from tests.planning.test_planner import CURVE, make_measured

MODEL = {"layers": "28", "heads": "28", "kv_heads": "4", "head_size": "128"}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    socket = tmp_path_factory.mktemp("plan") / "k.sock"
    with Service(Settings(socket=str(socket), grpc_port=-1, http_port=0, host_bytes=1 << 22)) as service:
        yield service.addresses.http_port


def get(port: int, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}", timeout=10) as reply:
        return json.load(reply)


def test_a_plan_has_its_schema_and_says_that_there_is_no_traffic(port: int) -> None:
    plan = get(port, "/plan", host="2x", ssd="1TiB")
    assert set(plan) == set(PlanDocument.__annotations__)
    assert plan["is_measured"] is False
    assert "no traffic yet" in plan["missing"]
    assert set(get(port, "/curves")) == set(CurvesDocument.__annotations__)


def test_a_what_if_is_answered_by_query(port: int) -> None:
    plan = get(port, "/plan", **MODEL, agents="32")
    assert plan["what_if"]["bytes_per_token"] == 57344
    assert plan["what_if"]["ratio"] > 4


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("plan?host=2y", "2x"),
        ("plan?hots=2x", "did you mean host"),
        ("plan?host=2x&host=3x", "once"),
        ("plan?tenant=nobody", "no lookups"),
        ("plan?layers=1&heads=100&hidden_size=10", "head_size"),
        ("plan?host=" + "9" * 400, "64GiB"),
        ("plan?agents=20", "layers"),
        ("curves?ssd=3x", "tenant, namespace"),
    ],
)
def test_bad_questions_are_answered_with_400_and_what_to_write(port: int, query: str, message: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/{query}", timeout=10)
    answer = json.load(caught.value)
    assert answer["error"] == "INVALID_INPUT"
    assert message in answer["message"]


def test_the_command_asks_a_node(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    address = ["plan", "--http", f"127.0.0.1:{port}"]
    assert main([*address, "--host", "2x"]) == 1
    assert "no traffic yet" in capsys.readouterr().out
    flags = [part for name, value in MODEL.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert main([*address, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["what_if"]["bytes_per_token"] == 57344


def test_the_command_answers_for_a_model_without_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"intermediate_size": 18944}))
    asked = ["plan", "--model", str(file), "--agents", "10", "--flops", "4e14", "--host", "64GiB"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    for words in ("A round", "56.0 KiB", "times less", "rounds in memory", "nothing here was measured"):
        assert words in " ".join(printed.split())
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 57344


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "much"], "64GiB"),
        (["--agents", "none"], "whole number"),
        (["--model", "/nowhere"], "cannot read"),
        (["--model", "/nowhere", "--ssd", "1TiB"], "there is no ssd"),
        (["--model", "/nowhere", "--host", "2x"], "no present size"),
        (["--http", "127.0.0.1:1", "--private-share", "3"], "0 to 1"),
    ],
)
def test_bad_flags_end_with_2_and_what_to_write(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_command_says_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--http", "127.0.0.1:1"]) == 1
    assert "kvservice serve" in capsys.readouterr().err


def test_a_measured_plan_is_printed_with_its_window_and_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(make_plan(make_measured(ssd_bytes=1 << 32), parse_request({"host": "2x"})))
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("planned", "30000 lookups", "working set", "+-", "times the SSD", "+1.0 GiB host memory"):
        assert words in printed


def test_names_of_tenants_are_printed_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    scope = "tenant [/x]\x1b[2J[red]"
    measured = make_measured(curve=replace(CURVE, name=scope), scope=scope, written_bytes_per_s=None)
    print_plan(make_plan(measured, parse_request({"tenant": scope, "ssd": "1TiB"})))
    print_plan(make_plan(make_measured(curve=None, scope=scope), parse_request({"tenant": scope})))
    printed = capsys.readouterr().out
    assert "\x1b[2J" not in printed
    assert printed.count("[/x]\ufffd[2J[red]") >= 3
    assert "as if it had the node alone" in " ".join(printed.split())


def test_what_a_node_refuses_with_is_printed_and_not_obeyed() -> None:
    body = io.BytesIO(json.dumps({"message": "There are: tenant \x1b[2J"}).encode())
    error = urllib.error.HTTPError("", 400, "", Message(), body)
    assert message_of(error) == "There are: tenant \ufffd[2J"
    error.close()


def test_an_estimate_of_wear_is_printed_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(make_plan(make_measured(written_bytes_per_s=None), parse_request({"ssd": "1TiB"})))
    assert "estimated from what is published" in " ".join(capsys.readouterr().out.split())
