"""A name with a typing error is asked about in one wording."""

from versatil_core.near_names import did_you_mean, near_names


def test_at_most_three_the_nearest_first() -> None:
    names = (f"layers.{number}" for number in range(9))

    near = near_names("layers.7x", names)

    assert len(near) == 3
    assert near[0] == "layers.7"


def test_nothing_is_near() -> None:
    assert near_names("head", ["encoder"]) == []
    assert near_names("head", ["encoder"], cutoff=0.0) == ["encoder"]
    assert did_you_mean([]) == ""


def test_the_wording() -> None:
    assert did_you_mean(["head"]) == "; did you mean 'head'?"
    assert did_you_mean(["head", "heads"]) == "; did you mean 'head' or 'heads'?"
