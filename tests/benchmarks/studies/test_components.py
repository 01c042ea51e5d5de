"""Parts of the block, four ways: each is the same function, has its own limit, and is told in one table."""
from types import SimpleNamespace

import pytest
import torch

from benchmarks import studies
from benchmarks.measure import options
from benchmarks.measure.modules import compare
from benchmarks.records.read import read, runs
from benchmarks.studies import components
from common import PRESETS, BlockConfig, parameters
from common.block import block_work, oracle
from common.block.traits import Arithmetic
from common.measure import measurement
from common.measure.cases import Setting
from common.report.result import Result, Row
from common.runtime import compiler, limit, machine
from common.runtime.iteration import BOTH, FORWARD, MODES
from common.runtime.limit import Peaks
from tests.helpers.blocks import case
from tests.helpers.made_records import FACTS, both, made
from tests.helpers.said import one_line

unit, integration = pytest.mark.unit, pytest.mark.integration
CPU = torch.device("cpu")
CONFIG = BlockConfig(2, 24, 32, 2, ffn_hidden_size=80, amp_dtype=None)
STUDY = studies.load("components")


def part(name: str, way: str, ms: float, **more) -> list[dict]:
    """The records of one part written in one way, which takes so long in the forward and twice that in both."""
    more = {"traits": components.WAYS[way], "variant": {"way": way}, "study": "components"} | more
    return made(name, both([ms] * 6, [2 * ms] * 6), **more)


def table_of(lines: list[dict], mode: str = FORWARD) -> list[list[str]]:
    """The cells of the table of one pass."""
    told = STUDY.report(lines).split(f"{mode}: ms (percent of the part's limit)\n\n")[1].split("\n\n")[0]
    return [row.split() for row in told.splitlines()[2:]]


def parsed(*argv: str):
    """The options of a command line."""
    parser = options.parser(STUDY.name, STUDY.doc)
    STUDY.add_arguments(parser)
    return options.parse(parser, ["--preset", "tiny", "--device", "cpu", *argv], STUDY.refine)


# ----------------------------------------------------------------------------------------------------- one function


@unit
@pytest.mark.parametrize("name", components.PARTS)
def test_naive_and_tuned_are_one_function_of_the_canonical_parameters(name):
    values, x, _ = case(CONFIG, dtype=torch.float64)
    own = components.values_of(name, values)
    naive = components.load(components.uninitialised(name, "naive", CONFIG).double(), own)
    tuned = components.load(components.uninitialised(name, "tuned", CONFIG).double(), own)
    if name in ("block", "LayerNorm"):                         # their LayerNorm is in FP32, as the library's is
        naive, x = naive.float(), x.float()
    assert oracle.relative_error(naive(x), tuned(x.double())) < 1e-6
    if name == "block":
        assert oracle.relative_error(tuned(x.double()), oracle.block(x.double(), values, CONFIG)) < 1e-12


@unit
@pytest.mark.parametrize("way", ["naive", "tuned", "compiled"])
@pytest.mark.parametrize("name", components.PARTS)
def test_a_part_has_every_parameter_it_needs_and_no_other(name, way):
    own = components.values_of(name, parameters.seeded(CONFIG))
    module = components.uninitialised(name, way, CONFIG)
    assert {parameter for parameter, _ in module.named_parameters()} <= own.keys()


@unit
@pytest.mark.parametrize("way", components.WAYS)
def test_a_case_has_the_traits_of_its_way_and_no_step(way):
    case_ = components.part_case("MLP", way, CONFIG, CPU, 0)
    assert (case_.name, case_.variant, case_.traits) == ("MLP", {"way": way}, components.WAYS[way])
    assert case_.step is None and case_.parameter_dtype == torch.float32 and not case_.traits.claimed


@unit
def test_all_ways_of_a_part_share_what_fp64_says_of_it(monkeypatch):
    components._given.cache_clear()
    made_of, truth_of = [], components.Truth

    def counted(*arguments):
        made_of.append(arguments)
        return truth_of(*arguments)
    monkeypatch.setattr(components, "Truth", counted)
    setting = Setting(CPU, 0, lambda *what: None, time_compiler=False)
    for way in ("naive", "tuned"):
        case_ = components.part_case("MLP", way, CONFIG, CPU, 0)
        result = Result("MLP", case_.config, "float32", FACTS)
        subject = case_.prepare(setting, result)
        assert subject.workload.tokens == CONFIG.tokens and result.errors["output"][0] < result.errors["output"][1]
        assert "gradient of fc.weight" in result.errors
    assert len(made_of) == 1


@unit
def test_a_part_that_does_not_fit_is_told_a_shape_that_does():
    told = components.part_case("MLP", "naive", CONFIG.replace(batch_size=64), CPU, 0).that_fits(2**40)
    assert told == "--batch-size 32 --seq-len 24 fits"


@unit
def test_a_part_that_is_not_there_is_missing_with_the_reason():
    case_ = components.part_case("MLP", "best known", CONFIG, CPU, 0)
    with pytest.raises(NotImplementedError, match="Transformer Engine needs a GPU"):
        case_.prepare(Setting(CPU, 0, lambda *what: None, time_compiler=False),
                      Result("MLP", case_.config, "float32", FACTS))


# --------------------------------------------------------------------------------------------------------- its limit


def limit_of(name: str, arithmetic, peaks: Peaks, mode: str = FORWARD) -> float:
    """The limit in ms that a row of a part gets."""
    work = components.work_of(name, block_work.work_in(arithmetic, CONFIG))
    return sum(limit.ms_by_kind(work.operations(mode), peaks).values())


IN_FP8 = Arithmetic("float8", "float16", parameter_bytes=4, activation_bytes=2, operand_bytes=1, weight_bytes=4)
ENDLESS = 1e30                                             # bytes/s: what is left is FLOPs


@unit
def test_a_parts_limit_is_that_of_its_own_operations():
    peaks = Peaks({"float8": 1e12, "float16": 1e12}, ENDLESS)
    N, S, E, F = CONFIG.tokens, CONFIG.seq_len, CONFIG.hidden_size, CONFIG.ffn_hidden_size
    qkv, attention, proj, mlp = 6 * N * E * E, 2 * N * S * E, 2 * N * E * E, 4 * N * E * F
    expected = {"QKV projection": qkv, "attention": qkv + attention + proj, "MLP": mlp,
                "block": qkv + attention + proj + mlp}
    for name, flops in expected.items():
        assert limit_of(name, IN_FP8, peaks) == pytest.approx(1e3 * flops / 1e12)
        assert limit_of(name, IN_FP8, peaks, BOTH) == pytest.approx(3e3 * flops / 1e12)
    moved = N * E * (4 + 2 + 2)                            # of two LayerNorms: read x, write y, in FP8 and read again
    of_copies = Peaks({"float8": ENDLESS, "float16": ENDLESS}, 1e9)
    assert limit_of("LayerNorm", IN_FP8, of_copies) == pytest.approx(1e3 * moved / 1e9 / 2)


@unit
def test_attention_is_held_against_the_peak_of_its_own_dtype():
    """Matmuls in FP8, attention in 16 bits: the peak of the one says nothing of the other."""
    N, S, E = CONFIG.tokens, CONFIG.seq_len, CONFIG.hidden_size
    matmuls, attention = 8 * N * E * E, 2 * N * S * E
    peaks = Peaks({"float8": 4e12, "float16": 1e12}, ENDLESS)
    assert limit_of("attention", IN_FP8, peaks) == pytest.approx(1e3 * (matmuls / 4e12 + attention / 1e12))
    slower = Peaks({"float8": 4e12, "float16": 0.5e12}, ENDLESS)
    assert limit_of("attention", IN_FP8, slower) - limit_of("attention", IN_FP8, peaks) == pytest.approx(
        1e3 * attention / 1e12)
    assert limit_of("MLP", IN_FP8, slower) == limit_of("MLP", IN_FP8, peaks)


@unit
def test_what_is_best_known_has_no_limit_of_its_own():
    """Of its operations nothing is said; its tokens are counted."""
    known, row = block_work.work_in(IN_FP8, CONFIG).part(()), Row()
    measurement.hold_against_limits([(row, known, BOTH)], SimpleNamespace())
    assert row.limits == {} and known.tokens == CONFIG.tokens and known.flops(BOTH) == 0.0


# -------------------------------------------------------------------------------------------------------- what it shows


@unit
def test_a_part_is_a_row_of_its_ways_and_the_fastest():
    lines = part("MLP", "naive", 4.0) + part("MLP", "tuned", 2.0) + part("MLP", "compiled", 1.0)
    lines += part("MLP", "best known", 1.0, status="skipped", reason="no FP8")
    assert table_of(lines) == [["MLP", "4.00", "(50", "%)", "2.00", "(50", "%)", "1.00", "(50", "%)", "skipped",
                                "4.00", "[4.00,", "4.00]", "compiled"]]
    assert "MLP, best known: skipped: no FP8" in STUDY.report(lines)


@unit
def test_without_the_naive_one_nothing_is_faster():
    lines = part("MLP", "naive", 4.0, status="failed", reason="why") + part("MLP", "tuned", 2.0)
    (row,) = table_of(lines)
    assert row == ["MLP", "failed", "2.00", "(50", "%)", "n/a", "n/a", "n/a"]
    (row,) = table_of(part("MLP", "naive", 4.0) + part("MLP", "tuned", 5.0))
    assert row[-2:] == ["1", "naive"]


@unit
def test_parts_stand_in_the_order_of_the_block():
    lines = part("LayerNorm", "naive", 1.0) + part("MLP", "naive", 4.0) + part("block", "naive", 9.0)
    assert [row[0] for row in table_of(lines)] == ["block", "MLP", "LayerNorm"]


@unit
def test_errors_and_kernels_stand_in_a_table_of_their_own():
    told = STUDY.report(part("MLP", "naive", 4.0) + part("MLP", "tuned", 2.0)).split("error against FP64")[1]
    rows = [row.split() for row in told.splitlines() if row.startswith("MLP, ")]
    assert rows == [["MLP,", "naive", "ok", "2.0e-07", "3", "3"], ["MLP,", "tuned", "ok", "2.0e-07", "3", "3"]]


@unit
@pytest.mark.parametrize("percent, cell", [(99.6, "0.400 (100 %)"), (112.6, "0.400 (113 %, ERROR)"), (None, "0.400")])
def test_a_part_beyond_its_limit_is_an_error_of_the_limit(percent, cell):
    run = SimpleNamespace(status="ok", best=lambda mode: "eager", figure=lambda *_: percent, best_ms=lambda mode: 0.4)
    assert components._cell(run, FORWARD) == cell


@unit
def test_the_chart_has_how_much_faster_than_naive_each_way_is(monkeypatch):
    drawn = []
    monkeypatch.setattr(components, "bars_chart", lambda *drawing, **more: drawn.append(drawing[0]))
    lines = part("MLP", "naive", 4.0) + part("MLP", "tuned", 2.0) + part("LayerNorm", "tuned", 2.0)
    STUDY.charts(lines)["speed-ups"]()
    assert drawn == [{"MLP": {"tuned": (2.0, 2.0, 2.0)}}]
    assert STUDY.charts(part("LayerNorm", "tuned", 2.0)) == {}


@unit
def test_the_answer_is_the_part_that_gains_most():
    lines = part("MLP", "naive", 4.0) + part("MLP", "tuned", 2.0)
    lines += part("LayerNorm", "naive", 5.0) + part("LayerNorm", "compiled", 1.0) + part("LayerNorm", "tuned", 2.0)
    assert STUDY.answer(lines) == "LayerNorm: 5.0 times as fast as naive (compiled)"


# --------------------------------------------------------------------------------------------------------- the command


@unit
def test_the_parts_that_were_asked_for_are_groups():
    groups = list(STUDY.groups(parsed("--part", "MLP", "--part", "LayerNorm")))
    assert [[case_.name for case_ in group.cases] for group in groups] == [["MLP"] * 4, ["LayerNorm"] * 4]
    assert len(list(STUDY.groups(parsed()))) == len(components.PARTS)
    assert not any(group.calibrated or group.watched for group in groups)
    assert parsed().config.amp_dtype is None               # on a CPU all is in FP32


@integration
def test_a_study_of_the_parts(study_main, cheap_backend, tmp_path):
    path = tmp_path / "parts.jsonl"
    status, out, err = study_main("components", "--rounds", 6, "--json", path, "--chart", tmp_path / "parts", "--part",
                                  "attention")
    assert status == 0 and "Traceback" not in err, out
    rows = [line.split() for line in out.splitlines() if line.startswith("attention ")]
    assert len(rows) == 2 and all("skipped" in row for row in rows)                      # two passes; FP8 on a CPU
    assert "Transformer Engine needs a GPU" in out and (tmp_path / "parts-speed-ups.png").exists()
    lines = read(path)
    assert STUDY.report(lines) in out
    ways = {run.variant["way"]: run for run in runs(lines)}
    tuned = ways["tuned"]
    limits = [tuned.value(mode, "limit", "eager") for mode in MODES]
    assert tuned.value(FORWARD, "percent of limit", "eager") > 0 and limits[1] > 2 * limits[0]
    in_fp32 = block_work.work_in(Arithmetic("float32", "float32", 4, 4, 4, 4), PRESETS["tiny"])
    of_attention = components.work_of("attention", in_fp32)
    counted = tuned.value(FORWARD, "rate", "eager") * tuned.median(FORWARD, "eager") / 1e3
    assert counted == pytest.approx(of_attention.flops(FORWARD))
    assert ways["best known"].status == "skipped"
    assert all(len(ways[way].samples(FORWARD, "eager")) == 6 for way in ("naive", "tuned", "compiled"))


@unit
def test_parts_that_this_machine_can_not_hold_are_refused(study_main, monkeypatch):
    """Before Linux kills the process."""
    monkeypatch.setattr(machine, "memory_total", lambda device: 1024)
    status, out, err = study_main("components", "--rounds", 6, "--part", "LayerNorm")
    assert (status, out) == (3, "") and one_line(err).startswith("components: out of memory: about ")


@integration
def test_a_wrong_part_is_a_row_and_the_others_are_timed(study_main, monkeypatch, cheap_backend):
    monkeypatch.setattr(components.NaiveLayerNorm, "forward", lambda self, x: x * self.weight)
    status, out, _ = study_main("components", "--rounds", 6, "--part", "LayerNorm")
    assert status == 1 and "LayerNorm, naive: failed: the output is off by" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("LayerNorm "))
    assert row[1] == "failed" and float(row[2]) > 0


@integration
def test_what_was_not_compiled_is_no_compiled_part(study_main, monkeypatch):
    monkeypatch.setattr(compiler, "compile_in_place", lambda module: None)
    status, out, _ = study_main("components", "--rounds", 6, "--part", "LayerNorm")
    assert status == 1 and "LayerNorm, compiled: failed: torch.compile compiled nothing" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("LayerNorm "))
    assert row.count("failed") == 1


@unit
def test_an_unknown_part_is_one_line(study_main):
    status, _, err = study_main("components", "--part", "head")
    assert status == 2 and one_line(err).startswith("components: error: argument --part")


@unit
@pytest.mark.transformer_engine
@pytest.mark.parametrize("name", components.PARTS)
def test_the_best_known_part_passes_its_check(name):
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.float16)
    device = torch.device("cuda")
    given = components.Given(name, config, device, seed=0)
    module = components.made(name, "best known", given)
    if name != "LayerNorm":
        components.calibrate(module, given.x)
    own = {parameter: value.to(device, torch.float64)
           for parameter, value in components.values_of(name, given.values).items()}
    reference = components.uninitialised(name, "tuned", config.replace(amp_dtype=None)).to(device, torch.float64)
    gates = {"best known": components.FP8_GATES.get(name, oracle.MODULE_GATES[torch.float16])[0]}
    results = compare({"best known": module}, (given.x,), components.load(reference, own), 6, gates).results
    assert results["best known"].status == "ok", results["best known"].info["reason"]
