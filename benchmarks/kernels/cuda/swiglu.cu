// SwiGLU's gate: y = silu(a) * b with silu(a) = a * sigmoid(a), element by element.
//
// There is nothing to share between threads: the kernel reads two tensors, writes one, and its only art is to keep
// enough bytes on their way. Each thread asks for VECTORS 16-byte vectors of every input before it uses the first.
//
// Backward: with s = sigmoid(a),    da = dy * b * s * (1 + a * (1 - s)),    db = dy * a * s.
#include "rows.cuh"

namespace {

constexpr int THREADS = 256;                                 // tunables
constexpr int VECTORS = 2;

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
forward(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ y, int64_t count) {
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * THREADS * VECTORS + threadIdx.x) * N;
    Vector<T, N> a_part[VECTORS], b_part[VECTORS], out;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        if (const int64_t here = first + v * THREADS * N; here < count) {
            a_part[v].read(a + here);
            b_part[v].read(b + here);
        }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        if (const int64_t here = first + v * THREADS * N; here < count) {
            float values[N];
#pragma unroll
            for (int i = 0; i < N; ++i)
                values[i] = a_part[v][i] * sigmoid(a_part[v][i]) * b_part[v][i];
            out.set(values);
            out.write(y + here);
        }
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
backward(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ dy, T* __restrict__ da,
         T* __restrict__ db, int64_t count) {
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * THREADS * VECTORS + threadIdx.x) * N;
    Vector<T, N> a_part[VECTORS], b_part[VECTORS], dy_part[VECTORS], out;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        if (const int64_t here = first + v * THREADS * N; here < count) {
            a_part[v].read(a + here);
            b_part[v].read(b + here);
            dy_part[v].read(dy + here);
        }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        if (const int64_t here = first + v * THREADS * N; here < count) {
            float of_a[N], of_b[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float gate = sigmoid(a_part[v][i]), silu = a_part[v][i] * gate;
                of_a[i] = dy_part[v][i] * b_part[v][i] * (gate + silu * (1.0f - gate));
                of_b[i] = dy_part[v][i] * silu;
            }
            out.set(of_a);
            out.write(da + here);
            out.set(of_b);
            out.write(db + here);
        }
}

// body(T(), vector length, blocks): whole vectors, or single elements where the tensors can't be cut into vectors.
template <typename Body>
void with_vectors(Float type, int64_t count, bool vectors, Body body) {
    with_type(type, [&](auto zero) {
        constexpr int N = 16 / sizeof(zero);
        const auto blocks = [&](int n) { return (count / n + THREADS * VECTORS - 1) / (THREADS * VECTORS); };
        if (vectors && count % N == 0)
            body(zero, std::integral_constant<int, N>(), blocks(N));
        else
            body(zero, std::integral_constant<int, 1>(), blocks(1));
    });
}

}  // namespace

void swiglu_forward(Float type, const void* a, const void* b, void* y, int64_t count, cudaStream_t stream) {
    with_vectors(type, count, aligned(a, b, y), [&](auto zero, auto n, int64_t blocks) {
        using T = decltype(zero);
        forward<T, decltype(n)::value><<<blocks, THREADS, 0, stream>>>(
            static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(y), count);
    });
}

void swiglu_backward(Float type, const void* a, const void* b, const void* dy, void* da, void* db, int64_t count,
                     cudaStream_t stream) {
    with_vectors(type, count, aligned(a, b, dy, da, db), [&](auto zero, auto n, int64_t blocks) {
        using T = decltype(zero);
        backward<T, decltype(n)::value><<<blocks, THREADS, 0, stream>>>(
            static_cast<const T*>(a), static_cast<const T*>(b), static_cast<const T*>(dy), static_cast<T*>(da),
            static_cast<T*>(db), count);
    });
}
