"""The stages of a batch and their bounds."""

import pytest
import torch
import torch.nn.functional as F

from ooc.models import products
from ooc.runtime.restoring import settings_restored
from tests.conftest import MakeStore
from tools.bench.sampled import stages


@pytest.mark.parametrize("in_pieces", [False, True])
def test_every_stage_has_cycles_and_a_bound(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_pieces: bool
) -> None:
    if in_pieces:  # as products of large batches are
        monkeypatch.setattr(products, "LEAST_SHARED", 1)
    monkeypatch.setattr(stages, "CHAIN", 1000)
    monkeypatch.setattr(stages, "COPY_BYTES", 2**16)
    command = ["stages", str(make_store()), "--fanout", "3,3", "--hidden", "8", "--batch-size", "8", "--dropout", "0.5"]
    monkeypatch.setattr("sys.argv", [*command, "--batches", "2", "--warmup", "1"])
    with settings_restored():
        stages.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    names = [name for half in ("forward", "backward") for name in (f"{half}: products", f"{half}: rest")]
    assert [row[0] for row in rows[:-1]] == ["sample", "gather and sum", "collate", *names, "optimizer"]
    assert all(float(cell) >= 0 for row in rows for cell in row[1:4])


def test_products_that_kernels_share_are_timed_as_torchs_are() -> None:
    rows, weight, bias = torch.randn(600, 64), torch.randn(256, 64), torch.randn(256)
    grad = torch.randn(600, 256)
    with settings_restored(), stages.Products() as found:
        torch.set_num_threads(1)
        made = products.added_products(bias, (rows, weight))
        gradients = products.weight_gradients(grad, [rows])
    assert len(found.found) == 2
    assert found.seconds > 0
    assert stages.products_seconds(found.found) > 0
    torch.testing.assert_close(made, F.linear(rows, weight, bias))
    torch.testing.assert_close(gradients, [grad.t() @ rows, grad.sum(0)], rtol=1e-4, atol=1e-4)
