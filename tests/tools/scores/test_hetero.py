"""The comparison with PyG in RAM on a small graph shaped as ACM."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ooc.models.hetero import build_hetero_model, full_hetero_blocks
from tools.scores import hetero


def small_acm(folder: Path, papers: int = 60) -> Path:
    """Features and subjects that follow the classes."""
    rng = np.random.default_rng(0)
    y = np.arange(papers) % 3
    numbers = rng.permutation(papers)
    arrays = {
        "paper_x": (rng.random((papers, 9)) < 0.2 + 0.6 * (np.arange(9) % 3 == y[:, None])).astype(np.uint8),
        "author_x": rng.integers(0, 2, (20, 9)).astype(np.uint8),
        "paper_y": y,
        "paper_author": np.stack([np.repeat(np.arange(papers), 2), rng.integers(0, 20, 2 * papers)]),
        "paper_subject": np.stack([np.arange(papers), y * 2 + rng.integers(0, 2, papers)]),
    }
    splits = {f"{name}_60": part for name, part in zip(("train", "val", "test"), np.split(numbers, [20, 40]), strict=True)}
    np.savez(folder / "acm.npz", **arrays, **splits)
    return folder


def test_the_model_in_ram_is_ours(tmp_path: Path) -> None:
    """With the same weights, where dropout is off; R-SAGE's maps of the own row added up."""
    data = hetero.acm(small_acm(tmp_path))
    sizes = {name: data[name].num_nodes for name in data.node_types}
    widths, blocks = {"paper": 9, "author": 9, "subject": 0}, full_hetero_blocks(data.edge_index_dict, sizes, 2)
    for name, settings in hetero.MODELS.items():
        theirs = hetero.InRam(name, data, settings).eval()
        more = {"heads": settings["heads"]} if name == "hgt" else {}
        ours = build_hetero_model(name, widths, 64, 3, data.metadata(), "paper", num_nodes=sizes, dropout=0.5, **more).eval()
        with torch.no_grad():
            ours.encoder.tables["subject"].weight.copy_(theirs.tables["subject"].weight)
            for layer, conv in zip(ours.layers, theirs.convs, strict=True):
                if name == "hgt":
                    layer.conv.load_state_dict(conv.state_dict())
                    continue
                for node_type in data.node_types:
                    into = [conv.convs[key] for key in data.edge_types if key[2] == node_type]
                    layer.conv.self_row[node_type].weight.copy_(sum(each.lin_r.weight for each in into))
                    layer.conv.self_row[node_type].bias.copy_(sum(each.lin_l.bias for each in into))
                for key in data.edge_types:
                    layer.conv.neighbor[key].weight.copy_(conv.convs[key].lin_l.weight)
            if name == "hgt":
                ours.decoder.head.load_state_dict(theirs.head.state_dict())
                for node_type, lin in theirs.inputs.items():
                    ours.encoder.maps[node_type].lin.load_state_dict(lin.state_dict())
            x = {**data.x_dict, "subject": torch.arange(sizes["subject"])}
            torch.testing.assert_close(ours(x, blocks), theirs(data), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_both_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: {**settings, "hidden": 8, "epochs": 15, "lr": 0.02} for name, settings in hetero.MODELS.items()}
    monkeypatch.setattr(hetero, "MODELS", small)
    data = hetero.acm(small_acm(tmp_path))
    assert data["subject"].num_nodes == 6
    assert "x" not in data["subject"]
    found = hetero.scores(tmp_path, tmp_path, [0])
    assert list(found) == ["rsage", "rsage-pyg", "hgt", "hgt-pyg"]
    assert all(score > 60 for each in found.values() for score in each)

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    for arm in ("here", "in_ram"):
        monkeypatch.setattr(hetero, arm, refuse)
    assert hetero.scores(tmp_path, tmp_path, [0]) == found
