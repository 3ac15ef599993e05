// A kernel that meets an input it must not follow (an id outside the vocabulary, a position outside the
// table) does something harmless instead and reports the first such case to the host.
#pragma once

namespace xserv {

// Lies in mapped host memory. code is 0 until the first fault; the host reads the rest after the
// launch has completed, and writes 0 to arm the record again.
struct FaultRecord {
  int code;
  int pad;
  long long index;  // place of the offending element
  long long value;  // what stood there
};
static_assert(sizeof(FaultRecord) == 24, "the host reads this struct");

constexpr int kFaultOutOfRange = 1;

__device__ __forceinline__ void report_fault(FaultRecord* fault, long long index, long long value) {
  if (fault == nullptr) return;
  // The compare-and-swap lets one thread of the launch through. On mapped memory it is atomic among the
  // threads of this device, which is all that is needed here.
  if (atomicCAS(&fault->code, 0, kFaultOutOfRange) == 0) {
    volatile FaultRecord* record = fault;
    record->index = index;
    record->value = value;
    __threadfence_system();
  }
}

}  // namespace xserv
