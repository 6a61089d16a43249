#ifndef FULLSHARD_TESTS_IO_TEMP_DIR_H_
#define FULLSHARD_TESTS_IO_TEMP_DIR_H_

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace fullshard {

// A fresh folder that is removed with everything in it.
class TempDir {
 public:
  TempDir() {
    const char* base = ::getenv("TEST_TMPDIR");
    std::string pattern =
        std::string(base == nullptr ? "/tmp" : base) + "/fullshard-io-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string file(const std::string& name) const { return path_ + "/" + name; }

  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(file(name), std::ios::binary) << bytes;
    return file(name);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      result.push_back(entry.path().filename().string());
    }
    return result;
  }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace fullshard

#endif  // FULLSHARD_TESTS_IO_TEMP_DIR_H_
