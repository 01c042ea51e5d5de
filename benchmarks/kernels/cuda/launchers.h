// What binding.cpp may call: each function starts its kernels on `stream` and returns at once.
// All pointers are to contiguous memory of the current GPU; `void*` points to elements of type `type`.
// A norm's backward fills `sums` [blocks, vectors, width], of an address that is a multiple of 16, and adds them up to
// its vectors' gradients [vectors, width]: the weight's and, where there is one, the bias's.
#pragma once
#include <cstdint>
#include <cuda_runtime_api.h>

enum class Float { half, bfloat16, single };

void layer_norm_gelu_forward(Float type, const void* x, const void* weight, const void* bias, void* y, float* mean,
                             float* rstd, int64_t rows, int width, float eps, cudaStream_t stream);
void layer_norm_gelu_backward(Float type, const void* x, const void* weight, const void* bias, const float* mean,
                              const float* rstd, const void* dy, void* dx, void* dvectors, float* sums, int64_t rows,
                              int width, int blocks, cudaStream_t stream);

void rms_norm_forward(Float type, const void* x, const void* weight, void* y, float* rstd, int64_t rows, int width,
                      float eps, cudaStream_t stream);
void rms_norm_backward(Float type, const void* x, const void* weight, const float* rstd, const void* dy, void* dx,
                       void* dweight, float* sums, int64_t rows, int width, int blocks, cudaStream_t stream);

void swiglu_forward(Float type, const void* a, const void* b, void* y, int64_t count, cudaStream_t stream);
void swiglu_backward(Float type, const void* a, const void* b, const void* dy, void* da, void* db, int64_t count,
                     cudaStream_t stream);

// `threshold`, of 65536: how many of the 16-bit random numbers drop their element.
void softmax_dropout_forward(Float type, const void* scores, void* y, float* peak, float* total, int64_t rows,
                             int width, unsigned threshold, uint64_t seed, bool causal, cudaStream_t stream);
void softmax_dropout_backward(Float type, const void* scores, const float* peak, const float* total, const void* dy,
                              void* dscores, int64_t rows, int width, unsigned threshold, uint64_t seed, bool causal,
                              cudaStream_t stream);

// False where a block's shared memory is more than this GPU has.
bool attention_forward(Float type, const void* q, const void* k, const void* v, void* y, int64_t heads, int length,
                       int head_width, bool causal, cudaStream_t stream);
