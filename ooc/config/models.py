"""Settings of the models of nodes. Nothing heavy is imported; see `ooc.config.nodes`."""

import json
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ooc.config.base import Depth, Fraction, Positive, Width, changed, check_settings, numbers
from ooc.config.labels import LabelConfig

DEFAULT_LAYERS = 2
PLAIN = ("sage", "gcn", "gat", "gin", "gine")
"""models of which each layer may have a width and settings of its own"""
REVERSIBLE = ("revsage", "revgat", "revgcn")
"""models whose activations do not grow with depth: see `ooc.models.reversible`"""
_BUILT_IN = ("sage", "gcn", "gat", "gin", "gine", "gcnii", "appnp", "sgc", *REVERSIBLE, "rsage", "rgcn", "hgt")
OF_MODEL = {
    "heads": ("gat", "hgt", "revgat"),
    "groups": REVERSIBLE,
    "output_heads": ("gat",),
    "alpha": ("gcnii", "appnp"),
    "theta": ("gcnii",),
    "rescale": ("gcn", "gin", "gine", "gcnii", "appnp", "sgc", "revgcn"),
    "num_bases": ("rgcn",),
    "input_dropout": _BUILT_IN,
    "init": _BUILT_IN,
}
"""settings that apply to these models only; a user-defined class may accept `heads` as well"""
_NOT_REVERSIBLE = {
    "residual": "which adds every layer's input in any case",
    "activation_checkpointing": "which recomputes activations in any case",
    "precision": "as inputs do not follow from rounded outputs",
    "compile": "whose layers free their input",
}
"""settings that do not apply to reversible models, and why"""


def _widths(value: object) -> object:
    """A single width as a number."""
    found = numbers(list(value) if isinstance(value, tuple) else value)
    if found == []:
        raise ValueError("expected a number greater than 0")
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def _blocks(value: object) -> object:
    """Parse a JSON list; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError('write it as JSON, as in [{"conv": "gat"}, {"mlp": 64}]') from None
    if found == []:
        raise ValueError("give a block for each layer, or leave it out")
    return found


Widths = Annotated[Width | Annotated[list[Width], Field(min_length=1, max_length=10_000)], BeforeValidator(_widths)]


class BlockConfig(BaseModel):
    """What differs in a layer of a model; None is what the model has otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    conv: Literal["sage", "gcn", "gat", "gin", "gine"] | None = None
    norm: Literal["none", "batch", "layer"] | None = None
    activation: Literal["relu", "elu", "leaky_relu", "gelu", "tanh", "none"] | None = None
    residual: bool | None = None
    dropout: Fraction | None = None
    heads: Positive | None = None
    mlp: Width | None = None
    """inner width of a two-layer perceptron behind the layer"""


class ModelConfig(LabelConfig):
    """Settings of the models of nodes, which runs on nodes and on whole graphs share."""

    model: str = Field(
        default="sage",
        description="sage, gcn, gat, gin, gine, gcnii, appnp, sgc; reversible revsage, revgat, revgcn; of heterogeneous graphs "
        "rsage, rgcn, hgt; or package.module:Class for your own.",
    )
    hidden: Widths = Field(default=64, description="Width of the hidden layers.")  # type: ignore[assignment]
    layers: Depth = Field(default=DEFAULT_LAYERS, description="Layers; by default as many as the fan-out has numbers.")
    jk: Literal["none", "cat", "max", "lstm", "sum"] = Field(
        default="none",
        description="Outputs from the rows behind all layers (jumping knowledge): cat, max, lstm or sum of them.",
    )
    blocks: Annotated[list[BlockConfig], BeforeValidator(_blocks)] = Field(
        default_factory=list,
        description="What differs in each layer: conv, norm, activation, residual, dropout, heads, mlp; [[blocks]] in TOML.",
    )
    heads: Positive = Field(
        default=8, description="Attention heads of the hidden layers (gat, hgt, revgat); --hidden is their total width."
    )
    groups: Positive = Field(
        default=2, description="Groups that the hidden columns are divided into (revsage, revgat, revgcn)."
    )
    output_heads: Positive = Field(default=1, description="Attention heads of the last layer (gat), averaged.")
    alpha: float = Field(default=0.1, gt=0, lt=1, description="Weight of the initial rows in every layer (gcnii, appnp).")
    theta: float = Field(default=0.5, gt=0, description="Strength of a layer's weights, which decays with depth (gcnii).")
    norm: Literal["none", "batch", "layer"] = Field(
        default="none",
        description="Normalization between layers: none, batch or layer (the default of revsage, ...).",
    )
    init: Literal["default", "kaiming", "xavier"] = Field(
        default="default", description="Initialization of weights: kaiming, xavier, or by default that of PyTorch and PyG."
    )
    residual: bool = Field(default=False, description="Residual connections between layers.")
    input_dropout: Fraction | None = Field(
        default=None, description="Dropout of the features; by default --dropout for gcn, gat, gcnii and appnp, else 0."
    )

    gives_hidden: ClassVar[bool] = False
    """whether the model's outputs are hidden rows, as embeddings are: then the last width is theirs"""

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns behind each hidden layer, the last of which is the outputs' where these are hidden rows."""
        count = self.layers - (self.jk == "none" and not self.gives_hidden)
        return (self.hidden,) * count if isinstance(self.hidden, int) else tuple(self.hidden)

    @property
    def embedding(self) -> int:
        """Columns of outputs that are hidden rows."""
        return self.hidden if isinstance(self.hidden, int) else self.hidden[-1]

    @property
    def convs(self) -> set[str]:
        """The models that layers are of."""
        return {block.conv or self.model for block in self.blocks} or {self.model}

    @property
    def link_decoder(self) -> str | None:
        """What scores pairs of nodes by the model's outputs, which are embeddings then; None where these are of labels."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _layers_of_widths(cls, values: Any) -> Any:
        """Derive `layers` from the widths, or the blocks, if nothing else says how many there are."""
        if not isinstance(values, dict) or values.get("layers") is not None or values.get("fanout"):
            return values
        blocks, hidden = values.get("blocks"), values.get("hidden")
        with suppress(ValueError):  # each is refused where it is parsed
            hidden = _widths(hidden)
            blocks = _blocks(blocks)
        if isinstance(blocks, list | tuple) and blocks:
            return {**values, "layers": len(blocks)}
        if isinstance(hidden, list):
            more = values.get("jk") in (None, "none") and not cls.gives_hidden
            return {**values, "layers": len(hidden) + more}
        return values

    @model_validator(mode="after")
    def _count_widths(self) -> Self:
        """Reject widths and blocks that are not one for each layer, or of models that have one of all."""
        several = [name for name, given in (("jk", self.jk != "none"), ("blocks", self.blocks)) if given]
        several += [] if isinstance(self.hidden, int) else ["hidden"]
        if several and self.model not in PLAIN:
            what = {"hidden": "a width for each layer"}.get(several[0], several[0])
            raise ValueError(f"{what} applies to models {', '.join(PLAIN)}, not to {self.model}: leave it out")
        count = self.layers - (self.jk == "none" and not self.gives_hidden)
        if not isinstance(self.hidden, int) and len(self.hidden) != count:
            which = f"layer{'s' * (count != 1)}"
            if count != self.layers:
                which = f"hidden {which} (the last layer has the outputs)"
            widths = f"{','.join(map(str, self.hidden))} has {len(self.hidden)} width{'s' * (len(self.hidden) != 1)}"
            raise ValueError(f"hidden {widths} for {count} {which}: give one for each")
        if self.blocks and len(self.blocks) != self.layers:
            raise ValueError(f"blocks are {len(self.blocks)} and layers are {self.layers}: give a block for each layer")
        return self

    @model_validator(mode="after")
    def _of_the_model(self) -> Self:
        """Unknown models are rejected elsewhere."""
        if ":" in self.model or self.model in _BUILT_IN:
            check_settings(self, OF_MODEL, ["heads"])
        if self.is_reversible:
            self._check_reversible()
        return self

    def _check_reversible(self) -> None:
        for name in changed(self, *(name for name in _NOT_REVERSIBLE if name in type(self).model_fields)):
            raise ValueError(f"{name} does not apply to model {self.model}, {_NOT_REVERSIBLE[name]}: leave it out")
        if "norm" not in self.model_fields_set:
            object.__setattr__(self, "norm", "layer")  # the model is frozen otherwise

    @property
    def is_reversible(self) -> bool:
        """Whether layers compute all nodes of a batch, and their inputs again from their outputs."""
        return self.model in REVERSIBLE
