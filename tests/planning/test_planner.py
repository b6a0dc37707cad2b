"""Plans from measured curves: what they say, what they do not dare to say, and whether it comes true."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.curves.histogram import EDGES
from kvservice.curves.sample import Sample
from kvservice.curves.scopes import ScopeCurve
from kvservice.curves.simulation import PolicySimulation, SimulatedPoint
from kvservice.model.errors import InvalidInputError
from kvservice.orders import LOAD_RATES
from kvservice.planning.model_config import ModelShape
from kvservice.planning.planner import Expectation, Measured, RegisteredModel, make_plan
from kvservice.planning.request import PlanRequest, parse_request
from kvservice.storage.eviction import ValueOrder
from tests.curves.builders import events_of, is_reference, make_sizes, make_space, play, zipf
from tests.curves.test_simulation import whole_cache

SEGMENTS, REFERENCES = 4000, 30_000
GIB = 1 << 30


def make_curve(records_max: int = 1 << 20, window_s: float = 600.0) -> ScopeCurve:
    events = events_of(make_space(), zipf(SEGMENTS, REFERENCES, 0.8), make_sizes(SEGMENTS))
    sample, distances = play(events, records_max, GIB)
    return ScopeCurve(
        "node",
        distances.curve(sample),
        window_s,
        REFERENCES,
        sample.records.segments,
        sample.rate,
        distances.bytes,
        4096.0,
        window_s,
    )


CURVE = make_curve()


def make_measured(**changes: Any) -> Measured:
    measured = Measured(
        host_bytes=GIB, ssd_bytes=0, half_life_s=21600.0, curve=CURVE, points=(), asked=1000, found=500, token_s=1e-4,
        is_token_s_measured=True, token_bytes=57344, ssd_load_bytes_per_s=0.0, written_bytes_per_s=1e6,
        published_bytes_per_s=5e6, stored_bytes=GIB, dense_bytes=3 * GIB, wanted=300, written=100,
    )  # fmt: skip
    return replace(measured, **changes)


def test_more_memory_finds_what_the_curve_says_and_saves_its_seconds() -> None:
    plan = make_plan(make_measured(), PlanRequest(host="2x"))
    now, planned = plan["now"], plan["planned"]
    assert now is not None
    assert planned is not None
    assert plan["is_measured"]
    assert planned["host_bytes"] == 2 * GIB
    assert now["hit_ratio"] == pytest.approx(CURVE.curve.hit_ratio(GIB), abs=1e-4)
    assert planned["hit_ratio"] == pytest.approx(CURVE.curve.hit_ratio(2 * GIB), abs=1e-4)
    seconds = REFERENCES / 600 * 3600 * CURVE.curve.seconds_each
    assert planned["prefill_saved_s_per_hour"] + planned["prefill_lost_s_per_hour"] == pytest.approx(seconds)
    assert plan["advice"][0].startswith("+1.0 GiB host memory: +")
    assert "prefill seconds saved per second" in plan["advice"][0]
    assert plan["window"] is not None
    assert plan["window"]["references"] == REFERENCES


def test_an_ssd_finds_what_memory_does_not() -> None:
    planned = make_plan(make_measured(), PlanRequest(ssd="8GiB"))["planned"]
    assert planned is not None
    assert planned["host_hit_ratio"] == pytest.approx(CURVE.curve.hit_ratio(GIB), abs=1e-4)
    assert planned["hit_ratio"] == pytest.approx(CURVE.curve.hit_ratio(8 * GIB), abs=1e-4)
    assert planned["ssd_hit_ratio"] == pytest.approx(planned["hit_ratio"] - planned["host_hit_ratio"], abs=1e-3)


def test_without_a_question_the_advice_names_the_last_step_that_pays() -> None:
    advice = make_plan(make_measured(), PlanRequest())["advice"][0]
    assert advice.endswith("more brings under 1 %")
    advice = make_plan(make_measured(host_bytes=1 << 36), PlanRequest())["advice"][0]
    assert advice == "twice the host memory brings under 1 %; half of it would do"


def test_less_memory_is_said_to_lose() -> None:
    advice = make_plan(make_measured(), PlanRequest(host="0.25x"))["advice"][0]
    assert advice.startswith("-768.0 MiB host memory: -")
    assert "lost per second" in advice


def test_writes_follow_the_misses_and_wear_is_said_where_it_is_too_much() -> None:
    plan = make_plan(make_measured(ssd_bytes=2 * GIB), PlanRequest(ssd="2x", rated_dwpd=3.0))
    endurance, now, planned = plan["endurance"], plan["now"], plan["planned"]
    assert endurance is not None
    assert now is not None
    assert planned is not None
    written = 86400e6 * (1 - planned["hit_ratio"]) / (1 - now["hit_ratio"])
    assert endurance["written_bytes_per_day"] == pytest.approx(written)
    assert endurance["dwpd"] == pytest.approx(written / (4 * GIB))
    assert endurance["life_share"] == pytest.approx(endurance["dwpd"] / 3)
    assert any("rated for 3" in line for line in plan["advice"])
    assert endurance["rests_on"] == "written"
    assert make_plan(make_measured(), PlanRequest())["endurance"] is None


def test_wear_of_an_ssd_that_is_not_there_rests_on_what_is_published_and_says_so() -> None:
    plan = make_plan(make_measured(written_bytes_per_s=None), PlanRequest(ssd="1TiB"))
    endurance, now, planned = plan["endurance"], plan["now"], plan["planned"]
    assert endurance is not None
    assert now is not None
    assert planned is not None
    written = 5e6 * 86400 * (1 - planned["hit_ratio"]) / (1 - now["hit_ratio"])
    assert endurance["written_bytes_per_day"] == pytest.approx(written)
    assert endurance["rests_on"] == "published"
    assert any("estimated from what is published" in line for line in plan["advice"])


def test_wear_is_unknown_where_nothing_was_published() -> None:
    plan = make_plan(make_measured(written_bytes_per_s=None, published_bytes_per_s=0.0), PlanRequest(ssd="1TiB"))
    assert plan["endurance"] is None
    assert any("writes to the SSD are not known" in line for line in plan["advice"])


def test_the_plan_of_a_tenant_says_what_it_assumes() -> None:
    curve = replace(CURVE, name="tenant one")
    plan = make_plan(make_measured(curve=curve, scope="tenant one"), PlanRequest(tenant="one"))
    assert "tenant one" in plan["assumes"]
    assert "as if it had the node alone" in plan["assumes"]
    assert plan["assumes"] in plan["advice"]
    assert make_plan(make_measured(), PlanRequest())["assumes"] == ""


def test_break_even_says_whether_loading_pays_and_whether_the_speed_was_measured() -> None:
    plan = make_plan(make_measured(ssd_load_bytes_per_s=1e9), PlanRequest())
    assert plan["break_even"] is not None
    assert plan["break_even"]["bandwidth_bytes_per_s"] == pytest.approx(57344 / 1e-4)
    assert "quicker than prefill" in plan["advice"][-1]
    slow = make_plan(make_measured(ssd_load_bytes_per_s=1e8, is_token_s_measured=False), PlanRequest())
    assert "slower than prefill" in slow["advice"][-1]
    assert "assumed" in slow["advice"][-1]


def test_storage_is_told_in_gains_and_working_sets() -> None:
    storage = make_plan(make_measured(), PlanRequest())["storage"]
    assert storage is not None
    assert (storage["mirror_gain"], storage["dedup_gain"]) == (3.0, 3.0)
    sets = storage["working_set_bytes"]
    assert 0 < sets["90%"] < sets["99%"] < sets["100%"]


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        (None, "no traffic yet"),
        (replace(CURVE, references=0), "no traffic yet"),
        (replace(CURVE, references=999), "not enough data yet: 999"),
        (replace(CURVE, segments_watched=29), "not enough data yet: 29"),
        (replace(CURVE, window_s=5.0), "5 s ago"),
    ],
)
def test_without_traffic_it_says_so_and_gives_no_number(curve: ScopeCurve | None, message: str) -> None:
    plan = make_plan(make_measured(curve=curve, asked=0), PlanRequest(host="2x"))
    assert not plan["is_measured"]
    assert plan["planned"] is None
    assert message in plan["missing"]
    assert message in plan["advice"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curve": None, "is_split": True}, "too little was noted of tenant one since another tenant appeared"),
        ({"curve": replace(CURVE, references=999), "is_split": True}, "999 segments looked up since another tenant"),
        ({"curve": None}, "no lookups of tenant one of late"),
        ({"curve": replace(CURVE, window_s=5.0)}, "curve began 5 s ago"),
        ({"curve": None, "is_kept": False}, "no curves are kept"),
        ({"curve": None, "scope": "node"}, "no traffic of late"),
    ],
)
def test_of_a_tenant_that_had_traffic_it_is_not_said_that_nobody_looked(changes: dict[str, Any], message: str) -> None:
    plan = make_plan(make_measured(**{"scope": "tenant one", **changes}), PlanRequest(tenant="one"))
    assert message in plan["missing"]
    assert "no traffic yet" not in plan["missing"]


def test_a_what_if_needs_no_traffic() -> None:
    query = {"layers": "28", "heads": "28", "kv_heads": "4", "head_size": "128", "host": "8GiB"}
    plan = make_plan(make_measured(curve=None), parse_request(query))
    assert plan["what_if"] is not None
    assert plan["what_if"]["rounds_in_host"] == pytest.approx(8 * GIB / plan["what_if"]["stored_bytes"])


def test_simulated_points_correct_the_curve_and_unreliable_ones_do_not() -> None:
    points = [SimulatedPoint(GIB, 0.9, 0.9, True, 0.02, 0.01), SimulatedPoint(2 * GIB, 0.1, 0.1, False, -0.3, -0.3)]
    expectation, lru = Expectation(CURVE, points), CURVE.curve
    assert expectation.hit_ratio(GIB) == pytest.approx(lru.hit_ratio(GIB) + 0.02)
    assert expectation.seconds_ratio(GIB) == pytest.approx(lru.seconds_ratio(GIB) + 0.01)
    assert expectation.sizes(GIB, 0)["policy"] == "simulated"
    plain = Expectation(CURVE, points[1:])
    assert plain.hit_ratio(2 * GIB) == pytest.approx(lru.hit_ratio(2 * GIB))
    assert plain.sizes(GIB, 0)["policy"] == "lru"


STEPS = st.lists(st.tuples(st.floats(-0.3, 0.3), st.integers(20, 40)), max_size=7)


@given(STEPS)
def test_a_larger_memory_is_never_said_to_find_less(steps: list[tuple[float, int]]) -> None:
    points = [SimulatedPoint(1 << power, 0, 0, True, more, more) for more, power in steps]
    expectation = Expectation(CURVE, points)
    sizes = [2 ** (power / 3) for power in range(36, 140)]
    for ratio in (expectation.hit_ratio, expectation.seconds_ratio):
        found = [ratio(size) for size in sizes]
        assert found == sorted(found)
        assert 0 <= found[0] <= found[-1] <= CURVE.curve.hit_ratio_max + 1e-9


def test_the_stated_error_covers_the_simulation_and_says_so() -> None:
    plain = Expectation(CURVE, []).sizes(GIB, 0)
    assert (plain["error_covers"], plain["error"]) == ("sample", round(CURVE.curve.error(plain["hit_ratio"]), 4))
    point = SimulatedPoint(GIB, 0.5, 0.5, True, 0.0, 0.0, error=0.04)
    both = Expectation(CURVE, [point]).sizes(GIB, 0)
    assert both["error_covers"] == "sample and simulation"
    assert both["error"] == pytest.approx(math.hypot(plain["error"], 0.04), abs=1e-4)


def stepped(*steps: tuple[int, float]) -> ScopeCurve:
    """A curve that rises at some sizes alone: (bytes, hit ratio from there on)."""
    hits = tuple(max((ratio for size, ratio in steps if edge >= size), default=0.0) for edge in EDGES)
    return replace(CURVE, curve=replace(CURVE.curve, hits=hits, seconds=hits))


def test_advice_looks_behind_a_step_that_brings_nothing() -> None:
    curve = stepped((GIB // 2, 0.2), (7 * GIB, 0.8))
    advice = make_plan(make_measured(curve=curve), PlanRequest())["advice"][0]
    assert advice.startswith("+3.0 GiB host memory brings under 1 %; +7.0 GiB host memory: +60.0 % hits")
    assert advice.endswith("more brings under 1 %")
    advice = make_plan(make_measured(curve=curve), PlanRequest(host="2x"))["advice"][0]
    assert advice.endswith("; less than 4 times as much again under 1 %, that much: +60.0 % hits")


def test_advice_names_the_first_step_that_pays_and_the_last() -> None:
    curve = stepped((GIB // 2, 0.2), (7 * GIB, 0.5), (30 * GIB, 0.8))
    advice = make_plan(make_measured(curve=curve), PlanRequest())["advice"][0]
    assert "; +7.0 GiB host memory: +30.0 % hits" in advice
    assert "; +31.0 GiB host memory: +60.0 % hits" in advice


def test_a_rate_of_writes_needs_an_ssd() -> None:
    with pytest.raises(InvalidInputError, match=r"dwpd = 3: .*ssd=1TiB"):
        make_plan(make_measured(), parse_request({"dwpd": "3"}))
    assert make_plan(make_measured(), parse_request({"dwpd": "3", "ssd": "1TiB"}))["endurance"] is not None


def test_seconds_saved_are_those_of_late() -> None:
    """A month at a hundredth of the load, then six hours at all of it: what counts in the curve came in so many."""
    late = replace(CURVE, window_s=30 * 86400.0, recent_s=600.0, references=10**7)
    saved = Expectation(late, []).sizes(GIB, 0)["prefill_saved_s_per_hour"]
    assert saved == Expectation(CURVE, []).sizes(GIB, 0)["prefill_saved_s_per_hour"]


REGISTERED = RegisteredModel("model tiny of tenant test", ModelShape(28, 1024, "bfloat16", 0, 0), 5000.0)


def test_before_traffic_the_closed_form_is_that_of_the_registered_model() -> None:
    plan = make_plan(make_measured(curve=None, model=REGISTERED), PlanRequest())
    found = plan["what_if"]
    assert found is not None
    assert found["bytes_per_token"] == 57344
    assert found["rounds_in_host"] == pytest.approx(GIB / found["stored_bytes"])
    assert found["break_even_bytes_per_s"] == pytest.approx(57344 * 5000)
    assert plan["what_if_of"] == "model tiny of tenant test, as registered"
    assert make_plan(make_measured(model=REGISTERED), PlanRequest())["what_if"] is None, "measured"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "no engine has registered a model yet"),
        (replace(REGISTERED, shape=None), "only the bytes of its rows are known"),
    ],
)
def test_before_traffic_it_is_said_what_a_closed_form_lacks(model: RegisteredModel | None, message: str) -> None:
    plan = make_plan(make_measured(curve=None, model=model), PlanRequest())
    assert plan["what_if"] is None
    assert message in plan["advice"][1]
    assert "layers, heads and head_size" in plan["advice"][1]
    speechless = make_plan(make_measured(curve=None, model=replace(REGISTERED, tokens_per_s=0.0)), PlanRequest())
    assert any("prefill_tokens_per_s" in note for note in (speechless["what_if"] or {"notes": []})["notes"])


@pytest.mark.parametrize("times", [0.7, 1.5, 3.0])
def test_the_prediction_is_within_three_points_of_a_cache_that_really_has_the_size(times: float) -> None:
    """Under the value order, with a sample, at sizes that are not simulated."""
    trace, sizes = zipf(SEGMENTS, REFERENCES, 0.8), make_sizes(SEGMENTS)
    tiers = [(int(GIB * one), LOAD_RATES.host) for one in (0.5, 1, 2, 4, 8)]
    simulation = PolicySimulation(tiers, ValueOrder, GIB)
    sample = Sample(1000, simulation)
    events = events_of(make_space(), trace, sizes)
    for event in events:
        sample.expect(is_reference(event))
        sample.take(event)
    predicted = Expectation(make_curve(1500), simulation.points()).hit_ratio(GIB * times)
    really = whole_cache(trace, sizes, int(GIB * times), ValueOrder())
    assert predicted == pytest.approx(really, abs=0.03)
