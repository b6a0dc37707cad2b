"""The stack by bytes against a plain list."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.curves.stack import ByteStack
from tests.curves.builders import NaiveStack


class Columns:
    """Of records that lie on no stack, with these sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.place = array("i", [-1]) * len(sizes)
        self.bytes = array("Q", sizes)


STEP = st.tuples(st.sampled_from(["push", "push", "push", "remove", "resize"]), st.integers(0, 90), st.integers(1, 99))


@settings(deadline=None)
@given(st.lists(STEP, max_size=400))
def test_it_tells_what_a_plain_list_tells(steps: list[tuple[str, int, int]]) -> None:
    columns, naive = Columns([name + 1 for name in range(91)]), NaiveStack()
    stack = ByteStack(columns)
    for step, name, size in steps:
        if step == "push":
            stack.push(name)
            naive.use(name, columns.bytes[name])
        elif columns.place[name] < 0:
            continue
        elif step == "remove":
            stack.remove(name)
            naive.keys.remove(name)
        else:
            stack.resize(name, size)
            naive.sizes[name] = size
    assert list(stack) == naive.keys[::-1]
    assert stack.bytes == sum(naive.sizes[name] for name in naive.keys)
    for name in stack:
        assert stack.above(name) + columns.bytes[name] == naive.distance(name)


def test_renumbering_many_keys_changes_no_distance() -> None:
    columns = Columns([name % 7 + 1 for name in range(1000)])
    stack = ByteStack(columns)
    for _ in range(5):
        for name in range(1000):
            stack.push(name)
    above = 0
    for name in reversed(range(1000)):
        assert stack.above(name) == above
        above += columns.bytes[name]
