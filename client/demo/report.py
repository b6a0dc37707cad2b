"""The demo's table: what a person should take away, and where the file with all of it lies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 1 << 20


def print_report(console: Console, facts: Mapping[str, Any], output: Path) -> None:
    """Print the facts that `run.play` gathered."""
    console.print()
    console.print(_main_table(facts))
    console.print(_quality_table(facts))
    console.print(f"All figures: [bold]{output}[/]")


def _main_table(facts: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"One round of {facts['agents']} agents, {facts['model']}", show_header=False, title_justify="left"
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    prompts, histories = facts["prompt_tokens"], facts["history_tokens"]
    table.add_row(
        "prompts",
        f"{min(prompts)}-{max(prompts)} tokens: {min(histories)}-{max(histories)} private, "
        f"{facts['shared_tokens']} shared",
    )
    dense, stored = facts["bytes_dense"] / MIB, facts["bytes_stored"] / MIB
    table.add_row("stored", f"{stored:.1f} MiB instead of {dense:.1f} MiB ({facts['round_ratio']:.1f}x less)")
    table.add_row("shared part", f"{facts['shared_ratio']:.1f}x less than {facts['agents']} dense copies")
    table.add_row(
        "mirrors",
        f"{facts['mirrors']}, about 1/{facts['mirror_ratio']:.0f} of a dense cache ({facts['selector']} refreshed)",
    )
    table.add_row("restored", "every bit of every agent" if facts["exact"] else "[red]BITS DIFFER[/]")
    table.add_row(
        "restore speed",
        f"{facts['restore_gb_s']:.1f} GB/s, {facts['restore_over_memcpy']:.2f} of memcpy "
        f"({facts['memcpy_gb_s']:.1f} GB/s)",
    )
    table.add_row(
        "next tokens",
        f"{facts['agreement_full']:.1%} as after a full prefill, "
        f"{facts['agreement_reuse_restored']:.0%} as before the drop",
    )
    return table


def _quality_table(facts: Mapping[str, Any]) -> Table:
    table = Table(title="What reuse costs, against a full prefill", title_justify="left")
    table.add_column("refreshed rows")
    table.add_column("KL, nats", justify="right")
    table.add_column("equal next tokens", justify="right")
    table.add_row(f"{facts['selector']}, as stored", f"{facts['kl_full']:.4f}", f"{facts['agreement_full']:.1%}")
    for name, found in facts["quality"].items():
        table.add_row(name, f"{found['kl']:.4f}", f"{found['agreement']:.1%}")
    return table
