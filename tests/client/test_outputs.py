"""The order of shared outputs: one for all readers, and stable as rounds are added."""

from hypothesis import given
from hypothesis import strategies as st

from kvservice.client.outputs import Output, canonical_order

outputs = st.lists(st.builds(Output, st.sampled_from("abcd"), st.text(max_size=2), st.integers(0, 3)), max_size=9)


@given(st.data(), outputs)
def test_every_order_of_arrival_gives_one_order(data: st.DataObject, said: list[Output]) -> None:
    assert canonical_order(data.draw(st.permutations(said))) == canonical_order(said)


@given(outputs, outputs)
def test_a_later_round_changes_nothing_before_it(said: list[Output], more: list[Output]) -> None:
    later = [Output(one.agent, one.text, one.turn + 4) for one in more]
    before = canonical_order(said)
    assert canonical_order([*later, *said])[: len(before)] == before


@given(outputs)
def test_a_reader_without_its_own_outputs_sees_the_others_in_the_same_order(said: list[Output]) -> None:
    assert canonical_order(said, without="a") == [one for one in canonical_order(said) if one.agent != "a"]
