#ifndef FULLSHARD_TESTS_IO_PYTHON_H_
#define FULLSHARD_TESTS_IO_PYTHON_H_

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace fullshard {

// Prints why and returns false where `variable`, which bazelw sets, is not set;
// CI has it.
inline bool have_test_setup(const char* variable) {
  if (std::getenv(variable) != nullptr) return true;
  std::printf("INTERCHANGE SKIPPED: %s is not set; run ./bazelw test once\n",
              variable);
  EXPECT_EQ(std::getenv("CI"), nullptr) << "CI must run interchange tests";
  return false;
}

inline bool have_python() { return have_test_setup("FULLSHARD_TEST_PYTHON"); }

// Runs `script` with the Python that has torch and safetensors; returns its
// exit status.
inline int run_python(const std::string& script, const std::string& arguments) {
  const std::string command = std::string("'") +
                              std::getenv("FULLSHARD_TEST_PYTHON") + "' '" +
                              script + "' " + arguments;
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace fullshard

#endif  // FULLSHARD_TESTS_IO_PYTHON_H_
