"""The techniques, in the order in which they are tried; one file each."""
from benchmarks.assistant.technique import Technique
from benchmarks.assistant.techniques import (
    alignment,
    autocast,
    block_mask,
    cast_once,
    channels_last,
    checkpointing,
    compiled,
    cuda_graph,
    cudnn_benchmark,
    dynamic,
    flex_attention,
    fold_batchnorm,
    fp8,
    fused_qkv,
    graph_break,
    host_sync,
    int8_weights,
    library_gelu,
    library_loss,
    library_norm,
    library_silu,
    loop,
    mask_is_causal,
    optimizer,
    repeat_kv,
    running_sum,
    sdpa,
    tf32,
)

EVERY: tuple[Technique, ...] = tuple(module.TECHNIQUE for module in (
    tf32, autocast, channels_last, cudnn_benchmark, fold_batchnorm, sdpa, flex_attention, library_norm, library_gelu,
    library_silu, library_loss, fused_qkv, fp8, cast_once, int8_weights, compiled, cuda_graph, graph_break, host_sync,
    loop, running_sum, mask_is_causal, block_mask, repeat_kv, alignment, optimizer, checkpointing, dynamic))
