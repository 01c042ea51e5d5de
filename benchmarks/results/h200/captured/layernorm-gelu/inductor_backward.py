# AOT ID: ['3_backward']
from ctypes import c_void_p, c_long, c_int
import torch
import math
import random
import os
import tempfile
from math import inf, nan
from cmath import nanj
from torch._inductor.hooks import run_intermediate_hooks
from torch._inductor.utils import maybe_profile
from torch._inductor.codegen.memory_planning import _align as align
from torch import device, empty_strided
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
import triton
import triton.language as tl
from torch._inductor.runtime.triton_heuristics import start_graph, end_graph
from torch._C import _cuda_getCurrentRawStream as get_raw_stream

aten = torch.ops.aten
inductor_ops = torch.ops.inductor
_quantized = torch.ops._quantized
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
assert_alignment = torch._C._dynamo.guards.assert_alignment
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
empty_strided_cpu_pinned = torch._C._dynamo.guards._empty_strided_cpu_pinned
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
empty_strided_xpu = torch._C._dynamo.guards._empty_strided_xpu
empty_strided_mtia = torch._C._dynamo.guards._empty_strided_mtia
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()
empty_strided_p2p = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p


# kernel path: /tmp/t1/tmpmjtgz90n/mc/cmcuytadveqnleuuyldd24io272qr2jdqcgurtodcksyye6pddmv.py
# Topologically Sorted Source Nodes: [convert_element_type_4, layer_norm, gelu, mul_13, mul_14, sub_1, mul_15, add_6, mul_16, mul_17, mul_18, add_7, mul_19, convert_element_type_9, mul_21, mul_22, mul_23, sum_2, mul_26], Original ATen: [aten.gelu_backward, aten.native_layer_norm, aten.gelu, aten.native_layer_norm_backward]
# Source node to ATen node mapping:
#   add_6 => add_6
#   add_7 => add_7
#   convert_element_type_4 => convert_element_type_4
#   convert_element_type_9 => convert_element_type_9
#   gelu => add_2, add_3, convert_element_type_2, mul_2, mul_3, mul_4, mul_5, mul_6, tanh
#   layer_norm => add_1, convert_element_type, convert_element_type_1, mul, mul_1, sub
#   mul_13 => mul_13
#   mul_14 => mul_14
#   mul_15 => mul_15
#   mul_16 => mul_16
#   mul_17 => mul_17
#   mul_18 => mul_18
#   mul_19 => mul_19
#   mul_21 => mul_21
#   mul_22 => mul_22
#   mul_23 => mul_23
#   mul_26 => mul_26
#   sub_1 => sub_1
#   sum_2 => sum_2
# Graph fragment:
#   %primals_1 : Tensor "bf16[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=primals_1]
#   %getitem_1 : Tensor "f32[16384, 1][1, 1]cuda:0" = PlaceHolder[target=getitem_1]
#   %rsqrt : Tensor "f32[16384, 1][1, 1]cuda:0" = PlaceHolder[target=rsqrt]
#   %primals_2 : Tensor "bf16[4096][1]cuda:0" = PlaceHolder[target=primals_2]
#   %primals_3 : Tensor "bf16[4096][1]cuda:0" = PlaceHolder[target=primals_3]
#   %tangents_1 : Tensor "bf16[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=tangents_1]
#   %convert_element_type_2 : Tensor "f32[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=convert_element_type_2]
#   %mul_23 : Tensor "f32[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=mul_23]
#   %convert_element_type_4 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%tangents_1, torch.float32), kwargs = {})
#   %convert_element_type : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%primals_1, torch.float32), kwargs = {})
#   %sub : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sub.Tensor](args = (%convert_element_type, %getitem_1), kwargs = {})
#   %mul : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=4] = call_function[target=torch.ops.aten.mul.Tensor](args = (%sub, %rsqrt), kwargs = {})
#   %mul_1 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul, %primals_2), kwargs = {})
#   %add_1 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%mul_1, %primals_3), kwargs = {})
#   %convert_element_type_1 : Tensor "bf16[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%add_1, torch.bfloat16), kwargs = {})
#   %convert_element_type_2 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=4] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%convert_element_type_1, torch.float32), kwargs = {})
#   %mul_2 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=2] = call_function[target=torch.ops.aten.mul.Tensor](args = (%convert_element_type_2, %convert_element_type_2), kwargs = {})
#   %mul_3 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_2, %convert_element_type_2), kwargs = {})
#   %mul_4 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_3, 0.044715), kwargs = {})
#   %add_2 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%convert_element_type_2, %mul_4), kwargs = {})
#   %mul_5 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%add_2, 0.7978845608028654), kwargs = {})
#   %tanh : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=2] = call_function[target=torch.ops.aten.tanh.default](args = (%mul_5,), kwargs = {})
#   %add_3 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%tanh, 1), kwargs = {})
#   %mul_13 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%add_3, 0.5), kwargs = {})
#   %mul_14 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%tanh, %tanh), kwargs = {})
#   %sub_1 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sub.Tensor](args = (1, %mul_14), kwargs = {})
#   %mul_15 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_2, 0.134145), kwargs = {})
#   %add_6 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%mul_15, 1), kwargs = {})
#   %mul_16 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%add_6, 0.7978845608028654), kwargs = {})
#   %mul_6 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%convert_element_type_2, 0.5), kwargs = {})
#   %mul_17 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_6, %sub_1), kwargs = {})
#   %mul_18 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_17, %mul_16), kwargs = {})
#   %add_7 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%mul_13, %mul_18), kwargs = {})
#   %mul_19 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=3] = call_function[target=torch.ops.aten.mul.Tensor](args = (%convert_element_type_4, %add_7), kwargs = {})
#   %convert_element_type_9 : Tensor "f32[4096][1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%primals_2, torch.float32), kwargs = {})
#   %mul_21 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=3] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_19, %convert_element_type_9), kwargs = {})
#   %mul_22 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_21, 4096), kwargs = {})
#   %mul_23 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_21, %mul), kwargs = {})
#   %sum_2 : Tensor "f32[16384, 1][1, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%mul_23, [1], True), kwargs = {})
#   %mul_26 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_19, %mul), kwargs = {})
#   return %convert_element_type_2,%mul_23,%mul_26,%mul_22,%sum_2
triton_red_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_0 = async_compile.triton('triton_red_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_0', '''
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.reduction(
    size_hints={'x': 16384, 'r0_': 4096},
    reduction_hint=ReductionHint.INNER,
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*bf16', 'in_ptr1': '*fp32', 'in_ptr2': '*fp32', 'in_ptr3': '*bf16', 'in_ptr4': '*bf16', 'in_ptr5': '*bf16', 'out_ptr0': '*fp32', 'out_ptr2': '*fp32', 'out_ptr3': '*fp32', 'out_ptr4': '*fp32', 'xnumel': 'i32', 'r0_numel': 'i32', 'XBLOCK': 'constexpr', 'R0_BLOCK': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32), 'constants': {}, 'native_matmul': False, 'enable_fp_fusion': True, 'launch_pdl': False, 'disable_ftz': False, 'configs': [{(0,): [['tt.divisibility', 16]], (1,): [['tt.divisibility', 16]], (2,): [['tt.divisibility', 16]], (3,): [['tt.divisibility', 16]], (4,): [['tt.divisibility', 16]], (5,): [['tt.divisibility', 16]], (6,): [['tt.divisibility', 16]], (7,): [['tt.divisibility', 16]], (8,): [['tt.divisibility', 16]], (9,): [['tt.divisibility', 16]], (10,): [['tt.divisibility', 16]], (11,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'Grid1D', 'autotune_hints': set(), 'kernel_name': 'triton_red_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_0', 'mutated_arg_names': [], 'optimize_mem': True, 'no_x_dim': False, 'atomic_add_found': False, 'num_load': 6, 'num_store': 4, 'num_reduction': 1, 'backend_hash': '91D1D1166449D9E2EB66EB9770C9E2C3B0FEB787341F27FEB4D3F0338DA50336', 'assert_indirect_indexing': True, 'autotune_local_cache': True, 'autotune_pointwise': True, 'autotune_remote_cache': None, 'force_disable_caches': False, 'dynamic_scale_rblock': True, 'max_autotune': False, 'max_autotune_pointwise': False, 'min_split_scan_rblock': 256, 'spill_threshold': 16, 'store_cubin': False, 'deterministic': False, 'force_filter_reduction_configs': False, 'mix_order_reduction_allow_multi_stages': False, 'are_deterministic_algorithms_enabled': False, 'tiling_scores': {'x': 262144, 'r0_': 1879064576}}
)
@triton.jit
def triton_red_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_0(in_ptr0, in_ptr1, in_ptr2, in_ptr3, in_ptr4, in_ptr5, out_ptr0, out_ptr2, out_ptr3, out_ptr4, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    xnumel = 16384
    r0_numel = 4096
    rnumel = r0_numel
    RBLOCK: tl.constexpr = R0_BLOCK
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = tl.full([XBLOCK], True, tl.int1)[:, None]
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    rbase = r0_base
    x0 = xindex
    tmp2 = tl.load(in_ptr1 + (x0), None, eviction_policy='evict_last')
    tmp4 = tl.load(in_ptr2 + (x0), None, eviction_policy='evict_last')
    _tmp45 = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_mask = r0_index < r0_numel
        roffset = r0_offset
        rindex = r0_index
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + 4096*x0), r0_mask, eviction_policy='evict_first', other=0.0).to(tl.float32)
        tmp6 = tl.load(in_ptr3 + (r0_1), r0_mask, eviction_policy='evict_last', other=0.0).to(tl.float32)
        tmp9 = tl.load(in_ptr4 + (r0_1), r0_mask, eviction_policy='evict_last', other=0.0).to(tl.float32)
        tmp14 = tl.load(in_ptr5 + (r0_1 + 4096*x0), r0_mask, eviction_policy='evict_first', other=0.0).to(tl.float32)
        tmp1 = tmp0.to(tl.float32)
        tmp3 = tmp1 - tmp2
        tmp5 = tmp3 * tmp4
        tmp7 = tmp6.to(tl.float32)
        tmp8 = tmp5 * tmp7
        tmp10 = tmp9.to(tl.float32)
        tmp11 = tmp8 + tmp10
        tmp12 = tmp11.to(tl.float32)
        tmp13 = tmp12.to(tl.float32)
        tmp15 = tmp14.to(tl.float32)
        tmp16 = tmp13 * tmp13
        tmp17 = tmp16 * tmp13
        tmp18 = tl.full([1, 1], 0.044715, tl.float32)
        tmp19 = tmp17 * tmp18
        tmp20 = tmp13 + tmp19
        tmp21 = tl.full([1, 1], 0.7978845608028654, tl.float32)
        tmp22 = tmp20 * tmp21
        tmp23 = libdevice.tanh(tmp22)
        tmp24 = tl.full([1, 1], 1.0, tl.float32)
        tmp25 = tmp23 + tmp24
        tmp26 = tl.full([1, 1], 0.5, tl.float32)
        tmp27 = tmp25 * tmp26
        tmp28 = tmp13 * tmp26
        tmp29 = tmp23 * tmp23
        tmp30 = tmp24 - tmp29
        tmp31 = tmp28 * tmp30
        tmp32 = tl.full([1, 1], 0.134145, tl.float32)
        tmp33 = tmp16 * tmp32
        tmp34 = tmp33 + tmp24
        tmp35 = tmp34 * tmp21
        tmp36 = tmp31 * tmp35
        tmp37 = tmp27 + tmp36
        tmp38 = tmp15 * tmp37
        tmp39 = tmp38 * tmp7
        tmp40 = tmp39 * tmp5
        tmp41 = tmp38 * tmp5
        tmp42 = tl.full([1, 1], 4096.0, tl.float32)
        tmp43 = tmp39 * tmp42
        tmp44 = tl.broadcast_to(tmp40, [XBLOCK, R0_BLOCK])
        tmp46 = _tmp45 + tmp44
        _tmp45 = tl.where(r0_mask, tmp46, _tmp45)
        tl.store(out_ptr0 + (r0_1 + 4096*x0), tmp13, r0_mask)
        tl.store(out_ptr2 + (r0_1 + 4096*x0), tmp41, r0_mask)
        tl.store(out_ptr3 + (r0_1 + 4096*x0), tmp43, r0_mask)
    tmp45 = tl.sum(_tmp45, 1)[:, None]
    tl.store(out_ptr4 + (x0), tmp45, None)
''', device_str='cuda')


# kernel path: /tmp/t1/tmpmjtgz90n/ui/cuikwul7s4w3bpwrlwlzqxy6cstp7z67rbuixpngzyp6atj3ar4s.py
# Topologically Sorted Source Nodes: [convert_element_type_4, layer_norm, gelu, mul_13, mul_14, sub_1, mul_15, add_6, mul_16, mul_17, mul_18, add_7, mul_19, convert_element_type_9, mul_21, sum_1, mul_24, sub_3, sub_4, div, mul_25, sum_4, convert_element_type_11], Original ATen: [aten.gelu_backward, aten.native_layer_norm, aten.gelu, aten.native_layer_norm_backward]
# Source node to ATen node mapping:
#   add_6 => add_6
#   add_7 => add_7
#   convert_element_type_11 => convert_element_type_11
#   convert_element_type_4 => convert_element_type_4
#   convert_element_type_9 => convert_element_type_9
#   div => div
#   gelu => add_2, add_3, mul_2, mul_3, mul_4, mul_5, mul_6, tanh
#   layer_norm => convert_element_type, mul, sub
#   mul_13 => mul_13
#   mul_14 => mul_14
#   mul_15 => mul_15
#   mul_16 => mul_16
#   mul_17 => mul_17
#   mul_18 => mul_18
#   mul_19 => mul_19
#   mul_21 => mul_21
#   mul_24 => mul_24
#   mul_25 => mul_25
#   sub_1 => sub_1
#   sub_3 => sub_3
#   sub_4 => sub_4
#   sum_1 => sum_1
#   sum_4 => sum_4
# Graph fragment:
#   %tangents_1 : Tensor "bf16[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=tangents_1]
#   %convert_element_type_2 : Tensor "f32[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=convert_element_type_2]
#   %primals_2 : Tensor "bf16[4096][1]cuda:0" = PlaceHolder[target=primals_2]
#   %rsqrt : Tensor "f32[16384, 1][1, 1]cuda:0" = PlaceHolder[target=rsqrt]
#   %mul_22 : Tensor "f32[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=mul_22]
#   %sum_1 : Tensor "f32[16384, 1][1, 16384]cuda:0" = PlaceHolder[target=sum_1]
#   %primals_1 : Tensor "bf16[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=primals_1]
#   %getitem_1 : Tensor "f32[16384, 1][1, 1]cuda:0" = PlaceHolder[target=getitem_1]
#   %sum_2 : Tensor "f32[16384, 1][1, 16384]cuda:0" = PlaceHolder[target=sum_2]
#   %convert_element_type_4 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%tangents_1, torch.float32), kwargs = {})
#   %convert_element_type : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%primals_1, torch.float32), kwargs = {})
#   %sub : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sub.Tensor](args = (%convert_element_type, %getitem_1), kwargs = {})
#   %mul : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=4] = call_function[target=torch.ops.aten.mul.Tensor](args = (%sub, %rsqrt), kwargs = {})
#   %mul_2 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=2] = call_function[target=torch.ops.aten.mul.Tensor](args = (%convert_element_type_2, %convert_element_type_2), kwargs = {})
#   %mul_3 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_2, %convert_element_type_2), kwargs = {})
#   %mul_4 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_3, 0.044715), kwargs = {})
#   %add_2 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%convert_element_type_2, %mul_4), kwargs = {})
#   %mul_5 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%add_2, 0.7978845608028654), kwargs = {})
#   %tanh : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=2] = call_function[target=torch.ops.aten.tanh.default](args = (%mul_5,), kwargs = {})
#   %add_3 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%tanh, 1), kwargs = {})
#   %mul_13 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%add_3, 0.5), kwargs = {})
#   %mul_14 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%tanh, %tanh), kwargs = {})
#   %sub_1 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sub.Tensor](args = (1, %mul_14), kwargs = {})
#   %mul_15 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_2, 0.134145), kwargs = {})
#   %add_6 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%mul_15, 1), kwargs = {})
#   %mul_16 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%add_6, 0.7978845608028654), kwargs = {})
#   %mul_6 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%convert_element_type_2, 0.5), kwargs = {})
#   %mul_17 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_6, %sub_1), kwargs = {})
#   %mul_18 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_17, %mul_16), kwargs = {})
#   %add_7 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%mul_13, %mul_18), kwargs = {})
#   %mul_19 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=3] = call_function[target=torch.ops.aten.mul.Tensor](args = (%convert_element_type_4, %add_7), kwargs = {})
#   %convert_element_type_9 : Tensor "f32[4096][1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%primals_2, torch.float32), kwargs = {})
#   %mul_21 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=3] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul_19, %convert_element_type_9), kwargs = {})
#   %sum_1 : Tensor "f32[16384, 1][1, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%mul_21, [1], True), kwargs = {})
#   %mul_24 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%mul, %sum_2), kwargs = {})
#   %sub_3 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sub.Tensor](args = (%mul_22, %sum_1), kwargs = {})
#   %sub_4 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sub.Tensor](args = (%sub_3, %mul_24), kwargs = {})
#   %div : Tensor "f32[16384, 1][1, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.div.Tensor](args = (%rsqrt, 4096), kwargs = {})
#   %mul_25 : Tensor "f32[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%div, %sub_4), kwargs = {})
#   %sum_4 : Tensor "f32[4096][1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%mul_19, [0]), kwargs = {})
#   %convert_element_type_11 : Tensor "bf16[16384, 4096][4096, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%mul_25, torch.bfloat16), kwargs = {})
#   return %sum_1,%convert_element_type_11
triton_per_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_1 = async_compile.triton('triton_per_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_1', '''
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.persistent_reduction(
    size_hints={'x': 16384, 'r0_': 4096},
    reduction_hint=ReductionHint.INNER,
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*bf16', 'in_ptr1': '*fp32', 'in_ptr2': '*bf16', 'in_ptr3': '*fp32', 'in_ptr4': '*fp32', 'in_ptr5': '*bf16', 'in_ptr6': '*fp32', 'in_ptr7': '*fp32', 'out_ptr1': '*bf16', 'ws_ptr': '*fp32', 'xnumel': 'i32', 'r0_numel': 'i32', 'XBLOCK': 'constexpr', 'RSPLIT_SIZE': 'constexpr', 'NUM_STAGES': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32), 'constants': {}, 'native_matmul': False, 'enable_fp_fusion': True, 'launch_pdl': False, 'disable_ftz': False, 'configs': [{(0,): [['tt.divisibility', 16]], (1,): [['tt.divisibility', 16]], (2,): [['tt.divisibility', 16]], (3,): [['tt.divisibility', 16]], (4,): [['tt.divisibility', 16]], (5,): [['tt.divisibility', 16]], (6,): [['tt.divisibility', 16]], (7,): [['tt.divisibility', 16]], (8,): [['tt.divisibility', 16]], (9,): [['tt.divisibility', 16]], (10,): [['tt.divisibility', 16]], (11,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'MixOrderReductionGrid', 'autotune_hints': set(), 'kernel_name': 'triton_per_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_1', 'mutated_arg_names': [], 'optimize_mem': True, 'no_x_dim': None, 'atomic_add_found': False, 'num_load': 8, 'num_store': 0, 'num_reduction': 1, 'backend_hash': '91D1D1166449D9E2EB66EB9770C9E2C3B0FEB787341F27FEB4D3F0338DA50336', 'assert_indirect_indexing': True, 'autotune_local_cache': True, 'autotune_pointwise': True, 'autotune_remote_cache': None, 'force_disable_caches': False, 'dynamic_scale_rblock': True, 'max_autotune': False, 'max_autotune_pointwise': False, 'min_split_scan_rblock': 256, 'spill_threshold': 16, 'store_cubin': False, 'deterministic': False, 'force_filter_reduction_configs': False, 'mix_order_reduction_allow_multi_stages': False, 'are_deterministic_algorithms_enabled': False, 'RSPLIT_SIZE': 16}
)
@triton.jit
def triton_per_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_1(in_ptr0, in_ptr1, in_ptr2, in_ptr3, in_ptr4, in_ptr5, in_ptr6, in_ptr7, out_ptr1, ws_ptr, xnumel, r0_numel, XBLOCK : tl.constexpr, RSPLIT_SIZE : tl.constexpr, NUM_STAGES : tl.constexpr):
    xnumel = 16384
    r0_numel = 4096
    R0_BLOCK: tl.constexpr = 4096
    rnumel = r0_numel
    RBLOCK: tl.constexpr = R0_BLOCK
    xoffset = tl.program_id(0) * RSPLIT_SIZE
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = tl.full([XBLOCK], True, tl.int1)[:, None]
    r0_index = tl.arange(0, R0_BLOCK)[None, :]
    r0_offset = 0
    r0_mask = tl.full([R0_BLOCK], True, tl.int1)[None, :]
    roffset = r0_offset
    rindex = r0_index
    r0_1 = r0_index
    accum0 = tl.full([R0_BLOCK], 0, tl.float32)[None, :]
    split_size = min(RSPLIT_SIZE, xnumel - xoffset)
    for _ in tl.range(0, split_size, XBLOCK, num_stages=NUM_STAGES):
        x0 = xindex
        xindex += XBLOCK
        tmp0 = tl.load(in_ptr0 + (r0_1 + 4096*x0), None).to(tl.float32)
        tmp2 = tl.load(in_ptr1 + (r0_1 + 4096*x0), None)
        tmp26 = tl.load(in_ptr2 + (r0_1), None, eviction_policy='evict_last').to(tl.float32)
        tmp32 = tl.load(in_ptr3 + (x0), None, eviction_policy='evict_last')
        tmp35 = tl.load(in_ptr4 + (r0_1 + 4096*x0), None)
        tmp37 = tl.load(in_ptr5 + (r0_1 + 4096*x0), None).to(tl.float32)
        tmp39 = tl.load(in_ptr6 + (x0), None, eviction_policy='evict_last')
        tmp42 = tl.load(in_ptr7 + (x0), None, eviction_policy='evict_last')
        tmp1 = tmp0.to(tl.float32)
        tmp3 = tmp2 * tmp2
        tmp4 = tmp3 * tmp2
        tmp5 = tl.full([1, 1], 0.044715, tl.float32)
        tmp6 = tmp4 * tmp5
        tmp7 = tmp2 + tmp6
        tmp8 = tl.full([1, 1], 0.7978845608028654, tl.float32)
        tmp9 = tmp7 * tmp8
        tmp10 = libdevice.tanh(tmp9)
        tmp11 = tl.full([1, 1], 1.0, tl.float32)
        tmp12 = tmp10 + tmp11
        tmp13 = tl.full([1, 1], 0.5, tl.float32)
        tmp14 = tmp12 * tmp13
        tmp15 = tmp2 * tmp13
        tmp16 = tmp10 * tmp10
        tmp17 = tmp11 - tmp16
        tmp18 = tmp15 * tmp17
        tmp19 = tl.full([1, 1], 0.134145, tl.float32)
        tmp20 = tmp3 * tmp19
        tmp21 = tmp20 + tmp11
        tmp22 = tmp21 * tmp8
        tmp23 = tmp18 * tmp22
        tmp24 = tmp14 + tmp23
        tmp25 = tmp1 * tmp24
        tmp27 = tmp26.to(tl.float32)
        tmp28 = tmp25 * tmp27
        tmp29 = tl.broadcast_to(tmp28, [XBLOCK, R0_BLOCK])
        tmp31 = tl.sum(tmp29, 1)[:, None].to(tl.float32)
        tmp33 = tl.full([1, 1], 0.000244140625, tl.float32)
        tmp34 = tmp32 * tmp33
        tmp36 = tmp35 - tmp31
        tmp38 = tmp37.to(tl.float32)
        tmp40 = tmp38 - tmp39
        tmp41 = tmp40 * tmp32
        tmp43 = tmp41 * tmp42
        tmp44 = tmp36 - tmp43
        tmp45 = tmp34 * tmp44
        tmp46 = tmp45.to(tl.float32)
        tl.store(out_ptr1 + (r0_1 + 4096*x0), tmp46, None)
        tmp47 = tl.sum(tmp25, 0)
        tmp48 = accum0 + tmp47
        accum0 = tmp48
    tl.store(ws_ptr + (tl.program_id(0) + 0 * tl.num_programs(0)) * r0_numel + r0_index, accum0, r0_mask)
''', device_str='cuda')


# kernel path: /tmp/t1/tmpmjtgz90n/wh/cwhj7yqdyzf23uwzvur6eebz7w57gyfffwrczsgbw2edc6e3eeli.py
# Topologically Sorted Source Nodes: [sum_3], Original ATen: [aten.native_layer_norm_backward]
# Source node to ATen node mapping:
#   sum_3 => sum_3
# Graph fragment:
#   %mul_26 : Tensor "f32[16384, 4096][4096, 1]cuda:0" = PlaceHolder[target=mul_26]
#   %sum_3 : Tensor "f32[4096][1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%mul_26, [0]), kwargs = {})
#   return %buf6
triton_red_fused_native_layer_norm_backward_2 = async_compile.triton('triton_red_fused_native_layer_norm_backward_2', '''
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.reduction(
    size_hints={'x': 131072, 'r0_': 512},
    reduction_hint=ReductionHint.OUTER,
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'r0_numel': 'i32', 'XBLOCK': 'constexpr', 'R0_BLOCK': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32), 'constants': {}, 'native_matmul': False, 'enable_fp_fusion': True, 'launch_pdl': False, 'disable_ftz': False, 'configs': [{(0,): [['tt.divisibility', 16]], (1,): [['tt.divisibility', 16]], (2,): [['tt.divisibility', 16]], (3,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'Grid1D', 'autotune_hints': set(), 'kernel_name': 'triton_red_fused_native_layer_norm_backward_2', 'mutated_arg_names': [], 'optimize_mem': True, 'no_x_dim': False, 'atomic_add_found': False, 'num_load': 1, 'num_store': 1, 'num_reduction': 1, 'backend_hash': '91D1D1166449D9E2EB66EB9770C9E2C3B0FEB787341F27FEB4D3F0338DA50336', 'assert_indirect_indexing': True, 'autotune_local_cache': True, 'autotune_pointwise': True, 'autotune_remote_cache': None, 'force_disable_caches': False, 'dynamic_scale_rblock': True, 'max_autotune': False, 'max_autotune_pointwise': False, 'min_split_scan_rblock': 256, 'spill_threshold': 16, 'store_cubin': False, 'deterministic': False, 'force_filter_reduction_configs': False, 'mix_order_reduction_allow_multi_stages': False, 'are_deterministic_algorithms_enabled': False, 'tiling_scores': {'x': 269484032, 'r0_': 0}}
)
@triton.jit
def triton_red_fused_native_layer_norm_backward_2(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    xnumel = 131072
    r0_numel = 512
    rnumel = r0_numel
    RBLOCK: tl.constexpr = R0_BLOCK
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = tl.full([XBLOCK], True, tl.int1)[:, None]
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    rbase = r0_base
    x0 = (xindex % 4096)
    x1 = xindex // 4096
    _tmp2 = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    x3 = xindex
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_mask = r0_index < r0_numel
        roffset = r0_offset
        rindex = r0_index
        r0_2 = r0_index
        tmp0 = tl.load(in_ptr0 + (x0 + 4096*r0_2 + 2097152*x1), r0_mask, eviction_policy='evict_first', other=0.0)
        tmp1 = tl.broadcast_to(tmp0, [XBLOCK, R0_BLOCK])
        tmp3 = _tmp2 + tmp1
        _tmp2 = tl.where(r0_mask, tmp3, _tmp2)
    tmp2 = tl.sum(_tmp2, 1)[:, None]
    tl.store(out_ptr0 + (x3), tmp2, None)
''', device_str='cuda')


# kernel path: /tmp/t1/tmpmjtgz90n/fe/cfevhjo4r7sxzkfy4hw2fb76ykk3ubfmr2ivgevevqi4kocuyhwe.py
# Topologically Sorted Source Nodes: [sum_3, convert_element_type_12], Original ATen: [aten.native_layer_norm_backward]
# Source node to ATen node mapping:
#   convert_element_type_12 => convert_element_type_12
#   sum_3 => sum_3
# Graph fragment:
#   %buf6 : Tensor "f32[4096, 32][1, 4096]cuda:0" = PlaceHolder[target=buf6]
#   %sum_3 : Tensor "f32[4096][1]cuda:0" = PlaceHolder[target=sum_3]
#   %sum_3 : Tensor "f32[4096][1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%mul_26, [0]), kwargs = {})
#   %convert_element_type_12 : Tensor "bf16[4096][1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%sum_3, torch.bfloat16), kwargs = {})
#   return %sum_3,%convert_element_type_12
triton_per_fused_native_layer_norm_backward_3 = async_compile.triton('triton_per_fused_native_layer_norm_backward_3', '''
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.persistent_reduction(
    size_hints={'x': 4096, 'r0_': 32},
    reduction_hint=ReductionHint.OUTER,
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr1': '*bf16', 'xnumel': 'i32', 'r0_numel': 'i32', 'XBLOCK': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32), 'constants': {}, 'native_matmul': False, 'enable_fp_fusion': True, 'launch_pdl': False, 'disable_ftz': False, 'configs': [{(0,): [['tt.divisibility', 16]], (1,): [['tt.divisibility', 16]], (2,): [['tt.divisibility', 16]], (3,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'Grid1D', 'autotune_hints': set(), 'kernel_name': 'triton_per_fused_native_layer_norm_backward_3', 'mutated_arg_names': [], 'optimize_mem': True, 'no_x_dim': None, 'atomic_add_found': False, 'num_load': 1, 'num_store': 1, 'num_reduction': 1, 'backend_hash': '91D1D1166449D9E2EB66EB9770C9E2C3B0FEB787341F27FEB4D3F0338DA50336', 'assert_indirect_indexing': True, 'autotune_local_cache': True, 'autotune_pointwise': True, 'autotune_remote_cache': None, 'force_disable_caches': False, 'dynamic_scale_rblock': True, 'max_autotune': False, 'max_autotune_pointwise': False, 'min_split_scan_rblock': 256, 'spill_threshold': 16, 'store_cubin': False, 'deterministic': False, 'force_filter_reduction_configs': False, 'mix_order_reduction_allow_multi_stages': False, 'are_deterministic_algorithms_enabled': False, 'tiling_scores': {'x': 540672, 'r0_': 0}}
)
@triton.jit
def triton_per_fused_native_layer_norm_backward_3(in_ptr0, out_ptr1, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 4096
    r0_numel = 32
    R0_BLOCK: tl.constexpr = 32
    rnumel = r0_numel
    RBLOCK: tl.constexpr = R0_BLOCK
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = tl.full([XBLOCK], True, tl.int1)[:, None]
    r0_index = tl.arange(0, R0_BLOCK)[None, :]
    r0_offset = 0
    r0_mask = tl.full([R0_BLOCK], True, tl.int1)[None, :]
    roffset = r0_offset
    rindex = r0_index
    r0_1 = r0_index
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0 + 4096*r0_1), None)
    tmp1 = tl.broadcast_to(tmp0, [XBLOCK, R0_BLOCK])
    tmp3 = tl.sum(tmp1, 1)[:, None].to(tl.float32)
    tmp4 = tmp3.to(tl.float32)
    tl.store(out_ptr1 + (x0), tmp4, None)
''', device_str='cuda')


# kernel path: /tmp/t1/tmpmjtgz90n/ov/covdbn7nftse75bzd224hcxyafpj4vox33qfd3yc5ifdc6nzx2i3.py
# Topologically Sorted Source Nodes: [convert_element_type_13], Original ATen: [aten.native_layer_norm_backward]
# Source node to ATen node mapping:
#   convert_element_type_13 => convert_element_type_13
# Graph fragment:
#   %sum_4 : Tensor "f32[4096][1]cuda:0" = PlaceHolder[target=sum_4]
#   %convert_element_type_13 : Tensor "bf16[4096][1]cuda:0"[num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](args = (%sum_4, torch.bfloat16), kwargs = {})
#   return %convert_element_type_13
triton_poi_fused_native_layer_norm_backward_4 = async_compile.triton('triton_poi_fused_native_layer_norm_backward_4', '''
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.pointwise(
    size_hints={'x': 4096}, 
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*bf16', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32), 'constants': {}, 'native_matmul': False, 'enable_fp_fusion': True, 'launch_pdl': False, 'disable_ftz': False, 'configs': [{(0,): [['tt.divisibility', 16]], (1,): [['tt.divisibility', 16]], (2,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'Grid1D', 'autotune_hints': set(), 'kernel_name': 'triton_poi_fused_native_layer_norm_backward_4', 'mutated_arg_names': [], 'optimize_mem': True, 'no_x_dim': False, 'atomic_add_found': False, 'num_load': 1, 'num_store': 1, 'num_reduction': 0, 'backend_hash': '91D1D1166449D9E2EB66EB9770C9E2C3B0FEB787341F27FEB4D3F0338DA50336', 'assert_indirect_indexing': True, 'autotune_local_cache': True, 'autotune_pointwise': True, 'autotune_remote_cache': None, 'force_disable_caches': False, 'dynamic_scale_rblock': True, 'max_autotune': False, 'max_autotune_pointwise': False, 'min_split_scan_rblock': 256, 'spill_threshold': 16, 'store_cubin': False, 'deterministic': False, 'force_filter_reduction_configs': False, 'mix_order_reduction_allow_multi_stages': False, 'are_deterministic_algorithms_enabled': False, 'tiling_scores': {'x': 32768}},
    min_elem_per_thread=0
)
@triton.jit
def triton_poi_fused_native_layer_norm_backward_4(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 4096
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = tl.full([XBLOCK], True, tl.int1)[:]
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), None)
    tmp1 = tmp0.to(tl.float32)
    tl.store(out_ptr0 + (x0), tmp1, None)
''', device_str='cuda')


async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        new_callables = []
        for fn, c in zip(fns, self.partitions):
            new_callables.append(fn(c))
        self.partitions = new_callables

    def call(self, args):
        primals_1, primals_2, primals_3, getitem_1, rsqrt, tangents_1 = args
        args.clear()
        assert_size_stride(primals_1, (16384, 4096), (4096, 1))
        assert_size_stride(primals_2, (4096, ), (1, ))
        assert_size_stride(primals_3, (4096, ), (1, ))
        assert_size_stride(getitem_1, (16384, 1), (1, 1))
        assert_size_stride(rsqrt, (16384, 1), (1, 1))
        assert_size_stride(tangents_1, (16384, 4096), (4096, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((16384, 4096), (4096, 1), torch.float32)
            buf5 = empty_strided_cuda((16384, 4096), (4096, 1), torch.float32)
            buf1 = empty_strided_cuda((16384, 4096), (4096, 1), torch.float32)
            buf4 = empty_strided_cuda((16384, 1), (1, 16384), torch.float32)
            # Topologically Sorted Source Nodes: [convert_element_type_4, layer_norm, gelu, mul_13, mul_14, sub_1, mul_15, add_6, mul_16, mul_17, mul_18, add_7, mul_19, convert_element_type_9, mul_21, mul_22, mul_23, sum_2, mul_26], Original ATen: [aten.gelu_backward, aten.native_layer_norm, aten.gelu, aten.native_layer_norm_backward]
            stream0 = get_raw_stream(0)
            triton_red_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_0.run(primals_1, getitem_1, rsqrt, primals_2, primals_3, tangents_1, buf0, buf5, buf1, buf4, 16384, 4096, stream=stream0)
            del primals_3
            buf10 = empty_strided_cuda((16384, 4096), (4096, 1), torch.bfloat16)
            # Call mix order reduction kernel
            # Topologically Sorted Source Nodes: [convert_element_type_4, layer_norm, gelu, mul_13, mul_14, sub_1, mul_15, add_6, mul_16, mul_17, mul_18, add_7, mul_19, convert_element_type_9, mul_21, sum_1, mul_24, sub_3, sub_4, div, mul_25, sum_4, convert_element_type_11], Original ATen: [aten.gelu_backward, aten.native_layer_norm, aten.gelu, aten.native_layer_norm_backward]
            workspace_0 = empty_strided_cuda((4194304, ), (1, ), torch.float32)
            stream0 = get_raw_stream(0)
            triton_per_fused_gelu_gelu_backward_native_layer_norm_native_layer_norm_backward_1.run(tangents_1, buf0, primals_2, rsqrt, buf1, primals_1, getitem_1, buf4, buf10, workspace_0, 16384, 4096, stream=stream0)
            buf9 = workspace_0[0 * 1024 * 4096 : (0 + 1) * 1024 * 4096].view(1024, 4096).sum(dim=0)
            del workspace_0
            del buf0
            del buf1
            del buf4
            del getitem_1
            del primals_1
            del primals_2
            del rsqrt
            del tangents_1
            buf6 = empty_strided_cuda((4096, 32), (1, 4096), torch.float32)
            # Topologically Sorted Source Nodes: [sum_3], Original ATen: [aten.native_layer_norm_backward]
            stream0 = get_raw_stream(0)
            triton_red_fused_native_layer_norm_backward_2.run(buf5, buf6, 131072, 512, stream=stream0)
            del buf5
            buf11 = empty_strided_cuda((4096, ), (1, ), torch.bfloat16)
            # Topologically Sorted Source Nodes: [sum_3, convert_element_type_12], Original ATen: [aten.native_layer_norm_backward]
            stream0 = get_raw_stream(0)
            triton_per_fused_native_layer_norm_backward_3.run(buf6, buf11, 4096, 32, stream=stream0)
            del buf6
            buf12 = empty_strided_cuda((4096, ), (1, ), torch.bfloat16)
            # Topologically Sorted Source Nodes: [convert_element_type_13], Original ATen: [aten.native_layer_norm_backward]
            stream0 = get_raw_stream(0)
            triton_poi_fused_native_layer_norm_backward_4.run(buf9, buf12, 4096, stream=stream0)
            del buf9
        return (buf10, buf11, buf12, )

runner = Runner(partitions=[])
call = runner.call
recursively_apply_fns = runner.recursively_apply_fns


def get_args():
    from torch._dynamo.testing import rand_strided
    primals_1 = rand_strided((16384, 4096), (4096, 1), device='cuda:0', dtype=torch.bfloat16)
    primals_2 = rand_strided((4096, ), (1, ), device='cuda:0', dtype=torch.bfloat16)
    primals_3 = rand_strided((4096, ), (1, ), device='cuda:0', dtype=torch.bfloat16)
    getitem_1 = rand_strided((16384, 1), (1, 1), device='cuda:0', dtype=torch.float32)
    rsqrt = rand_strided((16384, 1), (1, 1), device='cuda:0', dtype=torch.float32)
    tangents_1 = rand_strided((16384, 4096), (4096, 1), device='cuda:0', dtype=torch.bfloat16)
    return [primals_1, primals_2, primals_3, getitem_1, rsqrt, tangents_1]


def benchmark_compiled_module(args, times=10, repeat=10):
    from torch._inductor.utils import print_performance
    fn = lambda: call(list(args))
    return print_performance(fn, times=times, repeat=repeat)


if __name__ == "__main__":
    from torch._inductor.wrapper_benchmark import compiled_module_main
    args = get_args()
    compiled_module_main('None', lambda times, repeat: benchmark_compiled_module(args, times=times, repeat=repeat))
