// Programmatic dependent launch: a kernel may begin while the one before it in the stream is still
// running. Before dependency_wait() it may touch only data that no kernel writes: weights. Without the
// launch attribute both do nothing. PTX ISA, section "griddepcontrol".
#pragma once

namespace xserv {

// Lets the next kernel of the stream begin as soon as every block has called this or ended.
__device__ __forceinline__ void dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all kernels before this one have ended and their writes can be seen.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace xserv
