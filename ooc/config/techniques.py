"""Techniques against memory, as changes to the settings of a run, for `ooc compare`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooc.config.base import RunConfig, parse
from ooc.config.models import REVERSIBLE
from ooc.config.modes import class_of
from ooc.config.nodes import OWN, PARTS_AN_EPOCH, TrainConfig
from ooc.stores.errors import ConfigError

PLAIN = "plain"
"""the settings as they were given, which every technique is compared with"""
SMALLER = 4
"""batches that make up one, where gradients are accumulated"""
Changes = Callable[[TrainConfig, int | None], Mapping[str, Any]]
"""(settings, parts of the store's numbering or None) -> settings that differ, by name; ConfigError where there are none"""


@dataclass(frozen=True)
class Technique:
    """A way to train with less memory.

    Args:
        about: What it does, in a few words.
        changes: The settings that it changes; the others stay as they are.
        without: Settings that do not apply with it, and are left out.
    """

    about: str
    changes: Changes
    without: tuple[str, ...] = ()


def _to(**settings: Any) -> Changes:
    return lambda config, parts: settings


def _smaller(config: TrainConfig, parts: int | None) -> Mapping[str, Any]:
    return {"batch_size": max(1, config.batch_size // SMALLER), "accumulate": config.accumulate * SMALLER}


def _reversible(config: TrainConfig, parts: int | None) -> Mapping[str, Any]:
    if f"rev{config.model}" not in REVERSIBLE:
        raise ConfigError(f"model {config.model} has no reversible form; {', '.join(REVERSIBLE)} are there")
    return {"model": f"rev{config.model}"}


def _mode(mode: str, about: str, changes: Changes) -> Technique:
    others = {name for other, names in OWN.items() if other != mode for name in names} - {*OWN[mode]}
    return Technique(
        about,
        lambda config, parts: {"mode": mode, "layers": config.layers, **changes(config, parts)},
        ("fanout", "eval_fanout", *sorted(others)),
    )


def _in_parts(config: TrainConfig, parts: int | None) -> Mapping[str, Any]:
    """As many batches an epoch as the modes of parts make by themselves, unless the settings say."""
    if {"parts", "parts_per_batch"} & config.model_fields_set:
        return {}
    return {"parts": PARTS_AN_EPOCH} if parts is None else {"parts_per_batch": max(1, parts // PARTS_AN_EPOCH)}


TECHNIQUES: dict[str, Technique] = {
    PLAIN: Technique("the settings as given", _to()),
    "accumulate": Technique("a quarter of the batch at a time, the same optimizer steps", _smaller),
    "checkpointing": Technique("every layer recomputed in the backward pass", _to(activation_checkpointing="layers")),
    "checkpointing-sqrt": Technique("layers recomputed in segments", _to(activation_checkpointing="sqrt")),
    "checkpointing-auto": Technique("what memory has no room for is recomputed", _to(activation_checkpointing="auto")),
    "bf16": Technique("activations in bfloat16", _to(precision="bf16")),
    "int8": Technique("activations in int8 between the passes", _to(compress="int8")),
    "int4": Technique("activations in int4 between the passes", _to(compress="int4")),
    "int2": Technique("activations in int2 between the passes", _to(compress="int2")),
    "reversible": Technique("layers whose inputs are recomputed from their outputs", _reversible),
    "labor": Technique(
        "nodes of a batch, layers and 64 batches share neighbors",
        _to(sampler="labor", layer_dependency=True, batch_dependency=64),
    ),
    "cluster": _mode("cluster", "parts, and the edges between them", _in_parts),
    "saint": _mode("saint", "random subgraphs, normalized", _to()),
    "history": _mode("history", "parts, with their neighbors' inner rows from disk", _in_parts),
}
"""By name, in the order of the table."""
RECOMPUTING = {"checkpointing", "checkpointing-sqrt", "checkpointing-auto"}
"""those that recompute layers: `activation_checkpointing`"""


def compared_in(store: Path | None) -> Path | None:
    """Return the default directory of a comparison, None without a store.

    >>> compared_in(Path("data/tolokers.ooc"))
    PosixPath('runs/compare-tolokers')
    """
    return None if store is None else Path("runs") / f"compare-{Path(store).stem}"


def names_of(text: str | Iterable[str] | None) -> list[str]:
    """Return the techniques to compare, `PLAIN` first; all of them if none are given.

    Raises:
        ConfigError: If one is unknown, or a name is missing.

    >>> names_of("labor,bf16")
    ['plain', 'labor', 'bf16']
    """
    given = text.split(",") if isinstance(text, str) else [*(TECHNIQUES if text is None else text)]
    names = [name.strip() for name in given]
    known = ", ".join(TECHNIQUES)
    if not names or "" in names:
        raise ConfigError(f"techniques: a name is missing; there are {known}")
    for name in names:
        if name not in TECHNIQUES:
            raise ConfigError(f"techniques: {name!r} is unknown; there are {known}")
    return list(dict.fromkeys([PLAIN, *names]))


def with_technique(config: TrainConfig, name: str, parts: int | None) -> RunConfig:
    """Return the settings of a run with a technique.

    Args:
        config: The settings without it.
        name: The technique.
        parts: Parts of the store's numbering, None if it has none.

    Raises:
        ConfigError: If the technique and the other settings do not go together.

    >>> with_technique(TrainConfig(store="a.ooc", out="run"), "bf16", None).precision
    'bf16'
    """
    technique = TECHNIQUES[name]
    given = {key: getattr(config, key) for key in config.model_fields_set if key not in technique.without}
    values = {**given, **technique.changes(config, parts)}
    return parse(class_of(values), values)
