#include "fullshard/core/launch_env.h"

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace fullshard {
namespace {

using Variables = std::initializer_list<std::pair<const char*, const char*>>;

absl::StatusOr<LaunchEnv> parse(const Variables& variables) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
        "MASTER_PORT", "FULLSHARD_RENDEZVOUS",
        "TORCHELASTIC_USE_AGENT_STORE"}) {
    unsetenv(name);
  }
  for (const auto& [name, value] : variables) setenv(name, value, 1);
  return LaunchEnv::from_environment();
}

void expect_error(const Variables& variables, const std::string& text) {
  absl::StatusOr<LaunchEnv> env = parse(variables);
  ASSERT_FALSE(env.ok());
  EXPECT_EQ(env.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(env.status().message()).find(text), std::string::npos)
      << env.status();
}

TEST(LaunchEnvTest, NoVariablesMakeAWorldOfOne) {
  absl::StatusOr<LaunchEnv> env = parse({});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_EQ(env->rank, 0);
  EXPECT_EQ(env->world_size, 1);
  EXPECT_TRUE(env->single_host());
}

TEST(LaunchEnvTest, ReadsTorchrun) {
  absl::StatusOr<LaunchEnv> env =
      parse({{"RANK", "5"},
             {"WORLD_SIZE", "8"},
             {"LOCAL_RANK", "1"},
             {"LOCAL_WORLD_SIZE", "4"},
             {"MASTER_ADDR", "node0"},
             {"MASTER_PORT", "29500"},
             {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_EQ(env->rank, 5);
  EXPECT_EQ(env->world_size, 8);
  EXPECT_EQ(env->local_rank, 1);
  EXPECT_EQ(env->local_world_size, 4);
  EXPECT_EQ(env->master_addr, "node0");
  EXPECT_EQ(env->master_port, 29500);
  EXPECT_TRUE(env->launcher_serves_store);
  EXPECT_FALSE(env->single_host());
}

TEST(LaunchEnvTest, LoopbackMasterMeansOneHost) {
  absl::StatusOr<LaunchEnv> env =
      parse({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "1234"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_EQ(env->local_rank, 1);
  EXPECT_TRUE(env->single_host());
}

TEST(LaunchEnvTest, RemoteMasterWithoutLocalRanksMeansOneRankPerHost) {
  absl::StatusOr<LaunchEnv> env = parse({{"RANK", "1"},
                                         {"WORLD_SIZE", "2"},
                                         {"MASTER_ADDR", "node0"},
                                         {"MASTER_PORT", "1234"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_EQ(env->local_rank, 0);
  EXPECT_EQ(env->local_world_size, 1);
}

TEST(LaunchEnvTest, NamesTheVariableThatIsWrong) {
  expect_error({{"RANK", "0"}}, "WORLD_SIZE is not set");
  expect_error({{"WORLD_SIZE", "2"}}, "RANK is not set");
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "two"}},
               "WORLD_SIZE: expected a number");
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "got '0'");
  expect_error({{"RANK", "2"}, {"WORLD_SIZE", "2"}},
               "RANK: expected a number from 0 to 1, got '2'");
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "MASTER_PORT");
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}},
               "MASTER_PORT: expected a number from 0 to 65535, got '70000'");
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}},
               "LOCAL_WORLD_SIZE is not set");
  expect_error({{"RANK", "0"},
                {"WORLD_SIZE", "2"},
                {"LOCAL_RANK", "1"},
                {"LOCAL_WORLD_SIZE", "2"}},
               "LOCAL_RANK: expected 0");
}

}  // namespace
}  // namespace fullshard
