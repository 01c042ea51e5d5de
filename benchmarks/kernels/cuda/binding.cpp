// The launchers as functions of Python: tensors in, tensors filled in place. Shapes and dtypes are cuda.py's to check.
#include <torch/extension.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "launchers.h"

namespace {

using at::Tensor;

Float type_of(const Tensor& x) {
    switch (x.scalar_type()) {
        case at::kHalf: return Float::half;
        case at::kBFloat16: return Float::bfloat16;
        case at::kFloat: return Float::single;
        default: TORCH_CHECK_VALUE(false, "a tensor is ", x.scalar_type());
    }
}

// Calls start(type, stream) on x's GPU and its current stream, which is what a CUDA graph records.
template <typename Start>
void on_device_of(const Tensor& x, Start start) {
    const c10::cuda::CUDAGuard guard(x.device());
    start(type_of(x), c10::cuda::getCurrentCUDAStream().stream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

const void* in(const Tensor& x) { return x.const_data_ptr(); }
void* out(const Tensor& x) { return x.mutable_data_ptr(); }
const float* in_float(const Tensor& x) { return x.const_data_ptr<float>(); }
float* out_float(const Tensor& x) { return x.mutable_data_ptr<float>(); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("layer_norm_gelu_forward", [](Tensor x, Tensor weight, Tensor bias, Tensor y, Tensor mean, Tensor rstd,
                                             double eps) {
        on_device_of(x, [&](Float type, cudaStream_t stream) {
            layer_norm_gelu_forward(type, in(x), in(weight), in(bias), out(y), out_float(mean), out_float(rstd),
                                    x.size(0), x.size(1), eps, stream);
        });
    });
    module.def("layer_norm_gelu_backward", [](Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, Tensor dy,
                                              Tensor dx, Tensor sums, Tensor dvectors) {
        on_device_of(x, [&](Float type, cudaStream_t stream) {
            layer_norm_gelu_backward(type, in(x), in(weight), in(bias), in_float(mean), in_float(rstd), in(dy), out(dx),
                                     out(dvectors), out_float(sums), x.size(0), x.size(1), sums.size(0), stream);
        });
    });
    module.def("rms_norm_forward", [](Tensor x, Tensor weight, Tensor y, Tensor rstd, double eps) {
        on_device_of(x, [&](Float type, cudaStream_t stream) {
            rms_norm_forward(type, in(x), in(weight), out(y), out_float(rstd), x.size(0), x.size(1), eps, stream);
        });
    });
    module.def("rms_norm_backward", [](Tensor x, Tensor weight, Tensor rstd, Tensor dy, Tensor dx, Tensor sums,
                                       Tensor dweight) {
        on_device_of(x, [&](Float type, cudaStream_t stream) {
            rms_norm_backward(type, in(x), in(weight), in_float(rstd), in(dy), out(dx), out(dweight), out_float(sums),
                              x.size(0), x.size(1), sums.size(0), stream);
        });
    });
    module.def("swiglu_forward", [](Tensor a, Tensor b, Tensor y) {
        on_device_of(a, [&](Float type, cudaStream_t stream) {
            swiglu_forward(type, in(a), in(b), out(y), a.numel(), stream);
        });
    });
    module.def("swiglu_backward", [](Tensor a, Tensor b, Tensor dy, Tensor da, Tensor db) {
        on_device_of(a, [&](Float type, cudaStream_t stream) {
            swiglu_backward(type, in(a), in(b), in(dy), out(da), out(db), a.numel(), stream);
        });
    });
    module.def("softmax_dropout_forward", [](Tensor scores, Tensor y, Tensor peak, Tensor total, unsigned threshold,
                                             int64_t seed, bool causal) {
        on_device_of(scores, [&](Float type, cudaStream_t stream) {
            softmax_dropout_forward(type, in(scores), out(y), out_float(peak), out_float(total), scores.size(0),
                                    scores.size(1), threshold, seed, causal, stream);
        });
    });
    module.def("softmax_dropout_backward", [](Tensor scores, Tensor peak, Tensor total, Tensor dy, Tensor dscores,
                                              unsigned threshold, int64_t seed, bool causal) {
        on_device_of(scores, [&](Float type, cudaStream_t stream) {
            softmax_dropout_backward(type, in(scores), in_float(peak), in_float(total), in(dy), out(dscores),
                                     scores.size(0), scores.size(1), threshold, seed, causal, stream);
        });
    });
    module.def("attention", [](Tensor q, Tensor k, Tensor v, Tensor y, bool causal) {
        on_device_of(q, [&](Float type, cudaStream_t stream) {
            TORCH_CHECK(attention_forward(type, in(q), in(k), in(v), out(y), q.size(0) * q.size(1), q.size(2),
                                          q.size(3), causal, stream),
                        "this GPU has too little shared memory for the tiles of attention.cu");
        });
    });
}
