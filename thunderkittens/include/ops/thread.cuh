// Operations of a single thread: semaphores (mbarriers), named barriers, linear bulk copies, shared-memory moves.
#pragma once

#include "ops/extensions.cuh"

namespace kittens {

// An mbarrier in shared memory.
struct semaphore {
  private:
    uint64_t value;
};
// Named barrier barrier_id (1..15; 0 is __syncthreads) over num_warps warps.
template <int num_warps> struct barrier {
    int barrier_id;
    __device__ __forceinline__ barrier(int _id) : barrier_id(_id) {}
};

// A phase completes after thread_count arrivals and all expected bytes.
__device__ static inline void init_semaphore(semaphore &sem, int thread_count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&sem)), "r"(thread_count) : "memory");
}
__device__ static inline void arrive(semaphore &sem) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&sem)) : "memory");
}
__device__ static inline void arrive(semaphore &sem, uint32_t count) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&sem)), "r"(count) : "memory");
}
template <int num_warps> __device__ static inline void arrive(barrier<num_warps> bar) {
    asm volatile("bar.arrive %0, %1;" ::"r"(bar.barrier_id), "n"(num_warps * WARP_THREADS) : "memory");
}
template <int num_warps> __device__ static inline void arrive_and_wait(barrier<num_warps> bar) {
    asm volatile("bar.sync %0, %1;" ::"r"(bar.barrier_id), "n"(num_warps * WARP_THREADS) : "memory");
}
// Returns once the phase of parity kPhaseBit has completed; a fresh semaphore has "completed" parity 1.
// No trap on a time-out: a trap in the loop makes ptxas forget the setmaxnreg budget and spill.
__device__ static inline void wait(semaphore &sem, int kPhaseBit) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra.uni DONE;\nbra.uni "
        "WAIT;\nDONE:\n}" ::"r"(shared_address(&sem)),
        "r"(kPhaseBit)
        : "memory");
}
__device__ static inline bool try_wait(semaphore &sem, int kPhaseBit) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(&sem)), "r"(kPhaseBit)
                 : "memory");
    return done;
}

namespace tma {

// One arrival that also announces bytes of asynchronous copies.
__device__ static inline void expect_bytes(semaphore &sem, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&sem)), "r"(bytes) : "memory");
}
__device__ static inline void store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the last N groups are complete (visible in global memory) / have been read from shared memory.
template <int N = 0> __device__ static inline void store_async_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
template <int N = 0> __device__ static inline void store_async_read_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Linear copy; addresses and size are multiples of 16 bytes.
__device__ static inline void load_async(void *dst, void *src, uint32_t size_bytes, semaphore &sem) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst)),
                 "l"(src), "r"(size_bytes), "r"(shared_address(&sem))
                 : "memory");
}

}  // namespace tma

// Moves between registers and shared-memory addresses.
template <typename T> struct move {
    // Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. ldsm4t transposes each.
    __device__ static inline void ldsm4(T &a, T &b, T &c, T &d, uint32_t src) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word(a)), "=r"(word(b)), "=r"(word(c)), "=r"(word(d))
                     : "r"(src)
                     : "memory");
    }
    __device__ static inline void ldsm4t(T &a, T &b, T &c, T &d, uint32_t src) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word(a)), "=r"(word(b)), "=r"(word(c)), "=r"(word(d))
                     : "r"(src)
                     : "memory");
    }
    __device__ static inline void stsm4(uint32_t dst, T &a, T &b, T &c, T &d) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%4], {%0, %1, %2, %3};" ::"r"(word(a)), "r"(word(b)), "r"(word(c)),
                     "r"(word(d)), "r"(dst)
                     : "memory");
    }

  private:
    __device__ static inline uint32_t &word(T &x) {
        static_assert(sizeof(T) == 4);
        return *reinterpret_cast<uint32_t *>(&x);
    }
};

// Programmatic dependent launch.
namespace pdl {
__device__ static inline void arrive() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ static inline void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
}  // namespace pdl
}  // namespace kittens
