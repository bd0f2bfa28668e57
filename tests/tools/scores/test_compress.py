"""How far loss curves are apart."""

import numpy as np

from tools.scores.compress import EPOCHS, off


def test_differences_are_percents_of_the_exact_curve() -> None:
    exact = np.linspace(2.0, 1.0, EPOCHS)
    assert off(exact, exact) == {"mean": 0.0, "most": 0.0, "last 10": 0.0}
    found = exact.copy()
    found[0] *= 1.1
    found[-10:] *= 0.98
    assert off(found, exact) == {"mean": round((10 + 10 * 2) / EPOCHS, 2), "most": 10.0, "last 10": -2.0}
