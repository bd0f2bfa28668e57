"""One typed configuration for a training run: the keys of a TOML or JSON file are the flags with underscores.

What runs have in common stands in `RunConfig`; the mode says which class a configuration is of (`class_of`). Nothing heavy is
imported here: the command line builds its flags from these classes, and `ooc --help` must be fast.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ooc.config.base import Fraction, Numbers, Positive, RunConfig, Words, _numbers, changed

_DEFAULT_LAYERS = 2
_DEFAULT_FANOUT = 10


def _class_weights(value: object) -> object:
    return _numbers(value) if isinstance(value, str) and value not in ("none", "balanced") else value


_PARTS = ("parts", "parts_per_batch")
OWN = {
    "sampled": ("replace", "weight_attr"),
    "cluster": _PARTS,
    "saint": ("saint", "roots", "walk_length", "saint_coverage"),
    "history": (*_PARTS, "history", "history_dtype", "history_lag", "refresh", "drift_tolerance"),
}
"""settings that mean something in that mode only, or in several of these"""
_BUILT_IN = ("sage", "gcn", "gat", "gin", "gcnii", "appnp", "sgc")
OF_MODEL = {
    "heads": ("gat",),
    "output_heads": ("gat",),
    "alpha": ("gcnii", "appnp"),
    "theta": ("gcnii",),
    "rescale": ("gcn", "gin", "gcnii", "appnp", "sgc"),
    "input_dropout": _BUILT_IN,
}
"""settings that mean something to these models only; a class of the user's own may take `heads` as well"""


class NodeConfig(RunConfig):
    """What runs on nodes have in common: the model, the splits and the loss."""

    # the model
    model: str = Field("sage", description="sage, gcn, gat, gin, gcnii, appnp, sgc, or package.module:Class of your own.")
    layers: Positive = Field(_DEFAULT_LAYERS, description="Layers; by default as many as --fanout has numbers, or 2.")
    heads: Positive = Field(8, description="Attention heads of the hidden layers (gat); --hidden is their width together.")
    output_heads: Positive = Field(1, description="Attention heads of the last layer (gat), averaged.")
    alpha: float = Field(0.1, gt=0, lt=1, description="Share of the first rows in every layer (gcnii, appnp).")
    theta: float = Field(0.5, gt=0, description="How much of a layer's weights counts, the less the deeper (gcnii).")
    norm: Literal["none", "batch", "layer"] = Field("none", description="Normalisation between layers: none, batch or layer.")
    residual: bool = Field(False, description="Residual connections between layers.")
    input_dropout: Fraction | None = Field(
        None, description="Dropout of the features; by default --dropout for gcn, gat, gcnii and appnp, else 0."
    )
    train_split: str = Field("train", description="Name of the split to train on.")
    val_split: str = Field("val", description="Name of the split that chooses the best model.")
    eval_splits: Words = Field(["train", "val", "test"], description="Splits scored at the end, those the store has.")
    # the loss, and how steps are made
    label_smoothing: Fraction = Field(0.0, description="Label smoothing.")
    class_weights: Annotated[Literal["none", "balanced"] | list[float], BeforeValidator(_class_weights)] = Field(
        "none", description="none, balanced, or a weight a class (binary and multi-label: of the positives): 1,2.5."
    )
    plan: bool = Field(True, description="Predict the run before it begins, from a profile of a second or a few.")

    @model_validator(mode="after")
    def _of_the_model(self) -> Self:
        """A setting of another model would be ignored silently; unknown models are refused where they are made."""
        own, known = ":" in self.model, type(self).model_fields
        for name in changed(self, *(name for name in OF_MODEL if name in known)) if own or self.model in _BUILT_IN else ():
            if self.model not in OF_MODEL[name] and not (own and name == "heads"):
                hint = "leave it out, or give it as one of model_args" if own else "leave it out"
                raise ValueError(f"{name} means nothing to the model {self.model}: {hint}")
        return self


class TrainConfig(NodeConfig):
    """Everything that training on batches of nodes depends on.

    >>> TrainConfig(store="cora.ooc", out="runs/cora", model="gcn", fanout=[-1, -1]).layers
    2
    """

    rescale: bool = Field(
        True, description="Rescale sampled sums to the full aggregate's expectation (gcn, gin, gcnii, appnp, sgc)."
    )
    activation_checkpointing: bool = Field(False, description="Recompute layers in the backward pass: less memory, more time.")
    # the batches
    mode: Literal["sampled", "cluster", "saint", "history"] = Field(
        "sampled",
        description="sampled neighborhoods; cluster: parts and the edges between them; saint: random subgraphs, normalised; "
        "history: whole parts, their neighbors' inner rows from a cache on disk.",
    )
    parts: Positive | None = Field(None, description="Equal ranges of nodes to cut, where the store has no parts of its own.")
    parts_per_batch: Positive = Field(1, description="Parts a batch.")
    saint: Literal["walk", "node", "edge"] = Field("walk", description="How nodes are drawn (saint): walk, node or edge.")
    roots: Positive = Field(2000, description="Walks a batch (saint), or nodes or edges drawn for one.")
    walk_length: Positive = Field(2, description="Steps of a walk (saint).")
    saint_coverage: float = Field(
        50.0, gt=0, description="Times the nodes are drawn beforehand, to count how often each comes (saint)."
    )
    history: Literal["kept", "zero"] = Field("kept", description="Histories, or zeros in their place (to see what they add).")
    history_dtype: Literal["float16", "float32"] = Field("float16", description="How histories are stored: float16 or float32.")
    history_lag: Annotated[int, Field(ge=0)] = Field(0, description="A step sees the pushes of steps so many before the last.")
    refresh: Positive | Literal["auto"] | None = Field(
        None, description="Epochs between exact refreshes of the histories, or auto: where they have drifted too far."
    )
    drift_tolerance: float | None = Field(None, gt=0, description="Relative error at which auto refreshes. [0.1]")
    fanout: Numbers = Field(default_factory=list, description="In-neighbors to sample, a number a layer, -1 for all: 10,10.")
    eval_fanout: Numbers = Field(default_factory=list, description="The same for evaluation; by default --fanout.")
    replace: bool = Field(False, description="Sample with replacement.")
    weight_attr: str | None = Field(None, description="Edge column to sample in proportion to.")
    batch_size: Positive = Field(1024, description="Seeds a batch.")
    evaluate: Literal["auto", "sampled", "layerwise"] = Field(
        "auto",
        description="Scores by sampled batches, or layerwise: exact ones of all splits by one sweep over all nodes; "
        "auto: layerwise in mode history, unless eval_fanout or eval_batch_size is given.",
    )
    eval_batch_size: Positive | None = Field(None, description="Seeds a batch of evaluation; by default --batch-size.")
    # how steps are made
    accumulate: Positive = Field(1, description="Batches whose gradients make one optimizer step.")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="Autocast: fp32 (none), bf16 or fp16.")
    compile: bool = Field(False, description="Compile the model by torch.compile: for GPUs; on CPUs it has not paid off.")

    @field_validator("fanout", "eval_fanout")
    @classmethod
    def _counts(cls, value: list[int]) -> list[int]:
        if any(count < -1 or count == 0 for count in value):
            raise ValueError("each number is -1 (all neighbors) or positive")
        return value

    @model_validator(mode="before")
    @classmethod
    def _layers_of_fanout(cls, values: Any) -> Any:
        """Without `layers`, the fan-out says how many there are; without a fan-out, 10 a layer."""
        if not isinstance(values, dict):
            return values
        fanout = _numbers(values.get("fanout") or [])
        if values.get("layers") is None and isinstance(fanout, list) and fanout and values.get("mode") in (None, "sampled"):
            return {**values, "layers": len(fanout)}
        return values

    @model_validator(mode="after")
    def _fill(self) -> Self:
        fanout = self.fanout or [_DEFAULT_FANOUT if self.mode == "sampled" else -1] * self.layers
        evaluate = self.eval_fanout or fanout
        for flag, counts in (("fanout", fanout), ("eval_fanout", evaluate)):
            if len(counts) != self.layers:
                text = ",".join(map(str, counts))
                raise ValueError(
                    f"{flag} {text} has {len(counts)} number{'s' * (len(counts) != 1)} for {self.layers} layers: "
                    "give one a layer"
                )
        filled = {"fanout": fanout, "eval_fanout": evaluate, "eval_batch_size": self.eval_batch_size or self.batch_size}
        if self.evaluate == "auto":  # deep models are what histories are for, and whole neighborhoods of them the whole graph
            sweeps = self.mode == "history" and not self.eval_fanout and self.eval_batch_size is None
            filled["evaluate"] = "layerwise" if sweeps else "sampled"
        for name, value in filled.items():
            object.__setattr__(self, name, value)  # frozen for everybody else
        return self

    @model_validator(mode="after")
    def _of_the_mode(self) -> Self:
        """A setting of another mode would be ignored silently."""
        others = {name for mode, names in OWN.items() for name in names} - {*OWN[self.mode]}
        idle = sorted(changed(self, *others))
        if self.mode != "sampled" and any(count != -1 for count in self.fanout):
            idle.append("fanout")
        if idle:
            raise ValueError(f"{idle[0]} means nothing in mode {self.mode}: leave it out, or choose another mode")
        if self.saint != "walk" and changed(self, "walk_length"):
            raise ValueError(f"walk_length means nothing where saint = {self.saint}: leave it out")
        if self.evaluate == "layerwise" and (self.eval_fanout, self.eval_batch_size) != (self.fanout, self.batch_size):
            raise ValueError("eval_fanout and eval_batch_size mean nothing where evaluate = layerwise: leave them out")
        kept = changed(self, "refresh", "history_lag", "history_dtype")
        if self.history == "zero" and kept:
            raise ValueError(f"{kept[0]} means nothing where zeros stand in place of histories: leave it out")
        if self.drift_tolerance is not None and self.refresh != "auto":
            raise ValueError("drift_tolerance decides when refresh = auto refreshes: give that too, or leave it out")
        return self
