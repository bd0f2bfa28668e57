"""Settings of training on nodes: the keys of a TOML or JSON file are the flags with underscores.

`RunConfig` has the settings of all runs; the mode determines a configuration's class (`class_of`). Nothing heavy is imported,
because the command line builds its flags from these classes and `ooc --help` must be fast.
"""

from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ooc.config.base import DeviceName, Positive, Size, Threads, changed, parse
from ooc.config.fan_outs import ALL_OTHERS, FanOuts, by_edge_type, fanout_text, parsed
from ooc.config.fan_outs import HELP as FANOUT_HELP
from ooc.config.gradients import SharedGradients
from ooc.config.models import DEFAULT_LAYERS, REVERSIBLE, ModelConfig
from ooc.stores.sizes import parse_bytes

_DEFAULT_FANOUT = 10
_DEFAULT_LAYER_NODES = 512
_PARTS = ("parts", "parts_per_batch")
OF_LABOR = ("layer_dependency", "batch_dependency", "importance")
"""settings that apply to sampler = labor only"""
LEARNING = ("gradient", "learned")
LAYER_WISE = ("ladies", "fastgcn", "degree", *LEARNING)
"""samplers that draw nodes for all of a hop together; the numbers of `fanout` are theirs"""
OWN = {
    "sampled": (
        "sampler",
        *OF_LABOR,
        "normalize",
        "replace",
        "weight_attr",
        "pack",
        "gpu_memory",
        "sample_device",
        "read_threads",
    ),
    "cluster": _PARTS,
    "saint": ("saint", "roots", "walk_length", "saint_coverage"),
    "history": (*_PARTS, "history", "history_dtype", "history_lag", "refresh", "drift_tolerance"),
}
"""settings that apply to that mode only, or to several of these"""
COMPRESS = "Keep activations for the backward pass in int8, int4 or int2: a quarter, an eighth or a sixteenth of the bytes."
PARTS_AN_EPOCH = 16
"""batches of parts to make where the settings are open, where memory allows as large ones"""


def _checkpointing(value: object) -> object:
    """What a switch says, which the setting was once."""
    return {True: "layers", False: "none"}[value] if isinstance(value, bool) else value


Checkpointing = Annotated[Literal["none", "layers", "sqrt", "auto"], BeforeValidator(_checkpointing)]


class NodeConfig(ModelConfig):
    """Common settings of runs on the labels of nodes."""

    task: Literal["node"] = Field(default="node", description="What is predicted: node (labels of nodes).")
    node_type: str | None = Field(
        default=None, description="Node type whose labels are learned (heterogeneous); by default the one with labels."
    )
    num_bases: Positive | None = Field(
        default=None, description="Bases of the edge types' matrices (rgcn); by default 30, if there are more edge types."
    )
    plan: bool = Field(default=False, description="Predict the run before it starts, from a profile of a few seconds.")


class TrainConfig(NodeConfig, SharedGradients):
    """Settings of training on batches of nodes.

    >>> TrainConfig(store="cora.ooc", out="runs/cora", model="gcn", fanout=[-1, -1]).layers
    2
    """

    has_techniques: ClassVar[bool] = True

    rescale: bool = Field(
        default=True, description="Rescale sums over sampled edges to be unbiased (gcn, gin, gine, gcnii, appnp, sgc)."
    )
    activation_checkpointing: Checkpointing = Field(
        default="none",
        description="Recompute layers in the backward pass, for less memory and more time: layers (each of them), sqrt (in "
        "about as many segments as the square root of their number), or auto (what memory has no room for, by measured costs).",
    )
    compress: Literal["int8", "int4", "int2"] | None = Field(default=None, description=COMPRESS)
    # batches
    mode: Literal["sampled", "cluster", "saint", "history"] = Field(
        default="sampled",
        description="sampled: sampled neighborhoods; cluster: parts and the edges between them; saint: random subgraphs, "
        "normalized; history: whole parts, with their neighbors' inner rows from a cache on disk.",
    )
    parts: Positive | None = Field(default=None, description="Number of equal node ranges, if the store has no parts.")
    parts_per_batch: Positive = Field(default=1, description="Parts per batch.")
    saint: Literal["walk", "node", "edge"] = Field(default="walk", description="GraphSAINT sampler: walk, node or edge.")
    roots: Positive = Field(default=2000, description="Walks, nodes or edges sampled per batch (saint).")
    walk_length: Annotated[int, Field(gt=0, le=1000)] = Field(default=2, description="Steps of a walk (saint).")
    saint_coverage: float = Field(
        default=50.0, gt=0, le=10_000, description="Samples per node to estimate the normalization (saint)."
    )
    history: Literal["kept", "zero"] = Field(default="kept", description="Histories, or zeros instead (to see their effect).")
    history_dtype: Literal["float16", "float32", "int8"] = Field(
        default="float16", description="Dtype of the histories: float16, float32, or int8 with a scale a row."
    )
    history_lag: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Number of latest optimizer steps whose pushes are not visible yet."
    )
    refresh: Positive | Literal["auto"] | None = Field(
        default=None, description="Epochs between exact refreshes of the histories, or auto: when they have drifted too far."
    )
    drift_tolerance: float | None = Field(
        default=None, gt=0, description="Relative error at which --refresh auto refreshes, 0.1 by default."
    )
    fanout: FanOuts = Field(default_factory=list, description=FANOUT_HELP)
    eval_fanout: FanOuts = Field(default_factory=list, description="In-neighbors sampled for evaluation; by default --fanout.")
    sampler: Literal["neighbor", "labor", "ladies", "fastgcn", "degree", "gradient", "learned"] = Field(
        default="neighbor",
        description="labor: nodes of a batch share neighbors (see --help-all); ladies, ...: those of a layer a budget, "
        "--fanout.",
    )
    normalize: bool = Field(
        default=True,
        description="Scale the weights of a node's neighbors to its degree (ladies, ...): less variance; without "
        "it sums are unbiased.",
    )
    layer_dependency: bool = Field(default=False, description="Layers share neighbors too (labor).")
    batch_dependency: Positive = Field(
        default=1, description="Over how many consecutive batches neighbors are shared (labor), such as 64."
    )
    importance: Annotated[int, Field(ge=0, le=64)] | Literal["*"] = Field(
        default=0,
        description="Iterations, or * until they converge, after which neighbors that many nodes of a batch have in common are "
        "drawn more often (labor): 0 to 64.",
    )
    replace: bool = Field(default=False, description="Sample with replacement.")
    weight_attr: str | None = Field(default=None, description="Edge column with sampling weights.")
    pack: Size | None = Field(
        default=None,
        description="Disk space to write each batch's rows together in, such as 12GB: fewer bytes for deep fan-outs. It "
        "changes nothing where all rows fit in memory.",
    )
    gpu_memory: Size | None = Field(
        default=None,
        description="Memory of the GPU to take, such as 8GB; by default what is free.",
    )
    sample_device: DeviceName = Field(
        default="auto",
        description="Where neighbors are sampled: cpu, cuda (edges beyond its memory stay in the host's), or auto; batches are "
        "the same.",
    )
    batch_size: Positive = Field(default=1024, description="Seeds per batch.")
    evaluate: Literal["auto", "sampled", "layerwise"] = Field(
        default="auto",
        description="Evaluate on sampled batches, or layerwise: exactly, by a pass over all nodes; auto: layerwise in mode "
        "history, with ladies, ..., and where neighborhoods do not fit, without eval_fanout.",
    )
    eval_batch_size: Positive | None = Field(default=None, description="Seeds per evaluation batch; by default --batch-size.")
    # steps
    accumulate: Positive = Field(default=1, description="Batches whose gradients are accumulated per optimizer step.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="Autocast: fp32 (none), bf16 or fp16.")
    compile: bool = Field(default=False, description="Compile the model with torch.compile; for GPUs, no faster on CPUs.")
    sample_threads: Threads | None = Field(
        default=None, description="Threads that sample; by default by the cores. Results do not depend on it."
    )
    read_threads: Threads | None = Field(
        default=None, description="Threads that gather rows in RAM; by default by the cores. Results do not depend on it."
    )

    @model_validator(mode="before")
    @classmethod
    def _layers_of_fanout(cls, values: Any) -> Any:
        """Derive `layers` from the fan-out if only the latter is given."""
        if not isinstance(values, dict):
            return values
        fanout: object = None
        with suppress(ValueError):  # it is refused where it is parsed
            fanout = parsed(values.get("fanout") or [])
        first = next(iter(fanout.values()), None) if isinstance(fanout, dict) else fanout
        if values.get("model") in REVERSIBLE:  # all layers run on all that was sampled, however many hops
            return values
        if values.get("layers") is None and isinstance(first, list) and first and values.get("mode") in (None, "sampled"):
            return {**values, "layers": len(first)}
        return values

    @model_validator(mode="after")
    def _fill(self) -> Self:
        hops = DEFAULT_LAYERS if self.is_reversible else self.layers
        default = _DEFAULT_LAYER_NODES if self.sampler in LAYER_WISE else _DEFAULT_FANOUT
        fanout = self.fanout or [default if self.mode == "sampled" else -1] * hops
        self._check_scored(hops)
        evaluate = self.eval_fanout or fanout
        given = {"fanout": by_edge_type(fanout), "eval_fanout": by_edge_type(evaluate)}
        for flag, name, counts in ((flag, *each) for flag, own in given.items() for each in own.items()):
            if len(counts) != self.layers and not self.is_reversible:
                text = ("" if name == ALL_OTHERS else f"{name}=") + ",".join(map(str, counts))
                raise ValueError(
                    f"{flag} {text} has {len(counts)} number{'s' * (len(counts) != 1)} for {self.layers} layers: "
                    "give one per layer"
                )
        filled: dict[str, Any] = {
            "fanout": fanout,
            "eval_fanout": evaluate,
            "eval_batch_size": self.eval_batch_size or self.batch_size,
        }
        if self.evaluate == "auto" and not self._opens_scores():
            # sampling a deep model's full neighborhoods would reach the whole graph
            deep = self.mode == "history" or self.sampler in LAYER_WISE
            exact = self.task == "node" and deep and not self.eval_fanout and self.eval_batch_size is None
            filled["evaluate"] = "layerwise" if exact else "sampled"
        for name, value in filled.items():
            object.__setattr__(self, name, value)  # the model is frozen otherwise
        return self

    @model_validator(mode="after")
    def _of_the_mode(self) -> Self:
        """Reject settings of other modes, which would be ignored silently."""
        if self.is_reversible and self.mode == "history":
            raise ValueError(
                f"model {self.model} reads rows of neighbors that its layers compute themselves, and histories cannot stand "
                "for these: use mode cluster, saint or sampled"
            )
        others = {name for mode, names in OWN.items() for name in names} - {*OWN[self.mode]}
        unused = sorted(changed(self, *others))
        if self.mode != "sampled" and any(count != -1 for own in by_edge_type(self.fanout).values() for count in own):
            unused.append("fanout")
        if unused:
            raise ValueError(f"{unused[0]} does not apply to mode {self.mode}: leave it out, or use another mode")
        self._check_labor()
        self._check_layer_wise()
        self._check_compress()
        if self.activation_checkpointing == "auto" and self.compile:
            raise ValueError(
                "activation_checkpointing = auto does not apply to compile = true, whose layers keep what they choose: use "
                "layers or sqrt, or leave one of them out"
            )
        if self.mode == "history" and self.activation_checkpointing not in ("none", "layers"):
            raise ValueError(
                f"activation_checkpointing = {self.activation_checkpointing} does not apply to mode history, where histories "
                "act between layers: use layers"
            )
        if self.saint != "walk" and changed(self, "walk_length"):
            raise ValueError(f"walk_length does not apply to saint = {self.saint}: leave it out")
        if self.evaluate == "layerwise" and (self.eval_fanout, self.eval_batch_size) != (self.fanout, self.batch_size):
            raise ValueError("eval_fanout and eval_batch_size do not apply to evaluate = layerwise: leave them out")
        unused_history = changed(self, "refresh", "history_lag", "history_dtype")
        if self.history == "zero" and unused_history:
            raise ValueError(f"{unused_history[0]} does not apply to history = zero: leave it out")
        if self.drift_tolerance is not None and self.refresh != "auto":
            raise ValueError("drift_tolerance applies to refresh = auto only: set that too, or leave it out")
        return self

    def _opens_scores(self) -> bool:
        """Whether a run chooses how it is scored, by whether full neighborhoods fit its memory."""
        own = self.eval_fanout not in ([], self.fanout) or self.eval_batch_size not in (None, self.batch_size)
        return self.mode in ("cluster", "saint") and not own

    @property
    def automatic(self) -> tuple[str, ...]:
        return (*super().automatic, "evaluate")

    def _check_compress(self) -> None:
        if self.compress is None:
            return
        if self.is_reversible:
            raise ValueError(
                f"compress does not apply to model {self.model}, whose layers keep no activations for the backward pass: leave "
                "it out"
            )
        if self.activation_checkpointing != "none":
            raise ValueError("compress and activation_checkpointing save the same memory: leave one of them out")
        if self.compile:
            raise ValueError(
                "compress does not apply to compile = true, whose layers keep what they choose: leave one of them out"
            )

    def _check_labor(self) -> None:
        unused = changed(self, *OF_LABOR)
        if self.sampler != "labor" and unused:
            raise ValueError(f"{unused[0]} applies to sampler = labor only: set that too, or leave it out")
        if self.sampler == "labor" and self.replace:
            raise ValueError("replace does not apply to sampler = labor: leave it out")
        if self.importance != 0 and not getattr(self, "rescale", True):
            raise ValueError("importance weights sums by how often an edge is drawn: leave out rescale = false, or importance")

    def _check_layer_wise(self) -> None:
        if self.sampler not in LAYER_WISE:
            if changed(self, "normalize"):
                raise ValueError(f"normalize applies to sampler = {', '.join(LAYER_WISE)} only: set that too, or leave it out")
            return
        if unused := changed(self, "replace", "weight_attr"):
            raise ValueError(f"{unused[0]} does not apply to sampler = {self.sampler}: leave it out")
        if not getattr(self, "rescale", True):
            raise ValueError(f"sampler = {self.sampler} weights sums by how often a node is drawn: leave out rescale = false")

    def _check_scored(self, hops: int) -> None:
        """Reject fan-outs of scores that would be a budget of training batches. hops: that are sampled."""
        if self.sampler in LEARNING and self.task != "node":
            raise ValueError(f"sampler = {self.sampler} learns from labels of nodes: use another one with task = {self.task}")
        asked = self.task != "node" or self.eval_batch_size is not None
        sampled = self.evaluate == "sampled" or (self.evaluate == "auto" and asked)
        if self.sampler in LAYER_WISE and sampled and not self.eval_fanout:
            passes = self.task == "node" and self.eval_batch_size is None  # which take no batches
            instead = ", or evaluate = layerwise" if passes else ""
            raise ValueError(
                f"sampled scores draw neighbors of each node, and sampler = {self.sampler} does not: give eval_fanout = "
                f"{','.join(['10'] * hops)}{instead}"
            )

    @property
    def batches(self) -> str:
        parts = f"{self.parts_per_batch:,} part{'s' * (self.parts_per_batch != 1)} per batch"
        steps = f" of {self.walk_length}" if self.saint == "walk" else ""
        labor = "LABOR, " if self.sampler == "labor" else ""
        drawn = f"{labor}fan-out {fanout_text(self.fanout)}"
        if self.sampler in LAYER_WISE:
            drawn = f"{self.sampler}, {fanout_text(self.fanout)} nodes a layer"
        return {
            "sampled": f"{drawn}, batches of {self.batch_size:,}",
            "cluster": f"clusters, {parts}",
            "saint": f"GraphSAINT, {self.roots:,} {self.saint}s{steps} per batch",
            "history": f"{'histories' if self.history == 'kept' else 'zeros instead of histories'}, {parts}",
        }[self.mode]

    @property
    def of_a_rank(self) -> tuple[str, ...]:
        own = {"sampled": ("batch_size",), "cluster": ("parts_per_batch",), "saint": ("roots",)}
        return *own.get(self.mode, ()), "eval_batch_size"

    @property
    def leaves_mode_open(self) -> bool:
        return "mode" not in self.model_fields_set


class FullConfig(NodeConfig):
    """Settings of exact training on the whole graph; a step is an epoch.

    >>> FullConfig(store="cora.ooc", out="runs/cora", model="gcn", memory="3GB").placement
    'planned'
    """

    mode: Literal["full"] = Field(default="full", description="the whole graph at once, exactly, with offloading to disk.")
    placement: Literal["planned", "retained", "device", "disk", "recomputed", "compressed", "inverted"] = Field(
        default="planned",
        description="Where intermediates are kept for the backward pass: planned, or one placement for all (inverted: rows "
        "between reversible layers are made again from those above).",
    )
    compress: Literal["int8", "int4", "int2"] | None = Field(default=None, description=COMPRESS)
    disk: Size | None = Field(default=None, description="Disk space for intermediates, such as 50GB; by default what is free.")
    gpu_memory: Size | None = Field(
        default=None,
        description="Memory of the GPU to take, such as 8GB; by default what is free.",
    )

    halo: Literal["exact", "sampled", "stale"] = Field(
        default="exact",
        description="Rows of neighbors that other processes compute: exact; sampled: a share of them, drawn each epoch; stale: "
        "also of earlier epochs.",
    )
    halo_rate: float = Field(
        default=0.1, gt=0, le=1, description="Share of the halo's rows that an epoch draws (halo sampled)."
    )
    halo_every: Positive = Field(default=2, description="Epochs after which a row is sent again at the latest (halo stale).")
    halo_tolerance: float | None = Field(
        default=None,
        ge=0,
        description="Also send a row that drifted by more than this share of its length (halo stale); by default any drift is "
        "allowed.",
    )
    halo_recompute: Literal["none", "first", "all", "auto"] = Field(
        default="none",
        description="Rows of neighbors that each process computes itself instead of having them sent: none; first: those that "
        "follow from features alone; all; auto: whichever takes less time.",
    )
    halo_bandwidth: Size | None = Field(
        default=None,
        description="Bytes a second that a process sends, such as 100MB; by default it is measured (halo_recompute auto).",
    )

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.placement == "compressed" and self.compress is None:
            raise ValueError("placement = compressed needs to know how: give compress = int8, int4 or int2 too")
        return self

    @model_validator(mode="after")
    def _halo_settings(self) -> Self:
        if self.halo_recompute != "auto" and self.halo_bandwidth is not None:
            raise ValueError("halo_bandwidth applies to halo_recompute = auto only: set that too, or leave it out")
        for kind, names in (("sampled", ("halo_rate",)), ("stale", ("halo_every", "halo_tolerance"))):
            unused = changed(self, *names)
            if self.halo != kind and unused:
                raise ValueError(f"{unused[0]} applies to halo = {kind} only: set that too, or leave it out")
        return self

    @property
    def batches(self) -> str:
        exact = "the whole graph, exactly"
        return exact if self.halo == "exact" else f"the whole graph, with {self.halo} rows of other processes"

    @property
    def plans(self) -> bool:
        """Whether placements are planned before the first step; the run keeps the plan. Compression is a choice of the plan."""
        return self.plan or self.compress is not None

    @property
    def disk_bytes(self) -> int | None:
        """`disk` in bytes."""
        return None if self.disk is None else parse_bytes(self.disk)


def in_mode(config: TrainConfig, mode: str, more: dict[str, Any]) -> TrainConfig:
    """`config` in a mode, with `more` settings. Its fan-outs are of mode sampled; elsewhere their length is the depth.

    Raises ConfigError for other settings that do not apply there.
    """
    given = {name: getattr(config, name) for name in config.model_fields_set}
    if mode != "sampled":
        given = {name: value for name, value in given.items() if name not in ("fanout", "eval_fanout")}
    if more.get("evaluate") == "layerwise":
        given.pop("eval_batch_size", None)
    return parse(TrainConfig, {**given, "layers": config.layers, "mode": mode, **more})
