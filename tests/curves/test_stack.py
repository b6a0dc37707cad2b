"""The stack by bytes against a plain list."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.curves.stack import ByteStack
from tests.curves.builders import NaiveStack


@dataclass(eq=False)
class Key:
    name: int
    record_bytes: int
    place: int = -1


STEP = st.tuples(st.sampled_from(["push", "push", "push", "remove", "resize"]), st.integers(0, 90), st.integers(1, 99))


@settings(deadline=None)
@given(st.lists(STEP, max_size=400))
def test_it_tells_what_a_plain_list_tells(steps: list[tuple[str, int, int]]) -> None:
    stack, naive = ByteStack[Key](), NaiveStack()
    keys = {name: Key(name, name + 1) for name in range(91)}
    for step, name, size in steps:
        key = keys[name]
        if step == "push":
            stack.push(key)
            naive.use(name, key.record_bytes)
        elif key.place < 0:
            continue
        elif step == "remove":
            stack.remove(key)
            naive.keys.remove(name)
        else:
            stack.resize(key, size)
            naive.sizes[name] = size
    assert [key.name for key in stack] == naive.keys[::-1]
    assert stack.bytes == sum(naive.sizes[name] for name in naive.keys)
    for key in stack:
        assert stack.above(key) + key.record_bytes == naive.distance(key.name)


def test_renumbering_many_keys_changes_no_distance() -> None:
    stack, keys = ByteStack[Key](), [Key(name, name % 7 + 1) for name in range(1000)]
    for _ in range(5):
        for key in keys:
            stack.push(key)
    above = 0
    for key in reversed(keys):
        assert stack.above(key) == above
        above += key.record_bytes
