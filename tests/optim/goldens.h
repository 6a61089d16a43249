#ifndef FULLSHARD_TESTS_OPTIM_GOLDENS_H_
#define FULLSHARD_TESTS_OPTIM_GOLDENS_H_

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "gtest/gtest.h"

namespace fullshard {
namespace testing {

// Reads tests/optim/goldens/<name>, which the script of that name wrote.
inline nlohmann::json read_golden(const std::string& name) {
  const std::string path = "tests/optim/goldens/" + name;
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path << ": run from the workspace's root";
  return nlohmann::json::parse(file);
}

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_OPTIM_GOLDENS_H_
