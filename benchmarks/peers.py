"""Is step 4 as fast as the layer a user would take instead, Transformer Engine's own TransformerLayer?

    python -m benchmarks.peers --json benchmarks/results/h200/peers.jsonl

Same parameters, input and mask, same FP8 recipe, weights quantized at every call, attention in 16 bits. Each case is
checked against FP64, then all are timed in interleaved rounds, and the ratio of the rounds is what counts. With FP32
parameters TransformerLayer returns y in 16 bits; it is timed as it is, and with y cast to FP32 as in every step.
TransformerLayer runs as it comes, so its GELU is a kernel of its own, where step 4 has it ride on the matmul.
"""
import argparse
import statistics
import sys

import torch
from tabulate import tabulate
from torch import Tensor, nn

from common import BlockConfig, harness, parameters, report, roofline, steps, te_emulation, timing
from common import device as machine
from common.config import LAYER_NORM_EPS, PRESETS, default_preset


class TransformerLayer(nn.Module):
    """Transformer Engine's layer with the canonical parameters; x [B, S, E] -> [B, S, E] in `output_dtype`."""

    parameter_names = {  # canonical -> Transformer Engine's
        "ln_1.weight": "layer.self_attention.layernorm_qkv.layer_norm_weight",
        "ln_1.bias": "layer.self_attention.layernorm_qkv.layer_norm_bias",
        "attn.qkv.weight": "layer.self_attention.layernorm_qkv.weight",
        "attn.qkv.bias": "layer.self_attention.layernorm_qkv.bias",
        "attn.proj.weight": "layer.self_attention.proj.weight",
        "attn.proj.bias": "layer.self_attention.proj.bias",
        "ln_2.weight": "layer.layernorm_mlp.layer_norm_weight",
        "ln_2.bias": "layer.layernorm_mlp.layer_norm_bias",
        "mlp.fc.weight": "layer.layernorm_mlp.fc1_weight",
        "mlp.fc.bias": "layer.layernorm_mlp.fc1_bias",
        "mlp.proj.weight": "layer.layernorm_mlp.fc2_weight",
        "mlp.proj.bias": "layer.layernorm_mlp.fc2_bias",
    }
    fresh = None           # weights are quantized at every call

    def __init__(self, config: BlockConfig, dtype: torch.dtype, output_dtype: torch.dtype):
        super().__init__()
        te = te_emulation.transformer_engine_pytorch
        self.config, self.output_dtype = config, output_dtype
        self.engine = f"Transformer Engine {te_emulation.transformer_engine.__version__}"
        self.recipe = te.quantization.DelayedScaling()
        self.fp8 = te.autocast
        self.layer = te.TransformerLayer(
            config.hidden_size, config.ffn_hidden_size, config.num_heads, layernorm_epsilon=LAYER_NORM_EPS,
            hidden_dropout=0.0, attention_dropout=config.dropout, self_attn_mask_type="causal", fuse_qkv_params=True,
            qkv_weight_interleaved=False, attn_input_format="bshd", params_dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.dtype == torch.float32
        with torch.autocast("cuda", self.config.amp_dtype, enabled=mixed), self.fp8(enabled=True, recipe=self.recipe):
            y = self.layer(x)
        return y.to(self.output_dtype)


def blocks(config: BlockConfig, values: dict[str, Tensor], device: torch.device) -> dict[str, nn.Module]:
    """Name -> block, all with the same parameters."""
    dtype, amp = values["mlp.fc.weight"].dtype, config.amp_dtype
    found = {f"step {n}": steps.load(n).build(config, values, device) for n in (3, 4)}
    for output in dict.fromkeys((dtype, amp)):
        layer = TransformerLayer(config, dtype, output)
        name = f"te.TransformerLayer, y in {str(output).removeprefix('torch.')}"
        found[name] = parameters.load(layer, values, device)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default=default_preset("cuda"))
    parser.add_argument("--rounds", type=int, default=60, help="interleaved samples of each case")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line per metric")
    options = parser.parse_args()
    if options.rounds < 6:
        parser.error(f"--rounds {options.rounds}: give at least 6, fewer bound no median")
    try:
        output = report.Output(options.json)
    except OSError as error:
        parser.error(f"--json {options.json}: {error.strerror}; give a file that can be written")
    config, device, rows = PRESETS[options.preset], torch.device("cuda"), []
    _, engine = te_emulation.choose(config, parameters.seeded(PRESETS["tiny"]), device if torch.cuda.is_available()
                                    else torch.device("cpu"))
    if engine.startswith("emulated"):
        print(f"peers: skipped: {engine}", file=sys.stderr)
        return 4
    harness.use_private_caches()
    for dtype in (torch.float32, torch.float16):
        try:
            rows += compare(config, dtype, device, options.rounds, output)
        except harness.Failed as error:
            print(f"peers: failed: {error}", file=sys.stderr)
            return 1
    print(tabulate(rows, headers=("parameters", "pass", "launch", "case", "branch error", "ms",
                                  "its ms / step 4's [95 %]")))
    return 0


def compare(config: BlockConfig, dtype: torch.dtype, device: torch.device, rounds: int, output) -> list[tuple]:
    """Check and time every block with parameters of `dtype`; the rows of the table. Raises harness.Failed."""
    values = {name: value.to(dtype) for name, value in parameters.seeded(config).items()}
    shape = (config.batch_size, config.seq_len, config.hidden_size)
    x, dy = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(device, dtype) for n in (1, 2))
    facts, rows, reports, gradient = machine.facts(device), [], {}, {}
    cases = blocks(config, values, device)
    for case, block in cases.items():
        step = 3 if case == "step 3" else 4
        gradient[case] = dy.to(getattr(block, "output_dtype", dtype))
        result = reports[case] = report.Report(case, config, str(dtype).removeprefix("torch."), facts)
        result.matmul = roofline.arithmetic(config, step, dtype, device).matmul
        result.engine = getattr(block, "engine", "PyTorch")
        result.residual = str(config.amp_dtype if step == 4 else dtype).removeprefix("torch.")
        if step == 4:
            harness.calibrate(block, x, gradient[case])
        harness.check(block, x, values, result)
    for mode in report.MODES:
        calls = {case: harness.iterations(block, x, gradient[case], mode == "forward+backward")
                 for case, block in cases.items()}
        for launch in report.LAUNCHES:
            runs = {case: call for case, (call, _) in calls.items()}
            between = {case: clear for case, (_, clear) in calls.items()}
            if launch == "graph":
                runs = {case: _captured(block, *calls[case], x, reports[case]) for case, block in cases.items()}
                between = {}
            timing.interleaved(runs, timing.EventClock(), 5, between)                      # warm-up
            samples = timing.interleaved(runs, timing.EventClock(), rounds, between)
            for case, taken in samples.items():
                ratio, result = timing.paired_ratio(taken, samples["step 4"]), reports[case]
                middle, error = statistics.median(taken), result.errors["branch"][0]
                result.state = machine.state(device)
                rows.append((result.parameter_dtype, mode, launch, case, f"{error:.1e}", f"{middle:.3f}",
                             "{:.3f} [{:.3f}, {:.3f}]".format(*ratio)))
                output.write([report.record(result, "latency", "ms", taken, mode, launch=launch, median=middle,
                                            branch_error=error, ratio_to_step_4=ratio)])
            for _, clear in calls.values():
                clear()
    return rows


def _captured(block: nn.Module, iteration, between, x: Tensor, result: report.Report):
    """The iteration as a graph, verified."""
    static = {}
    replay = timing.capture(lambda: static.update(y=iteration()), between)
    harness.verify_replay(block, replay, iteration, between, static, x, result)
    return replay


if __name__ == "__main__":
    sys.exit(main())
