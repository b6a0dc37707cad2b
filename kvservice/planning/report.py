"""A plan as tables for people."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvservice.planning.advice import PUBLISHED
from kvservice.planning.document import PlanDocument, SizesDocument, WhatIfDocument
from kvservice.text import printable, text_of_bytes


def print_plan(document: PlanDocument, console: Console | None = None) -> None:
    """Print what GET /plan answered."""
    (console or Console()).print(plan_tables(document))


def print_what_if(document: WhatIfDocument, console: Console | None = None) -> None:
    """Print the closed forms of a round."""
    (console or Console()).print(what_if_table(document))


def plan_tables(document: PlanDocument) -> RenderableType:
    """Sizes, storage, the what-if, and the advice."""
    parts: list[RenderableType] = []
    now, planned = document["now"], document["planned"]
    if now is not None and planned is not None:
        parts += [_sizes(document, now, planned), _storage(document)]
    if document["what_if"] is not None:
        parts.append(what_if_table(document["what_if"], document["what_if_of"]))
    return Group(*parts, *(_text(f"- {line}") for line in document["advice"]))


def _text(words: str) -> Text:
    """Words that may hold a client's: neither rich nor the terminal obeys them."""
    return Text(printable(words))


def _sizes(document: PlanDocument, now: SizesDocument, planned: SizesDocument) -> Table:
    table = Table("", "memory", "SSD", "hits in memory", "on SSD", "all hits", "prefill saved an hour", title="Plan")
    for name, sizes in (("now", now), ("planned", planned)):
        table.add_row(
            name,
            text_of_bytes(sizes["host_bytes"]),
            text_of_bytes(sizes["ssd_bytes"]) if sizes["ssd_bytes"] else "none",
            f"{sizes['host_hit_ratio']:.1%}",
            f"{sizes['ssd_hit_ratio']:.1%}",
            f"{sizes['hit_ratio']:.1%} +- {sizes['error']:.1%}",
            f"{sizes['prefill_saved_s_per_hour']:.0f} s",
        )
    window, observed = document["window"], document["observed_hit_ratio"]
    if window is not None:
        seen = "" if observed is None else f"; found since the start: {observed:.1%}"
        alone = ", as if it had the node alone" if document["assumes"] else ""
        table.caption = _text(
            f"{window['scope']}{alone}: {window['references']} lookups of segments in {window['seconds']:.0f} s, "
            f"{window['segments_watched']} segments watched ({window['rate']:.2%}), {now['policy']}{seen}"
        )
    return table


def _storage(document: PlanDocument) -> Table:
    table = Table("what", "how it stands", title="Storage", show_header=False)
    storage, endurance = document["storage"], document["endurance"]
    if storage is not None:
        known = [storage["bytes_per_token"], storage["dense_bytes_per_token"]]
        stored, dense = ("unknown" if one is None else text_of_bytes(one) for one in known)
        table.add_row("bytes a token", f"{stored} stored, {dense} dense")
        gain = storage["mirror_gain"]
        table.add_row("mirrors", "unknown" if gain is None else f"{gain:.1f} times their own bytes")
        table.add_row(
            "found on storing",
            "unknown" if storage["dedup_gain"] is None else f"{storage['dedup_gain']:.2f} wanted for each written",
        )
        sizes = ", ".join(f"{share} {text_of_bytes(size)}" for share, size in storage["working_set_bytes"].items())
        table.add_row("working set", sizes)
    if endurance is not None:
        written = f"{text_of_bytes(endurance['written_bytes_per_day'])} a day, {endurance['dwpd']:.2g} times the SSD"
        rests = ", estimated from what is published" if endurance["rests_on"] == PUBLISHED else ""
        table.add_row("writes", f"{written} (rated {endurance['rated_dwpd']:g}){rests}")
    return table


def what_if_table(document: WhatIfDocument, of: str = "") -> Table:
    """The closed forms; ``of``: whose model it is."""
    table = Table("what", "by closed forms", title="A round", show_header=False)
    table.add_row("bytes a token", text_of_bytes(document["bytes_per_token"]))
    table.add_row("dense", text_of_bytes(document["dense_bytes"]))
    limit = (
        "without limit"
        if document["ratio_limit"] is None
        else f"at most {document['ratio_limit']:.1f} with more agents"
    )
    table.add_row("stored", f"{text_of_bytes(document['stored_bytes'])}, {document['ratio']:.1f} times less, {limit}")
    table.add_row("a mirror", text_of_bytes(document["mirror_bytes"]))
    table.add_row("prefill", f"{document['prefill_tokens']} tokens of {document['prefill_tokens_without']}")
    if document["prefill_saved_s"] is not None:
        table.add_row("saved a round", f"{document['prefill_saved_s']:.2f} s")
    if document["break_even_bytes_per_s"] is not None:
        table.add_row("loading pays above", f"{text_of_bytes(document['break_even_bytes_per_s'])} a second")
    if document["rounds_in_host"] is not None:
        table.add_row("rounds in memory", f"{document['rounds_in_host']:.1f}")
    table.caption = _text("; ".join([*([f"of {of}"] if of else []), *document["notes"]]))
    return table
