"""The error tree: codes are unique, stable, and survive a trip over the wire."""

from kvservice.model.errors import BY_CODE, CorruptError, KVServiceError, SlotError, error_from_code


def test_codes_are_unique() -> None:
    assert all(kind.code == code for code, kind in BY_CODE.items())
    assert len(BY_CODE) == len(set(BY_CODE.values()))


def test_a_code_brings_back_its_class_and_message() -> None:
    error = error_from_code(SlotError.code, "slot 7")
    assert isinstance(error, SlotError)
    assert str(error) == "slot 7"


def test_unknown_codes_become_the_root_class() -> None:
    assert type(error_from_code("FROM_THE_FUTURE", "x")) is KVServiceError


def test_a_bad_commit_counts_as_corrupt() -> None:
    assert issubclass(BY_CODE["CHECKSUM_MISMATCH"], CorruptError)
