"""What a run is busy with: shown while it goes on, and what its time is counted under."""
import enum


class Phase(enum.Enum):
    """One kind of work. Its value is what a person sees, and what a record calls it."""
    STARTING = "starting"
    READING = "reading the model"
    BUILDING = "building"
    COMPILING = "compiling"
    CHECKING = "checking"
    CALIBRATING = "calibrating"
    WARMING_UP = "warming up"
    SAMPLING = "sampling"
    TIMED = "timed"                        # of the samples, what was timed; the rest warmed up for it
    PROFILING = "profiling"
    OBSERVING = "observing"
    ATTRIBUTING = "attributing"
    COUNTING = "counting"
    METERING = "metering"
    READING_CLOCKS = "reading clocks"
    CAPTURING = "capturing"
    JUDGING = "judging"
    TRAINING = "training"
    SHOWING = "showing what was measured"

    def said(self, detail: str = "") -> str:
        """What a person sees: the phase, and what of it."""
        return f"{self.value}: {detail}" if detail else self.value
