"""What the tests of kernels over chunks share: decays of all kinds, and how exact results must be."""
import torch

GATES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TIMES_OF_A_GRADIENT = 2
DECAYS = {"of all sizes": (-5.0, -1e-3), "near 1": (-1e-6, -1e-7), "near 0": (-40.0, -20.0)}
