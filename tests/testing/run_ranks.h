#ifndef FULLSHARD_TESTS_TESTING_RUN_RANKS_H_
#define FULLSHARD_TESTS_TESTING_RUN_RANKS_H_

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "fullshard/core/process_groups.h"

namespace fullshard {
namespace testing {

struct RunRanksOptions {
  std::string backend = "shm";
  // The ranks that still run after this are killed, and the test fails.
  std::chrono::milliseconds timeout{60000};
  // How long a rank waits for another in a collective.
  std::chrono::milliseconds collective_timeout{30000};
  int shard_group_size = 0;
  int reshard_group_size = 0;
};

// How a rank ended and what it printed.
struct RankOutcome {
  int exit_code = 0;  // 0: every expectation held
  int signal = 0;     // 0: it was not killed
  bool timed_out = false;
  std::string output;
};

// Runs `body` in `num_ranks` forked processes that form a job of their own.
// Failed expectations, exceptions, a signal or a hang in any rank fail the
// current test, with that rank's output.
//
// A world of one gets the backend "single", like any job of one rank.
// Requires: this process has run no tensor code and has no threads yet; it runs
// none itself.
void run_ranks(int num_ranks,
               const std::function<void(ProcessGroups& groups)>& body,
               const RunRanksOptions& options = {});

// The same without judging: for tests in which ranks are meant to fail.
std::vector<RankOutcome> collect_ranks(
    int num_ranks, const std::function<void(ProcessGroups& groups)>& body,
    const RunRanksOptions& options = {});

// The same without process groups, for tests of what makes them.
std::vector<RankOutcome> collect_processes(
    int num_ranks, const std::function<void(const LaunchEnv& env)>& body,
    std::chrono::milliseconds timeout = std::chrono::milliseconds(60000));

// Fails the current test for every rank that did not end well.
void expect_success(const std::vector<RankOutcome>& outcomes);

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_TESTING_RUN_RANKS_H_
