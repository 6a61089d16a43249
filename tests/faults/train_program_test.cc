// The training program as a user runs it: other numbers of ranks give the same
// losses, and a rank that dies ends the job with its name and loses nothing.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "fullshard/io/full_state_dict.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

struct Outcome {
  int exit_code = 0;
  std::string output;
};

// The program in its own process group, with its output in a file.
class Program {
 public:
  // `keep`: what an earlier program of that run left is still there.
  Program(const std::string& run_id, std::vector<std::string> flags,
          bool keep = false)
      : root_(fs::path(::testing::TempDir()) / "train_program"),
        run_dir_(root_ / run_id),
        log_(root_ / (run_id + ".log")) {
    if (!keep) fs::remove_all(run_dir_);
    fs::create_directories(root_);
    if (keep) {
      flags.push_back("--resume=" + run_dir_.string());
    } else {
      flags.push_back("--run_root_dir=" + root_.string());
      flags.push_back("--run_id=" + run_id);
    }
    pid_ = fork();
    if (pid_ != 0) return;
    (void)!std::freopen(log_.c_str(), "w", stdout);
    dup2(STDOUT_FILENO, STDERR_FILENO);
    std::vector<char*> argv = {const_cast<char*>("train")};
    for (std::string& flag : flags) argv.push_back(flag.data());
    argv.push_back(nullptr);
    execv("./train", argv.data());
    _exit(127);
  }

  Outcome wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    Outcome outcome;
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::ifstream file(log_);
    outcome.output.assign(std::istreambuf_iterator<char>(file), {});
    return outcome;
  }

  // Losses of the steps so far.
  std::vector<double> losses() const {
    std::vector<double> losses;
    std::ifstream file(run_dir_ / (run_dir_.filename().string() + ".jsonl"));
    for (std::string line; std::getline(file, line);) {
      const auto step = nlohmann::json::parse(line, nullptr, false);
      if (!step.is_discarded()) losses.push_back(step["Finetune/Loss (Raw)"]);
    }
    return losses;
  }

  // Polls until that many steps are logged; a minute at most.
  bool reach(size_t steps) const {
    for (int i = 0; i < 1200 && losses().size() < steps; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return losses().size() >= steps;
  }

  // A rank of the job: a child of the launcher.
  pid_t rank_pid() const {
    const std::string path = "/proc/" + std::to_string(pid_) + "/task/" +
                             std::to_string(pid_) + "/children";
    std::ifstream file(path);
    pid_t first = 0, second = 0;
    file >> first >> second;
    return second;
  }

  pid_t pid() const { return pid_; }
  const fs::path& run_dir() const { return run_dir_; }

 private:
  const fs::path root_, run_dir_, log_;
  pid_t pid_ = 0;
};

double held_out_loss(const std::string& output) {
  const size_t at = output.find("held-out loss ");
  return at == std::string::npos ? -1 : std::stod(output.substr(at + 14));
}

TEST(TrainProgramTest, AnyNumberOfRanksGivesTheSameLosses) {
  std::vector<double> reference;
  double reference_held_out = 0;
  for (int nproc : {1, 2, 3, 4}) {
    Program program("ranks" + std::to_string(nproc),
                    {"--nproc=" + std::to_string(nproc), "--max_steps=60",
                     "--loss_weighting=tokens", "--show_images=0"});
    const Outcome outcome = program.wait();
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    const std::vector<double> losses = program.losses();
    ASSERT_EQ(losses.size(), 60u);
    const double held_out = held_out_loss(outcome.output);
    if (nproc == 1) {
      reference = losses;
      reference_held_out = held_out;
      continue;
    }
    for (size_t i = 0; i < 20; ++i) {
      EXPECT_NEAR(losses[i], reference[i], 1e-5)
          << nproc << " ranks, step " << i;
    }
    EXPECT_NEAR(held_out, reference_held_out, 0.02 * reference_held_out);
  }
}

TEST(TrainProgramTest, KilledRankEndsTheJobAndKeepsTheLastCheckpoint) {
  // Seven steps to an epoch, each of which saves a checkpoint.
  Program program("killed", {"--max_steps=none", "--epochs=100000",
                             "--global_batch_size=600", "--show_images=0"});
  ASSERT_TRUE(program.reach(10));
  const auto start = std::chrono::steady_clock::now();
  kill(program.rank_pid(), SIGKILL);
  const Outcome outcome = program.wait();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(outcome.exit_code, 128 + SIGKILL);
  EXPECT_THAT(outcome.output, HasSubstr("rank 1"));
  const auto checkpoint = FullStateDictReader::open(
      (program.run_dir() / "checkpoints" / "latest-checkpoint.pt").string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE((*checkpoint)->verify().ok());
  EXPECT_EQ((*checkpoint)->module_keys(),
            (std::vector<std::string>{"vision_backbone", "projector",
                                      "llm_backbone"}));
}

TEST(TrainProgramTest, CtrlCSavesAndASecondRunStartsFromIt) {
  Program program("interrupted", {"--max_steps=100000", "--show_images=0",
                                  "--lr_scheduler_type=constant"});
  ASSERT_TRUE(program.reach(60));
  kill(program.pid(), SIGINT);
  const Outcome outcome = program.wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("interrupted at step"));
  Program next(
      "continued",
      {"--max_steps=3", "--show_images=0", "--lr_scheduler_type=constant",
       "--pretrained_checkpoint=" + program.run_dir().string()});
  const Outcome again = next.wait();
  ASSERT_EQ(again.exit_code, 0) << again.output;
  EXPECT_THAT(again.output, HasSubstr("loaded vision_backbone"));
  EXPECT_LT(next.losses()[0], program.losses()[0] - 0.5);
}

// Killed between two saves and resumed, a run has the losses of one that was
// left alone, bit for bit; on another number of ranks, nearly.
TEST(TrainProgramTest, AKilledRunResumesExactly) {
  const std::vector<std::string> flags = {"--max_steps=40", "--show_images=0",
                                          "--loss_weighting=tokens",
                                          "--global_batch_size=600"};
  Program whole("whole", flags);
  const Outcome expected = whole.wait();
  ASSERT_EQ(expected.exit_code, 0) << expected.output;
  const std::vector<double> losses = whole.losses();
  ASSERT_EQ(losses.size(), 40u);
  for (int nproc : {2, 3}) {
    const std::string id = "resumed" + std::to_string(nproc);
    std::vector<std::string> saving = flags;
    saving.emplace_back("--save_interval=5");
    Program killed(id, saving);
    ASSERT_TRUE(killed.reach(18));
    kill(killed.rank_pid(), SIGKILL);
    EXPECT_NE(killed.wait().exit_code, 0);
    Program resumed(id, {"--nproc=" + std::to_string(nproc)}, /*keep=*/true);
    const Outcome outcome = resumed.wait();
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("resumed from "));
    EXPECT_THAT(outcome.output, ::testing::Not(HasSubstr("step 5 of")));
    const std::vector<double> again = resumed.losses();
    ASSERT_EQ(again.size(), losses.size());
    for (size_t i = 0; i < losses.size(); ++i) {
      if (nproc == 2) {
        EXPECT_EQ(again[i], losses[i]) << i;
      } else {
        EXPECT_NEAR(again[i], losses[i], 2e-3) << i;
      }
    }
    if (nproc == 2) {
      EXPECT_EQ(held_out_loss(outcome.output), held_out_loss(expected.output));
    }
  }
}

TEST(TrainProgramTest, ResumeNamesWhatIsWrong) {
  Program first("resumable", {"--max_steps=3", "--show_images=0"});
  ASSERT_EQ(first.wait().exit_code, 0);
  const std::pair<std::string, std::string> mistakes[] = {
      {"--seed=8", "seed: the run was started with 7"},
      {"--global_batch_size=60", "global_batch_size: the run was started"},
      {"--stage=align", "unexpected key"}};
  for (const auto& [flag, expected] : mistakes) {
    Program program("resumable", {flag}, /*keep=*/true);
    const Outcome outcome = program.wait();
    EXPECT_NE(outcome.exit_code, 0) << flag;
    EXPECT_THAT(outcome.output, HasSubstr(expected)) << flag;
    EXPECT_THAT(outcome.output, ::testing::Not(HasSubstr("frame #")));
  }
  Program nowhere("nowhere", {"--resume=/tmp/no-such-run"});
  EXPECT_THAT(nowhere.wait().output, HasSubstr("expected the folder of a run"));
  // A run that has ended goes on if there is more to do.
  Program more("resumable", {"--max_steps=5"}, /*keep=*/true);
  EXPECT_EQ(more.wait().exit_code, 0);
  EXPECT_EQ(more.losses().size(), 5u);
}

TEST(TrainProgramTest, UsersMistakesAreOneLine) {
  const std::pair<std::string, std::string> mistakes[] = {
      {"--global_batch_size=61", "the nearest are 60 and 62"},
      {"--stage=finetunes", "stage: expected one of align"},
      {"--sharding=zero3", "sharding: expected full-shard"},
      {"--lr_scheduler_type=cosine", "linear-warmup+cosine-decay"},
      {"--pretrained_checkpoint=missing.pt", "missing.pt"},
      {"--backend=mpi", "mpi"},
  };
  for (const auto& [flag, expected] : mistakes) {
    Program program("mistake", {flag, "--per_device_batch_size=1"});
    const Outcome outcome = program.wait();
    EXPECT_NE(outcome.exit_code, 0) << flag;
    EXPECT_THAT(outcome.output, HasSubstr(expected)) << flag;
    EXPECT_THAT(outcome.output, ::testing::Not(HasSubstr("frame #")));
  }
}

}  // namespace
}  // namespace fullshard
