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
  for (const char* name : {"RANK",
                           "WORLD_SIZE",
                           "LOCAL_RANK",
                           "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR",
                           "MASTER_PORT",
                           "FULLSHARD_RENDEZVOUS",
                           "TORCHELASTIC_USE_AGENT_STORE",
                           "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_RANK",
                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                           "PMIX_NAMESPACE",
                           "SLURM_PROCID",
                           "SLURM_STEP_NUM_TASKS",
                           "SLURM_LOCALID",
                           "SLURM_NODEID",
                           "SLURM_STEP_TASKS_PER_NODE",
                           "SLURM_STEP_NODELIST",
                           "SLURM_JOB_ID",
                           "SLURM_STEP_ID"}) {
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
  EXPECT_FALSE(env->launched);
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
  EXPECT_TRUE(env->launched);
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

TEST(LaunchEnvTest, ReadsOpenMpi) {
  absl::StatusOr<LaunchEnv> env = parse({{"OMPI_COMM_WORLD_RANK", "3"},
                                         {"OMPI_COMM_WORLD_SIZE", "4"},
                                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                         {"PMIX_NAMESPACE", "prterun-7"},
                                         {"MASTER_ADDR", "node0"},
                                         {"MASTER_PORT", "29500"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_TRUE(env->launched);
  EXPECT_EQ(env->rank, 3);
  EXPECT_EQ(env->world_size, 4);
  EXPECT_EQ(env->local_rank, 1);
  EXPECT_EQ(env->local_world_size, 2);
  EXPECT_EQ(env->rendezvous, "mpi-prterun-7");
  EXPECT_EQ(env->master_addr, "node0");
}

TEST(LaunchEnvTest, OpenMpiOnOneHostNeedsNoMaster) {
  absl::StatusOr<LaunchEnv> env = parse({{"OMPI_COMM_WORLD_RANK", "1"},
                                         {"OMPI_COMM_WORLD_SIZE", "2"},
                                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                         {"PMIX_NAMESPACE", "job"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_TRUE(env->single_host());
}

TEST(LaunchEnvTest, ReadsSlurm) {
  const auto rank = [](const char* procid, const char* local, const char* node,
                       const char* hosts) {
    return parse({{"SLURM_PROCID", procid},
                  {"SLURM_STEP_NUM_TASKS", "9"},
                  {"SLURM_LOCALID", local},
                  {"SLURM_NODEID", node},
                  {"SLURM_STEP_TASKS_PER_NODE", "4(x2),1"},
                  {"SLURM_STEP_NODELIST", hosts},
                  {"SLURM_JOB_ID", "1001"},
                  {"SLURM_STEP_ID", "2"}});
  };
  absl::StatusOr<LaunchEnv> env = rank("5", "1", "1", "node[03-05]-ib,login");
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_TRUE(env->launched);
  EXPECT_EQ(env->rank, 5);
  EXPECT_EQ(env->world_size, 9);
  EXPECT_EQ(env->local_rank, 1);
  EXPECT_EQ(env->local_world_size, 4);
  EXPECT_EQ(env->master_addr, "node03-ib");
  EXPECT_EQ(env->master_port, 20000 + (31 * 1001 + 2) % 12000);
  EXPECT_EQ(env->rendezvous, "slurm-1001-2");
  env = rank("8", "0", "2", "alpha,beta,gamma");
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_EQ(env->local_world_size, 1);
  EXPECT_EQ(env->master_addr, "alpha");
  EXPECT_EQ(rank("0", "0", "0", "n[7,9-10]")->master_addr, "n7");
}

TEST(LaunchEnvTest, OneTaskOfSlurmIsAShellAndNoRank) {
  absl::StatusOr<LaunchEnv> env =
      parse({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_FALSE(env->launched);
}

TEST(LaunchEnvTest, TorchrunComesBeforeSlurm) {
  absl::StatusOr<LaunchEnv> env = parse({{"RANK", "1"},
                                         {"WORLD_SIZE", "2"},
                                         {"MASTER_PORT", "1234"},
                                         {"SLURM_PROCID", "0"},
                                         {"SLURM_STEP_NUM_TASKS", "4"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_EQ(env->rank, 1);
  EXPECT_EQ(env->world_size, 2);
}

TEST(LaunchEnvTest, NamesTheVariableOfOtherLaunchers) {
  expect_error({{"OMPI_COMM_WORLD_RANK", "1"},
                {"OMPI_COMM_WORLD_SIZE", "4"},
                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
               "MASTER_ADDR is not set");
  expect_error({{"OMPI_COMM_WORLD_SIZE", "4"}},
               "OMPI_COMM_WORLD_RANK is not set");
  expect_error({{"SLURM_PROCID", "4"}, {"SLURM_STEP_NUM_TASKS", "4"}},
               "SLURM_PROCID: expected a number from 0 to 3");
  expect_error({{"SLURM_PROCID", "1"},
                {"SLURM_STEP_NUM_TASKS", "4"},
                {"SLURM_NODEID", "2"},
                {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}},
               "with host 2 (SLURM_NODEID), got '2(x2)'");
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
