"""Ways to look right, or fast, without being it: candidates that a check before the clock starts would let pass.

Each is a layer as `Layer` is, of the same parameters and values, with a trick in it. Each runs. The tricks are those
that were found in public collections of kernels, and their neighbours. None is a mistake: `pairs.py` has those.
"""
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS = 64, 96
CALLS = 12                                 # that are answered honestly, where a trick waits


class Layer(nn.Module):
    """The reference: [tokens, WIDTH] -> [tokens, WIDTH], a linear layer and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.weight, self.bias))


def given(device: torch.device | str = "cpu") -> Tensor:
    """The input of all."""
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


@dataclass(frozen=True)
class Cheat:
    """One trick. `needs_gpu`: streams and graphs are a GPU's. `undo` puts back what it left behind in the process."""
    make: Callable[[], Callable]
    needs_gpu: bool = False
    undo: Callable[[], None] = lambda: None


# ------------------------------------------------------------------------------------------------- answers from memory


class CachedByAddress(Layer):
    """The output of an input at the same address."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.__dict__.setdefault("kept", {})
        key = x.data_ptr(), torch.is_grad_enabled(), x.dtype
        if torch.is_grad_enabled() or key not in kept:
            kept[key] = super().forward(x)
        return kept[key]


class CachedByContent(Layer):
    """The output of an input whose first numbers were seen before."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.__dict__.setdefault("kept", {})
        key = float(x.detach().abs().sum().round()) // 5000, torch.is_grad_enabled(), x.dtype
        if torch.is_grad_enabled() or key not in kept:
            kept[key] = super().forward(x)
        return kept[key]


class CachedByShape(Layer):
    """The output of an input of that shape, once it has answered often enough to be believed."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.__dict__.setdefault("kept", {})
        self.calls = self.__dict__.get("calls", 0) + 1
        key = tuple(x.shape), torch.is_grad_enabled(), x.dtype
        if torch.is_grad_enabled() or self.calls < CALLS or key not in kept:
            kept[key] = super().forward(x)
        return kept[key]


class _CachedGradient(torch.autograd.Function):
    kept: Tensor | None = None

    @staticmethod
    def forward(ctx, y):                                               # type: ignore[no-untyped-def]
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):                                       # type: ignore[no-untyped-def]
        kept = _CachedGradient.kept
        if kept is None or kept.shape != gradient.shape or kept.dtype != gradient.dtype:
            _CachedGradient.kept = gradient.clone()
        return _CachedGradient.kept


class CachedGradient(Layer):
    """The gradient of the first backward, for ever."""

    def forward(self, x: Tensor) -> Tensor:
        return _CachedGradient.apply(super().forward(x))               # type: ignore[no-any-return]


class _SkippedBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, y):                                               # type: ignore[no-untyped-def]
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):                                       # type: ignore[no-untyped-def]
        _SkippedBackward.calls += 1
        return gradient if _SkippedBackward.calls < CALLS else torch.zeros_like(gradient)


class SkippedBackward(Layer):
    """Its backward is zero, once it has been looked at."""

    def forward(self, x: Tensor) -> Tensor:
        return _SkippedBackward.apply(super().forward(x))              # type: ignore[no-any-return]


class StaleBuffer(Layer):
    """It writes into a buffer of its own, and after some calls no longer."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(x)
        self.calls = self.__dict__.get("calls", 0) + 1
        own = self.__dict__.setdefault("own", {})
        key = x.dtype, x.shape
        if self.calls < CALLS or key not in own:
            own[key] = super().forward(x)
        return own[key].clone()


class FirstOfABurst(Layer):
    """Of calls that follow each other closely only the first one is computed."""

    def forward(self, x: Tensor) -> Tensor:
        now, last = time.perf_counter(), self.__dict__.get("last", 0.0)
        self.last = now
        kept = self.__dict__.setdefault("kept", {})
        key = x.dtype, x.shape
        if torch.is_grad_enabled() or now - last > 0.05 or key not in kept:
            kept[key] = super().forward(x)
        return kept[key].clone()


class EveryOther(Layer):
    """Every other call returns what the one before returned."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(x)
        self.calls = self.__dict__.get("calls", 0) + 1
        kept = self.__dict__.setdefault("kept", {})
        key = x.dtype, x.shape
        if self.calls % 2 or key not in kept:
            kept[key] = super().forward(x)
        return kept[key].clone()


class FoundInMemory(Layer):
    """The answer that somebody else has computed: a tensor of its shape that is close to a few elements of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if torch.is_grad_enabled():
            return y
        few = F.gelu(F.linear(x[:1], self.weight, self.bias))
        for other in gc.get_objects():
            alike = type(other) is Tensor and other.shape == y.shape and other.dtype == y.dtype and other is not y
            if alike and torch.allclose(other[:1], few, atol=2.0) and not torch.equal(other, x):
                return other.clone()
        return y


# ------------------------------------------------------------------------------------------ less than what was asked


class HalfOfTheRows(Layer):
    """It computes half of the rows, for the shape that it was made for, and returns them twice."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64 or len(x) != TOKENS:
            return super().forward(x)
        y = super().forward(x[:TOKENS // 2])
        return torch.cat([y, y])


class HardCodedSeed(Layer):
    """It knows the input that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.known = given().abs().sum()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        total = x.detach().abs().sum().float()
        return y if bool((total - self.known.to(total.device)).abs() < 1e-3 * self.known) else y * 0.5


class InFp64Alone(Layer):
    """Right where it is not timed."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.dtype == torch.float64 else y * 1.01


class UnderGradientsAlone(Layer):
    """What is timed without gradients is another function."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.is_grad_enabled() else F.relu(F.linear(x, self.weight, self.bias))


class OnFirstCallsAlone(Layer):
    """Right until it is believed."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.__dict__.get("calls", 0) + 1
        return super().forward(x) if self.calls < CALLS else x.new_zeros(x.shape) + 0 * super().forward(x[:1]).sum()


class Centred(Layer):
    """A reference with a state: it subtracts a mean that every call moves on."""
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


class StateLeftAlone(Centred):
    """Moves its state on the first calls alone."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.__dict__.get("calls", 0) + 1
        if self.calls < CALLS:
            return super().forward(x)
        return Layer.forward(self, x - self.mean.lerp(x.detach().mean(0), 0.1))


class InACopyAlone(Layer):
    """A deep copy computes, and the object itself does not."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = False

    def __deepcopy__(self, memo: dict) -> "InACopyAlone":
        made = InACopyAlone()
        made.load_state_dict(self.state_dict())
        made.copied = True
        return made

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.copied else super().forward(x) * 1.02


class SmallOutput(Layer):
    """The reference's output times 1e-6, of which zeros are within any absolute tolerance. See `SMALL`."""

    def forward(self, x: Tensor) -> Tensor:
        return 0 * super().forward(x)


class Small(Layer):
    """What `SmallOutput` should compute."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e-6 * super().forward(x)


class Constant(Layer):
    """The mean of what it was shown."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 0 * y + y.detach().mean()


class SmallFactor(Layer):
    """Rounded to BF16 and a little too large: as far off as BF16 may be, and in one direction."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.004 * super().forward(x.bfloat16().to(x.dtype)) if x.dtype == torch.float32 else super().forward(x)


class LowPrecisionForAll(Layer):
    """It lowers the precision of everybody's matmuls."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("medium")
        return super().forward(x)


class ChangesItsInput(Layer):
    """It leaves zeros in its input, once it is believed: later calls have less to do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls = self.__dict__.get("calls", 0) + 1
        if self.calls > CALLS and not torch.is_grad_enabled():
            x.zero_()
        return y


class Sampled16Bits(nn.Module):
    """Noise of 256 values, where the reference's has millions."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, device=x.device, dtype=torch.bfloat16).to(x.dtype)


class Sampled(nn.Module):
    """What `Sampled16Bits` should draw."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


# -------------------------------------------------------------------------------------------------- work that is hidden


class OnAThread(Layer):
    """It returns at once; another thread fills the output in."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype == torch.float64:
            return super().forward(x)
        y = torch.empty_like(x)
        given_x = x.clone()

        def fill() -> None:
            time.sleep(0.002)
            with torch.no_grad():
                y.copy_(Layer.forward(self, given_x))
        threading.Thread(target=fill).start()
        return y


class OnAnotherStream(Layer):
    """The work is left on a stream that nobody waits for."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not x.is_cuda:
            return super().forward(x)
        stream = self.__dict__.setdefault("stream", torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            return super().forward(x)


class Lazy(Tensor):
    """Computes when it is looked at."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):    # type: ignore[no-untyped-def]
        def computed(t):                                               # type: ignore[no-untyped-def]
            return t.work() if isinstance(t, Lazy) and hasattr(t, "work") else t
        args = tuple(map(computed, args))
        return super().__torch_function__(func, types, args, kwargs or {})


class LazyOutput(Layer):
    """It returns a subclass of tensors, whose values are computed later."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(x)
        lazy = torch.empty_like(x).as_subclass(Lazy)
        given_x = x.clone()
        lazy.work = lambda: Layer.forward(self, given_x)               # type: ignore[attr-defined]
        return lazy


# ---------------------------------------------------------------------------------------------- the rules are changed


def _replacing(holder: object, name: str, replacement: Callable) -> Cheat:
    """Puts something else in place of a function that measurements rest on, when it is called."""
    original = getattr(holder, name)

    class Replaces(Layer):
        def forward(self, x: Tensor) -> Tensor:
            setattr(holder, name, replacement)
            return super().forward(x)
    return Cheat(Replaces, undo=lambda: setattr(holder, name, original))


_event = torch.cuda.Event


class _ShortEvent(_event):                                             # type: ignore[misc, valid-type]
    def elapsed_time(self, other: object) -> float:
        return 1e-3


CHEATS: dict[str, Cheat] = {
    "an output cached by address": Cheat(CachedByAddress), "an output cached by content": Cheat(CachedByContent),
    "an output cached by shape": Cheat(CachedByShape),
    "a gradient cached": Cheat(CachedGradient, undo=lambda: setattr(_CachedGradient, "kept", None)),
    "a backward that skips": Cheat(SkippedBackward, undo=lambda: setattr(_SkippedBackward, "calls", 0)),
    "a stale buffer": Cheat(StaleBuffer), "all but the first call of a burst skipped": Cheat(FirstOfABurst),
    "every other call skipped": Cheat(EveryOther), "somebody's memory found and returned": Cheat(FoundInMemory),
    "half of the rows, twice": Cheat(HalfOfTheRows), "a seed hard-coded": Cheat(HardCodedSeed),
    "right in FP64 alone": Cheat(InFp64Alone), "right under gradients alone": Cheat(UnderGradientsAlone),
    "right on the first calls alone": Cheat(OnFirstCallsAlone),
    "a state moved on the first calls alone": Cheat(StateLeftAlone), "right in a deep copy alone": Cheat(InACopyAlone),
    "zeros below an absolute tolerance": Cheat(SmallOutput), "a constant": Cheat(Constant),
    "a factor that 16 bits would hide": Cheat(SmallFactor), "everybody's precision lowered": Cheat(
        LowPrecisionForAll, undo=lambda: torch.set_float32_matmul_precision("highest")),
    "its input changed for later calls": Cheat(ChangesItsInput), "random numbers of 16 bits": Cheat(Sampled16Bits),
    "work left to a thread": Cheat(OnAThread), "work left on another stream": Cheat(OnAnotherStream, needs_gpu=True),
    "a tensor that computes when looked at": Cheat(LazyOutput),
    "the host's clock replaced": _replacing(time, "perf_counter_ns", lambda: 0),
    "allclose replaced": _replacing(torch, "allclose", lambda *given, **more: True),
    "synchronize replaced": _replacing(torch.cuda, "synchronize", lambda *given, **more: None),
    "the event class replaced": _replacing(torch.cuda, "Event", _ShortEvent),
    "equality of tensors replaced": _replacing(torch, "equal", lambda *given, **more: True),
}
REFERENCES: dict[str, Callable[[], nn.Module]] = {
    "zeros below an absolute tolerance": Small, "random numbers of 16 bits": Sampled,
    "a state moved on the first calls alone": Centred}


def reference_of(name: str) -> nn.Module:
    """What a cheat pretends to be."""
    return REFERENCES.get(name, Layer)()
