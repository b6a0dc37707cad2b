"""The quality harness: worlds and orders are the same in every run, sums are right, one world runs on a tiny model."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bench.quality import __main__ as harness
from bench.quality.arrangements import (
    Arrangement,
    Order,
    Source,
    overlap,
    read_order,
    reader_parts,
    shuffled,
    source_prompts,
)
from bench.quality.methods import needs_mass
from bench.quality.plot import draw, x_of, y_of
from bench.quality.results import Cell, distinct, gain, over_worlds, read, write
from bench.quality.scenes import SCENES, Scene
from bench.quality.tables import filled, mirror
from bench.quality.trial import Laboratory, Trial
from bench.quality.worlds import Agent, Model, World, build_world, load_model
from kvservice.client.demo.model import tiny_model
from kvservice.client.rounds import PartKind

# The byte tokenizer makes every label of its own first letter the same space: no judges there.
TINY = Scene(
    "tiny",
    "A b c.",
    {name: f"You are {name}. " * count for count, name in enumerate(("Ada", "Ben", "Cyd", "Dot"), start=2)},
    "Speak.",
    output_tokens=24,
    questions=("Why?", "Who?"),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model("tiny", tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3))


@pytest.fixture(scope="module")
def world(model: Model) -> World:
    return build_world(model, TINY)


def make_world(agents: int = 4) -> World:
    return World(
        "made",
        tuple(Agent(f"a{n}", tuple(range(100 * n, 100 * n + 40 + n)), n) for n in range(agents)),
        (7, 8),
        tuple((1000 + n, 2000 + n) for n in range(agents)),
        tuple(range(agents)),
        ((5,),),
        ((6,),),
    )


def make_trial(**changes: object) -> Trial:
    values: dict[str, object] = {
        "world": "w",
        "source": "s",
        "order": "o",
        "method": "none",
        "reader": 0,
        "fit": 1.0,
        "overlap": 1.0,
        "kl": 0.5,
        "agreement": 0.75,
        "answer_tokens": 96,
        "rows": 200,
        "picked": 4,
        "record_bytes": 50,
        "dense_bytes": 2000,
    }
    return Trial(**(values | changes))  # type: ignore[arg-type]


def test_scenes_are_at_least_four_and_all_names_differ() -> None:
    assert len(SCENES) >= 4
    assert {len(scene.agents) for scene in SCENES.values()} >= {3, 10}
    for scene in SCENES.values():
        assert len({name.split()[-1] for name in scene.agents}) == len(scene.agents)


def test_a_world_is_the_same_in_every_run(model: Model, world: World) -> None:
    assert build_world(model, TINY) == world


def test_speech_keeps_to_its_limit(world: World) -> None:
    assert all(len("\nAda said: ") < len(segment) <= len("\nAda said: ") + 24 for segment in world.segments)


def test_the_leader_reads_the_shortest_history_and_is_no_reader(world: World) -> None:
    assert world.leader == 0
    assert world.readers(2) == [1, 2]
    assert world.readers(9) == [1, 2, 3]


def test_orders_hold_every_segment_but_the_one_left_out() -> None:
    world = make_world(8)
    assert read_order(world, Order.SAME, 3) == list(range(8))
    assert read_order(world, Order.LEFT_OUT, 3) == [0, 1, 2, 4, 5, 6, 7]
    assert read_order(world, Order.ROTATED, 3) == [3, 4, 5, 6, 7, 0, 1, 2]
    assert sorted(read_order(world, Order.SHUFFLED, 3)) == list(range(8))


@pytest.mark.parametrize("count", [3, 4, 8, 24])
def test_a_shuffled_order_keeps_no_pair(count: int) -> None:
    order = shuffled(count, seed=1)
    assert sorted(order) == list(range(count))
    assert order[0] != 0
    assert all(later - earlier != 1 for earlier, later in pairwise(order))
    assert order == shuffled(count, seed=1)


def test_sources_are_what_their_names_say() -> None:
    world = make_world()
    run = [(PartKind.SHARED, segment) for segment in world.segments]
    [member] = source_prompts(world, Source.MEMBER, 2)
    assert list(member.parts) == [(PartKind.PRIVATE, world.agents[0].history), *run]
    [own] = source_prompts(world, Source.OWN, 2)
    assert own.parts[0][1] == world.agents[2].history[:18]
    [bare] = source_prompts(world, Source.BARE, 2)
    assert list(bare.parts) == run
    producers = source_prompts(world, Source.PRODUCERS, 2)
    assert [one.parts[0][1] for one in producers] == [agent.history + world.request for agent in world.agents]
    assert all(one.is_last_only for one in producers)
    assert [list(one.parts) for one in source_prompts(world, Source.ALONE, 2)] == [[part] for part in run]
    three = source_prompts(world, Source.THREE_MEMBERS, 2)
    assert len(three) == 3
    assert all(one.parts[0][1] != world.agents[2].history for one in three)
    assert len({one.parts[1] for one in three}) > 1


def test_readers_read_their_own_history_first() -> None:
    world = make_world()
    assert reader_parts(world, Order.SAME, 2)[0] == (PartKind.PRIVATE, world.agents[2].history)


def test_overlap_asks_what_stood_before_not_in_which_order() -> None:
    world = make_world(8)

    def of(source: Source, order: Order) -> float:
        return overlap(world, Arrangement(source, order), 3)

    assert of(Source.MEMBER, Order.SAME) == of(Source.BARE, Order.SAME) == 1
    assert of(Source.MEMBER, Order.LEFT_OUT) > 0.7
    # Rotated by three: of 5 segments the first three stood before, of the others those five did not.
    behind_turn = sum(index / (index + 3) for index in range(5))
    in_front = sum(index / (index + 5) for index in range(3))
    assert of(Source.MEMBER, Order.ROTATED) == pytest.approx((behind_turn + in_front) / 8)
    assert of(Source.PRODUCERS, Order.SAME) == of(Source.ALONE, Order.SAME) == 1 / 8


METHODS = {
    Arrangement(Source.MEMBER, Order.SAME): (
        "exact",
        "none",
        "hkvd:0.1",
        "head:4",
        "hkvd:0.1@2",
        "gradual:0.2>0.1",
        "each:0.1",
        "seam:4",
        "seam:4+0.1",
        "mass:0.1",
        "values:0.1",
        "keys:0.1",
        "scaled:0.1",
        "cosine:0.1",
    ),
    Arrangement(Source.PRODUCERS, Order.LEFT_OUT): ("none",),
    Arrangement(Source.THREE_MEMBERS, Order.SHUFFLED): ("none",),
}


@pytest.fixture(scope="module")
def trials(model: Model, world: World) -> list[Trial]:
    with Laboratory(model, world, readers=1) as laboratory:
        return list(laboratory.run(METHODS))


def test_every_method_of_every_arrangement_is_tried(trials: list[Trial]) -> None:
    assert len(trials) == sum(len(methods) for methods in METHODS.values())


def test_full_computing_is_the_reference_itself(trials: list[Trial]) -> None:
    assert trials[0].method == "exact"
    assert trials[0].kl < 1e-3
    assert trials[0].agreement == 1
    assert trials[0].record_bytes >= trials[0].dense_bytes


def test_mirrors_hold_the_rows_that_were_picked(trials: list[Trial]) -> None:
    found = {one.method: one for one in trials if one.order == "same"}
    rows = found["none"].rows
    assert found["none"].picked == 0
    assert found["hkvd:0.1"].picked == int(0.1 * rows)
    assert found["head:4"].picked == 4 * 4
    assert found["seam:4"].picked == 4, "in the round's order only the first segment has another one before it"
    assert found["gradual:0.2>0.1"].picked == found["hkvd:0.1"].picked
    assert found["none"].record_bytes < found["hkvd:0.1"].record_bytes < found["exact"].record_bytes


def test_a_refresh_is_nearer_than_none_and_the_same_order_nearer_than_another(trials: list[Trial]) -> None:
    found = {(one.order, one.method): one.kl for one in trials}
    assert found["same", "hkvd:0.1"] < found["same", "none"]
    assert found["same", "none"] < found["one left out", "none"]


def test_fit_is_the_leader_s(trials: list[Trial]) -> None:
    assert {one.fit for one in trials if one.order == "same"} == {1.0}
    assert all(one.fit < 0.5 for one in trials if one.source == "producers")


def test_no_slot_is_left(model: Model, world: World, trials: list[Trial]) -> None:
    shape = model.decoder.kv.shape
    assert model.decoder.kv.free_tokens == shape.blocks * shape.block_size


def test_cells_add_up(tmp_path: Path) -> None:
    cells = [Cell.of("m", make_trial()), Cell.of("m", make_trial(reader=1, kl=0.1, agreement=0.25))]
    [cell] = over_worlds(cells)
    assert (cell.readers, cell.rows, cell.picked, cell.tokens) == (2, 400, 8, 192)
    assert cell.kl == pytest.approx(0.3)
    assert cell.agreement == 0.5
    assert cell.share == 0.025
    assert mirror(cell) == "1/40"
    assert distinct([*cells, cells[0]]) == cells
    write(tmp_path / "cells", [cell])
    assert [asdict(one) for one in read(tmp_path / "cells")] == [pytest.approx(asdict(cell))]


def test_methods_are_compared_over_readers_that_tried_both() -> None:
    cells = [
        Cell.of("m", make_trial(kl=0.4, agreement=0.5)),
        Cell.of("m", make_trial(world="v", kl=0.01, agreement=0.75)),
        Cell.of("m", make_trial(world="u", kl=9.0)),
        Cell.of("m", make_trial(method="head:4", kl=0.1, agreement=0.75)),
        Cell.of("m", make_trial(method="head:4", world="v", kl=0.01, agreement=0.75)),
        Cell.of("m", make_trial(method="head:8", world="x")),
    ]
    found = gain(cells, "head:4")
    assert found is not None
    assert (found.readers, found.agreement) == (2, 0.125)
    assert found.kl_ratio == pytest.approx(0.5)
    assert gain(cells, "head:8") is None


def test_tables_go_between_their_marks() -> None:
    text = "a\n<!-- table one -->\nold\n<!-- end -->\nb\n"
    new = filled(text, {"one": "| x |"})
    assert new == "a\n<!-- table one -->\n| x |\n<!-- end -->\nb\n"
    assert filled(new, {"one": "| x |"}) == new
    with pytest.raises(ValueError, match="marks for"):
        filled(text, {"two": ""})


def test_the_plot_puts_more_bytes_right_and_more_loss_up() -> None:
    assert x_of(0) < x_of(0.01) < x_of(0.3)
    assert y_of(1.0) < y_of(0.001)
    plot = draw([Cell.of("m", make_trial()), Cell.of("m", make_trial(method="hkvd:0.02"))], "m")
    assert plot.startswith("<svg")
    assert plot.count("<circle") == 2


def test_the_page_is_what_its_results_make() -> None:
    """`python -m bench.quality page` was run after the last measurement."""
    folder = Path(harness.__file__).parent
    page = (folder / "README.md").read_text()
    cells = read(folder / harness.RESULTS)
    assert filled(page, harness.tables(cells)) == page
    for model, name in harness.PLOTS.items():
        assert (folder / name).read_text() == draw(cells, model)


def test_only_methods_that_weigh_attention_look_at_the_question() -> None:
    assert needs_mass("mass:0.02")
    assert not needs_mass("hkvd:0.02")
