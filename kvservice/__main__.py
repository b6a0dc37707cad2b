"""The ``kvservice`` command: serve, demo, doctor, drain, explain, members, plan, stats, top. Names both sides, imports
each only when asked to.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvservice import __version__
from kvservice.config import Settings, add_flags, settings_from_flags, user_cache_folder
from kvservice.model.errors import InvalidInputError, KVServiceError
from kvservice.planning.flags import add_flags as add_plan_flags
from kvservice.stats import asking

if TYPE_CHECKING:
    from kvservice.client.explain_command import Question

HTTP_TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 the command found something wrong, 2 bad usage."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except KVServiceError as error:
        print(f"kvservice: {error.code}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvservice", description="KV-cache storage for multi-agent LLM inference")
    parser.add_argument("--version", action="version", version=f"kvservice {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run a cache node until it is told to stop")
    add_flags(serve)
    serve.set_defaults(run=_serve)
    stats = commands.add_parser("stats", help="print what a running node holds")
    asking.add_flags(stats)
    stats.add_argument("--json", action="store_true", help="the whole document, for programs")
    stats.set_defaults(run=_stats)
    top = commands.add_parser("top", help="watch a running node in a terminal")
    asking.add_flags(top)
    top.add_argument("--interval", default="2", metavar="SECONDS", help="between two frames (2)")
    top.add_argument("--once", action="store_true", help="one frame of plain text, and no more")
    top.set_defaults(run=_top)
    log = commands.add_parser("log", help="the request log of a running node, see setting log_segments")
    export = log.add_subparsers(required=True, metavar="COMMAND").add_parser("export", help="write it to a file")
    export.add_argument("file", type=Path, metavar="FILE", help="ends in .parquet or .arrow; what is there is replaced")
    asking.add_flags(export)
    export.set_defaults(run=_export_log)
    plan = commands.add_parser(
        "plan", help="what would more memory or SSD bring; or what a round takes, before traffic"
    )
    asking.add_flags(plan)
    add_plan_flags(plan)
    plan.set_defaults(run=_plan)
    _add_admin_commands(commands)
    _add_client_commands(commands)
    return parser


def _add_admin_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    drain = commands.add_parser("drain", help="have a node give away what only it has, before it is stopped")
    drain.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="at most (60)")
    drain.set_defaults(run=_drain)
    members = commands.add_parser("members", help="the shared nodes, as a running node sees them")
    members.add_argument("--json", action="store_true", help="the whole answer, for programs")
    members.set_defaults(run=_members)
    for parser in (drain, members):
        parser.add_argument("--socket", default=str(Settings().socket_path), metavar="PATH", help="of the node")


def _add_client_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser("demo", help="store a round of agents once, restore every one of them exactly")
    demo.add_argument("--tiny", action="store_true", help="a small random model: seconds, and no download")
    demo.add_argument("--agents", type=int, default=8, metavar="N")
    demo.add_argument("--ratio", type=float, default=0.02, help="share of the shared rows that is refreshed")
    demo.add_argument("--output", type=Path, default=Path("build/demo.json"), metavar="FILE")
    demo.add_argument("--cache", type=Path, default=user_cache_folder(), metavar="FOLDER", help="converted models")
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser("doctor", help="prove a round trip against a running node, or say what is wrong")
    doctor.add_argument("--socket", default=str(Settings().socket_path), metavar="PATH")
    doctor.set_defaults(run=_doctor)
    _add_explain(commands)


def _add_explain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    explain = commands.add_parser(
        "explain",
        help="why was there no hit: what keeps two identities apart, or what became of a prompt's caches",
        description="With two files: what keeps two identities apart. With --identity and --tokens: what became of "
        "every segment of a prompt on a running node. Exit status: 0 equal or all found, 1 not, 2 bad usage.",
    )
    explain.add_argument("files", nargs="*", metavar="IDENTITY.json", help="two identities to compare")
    explain.add_argument("--identity", metavar="FILE", help="whose prompt it is; vLLM's connector writes identity_file")
    explain.add_argument("--tokens", metavar="FILE", help="the prompt's token ids: a JSON list or numbers; - for stdin")
    where = explain.add_mutually_exclusive_group()
    where.add_argument("--socket", default=str(Settings().socket_path), metavar="PATH", help="of the node")
    where.add_argument("--node", metavar="HOST:PORT", help="of the node, on this host")
    asking.add_secret_flags(explain, "with --node: file:PATH")
    explain.add_argument("--chunk-tokens", type=int, default=256, metavar="N", help="tokens of a segment (256)")
    explain.add_argument(
        "--block-size", type=int, default=1, metavar="N", help="of the engine: segments are whole blocks"
    )
    explain.add_argument(
        "--request", metavar="FILE", help="the request's JSON, or its kv_transfer_params: what it says of its round"
    )
    explain.add_argument("--salt", default="", metavar="TEXT", help="the request's cache_salt")
    explain.add_argument("--adapter", default="", metavar="NAME=DIGEST", help="the request's LoRA adapter")
    explain.add_argument("--json", action="store_true", help="the whole answer, for programs")
    explain.set_defaults(run=_explain)


def _serve(parsed: argparse.Namespace) -> int:
    from kvservice.app import Addresses, serve

    settings = settings_from_flags(parsed)
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def announce(addresses: Addresses) -> None:
        line = f"kvservice {__version__}: unix:{addresses.socket}, gRPC port {addresses.grpc_port}, "
        line += f"HTTP port {addresses.http_port}, host arena {settings.host_bytes} bytes"
        line += f", peer port {addresses.peer_port}" if addresses.peer_port else ""
        line += f", SSD {settings.ssd_folder} of {settings.ssd_bytes} bytes" if settings.ssd_folder else ", no SSD"
        print(line, flush=True)

    asyncio.run(serve(settings, announce))
    return 0


def _stats(parsed: argparse.Namespace) -> int:
    from kvservice.stats.report import print_stats

    try:
        document = asking.HttpNode.of_flags(parsed).answer("/stats", HTTP_TIMEOUT_S)
    except InvalidInputError as error:
        print(f"kvservice stats: {error}", file=sys.stderr)
        return 2
    if parsed.json:
        print(json.dumps(document, indent=2))
    else:
        print_stats(document)
    return 0


def _top(parsed: argparse.Namespace) -> int:
    from kvservice.top import run

    try:
        return run(parsed)
    except InvalidInputError as error:
        print(f"kvservice top: {error}", file=sys.stderr)
        return 2


def _export_log(parsed: argparse.Namespace) -> int:
    from kvservice.stats.log_command import export

    try:
        print(export(asking.HttpNode.of_flags(parsed), parsed.file))
    except InvalidInputError as error:
        print(f"kvservice log: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(parsed: argparse.Namespace) -> int:
    from kvservice.planning.command import run

    try:
        return run(parsed)
    except InvalidInputError as error:
        print(f"kvservice plan: {error}", file=sys.stderr)
        return 2


def _drain(parsed: argparse.Namespace) -> int:
    from kvservice.sharing.command import drain

    status, text = drain(parsed.socket, parsed.timeout)
    print(text)
    return status


def _members(parsed: argparse.Namespace) -> int:
    from kvservice.sharing.command import members

    print(members(parsed.socket, as_json=parsed.json))
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    try:
        from kvservice.client.demo.run import DemoSettings, run_demo
    except ModuleNotFoundError as error:
        print(f"kvservice: the demo needs {error.name}: pip install 'kvservice[demo]'", file=sys.stderr)
        return 1

    settings = DemoSettings(
        agents=parsed.agents, ratio=parsed.ratio, is_tiny=parsed.tiny, output=parsed.output, cache=parsed.cache
    )
    return run_demo(settings)


def _doctor(parsed: argparse.Namespace) -> int:
    from kvservice.client.doctor import run_doctor

    return run_doctor(parsed.socket)


def _explain(parsed: argparse.Namespace) -> int:
    from kvservice.client import explain_command as command

    try:
        if len(parsed.files) == 2 and not (parsed.identity or parsed.tokens):
            status, text = command.compare(*parsed.files, as_json=parsed.json)
        else:
            where = command.Where(
                parsed.socket, parsed.node or "", parsed.token, parsed.ca, parsed.client_cert, parsed.client_key
            )
            status, text = command.ask(where, _question(parsed), as_json=parsed.json)
    except InvalidInputError as error:
        print(f"kvservice explain: {error}", file=sys.stderr)
        return 2
    print(text)
    return status


def _question(parsed: argparse.Namespace) -> "Question":
    from kvservice.client import explain_command as command

    if parsed.files or not (parsed.identity and parsed.tokens):
        raise InvalidInputError("give two files of identities; or --identity FILE and --tokens FILE")
    tokens = command.read_tokens(parsed.tokens)
    return command.Question(
        command.read_identity(parsed.identity),
        tokens,
        parsed.chunk_tokens,
        parsed.block_size,
        parsed.salt,
        command.read_adapter(parsed.adapter),
        command.read_words(parsed.request, len(tokens)) if parsed.request else None,
    )


if __name__ == "__main__":
    sys.exit(main())
