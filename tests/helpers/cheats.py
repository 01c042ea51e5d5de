"""What is said of each of the cheats."""

# Work on another stream that is not done yet may be seen by any look of the judge's.
UNFINISHED = ("on another stream", "filled in later", "a later call writes over it", "its outputs are random", "off by")
# What is said of each, in part. Of two, who looks first decides what is found: "".
SAID = {
    "an output cached by address": "timed call (forward) returned another result",
    "an output cached by content": "timed call (forward) returned another result",
    "an output cached by shape": "timed call (forward) returned another result",
    "a gradient cached": "gradient of", "a backward that skips": "gradient", "a stale buffer": "timed call (forward)",
    "all but the first call of a burst skipped": "timed call (forward)", "every other call skipped": "a timed call",
    "somebody's memory found and returned": "off by", "half of the rows, twice": "output",
    "a seed hard-coded": "on inputs that it had not seen", "right in FP64 alone": "no rounding makes of it",
    "right under gradients alone": "output without gradients", "right on the first calls alone": "a timed call",
    "a state moved on the first calls alone": "",
    "right in a deep copy alone": "no rounding makes of it", "zeros below an absolute tolerance": "output",
    "a constant": "output", "a factor that 16 bits would hide": "no rounding makes of it",
    "everybody's precision lowered": "float32_matmul_precision",
    "its input changed for later calls": "changes its input in place", "random numbers of 16 bits": "coincide",
    "work left to a thread": "", "work left on another stream": UNFINISHED,
    "a tensor that computes when looked at": "a Lazy, which may compute",
    "the host's clock replaced": "time.perf_counter_ns",
    "allclose replaced": "torch.allclose", "synchronize replaced": "torch.cuda.synchronize",
    "the event class replaced": "torch.cuda.Event", "equality of tensors replaced": "torch.equal",
}


def is_named(cheat, reason):
    """Whether a reason says what is said of that cheat, or one of several things."""
    words = SAID[cheat]
    return any(each in reason for each in ((words,) if isinstance(words, str) else words))
