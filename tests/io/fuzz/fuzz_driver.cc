// Drives a fuzz target with mutations of its corpus: a bounded number, the same
// in every run (FULLSHARD_FUZZ_SEED changes them, FULLSHARD_FUZZ_FACTOR
// multiplies their number). A crash is a failed test; so is an input that costs
// more memory than the target allows.

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <random>
#include <string>

#include "fullshard/tests/io/fuzz/fuzz_target.h"

namespace {

std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};

void* counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  const int64_t live = live_bytes += malloc_usable_size(memory);
  if (live > peak_bytes) peak_bytes = live;
  return memory;
}

void uncounted(void* memory) {
  if (memory == nullptr) return;
  live_bytes -= malloc_usable_size(memory);
  std::free(memory);
}

}  // namespace

void* operator new(size_t size) { return counted(std::malloc(size)); }
void operator delete(void* memory) noexcept { uncounted(memory); }
void operator delete(void* memory, size_t) noexcept { uncounted(memory); }

namespace fullshard {
namespace {

constexpr size_t kBytesPerFile = size_t{48} << 20;
constexpr size_t kMostInputs = 4000;
constexpr size_t kFewestInputs = 60;

int64_t environment(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  // One to four changes, most of them near the ends, where formats keep their
  // structure.
  std::string mutate(const std::string& input, const std::string& other) {
    std::string bytes = input;
    for (uint64_t changes = 1 + below(4); changes > 0; --changes) {
      change(&bytes, other);
    }
    return bytes;
  }

 private:
  uint64_t below(uint64_t limit) { return limit == 0 ? 0 : random_() % limit; }

  size_t place(const std::string& bytes) {
    const size_t near = std::min<size_t>(bytes.size(), 1024);
    switch (below(4)) {
      case 0:
        return below(near);
      case 1:
        return bytes.size() - near + below(near);
      case 2:
        return below(std::min<size_t>(bytes.size(), 64));
      default:
        return below(bytes.size());
    }
  }

  void change(std::string* bytes, const std::string& other) {
    const size_t at = place(*bytes);
    const size_t length = std::min<size_t>(bytes->size() - at,
                                           1 + below(below(8) == 0 ? 400 : 16));
    switch (below(9)) {
      case 0:
        if (!bytes->empty()) (*bytes)[at] ^= static_cast<char>(1 << below(8));
        break;
      case 1:
        if (!bytes->empty()) (*bytes)[at] = static_cast<char>(random_());
        break;
      case 2:  // a number at its limits
        for (size_t i = 0; i < std::min<size_t>(length, 8); ++i) {
          constexpr unsigned char kBytes[] = {0x00, 0xff, 0x7f, 0x80, 0x01};
          (*bytes)[at + i] = static_cast<char>(kBytes[below(5)]);
        }
        break;
      case 3:
        bytes->resize(at);
        break;
      case 4:
        bytes->erase(at, length);
        break;
      case 5:
        bytes->insert(at, bytes->substr(at, length));
        break;
      case 6: {
        const std::string piece =
            other.substr(below(other.size() + 1), 1 + below(64));
        bytes->insert(at, piece);
        break;
      }
      case 7:  // a digit of a JSON header
        for (size_t i = at; i < std::min(bytes->size(), at + 200); ++i) {
          if ((*bytes)[i] >= '0' && (*bytes)[i] <= '9') {
            (*bytes)[i] = static_cast<char>('0' + below(10));
            break;
          }
        }
        break;
      default:  // the same again and again
        bytes->insert(at, std::string(1 + below(5000),
                                      bytes->empty() ? ']' : (*bytes)[at]));
        break;
    }
  }

  std::mt19937_64 random_;
};

void run(const std::string& input) {
  peak_bytes = live_bytes.load();
  const int64_t before = live_bytes;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()),
                         input.size());
  ASSERT_LE(peak_bytes - before,
            static_cast<int64_t>(fuzz_memory_limit(input.size())))
      << "bytes for an input of " << input.size();
}

TEST(FuzzTest, MutationsOfTheCorpusAreReadOrRefused) {
  const std::vector<std::string> corpus = fuzz_corpus();
  Mutator mutator(static_cast<uint64_t>(environment("FULLSHARD_FUZZ_SEED", 1)));
  size_t num_inputs = 0;
  for (size_t i = 0; i < corpus.size(); ++i) {
    run(corpus[i]);
    const size_t count =
        std::clamp(kBytesPerFile / std::max<size_t>(corpus[i].size(), 1),
                   kFewestInputs, kMostInputs);
    const auto factor =
        static_cast<size_t>(environment("FULLSHARD_FUZZ_FACTOR", 1));
    for (size_t n = 0; n < count * factor && !HasFatalFailure(); ++n) {
      const std::string& other = corpus[n % corpus.size()];
      run(mutator.mutate(corpus[i], other));
      ++num_inputs;
    }
  }
  std::printf("FUZZED %zu inputs from a corpus of %zu\n", num_inputs,
              corpus.size());
}

// Every prefix of a small file, some of a large one.
TEST(FuzzTest, TruncationsAreRefused) {
  for (const std::string& input : fuzz_corpus()) {
    const size_t count = std::clamp<size_t>(
        kBytesPerFile / std::max<size_t>(input.size(), 1), 20, 500);
    const size_t step = std::max<size_t>(1, input.size() / count);
    for (size_t size = 0; size < input.size(); size += step) {
      // A copy of the exact size lets memory checkers see reads beyond it.
      run(input.substr(0, size));
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace fullshard
