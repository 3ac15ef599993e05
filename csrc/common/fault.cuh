// A kernel that meets an index it must not follow (an id outside the vocabulary, a position outside the
// table, a block outside the cache) does something harmless instead and reports the first such case.
#pragma once

#include "common/layouts.cuh"

namespace xserv {

// The record lies in mapped host memory. code is 0 until the first fault; the host reads the record
// after it has waited for the stream, and writes 0 to arm it again (src/backend/cuda/context.rs has the
// same layout and codes).
struct FaultRecord {
  int code;
  int _padding;
  long long index;  // place of the offending element in the index array
  long long value;  // the element itself
};
XSERV_LAYOUT_FaultRecord;

constexpr int kFaultTokenId = 1;
constexpr int kFaultPosition = 2;
constexpr int kFaultBlock = 3;

__device__ __forceinline__ void report_fault(FaultRecord* fault, int code, long long index, long long value) {
  if (fault == nullptr) return;
  // The compare-and-swap lets one thread through. On mapped memory it is atomic among the threads of this
  // device, which is all that is needed: a context's record belongs to one device.
  if (atomicCAS(&fault->code, 0, code) == 0) {
    volatile FaultRecord* record = fault;
    record->index = index;
    record->value = value;
    __threadfence_system();
  }
}

}  // namespace xserv
