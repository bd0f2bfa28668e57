"""Settings common to all runs, and parsing of values. Imports nothing heavy, because the command line needs it."""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from ooc.config.faults import fault_of
from ooc.stores.errors import ConfigError
from ooc.stores.io.remote.url import store_path
from ooc.stores.sizes import parse_bytes

CONFIG = "config.json"
"""file in a run's directory with its resolved settings"""
FREE_TO_CHANGE = frozenset(
    {"store", "out", "memory", "engine", "in_memory", "checkpoint_every", "epochs", "max_steps", "eval_splits", "plan"}
    | {"tensorboard", "log", "patience", "placement", "disk", "pack", "verify_reads", "cache_dir", "cache"}
    | {"sample_device", "sample_threads", "read_threads", "gpu_memory", "activation_checkpointing", "evaluate"}
)
"""keys a resumed run may change: they affect where bytes come from, how it is scored or when it ends, never a step's loss, but
that a learning rate by plateau follows from scores"""


def numbers(value: object) -> object:
    """Parse "10,5" and 10 to lists, "" to an empty one; lists are returned unchanged. Raises ValueError for "10,,5"."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")] if value.strip() else []
        if "" in parts:
            raise ValueError("a value is missing beside a comma: give it, or leave the comma out")
        return parts
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _pairs(value: object) -> object:
    """Parse ["x=a.npy"], "x=a.npy" or a JSON object to a dict; dicts are returned unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    pairs = [value] if isinstance(value, str) else value
    if not isinstance(pairs, list | tuple):
        return value
    if not all(isinstance(pair, str) and "=" in pair for pair in pairs):
        raise ValueError("write it as name=value")
    return dict(pair.split("=", 1) for pair in pairs)


def task_name(value: object) -> object:
    """Return the name of a task for an older one: "link" for "links"."""
    return {"links": "link", "nodes": "node"}.get(value, value) if isinstance(value, str) else value


def _size(value: object, info: ValidationInfo) -> object:
    """Check a number of bytes, such as "2GB", and return it as text."""
    if value is not None:
        parse_bytes(value if isinstance(value, int) else str(value), info.field_name or "")
    return None if value is None else str(value)


Settings = TypeVar("Settings", bound=BaseModel)
Number = Annotated[int, Field(lt=2**31)]
Numbers = Annotated[list[Number], BeforeValidator(numbers)]
Size = Annotated[str, BeforeValidator(_size)]
Words = Annotated[list[str], BeforeValidator(numbers)]
Counts = Annotated[list[Annotated[int, Field(gt=0, le=10_000)]], BeforeValidator(numbers)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Width = Annotated[int, Field(gt=0, le=2**16)]
"""columns of a layer: a square matrix of this size already takes 17 GB"""
Depth = Annotated[int, Field(gt=0, le=10_000)]
"""layers: ten times those of the deepest published models"""
Ratio = Annotated[int, Field(gt=0, le=10_000)]
"""negatives per event: ten times those of TGB"""
OfModel = Mapping[str, Sequence[str]]
"""setting -> the models that it applies to"""


def check_model(config: "RunConfig", built_in: Sequence[str], of_model: OfModel, of_own: Sequence[str] = ()) -> None:
    """Raise ValueError for an unknown model, and for what does not apply to it; see `check_settings`."""
    own = ":" in config.model
    if not own and config.model not in built_in:
        known = ", ".join(built_in)
        raise ValueError(f"model {config.model!r} is unknown: use {known}, or package.module:Class for your own")
    check_settings(config, of_model, of_own)


def check_settings(config: "RunConfig", of_model: OfModel, of_own: Sequence[str]) -> None:
    """Raise ValueError for settings of other models, which would be ignored silently; own classes have those of `of_own`."""
    own, known = ":" in config.model, type(config).model_fields
    if not own and config.model_args:
        raise ValueError(f"model_args apply to your own class (package.module:Class), not to {config.model}")
    for name in changed(config, *(name for name in of_model if name in known)):
        if config.model not in of_model[name] and not (own and name in of_own):
            hint = "leave it out, or give it in model_args" if own else "leave it out"
            raise ValueError(f"{name} does not apply to model {config.model}: {hint}")


def changed(config: BaseModel, *names: str) -> list[str]:
    """Return those of `names` that differ from their default."""
    fields = type(config).model_fields
    return [name for name in names if getattr(config, name) != fields[name].get_default(call_default_factory=True)]


def differing(model: "type[RunConfig]", values: Mapping[str, Any]) -> set[str]:
    """Return the settings that are neither defaults nor follow from the other ones.

    Args:
        model: The class of the settings.
        values: All of them, with resolved values, as in RUN/config.json.

    >>> differing(TrainConfig, TrainConfig(store="a.ooc", out="run", fanout=[5, 5, 5]).model_dump(mode="json"))
    {'store', 'out', 'fanout'}
    """
    fields = model.model_fields
    found = {name for name in fields if name in values}
    for name in sorted(found, key=lambda name: name != "layers"):  # layers follow from the fan-out, not the other way round
        left = {other: values[other] for other in found if other != name}
        try:
            same = getattr(model(**left), name) == getattr(model(**left, **{name: values[name]}), name)
        except ValidationError:
            same = False
        found -= {name} if same else set()
    return found


OF_SCHEDULE = {
    "lr_epochs": ("cosine", "step"),
    "lr_factor": ("step", "plateau"),
    "lr_patience": ("plateau",),
}
"""settings that apply to these schedules only"""
DeviceName = Literal["auto", "cpu", "cuda"]


class RunConfig(BaseModel):
    """Settings of every run; frozen, and saved with resolved values as RUN/config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    has_techniques: ClassVar[bool] = False
    """whether `ooc compare` has techniques against memory for such runs"""
    refused: ClassVar[tuple[str, ...]] = ()
    """settings of the class it extends that its own runs refuse"""
    often: ClassVar[tuple[str, ...]] = ()
    """settings that the short help of such runs shows beside those that all have"""

    store: Annotated[Path, AfterValidator(store_path)] = Field(description="The store to train on: a directory, or a URL.")
    out: Path = Field(description="Directory of the run; it must not exist.")
    mode: str
    task: str
    """what is predicted: see `ooc.config.modes.choices`"""
    model: str
    model_args: Annotated[dict[str, Any], BeforeValidator(_pairs)] = Field(
        default_factory=dict, description="Further arguments of your own class, as a JSON object."
    )
    hidden: Width = Field(default=64, description="Width of the hidden layers.")
    dropout: Fraction = Field(default=0.5, description="Dropout on every layer's input (and on gat's attention).")
    # optimization
    epochs: Positive = Field(default=100, description="Epochs: passes over the training data.")
    max_steps: Positive | None = Field(default=None, description="Stop after this many batches in total.")
    optimizer: Literal["adam", "adamw", "sgd"] = Field(default="adam", description="adam, adamw or sgd.")
    momentum: Fraction = Field(default=0.0, description="Momentum (sgd).")
    lr: float = Field(default=0.01, gt=0, description="Learning rate.")
    lr_schedule: Literal["constant", "cosine", "step", "plateau"] = Field(
        default="constant",
        description="Learning rate over time: constant, cosine (to 0), step (by a factor every so many epochs), or plateau (by "
        "a factor where validation does not improve).",
    )
    lr_warm_up: float = Field(
        default=0.0, ge=0, description="Epochs, or a part of one, in which the learning rate rises from 0."
    )
    lr_epochs: Positive | None = Field(
        default=None,
        description="Epochs until the learning rate is 0 (cosine), by default --epochs; or between its steps (step), by "
        "default a third.",
    )
    lr_factor: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Factor of the learning rate at each fall (step, plateau); without --lr-schedule it sets plateau.",
    )
    lr_patience: Positive = Field(
        default=5,
        description="Evaluations without improvement before the learning rate falls (plateau; set without --lr-schedule).",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of all parameters but embedding tables.")
    grad_clip: float | None = Field(default=None, gt=0, description="Clip the gradient to this norm.")
    eval_every: Positive = Field(default=1, description="Epochs between evaluations on validation.")
    monitor: str | None = Field(
        default=None, description="Validation score that selects the best model: accuracy, auroc, rmse, loss, ..."
    )
    patience: Positive | None = Field(default=None, description="Stop after this many evaluations without improvement.")
    # machine
    device: DeviceName = Field(default="auto", description="auto, cpu or cuda.")
    memory: Size | None = Field(default=None, description="Memory limit of the process, such as 2GB.")
    engine: Literal["auto", "uring", "pread", "mmap", "gds"] = Field(
        default="auto", description="How rows are read: auto, uring, pread, mmap, or gds (needs CUDA and the extra ooc[gds])."
    )
    in_memory: bool = Field(default=False, description="Keep all rows in RAM; results do not change.")
    verify_reads: bool = Field(
        default=False,
        description="Compare every chunk with its checksum before rows are read from it; by default those read whole.",
    )
    cache_dir: Path | None = Field(
        default=None, description="Directory that keeps what was read of a store at a URL; by default ~/.cache/ooc/stores."
    )
    cache: Size | None = Field(
        default=None, description="Size of that cache, such as 200GB; by default half of what is free on its disk."
    )
    features: Annotated[dict[str, str], BeforeValidator(_pairs)] = Field(
        default_factory=dict, description="Read a node array from elsewhere (Zarr or LMDB): name=path; repeatable."
    )
    threads: Threads | None = Field(
        default=None, description="Number of torch threads; a resumed run keeps the recorded number."
    )
    tf32: bool = Field(default=False, description="TF32 in matrix products of float32, on GPUs: faster, 10 bits of mantissa.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Random seed.")
    checkpoint_every: Positive | None = Field(
        default=None, description="Steps between checkpoints; by default every few seconds, at most 5 % of the time."
    )
    log: Annotated[list[Literal["tensorboard", "wandb", "mlflow"]], BeforeValidator(numbers)] = Field(
        default_factory=list,
        description="Log losses and scores to tensorboard (in the run's directory), wandb, mlflow; several: "
        "tensorboard,wandb. Each needs the extra of its name: ooc[wandb].",
    )
    tensorboard: bool = Field(default=False, description="The same as --log tensorboard.")

    @model_validator(mode="after")
    def _of_the_schedule(self) -> Self:
        """What a schedule leaves open, and settings of others, which would be ignored silently."""
        given = [name for name in changed(self, *OF_SCHEDULE) if (name, getattr(self, name)) != ("lr_factor", 1.0)]
        if given and "lr_schedule" not in self.model_fields_set and set(given) <= {"lr_factor", "lr_patience"}:
            object.__setattr__(self, "lr_schedule", "plateau")  # the model is frozen otherwise
        for name in given:
            if self.lr_schedule not in OF_SCHEDULE[name]:
                raise ValueError(
                    f"{name} applies to lr_schedule = {' or '.join(OF_SCHEDULE[name])}: set that too, or leave it out"
                )
        if self.lr_schedule not in OF_SCHEDULE["lr_factor"] and self.lr_factor == 1:  # the default of earlier runs of tables
            object.__setattr__(self, "lr_factor", type(self).model_fields["lr_factor"].default)
        if self.lr_factor == 1:
            raise ValueError(f"lr_factor = 1 leaves the rate of lr_schedule = {self.lr_schedule} as it is: give less")
        if self.lr_epochs is None and self.lr_schedule in OF_SCHEDULE["lr_epochs"]:
            whole = self.lr_schedule == "cosine"
            object.__setattr__(self, "lr_epochs", self.epochs if whole else max(1, self.epochs // 3))
        if self.lr_schedule == "cosine" and self.lr_warm_up >= (self.lr_epochs or 0):
            raise ValueError(f"lr_warm_up = {self.lr_warm_up:g} leaves nothing of lr_epochs = {self.lr_epochs}: give less")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum applies to optimizer = sgd, not {self.optimizer}: leave it out")
        return self

    @property
    def needs_scores(self) -> str:
        """The setting that needs scores on validation, for people; "" for none."""
        if self.patience is not None:
            return "patience"
        return "lr_schedule = plateau" if self.lr_schedule == "plateau" else ""

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def folders(self) -> tuple[Path, Path]:
        """The store and the run: data, from which no code is imported."""
        return self.store, self.out

    @property
    def loggers(self) -> list[str]:
        """Names of the loggers: `log`, and `tensorboard`, its older form."""
        return list(dict.fromkeys([*self.log, *(["tensorboard"] if self.tensorboard else [])]))

    @property
    def batches(self) -> str:
        """What a batch is made of, for people."""
        raise NotImplementedError

    @property
    def of_a_rank(self) -> tuple[str, ...]:
        """Settings that say how much one of several processes takes in a step: all of them together take so many times that."""
        return ()

    @property
    def automatic(self) -> tuple[str, ...]:
        """Settings that a run chooses where they are None or "auto", when it begins; it keeps them when it goes on."""
        return ()

    @property
    def leaves_mode_open(self) -> bool:
        """Whether `ooc plan` compares the modes, as none is given."""
        return False

    def differences(self, other: "RunConfig") -> list[str]:
        """Return the keys in which the two runs' losses would differ."""
        return [
            key
            for key in type(self).model_fields
            if key not in FREE_TO_CHANGE and getattr(self, key) != getattr(other, key, None)
        ]


class TimeConfig(RunConfig):
    """Settings that all runs on temporal graphs share."""

    columns: Words | None = Field(default=None, description="Event columns the model uses (none: []); by default all.")
    val: Fraction = Field(default=0.15, description="Share of the events for validation, before the test events.")
    test: Fraction = Field(default=0.15, description="Share of the events for testing, the last ones.")
    negatives: Literal["destinations", "random", "historical"] = Field(
        default="destinations",
        description="Training negatives: destinations (nodes that are destinations of training events), random (any node), or "
        "historical (earlier destinations of the source).",
    )
    ratio: Ratio = Field(default=1, description="Training negatives per event.")
    destinations: Annotated[Numbers, Field(max_length=2)] = Field(
        default_factory=list, description="FIRST,LAST: range of nodes for random negatives; by default all."
    )

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if len(self.destinations) == 1:
            raise ValueError("destinations must be two numbers: the first and the last node")
        for name in ("negatives", "eval_negatives") if self.destinations else ():
            if getattr(self, name) in ("destinations", "tgb"):
                if name in self.model_fields_set:
                    raise ValueError(
                        f"destinations are a range for random negatives: leave it out, or {name} = {getattr(self, name)}"
                    )
                object.__setattr__(self, name, "random")  # the model is frozen otherwise
        if self.val + self.test >= 1:
            raise ValueError("val and test must be shares of the events that sum to less than 1")
        return self


def read_config(path: Path) -> dict[str, Any]:
    """Return the unchecked keys of a TOML or JSON file. Raises ConfigError if it cannot be read or parsed."""
    try:
        data = path.read_bytes()
        values = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except ValueError as error:  # both parsers' errors, and invalid UTF-8
        raise ConfigError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: the configuration is nested too deeply: a key holds a value, or a list of values") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration must be a table of keys, not a {type(values).__name__}")
    return values


def saved_config(out: Path) -> dict[str, Any] | None:
    """Return the resolved settings of the run in `out`, None if it has none yet. Raises ConfigError if there is no `out`."""
    if not os.path.lexists(out):
        raise ConfigError(f"there is no run in {out}: check the path")
    return read_config(out / CONFIG) if (out / CONFIG).is_file() else None


def parse(model: type[Settings], values: Mapping[str, Any], where: str = "") -> Settings:
    """Construct `model` from values, also those of numpy and torch; raises ConfigError with the first fault in one line."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(where + fault_of(error, values)) from None
