// Copies from memory to shared memory that pass through no registers and are on their way while the threads go on.
#pragma once
#include <cstdint>

__device__ inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Starts to copy 16 bytes; zeros where not `inside`.
__device__ inline void copy_async(void* to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(inside ? 16 : 0) : "memory");
}

// The copies that this thread started since the last such call are a group; there may be none of them.
__device__ inline void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until of this thread's groups at most the last LEFT are on their way; a barrier then says so to other threads.
template <int LEFT>
__device__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// The same for all copies of this thread, in groups or not.
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
