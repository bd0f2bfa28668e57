"""`LightningData`: loaders for training, validation, test and prediction, as PyTorch Lightning's Trainer asks for them."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError

try:
    from lightning.pytorch import LightningDataModule
except ImportError:
    LightningDataModule = object  # the class below then says what it needs

Options = Mapping[str, Any]
"""arguments of a loader by name"""
_BY_SPLIT: Options = MappingProxyType({})
_SPLITS = {"train": "train", "val": "val", "test": "test", "predict": None}
"""stage -> the split that it goes through; None for all nodes (graphs)"""


class LightningData(LightningDataModule):  # type: ignore[misc]
    """A LightningDataModule over the loaders of a store (extra `ooc[lightning]`).

    Every process of a Trainer opens the store for itself and has its share of the seeds of each step: with K devices a step has
    K times `batch_size` of them, in the order of one process. All ranks have as many training steps; a last step of fewer seeds
    than ranks is left out. In validation, test and prediction each seed is on one rank, once. The loaders are no DataLoaders,
    so Lightning puts no DistributedSampler into them, whatever `use_distributed_sampler` says. A checkpoint has where the
    training loader stands: `trainer.fit(..., ckpt_path=)` goes on in the middle of an epoch with the batches that were to
    come, on as many devices.

    Args:
        data: The store's path, which each process opens, or an open data set.
        loader: Class of the loaders: NeighborLoader, HGTLoader, LinkNeighborLoader, ClusterLoader, SaintLoader or GraphLoader.
        memory: Limit of each process's memory, such as "4GB", of a store that is opened.
        train, val, test, predict: Further arguments of the stage's loader, such as {"batch_size": 4096}; None: no such stage.
            By default a stage goes through the nodes (graphs) of the split of its name, where there is one, and predict
            through all; training is shuffled. Of several node types give a stage's input_nodes, of links its
            edge_label_index.
        options: Arguments of all loaders: num_neighbors, batch_size, ...

    Raises:
        ConfigError: Lightning is not installed, or the loader has no share for ranks.

    >>> data = ooc.LightningData("papers.ooc", num_neighbors=[10, 10], batch_size=1024, memory="4GB")
    >>> Trainer(devices=2, strategy="ddp").fit(model, data)
    """

    def __init__(
        self,
        data: Dataset | Path | str,
        loader: type[Any] = NeighborLoader,
        *,
        memory: int | str | None = None,
        train: Options | None = _BY_SPLIT,
        val: Options | None = _BY_SPLIT,
        test: Options | None = _BY_SPLIT,
        predict: Options | None = _BY_SPLIT,
        **options: Any,
    ) -> None:
        if LightningDataModule is object:
            raise ConfigError("LightningData needs a package: pip install 'ooc[lightning]'")
        super().__init__()
        parameters = inspect.signature(loader).parameters
        if "rank" not in parameters:
            raise ConfigError(f"{loader.__name__} has no share for ranks: iterate over it in a loop of your own")
        self._input = next((name for name in ("edge_label_index", "input_nodes", "input_graphs") if name in parameters), None)
        self._given, self._memory, self._loader, self._options = data, memory, loader, options
        self._stages = {"train": train, "val": val, "test": test, "predict": predict}
        self._data: Dataset | None = None

    @property
    def data(self) -> Dataset:
        """The data set of this process, open until `teardown` if it was given by its path."""
        if isinstance(self._given, Dataset):
            return self._given
        if self._data is None:
            self._data = Dataset.open(self._given, self._memory)
        return self._data

    def teardown(self, stage: str) -> None:
        """Close the data set that this process has opened; Lightning calls it at the end of a fit, test or prediction."""
        if self._data is not None:
            self._data.close()
            self._data = None

    def train_dataloader(self) -> "StageLoader":
        """The batches of training."""
        return self._made("train", shuffle=True)

    def val_dataloader(self) -> "StageLoader | list[Any]":
        """The batches of validation; [] where there are none."""
        given = self._stages["val"]
        by_split = given is not None and self._input is not None and self._input not in given
        no_split = by_split and not self.data.is_hetero and "val" not in self._splits()
        return [] if given is None or no_split else self._made("val")

    def test_dataloader(self) -> "StageLoader":
        """The batches of the test."""
        return self._made("test")

    def predict_dataloader(self) -> "StageLoader":
        """The batches of prediction, by default of all nodes (graphs); `input_id` says whose they are."""
        return self._made("predict")

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """The batch itself on a GPU, where its loader has copied it ahead; else as Lightning does it."""
        return batch if device.type == "cuda" else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _splits(self) -> list[str]:
        return self.data.graphs.splits if self._input == "input_graphs" else self.data.splits

    def _made(self, stage: str, **defaults: Any) -> "StageLoader":
        given = self._stages[stage]
        if given is None:
            raise ConfigError(f"`{stage}` is None, so there is no loader for it: leave it out, or do not call Trainer for it")
        if self._input is not None and self._input != "edge_label_index":
            defaults[self._input] = _SPLITS[stage]
        trainer = self.trainer
        ranks = {"rank": 0, "world_size": 1}
        if trainer is not None:
            ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
            device = trainer.strategy.root_device
            defaults |= {"device": device} if device.type == "cuda" else {}
        loader = self._loader(self.data, **{**defaults, **ranks, **self._options, **given})
        return StageLoader(loader, stage == "train", repeated=trainer is not None and trainer.overfit_batches > 0)


class StageLoader:
    """A loader as Lightning takes it: its epochs begin with their first batch, not with `iter`, which Lightning also calls to
    look whether there is one; and its state is that of any rank, because rank 0 writes the checkpoint of all. repeated: whether
    every epoch has the batches of the first one, as `overfit_batches` means.
    """

    def __init__(self, loader: Any, training: bool, repeated: bool = False) -> None:
        self.loader, self._repeated = loader, repeated
        self.batch_sampler = SimpleNamespace(sampler=self)  # where Lightning calls set_epoch
        self._steps: int = loader.shared_steps if training else loader.own_steps
        loader.stop_before(self._steps)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def set_epoch(self, epoch: int) -> None:
        """The next batches are this epoch's, from where `load_state_dict` left it."""
        self.loader.set_epoch(0 if self._repeated else epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks stand; at the end of an epoch the beginning of the next one."""
        state = {name: value for name, value in self.loader.state_dict().items() if name != "rank"}
        return {**state, "epoch": state["epoch"] + 1, "step": 0} if state["step"] >= self._steps else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there; see `EpochLoader.load_state_dict`."""
        self.loader.load_state_dict(state)
