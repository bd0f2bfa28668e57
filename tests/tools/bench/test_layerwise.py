"""The bound of a sweep's bytes, by hand."""

from tools.bench.full.layerwise import bound_of


def test_the_cheapest_of_passes_times_input_and_output() -> None:
    # 100 nodes, 8 -> 16 -> 2 columns; the last layer maps first, so the first writes 2 x 2 columns.
    first = 100 * (32 + 16)  # one pass with the own rows beside the sums: 100 x 16 x 4 bytes fit
    last = 100 * (8 + 8 + 8)
    assert bound_of(100, 32, [8, 16, 2], room=6400) == first + last
    # half the room: sums alone fit, own rows are read again
    assert bound_of(100, 32, [8, 16, 2], room=3200) == first + 100 * 32 + last
    # a quarter: two passes and the own rows
    assert bound_of(100, 32, [8, 16, 2], room=1600) == first + 100 * 64 + last
    # features in a quarter of the bytes are summed as wide
    assert bound_of(100, 8, [8, 16, 2], room=3200) == 100 * (16 + 16) + last
