#ifndef FULLSHARD_TESTS_TESTING_ALLOCATION_COUNTER_H_
#define FULLSHARD_TESTS_TESTING_ALLOCATION_COUNTER_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "c10/core/CPUAllocator.h"
#include "c10/core/impl/alloc_cpu.h"

namespace fullshard {
namespace testing {

// From its construction on, LibTorch's CPU allocations of the whole process go
// through this one, to the end of the process. Use in a rank's process, once.
class AllocationCounter {
 public:
  AllocationCounter() { c10::SetCPUAllocator(counting(), /*priority=*/255); }

  // Bytes that are allocated now, of those allocated since construction.
  int64_t now() const { return counting()->bytes; }
  // The most since the last reset_peak().
  int64_t peak() const { return counting()->peak; }
  void reset_peak() { counting()->peak = counting()->bytes.load(); }

 private:
  struct Counting final : c10::Allocator {
    // Lies before the data, which is also its own context: LibTorch wants
    // that of an allocator it takes raw pointers from.
    struct alignas(64) Header {
      int64_t num_bytes;
    };
    c10::DataPtr allocate(size_t num_bytes) override {
      auto* const header =
          static_cast<Header*>(c10::alloc_cpu(sizeof(Header) + num_bytes));
      header->num_bytes = static_cast<int64_t>(num_bytes);
      bytes += header->num_bytes;
      peak = std::max(peak.load(), bytes.load());
      void* const data = header + 1;
      return {data, data, &free_data, c10::kCPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_data; }
    void copy_data(void* to, const void* from, size_t n) const override {
      default_copy_data(to, from, n);
    }
    static void free_data(void* data) {
      Header* const header = static_cast<Header*>(data) - 1;
      counting()->bytes -= header->num_bytes;
      c10::free_cpu(header);
    }
    std::atomic<int64_t> bytes{0}, peak{0};
  };
  static Counting* counting() {
    static auto* const allocator = new Counting;
    return allocator;
  }
};

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_TESTING_ALLOCATION_COUNTER_H_
