"""The benchmark of kept activations, on small blocks."""

from tools.bench.sampled.activations import measured


def test_what_is_kept_becomes_less_with_the_bits() -> None:
    found = measured("sage", rows=True, nodes=(3000, 2000, 1500, 1000))
    shares = [each["kept_share"] for each in found.values()]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[1] < 0.3
    assert shares[3] < 0.15
