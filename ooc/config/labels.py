"""Settings of training on labels, whatever they are of: splits and loss. Imports nothing heavy; see `ooc.config.nodes`."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ooc.config.base import Fraction, RunConfig, Words, changed, numbers


def _class_weights(value: object) -> object:
    return numbers(value) if isinstance(value, str) and value not in ("none", "balanced") else value


class LabelConfig(RunConfig):
    """Common settings of runs that learn labels by split: classes, or numbers."""

    train_split: str = Field(default="train", description="Name of the split to train on.")
    val_split: str = Field(default="val", description="Name of the split that selects the best model.")
    eval_splits: Words = Field(
        default=["val", "test"],
        description="Splits to score at the end with the best model; train, val and test are skipped where they are missing. "
        'To score the training split: train,val,test; to score none: "". Validation is scored after epochs in any '
        "case, as it selects the best model.",
    )
    loss: Literal["auto", "mse", "mae", "huber"] = Field(
        default="auto",
        description="Loss of a regression: mse (squared error), mae (absolute error) or huber; auto: mse, and cross entropy of "
        "classes.",
    )
    huber_delta: float = Field(default=1.0, gt=0, description="Error from which on the Huber loss is linear (--loss huber).")
    label_smoothing: Fraction = Field(default=0.0, description="Label smoothing (of classes).")
    class_weights: Annotated[Literal["none", "balanced"] | list[float], BeforeValidator(_class_weights)] = Field(
        default="none", description="none, balanced, or one weight per class (binary, multi-label: of the positives): 1,2.5."
    )

    @field_validator("class_weights")
    @classmethod
    def _none_negative(cls, value: str | list[float]) -> str | list[float]:
        if not isinstance(value, str) and any(weight < 0 for weight in value):
            raise ValueError("weights must be 0 or more")
        return value

    @model_validator(mode="after")
    def _of_the_loss(self) -> Self:
        if self.loss != "huber" and changed(self, "huber_delta"):
            raise ValueError("huber_delta applies to loss = huber only: set that too, or leave it out")
        return self
