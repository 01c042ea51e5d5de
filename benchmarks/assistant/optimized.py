"""What `optimize` found, and how it is shown."""
from collections.abc import Callable

from benchmarks.assistant.combination import AS_IT_IS, ON_THE_FIRST, Combination, Interval
from benchmarks.assistant.look import shapes_in_words, times
from benchmarks.assistant.missing import missing_by_kind
from benchmarks.assistant.sections import Code, Said, Section, Shown, Table
from benchmarks.assistant.trials import Trials
from benchmarks.records import BY_HAND
from benchmarks.records.read import verdict
from common.outcome import in_a_line
from common.report.card import card
from common.report.metrics import ENERGY
from common.runtime.iteration import MODES
from common.text import NOT_AVAILABLE, figures, number, only, ratio


class Optimized(Trials, Shown):
    """What `optimize` found."""

    def card(self, combination: Combination = AS_IT_IS) -> str:
        """The card of a rung, as a step has one. Raises KeyError where it was not measured."""
        return card({**self.alone.results, **self.together.results}[combination.name])

    def cards(self) -> list[str]:
        """Those of the model as it is, and of all techniques on the ladder: their diff is what these bought."""
        return [self.card(each) for each in (AS_IT_IS, *(added.combination for added in self.ladder[-1:]))]

    def sections(self) -> list[Section]:
        parts: list[Callable[[], Section | None]] = [
            self._model, self.looked.where, self._ranked, self._on_each, self._predicted, self._memory, self._climbed,
            self._beside_by_hand, self._write_this, self._written, self._reasons]
        shown = [section for part in parts if (section := self._unless_it_breaks(part))]
        if failed := self.failures:
            shown.append(Said("what failed", [("", each) for each in failed]))
        return shown

    def _unless_it_breaks(self, part: Callable[[], Section | None]) -> Section | None:
        """A part of the report; the others are shown without it."""
        try:
            return part()
        except Exception as error:
            self.faults[f"a part of the report, a fault of this suite: {in_a_line(error)}"] = None
            return None

    def _model(self) -> Section | None:
        measured = [(words, shapes_in_words(inputs)) for words, inputs in self.others.items()]
        measured.append(("truth", self.truth))
        measured += [(mode, said) for mode in MODES if (said := self._as_it_is(mode))]
        return self.looked.model(measured)

    def _as_it_is(self, mode: str) -> str:
        """The time of the model as it is."""
        ms, percent = self.alone.ms(AS_IT_IS, mode), self.alone.percent_of_limit(AS_IT_IS, mode)
        if ms is None:
            return ""
        limit = f", {percent:.0f} % of what this machine could do" if percent else ""
        return f"{figures(ms)} ms as it is{limit}"

    def _ranked(self) -> Table | None:
        rows = []
        for one in self.opportunities:
            where = one.found.place.name if one.found.place else "the call"
            gain = (one.speedup, *one.interval) if one.speedup and one.interval else None
            error = f"{one.error:.0e}" if one.error is not None else ""
            predicted = self.predictions.get(one.technique)
            rows.append([one.technique, where, times(one.count), str(predicted or ""), interval(gain) if gain else "",
                         error, one.verdict])
        alone = "on all inputs" if self.others else "alone"
        foreseen = "predicted on input 1" if self.others else "predicted"
        headers = ["opportunity", "where", "", foreseen, f"{alone}, {self.mode}", "error", "verdict"]
        return Table("what it buys", headers, rows, keys=3) if rows else None

    def _on_each(self) -> Table | None:
        """How many times as fast each technique alone makes a call, on each of several inputs."""
        if not self.others:
            return None
        timed = [technique for technique in self.looked.found if self.gains_on_each(technique)]
        rows = [[technique.name, *(interval(self.gains_on_each(technique).get(words)) for words in self.every_input)]
                for technique in timed]
        as_it_is = [measured.ms(AS_IT_IS, self.mode) for measured in self.timed_on_each.values()]
        rows.insert(0, ["as it is, ms", *(figures(ms) if ms else NOT_AVAILABLE for ms in as_it_is)])
        return Table("on each of the inputs, alone", ["", *self.timed_on_each], rows)

    def _predicted(self) -> Said | None:
        """How many of the gains that were measured lie where they were predicted."""
        measured = {technique: self.alone.gain(Combination((technique,)), self.base_of(technique), self.mode)
                    for technique in self.looked.predicted}
        held = [self.looked.predicted[technique].holds(gain[0]) for technique, gain in measured.items() if gain]
        words = f"{sum(held)} of {len(held)} gains that were measured alone lie where they were predicted"
        return Said("", [("predicted", words)]) if held else None

    def _memory(self) -> Table | None:
        """What each frees alone, beside what was predicted; None where no peak can be read, as on a CPU."""
        rows = []
        for technique, predicted in self.looked.predicted.items():
            measured = self.freed(technique)
            if predicted.freed and measured is not None:
                rows.append([technique.name, str(predicted.freed), number(measured / 2**30, ".2f")])
        return Table("", ["GiB less at the peak, alone", "predicted", "measured"], rows) if rows else None

    def _climbed(self) -> Table | None:
        """One technique more in each row; at the end a compiled rung captured, where the model as it is can't be."""
        if not self.ladder and not self.version_by_hand():
            return None
        rows = [["as it is", *self._row(AS_IT_IS), "", ""]]
        captured = self.captured_at_the_top()
        for added in self.ladder:
            left_out = captured.gain if captured and added.technique is captured.technique else added.left_out
            gains = [interval(gain) for gain in (added.gain, left_out)]
            rows.append([f"+ {added.technique.name}", *self._row(added.combination), *gains])
        for graph in (each for each in self.looked.found if each.launch == "graph"):
            if on_compiled := self.captured_where_compiled(graph):
                rows.append([f"+ {graph.name}", *self._row(on_compiled.combination), interval(on_compiled.gain), ""])
        if by_hand := self.version_by_hand():
            launched = ", as a graph" if by_hand.launch == "graph" else ""
            rows.append([f"{BY_HAND}{launched}", *self._row(by_hand), "", ""])
        ladder = f"the ladder {ON_THE_FIRST}" if self.others else "the ladder"
        headers = [ladder, "ms", "times", "% of limit", "GiB", "J", "on top of those above", "left out of all"]
        shown = [place for place in range(len(headers)) if any(row[place] not in (NOT_AVAILABLE, "") for row in rows)]
        return Table("", only(headers, shown), [only(row, shown) for row in rows])

    def _row(self, combination: Combination) -> list[str]:
        """Time, how many times as fast as the model as it is, share of the limit, memory, energy."""
        row = self.together.row(combination, self.mode)
        changed = combination != AS_IT_IS
        gain = self.together.gain(combination, AS_IT_IS, self.mode) if changed else None
        return [figures(row.median) if row and row.median else NOT_AVAILABLE,
                number(gain[0] if gain else None, ".2f") if changed else "",
                number(self.together.percent_of_limit(combination, self.mode), ".0f"),
                number(row.peak_bytes / 2**30 if row and row.peak_bytes else None, ".2f"),
                number(ENERGY.of(row) if row else None, ".2f")]

    def _beside_by_hand(self) -> Said | None:
        """How much of the speed by hand the ladder reaches, how many milliseconds are missing, and where."""
        by_hand, rung = self.version_by_hand(), self.fastest_rung()
        if why_not := self.together.why_not(Combination(called=BY_HAND), self.mode):
            return Said("", [(BY_HAND, f"it was not timed: {why_not}")])
        share = self.together.gain(rung, by_hand, self.mode) if by_hand else None
        before, after = (self.together.ms(each, self.mode) if each else None for each in (rung, by_hand))
        if not (share and before and after):
            return None
        name = rung.words or "the model as it is"
        words = f"{name} reaches {interval(share)} of its speed"
        ran = [self.together.results[each.name].evidence.get(self.mode) for each in (rung, by_hand) if each]
        if share[2] < 1.0:
            words += f": {figures(before - after)} ms are missing to it"
            if ran[0] and ran[1] and (by_kind := missing_by_kind(ran[0].ms, ran[1].ms)):
                words += f", in kernels: {by_kind}"
        if ran[0] and ran[1]:
            words += f"; it launches {ran[1].launches:,} kernels, and the ladder's {ran[0].launches:,}"
        return Said("", [(BY_HAND, words)])

    def _write_this(self) -> Code | None:
        """For each that is worth it the place and the code; several at one place together, the call last."""
        pieces: dict[str, dict[str, None]] = {}
        for advice in self.to_write():
            for line in advice.imports:
                pieces.setdefault(f"{advice.place.path}, at the top", {})[line] = None   # type: ignore[union-attr]
            for definition in advice.definitions:
                where = f"{advice.place.path}, behind its imports"                       # type: ignore[union-attr]
                pieces.setdefault(where, {})[definition] = None
            place = str(advice.place or "where you call the model")
            pieces.setdefault(place, {})[advice.code] = None
        return Code("write this", [(place, "\n".join(codes)) for place, codes in pieces.items()]) if pieces else None

    def _written(self) -> Said | None:
        return self.written.section() if self.written else None

    def _reasons(self) -> Said | None:
        lines = []
        for one in self.opportunities:
            said = "; ".join(filter(None, [one.reason, one.why]))
            if one.technique == "compile" and self.payback:
                said += f"; when it pays: {self.payback}"
            lines.append((one.technique, f"{one.found.place.name}: {said}" if one.found.place else said))
        return Said("why", lines) if lines else None


def interval(gain: Interval | None) -> str:
    """A ratio with its interval, and what that allows to say."""
    return ratio(gain) + verdict(*gain[1:]) if gain else NOT_AVAILABLE
