"""A plan in words: what more memory or SSD brings, where it stops, what the disk bears. Pure."""

from collections.abc import Callable

from kvservice.planning.document import BreakEvenDocument, EnduranceDocument, SizesDocument
from kvservice.text import text_of_bytes

GAIN_MIN = 0.01
"""Hits that a doubling must bring to be worth a word."""
DOUBLINGS_MAX = 12
HOUR_S = 3600.0
PUBLISHED = "published"
"""What an estimate of wear rests on where there is no SSD."""
Sizes = Callable[[int, int], SizesDocument]


def advise(
    now: SizesDocument,
    planned: SizesDocument,
    sizes: Sizes,
    endurance: EnduranceDocument | None,
    break_even: BreakEvenDocument | None,
) -> list[str]:
    """Sentences, the most telling first; never empty."""
    said = []
    if (planned["host_bytes"], planned["ssd_bytes"]) != (now["host_bytes"], now["ssd_bytes"]):
        said.append(_difference(now, planned, sizes))
    else:
        said.append(_next_step(now, sizes, "host"))
        if now["ssd_bytes"] > now["host_bytes"]:
            said.append(_next_step(now, sizes, "ssd"))
    if endurance is not None and (endurance["life_share"] > 1 or endurance["rests_on"] == PUBLISHED):
        said.append(_wear(endurance))
    if break_even is not None:
        said += _loading(break_even)
    return said


def _wear(endurance: EnduranceDocument) -> str:
    said = f"the SSD would be written {endurance['dwpd']:.2g} times a day, rated for {endurance['rated_dwpd']:g}"
    if endurance["rests_on"] == PUBLISHED:
        said += ", estimated from what is published, as there is none yet and as if all of it were written"
    return f"{said}: set ssd_write_budget_bytes, or take a larger one" if endurance["life_share"] > 1 else said


def _difference(now: SizesDocument, planned: SizesDocument, sizes: Sizes) -> str:
    """``+64.0 GiB host memory: +11.0 % hits (+-0.4), 3.1 prefill seconds saved per second; more brings under 1 %``."""
    text = f"{_change(now, planned)}: {_gain(now, planned)}"
    for doubling in range(1, DOUBLINGS_MAX + 1):
        times = 1 << doubling
        gain = sizes(planned["host_bytes"] * times, planned["ssd_bytes"] * times)["hit_ratio"] - planned["hit_ratio"]
        if gain >= GAIN_MIN:
            far = "twice as much again" if times == 2 else f"less than {times} times as much again under 1 %, that much"
            return f"{text}; {far}: {gain * 100:+.1f} % hits"
    return f"{text}; more brings under 1 %"


def _change(now: SizesDocument, planned: SizesDocument) -> str:
    parts = []
    for before, after, name in (
        (now["host_bytes"], planned["host_bytes"], "host memory"),
        (now["ssd_bytes"], planned["ssd_bytes"], "SSD"),
    ):
        if after != before:
            parts.append(f"{'+' if after > before else '-'}{text_of_bytes(abs(after - before))} {name}")
    return " and ".join(parts)


def _gain(now: SizesDocument, then: SizesDocument) -> str:
    hits = then["hit_ratio"] - now["hit_ratio"]
    seconds = (then["prefill_saved_s_per_hour"] - now["prefill_saved_s_per_hour"]) / HOUR_S
    error = max(now["error"], then["error"])
    kind = "saved" if seconds >= 0 else "lost"
    faster = then["host_hit_ratio"] - now["host_hit_ratio"]
    moved = f" ({faster * 100:+.1f} % from memory)" if abs(faster - hits) >= GAIN_MIN else ""
    return (
        f"{hits * 100:+.1f} % hits{moved} (+-{error * 100:.1f}), {abs(seconds):.2g} prefill seconds {kind} per second"
    )


def _next_step(now: SizesDocument, sizes: Sizes, tier: str) -> str:
    """The last doubling that still brings something, also behind some that bring nothing; or that none does."""
    host, ssd = now["host_bytes"], now["ssd_bytes"]
    paying, before = list[SizesDocument](), now
    for doubling in range(1, DOUBLINGS_MAX + 1):
        then = sizes(host << doubling, ssd) if tier == "host" else sizes(host, ssd << doubling)
        if _value(then, tier) - _value(paying[-1] if paying else now, tier) >= GAIN_MIN:
            paying.append(then)
        elif not paying:
            before = then
    if not paying:
        name = "host memory" if tier == "host" else "SSD"
        half = sizes(host // 2, ssd) if tier == "host" else None
        less = "; half of it would do" if half is not None and _value(now, tier) - _value(half, tier) < GAIN_MIN else ""
        return f"twice the {name} brings under 1 %{less}"
    first, last = paying[0], paying[-1]
    steps = [first, last] if before is not now and last is not first else [last]
    flat = f"{_change(now, before)} brings under 1 %; " if before is not now else ""
    said = "; ".join(f"{_change(now, then)}: {_gain(now, then)}" for then in steps)
    return f"{flat}{said}; more brings under 1 %"


def _value(sizes: SizesDocument, tier: str) -> float:
    return sizes["host_hit_ratio"] if tier == "host" else sizes["hit_ratio"]


def _loading(break_even: BreakEvenDocument) -> list[str]:
    wanted, ssd = break_even["bandwidth_bytes_per_s"], break_even["ssd_bytes_per_s"]
    how = "" if break_even["is_prefill_measured"] else " (assumed: no writer said how long prefill took)"
    speed = f"{break_even['prefill_tokens_per_s']:.0f} tokens a second{how}"
    said = f"loading pays above {text_of_bytes(wanted)} a second, at {speed}"
    if ssd is None:
        return [said]
    verdict = "quicker than prefill" if ssd > wanted else "slower than prefill: keep more in memory"
    return [f"{said}; records came from SSD at {text_of_bytes(ssd)} a second each, {verdict}"]
