import numpy as np
import pytest
import torch

from ooc.models.link_scores import make_scorer
from ooc.models.regularizers import LinkRegularizer
from ooc.stores.errors import ConfigError


@pytest.mark.parametrize(("name", "power"), [("n3", 3), ("l2", 2)])
def test_the_penalty_is_the_mean_over_links_of_complex_powers(name, power):
    scorer = make_scorer("complex", 6, 4, reciprocal=True)
    rows = [torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = LinkRegularizer(name, 0.3)(scorer, *rows)
    modulus = [np.abs(each[:, :3] + 1j * each[:, 3:]) for each in (row.detach().numpy() for row in rows)]
    assert found.item() == pytest.approx(0.3 * sum((each**power).sum() for each in modulus) / 5)
    found.backward()
    row = rows[0].detach().numpy()
    wanted = 0.3 * power / 5 * row * np.tile(modulus[0] ** (power - 2), 2)
    np.testing.assert_allclose(rows[0].grad.numpy(), wanted, rtol=1e-9)


def test_relations_that_are_not_given_are_free_and_other_names_refused():
    scorer, row = make_scorer("rotate", 4, 1), torch.ones(2, 4)
    assert LinkRegularizer("l2", 0.5)(scorer, row, row).item() == pytest.approx(0.5 * (8 + 8) / 2)
    with pytest.raises(ConfigError, match="'l1' is unknown: use one of n3, l2"):
        LinkRegularizer("l1")
