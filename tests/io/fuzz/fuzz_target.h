#ifndef FULLSHARD_TESTS_IO_FUZZ_FUZZ_TARGET_H_
#define FULLSHARD_TESTS_IO_FUZZ_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// A fuzz target is a function in libFuzzer's form. Here it is driven by
// fuzz_driver.cc, with mutations of the target's corpus; clang links the same
// source with libFuzzer: clang++ -fsanitize=fuzzer,address x_fuzz.cc ...
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fullshard {

// Whole inputs that the target reads: small ones of our own writers and, where
// they are set up, real files. Defined by the target.
std::vector<std::string> fuzz_corpus();

// The most memory that an input of `size` bytes may cost. Defined by the
// target.
size_t fuzz_memory_limit(size_t size);

// A file that holds an input, in memory.
class FuzzFile {
 public:
  FuzzFile();
  ~FuzzFile();
  FuzzFile(const FuzzFile&) = delete;
  FuzzFile& operator=(const FuzzFile&) = delete;

  // Replaces the file's content and returns its path.
  const std::string& set(const uint8_t* data, size_t size);

 private:
  int fd_;
  std::string path_;
};

}  // namespace fullshard

#endif  // FULLSHARD_TESTS_IO_FUZZ_FUZZ_TARGET_H_
