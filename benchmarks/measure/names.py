"""What a check is of: an output, a gradient or a buffer, and how it is called."""
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Of a tensor; a CALL is no tensor, but the call as a whole."""
    OUTPUT = "output"
    INPUT_GRADIENT = "gradient of an input"
    PARAMETER_GRADIENT = "gradient of a parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CALL = "call"

    @property
    def is_gradient(self) -> bool:
        return self in (Kind.INPUT_GRADIENT, Kind.PARAMETER_GRADIENT)


@dataclass(frozen=True)
class Named:
    """One of them. `alone`: an output of a forward without gradients."""
    kind: Kind
    words: str
    alone: bool = False

    def __str__(self) -> str:
        return f"{self.words} without gradients" if self.alone else self.words


THE_CALL = Named(Kind.CALL, "call")


def output(path: str, alone: bool = False) -> Named:
    """By its path: "output", "output[0]", "output['logits']"."""
    return Named(Kind.OUTPUT, path, alone)


def gradient_of_input(name: str) -> Named:
    """By the name of the input: "input 0", "input mask"."""
    return Named(Kind.INPUT_GRADIENT, f"gradient of {name}")


def gradient_of(parameter: str) -> Named:
    """By the name of the parameter."""
    return Named(Kind.PARAMETER_GRADIENT, f"gradient of {parameter}")


def buffer(name: str) -> Named:
    """By its name."""
    return Named(Kind.BUFFER, f"buffer {name}")


def changed_input(name: str) -> Named:
    """An input that is looked at because a call changes it."""
    return Named(Kind.INPUT, name)
