#include "fullshard/train_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <nlohmann/json.hpp>

#include "fullshard/tests/io/temp_dir.h"

namespace fullshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

void expect_refused(const std::vector<std::string>& arguments,
                    const testing::Matcher<std::string>& message) {
  const absl::Status status = parse_train_config(arguments).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), message);
}

TEST(TrainConfigTest, DefaultsAreThoseOfFashionCaptions) {
  const TrainConfig config = *parse_train_config({});
  EXPECT_EQ(config.data, "fashion-captions");
  EXPECT_EQ(config.nproc, 2);
  EXPECT_EQ(config.run_root_dir, "runs");
  EXPECT_EQ(config.strategy.seed, 7u);
  EXPECT_FALSE(config.strategy.enable_mixed_precision_training);
  for (const int64_t ranks : {1, 2, 3, 4}) {
    EXPECT_EQ(config.strategy.global_batch_size % ranks, 0) << ranks;
  }
}

TEST(TrainConfigTest, TakesEveryKindOfValue) {
  const TrainConfig config =
      *parse_train_config({"--stage=align", "--epochs=3", "--max_steps=none",
                           "--learning_rate=1e-4", "--reduce_in_full_precision",
                           "--enable_gradient_checkpointing=false",
                           "--seed=18446744073709551615", "--run_id=a=b"});
  EXPECT_EQ(config.strategy.stage, "align");
  EXPECT_EQ(config.strategy.epochs, 3);
  EXPECT_FALSE(config.strategy.max_steps.has_value());
  EXPECT_EQ(config.strategy.learning_rate, 1e-4);
  EXPECT_TRUE(config.strategy.reduce_in_full_precision);
  EXPECT_FALSE(config.strategy.enable_gradient_checkpointing);
  EXPECT_EQ(config.strategy.seed, 18446744073709551615u);
  EXPECT_EQ(config.run_id, "a=b");
}

TEST(TrainConfigTest, TheLaterFlagWins) {
  const TrainConfig config = *parse_train_config({"--nproc=3", "--nproc=4"});
  EXPECT_EQ(config.nproc, 4);
}

TEST(TrainConfigTest, FlagsWinOverFilesAndLaterFilesOverEarlierOnes) {
  const TempDir dir;
  const std::string first =
      dir.write("first.yaml", "nproc: 3\nepochs: 5\nseed: 1\n");
  const std::string second = dir.write("second.yaml", "epochs: 6\n");
  const TrainConfig config = *parse_train_config(
      {"--seed=2", "--config=" + first, "--config=" + second});
  EXPECT_EQ(config.nproc, 3);
  EXPECT_EQ(config.strategy.epochs, 6);
  EXPECT_EQ(config.strategy.seed, 2u);
}

TEST(TrainConfigTest, AnUnknownKeyIsRefusedWithTheNearest) {
  expect_refused({"--learnin_rate=1"},
                 AllOf(HasSubstr("learnin_rate"),
                       HasSubstr("nearest is 'learning_rate'")));
  const TempDir dir;
  const std::string file = dir.write("c.yaml", "nproc: 2\n\nepoch: 1\n");
  expect_refused({"--config=" + file},
                 AllOf(HasSubstr("c.yaml:3"), HasSubstr("'epochs'")));
}

TEST(TrainConfigTest, ABadValueNamesKeyExpectedGotAndPlace) {
  expect_refused({"--epochs=two"},
                 HasSubstr("command line: epochs: expected an integer, got "
                           "'two'"));
  expect_refused({"--epochs="}, HasSubstr("expected an integer, got ''"));
  expect_refused({"--seed=-1"}, HasSubstr("expected a positive integer"));
  expect_refused({"--learning_rate=nan"}, HasSubstr("a finite number"));
  expect_refused({"--reduce_in_full_precision=maybe"},
                 HasSubstr("true or false"));
  expect_refused({"--max_steps=1.5"}, HasSubstr("an integer or none"));
}

TEST(TrainConfigTest, SettingsOutOfRangeAreRefused) {
  expect_refused({"--nproc=0"}, HasSubstr("1 to 256, got 0"));
  expect_refused({"--epochs=0"}, HasSubstr("1 or more"));
  expect_refused({"--max_steps=0"}, HasSubstr("1 or more"));
  expect_refused({"--learning_rate=-1e-3"},
                 HasSubstr("learning_rate: expected 0 or more, got -0.001"));
  expect_refused({"--data=imagenet"}, HasSubstr("fashion-captions"));
  expect_refused({"--run_id=../x"}, HasSubstr("without '/'"));
}

TEST(TrainConfigTest, OtherArgumentsAreRefused) {
  expect_refused({"epochs=2"}, HasSubstr("expected --key=value"));
}

TEST(TrainConfigTest, FilesThatAreNoMapsAreRefused) {
  const TempDir dir;
  expect_refused({"--config=" + dir.write("a.yaml", "- 1\n")},
                 HasSubstr("expected a map of settings"));
  expect_refused({"--config=" + dir.write("b.yaml", "epochs: [1, 2]\n")},
                 HasSubstr("b.yaml:1: epochs: expected one value"));
  expect_refused({"--config=" + dir.write("c.yaml", "a: 'b\n")},
                 HasSubstr("c.yaml"));
  const absl::Status absent =
      parse_train_config({"--config=" + dir.file("absent.yaml")}).status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(absent.message()), HasSubstr("absent.yaml"));
}

TEST(TrainConfigTest, WrittenYamlReadsBackExactly) {
  const TrainConfig config = *parse_train_config(
      {"--learning_rate=0.00123456789012345", "--max_steps=none",
       "--pretrained_checkpoint=a b: c.pt", "--weight_decay=0.1"});
  EXPECT_THAT(to_yaml(config), HasSubstr("weight_decay: 0.1\n"));
  const TempDir dir;
  const TrainConfig again = *parse_train_config(
      {"--config=" + dir.write("config.yaml", to_yaml(config))});
  EXPECT_EQ(to_yaml(again), to_yaml(config));
  EXPECT_EQ(again.strategy.learning_rate, 0.00123456789012345);
  EXPECT_EQ(again.pretrained_checkpoint, "a b: c.pt");
  EXPECT_FALSE(again.strategy.max_steps.has_value());
}

TEST(TrainConfigTest, JsonKeepsTypes) {
  const auto json = nlohmann::json::parse(
      to_json(*parse_train_config({"--max_steps=none", "--epochs=2"})));
  EXPECT_TRUE(json["max_steps"].is_null());
  EXPECT_EQ(json["epochs"], 2);
  EXPECT_EQ(json["enable_mixed_precision_training"], false);
  EXPECT_EQ(json["data"], "fashion-captions");
}

TEST(TrainConfigTest, HelpNamesEverySettingWithItsDefault) {
  const std::string help = train_config_help();
  const auto json = nlohmann::json::parse(to_json(TrainConfig()));
  for (const auto& item : json.items()) {
    EXPECT_THAT(help, HasSubstr("--" + item.key() + "="));
  }
  EXPECT_THAT(help, HasSubstr("--warmup_ratio=0.05 "));
}

TEST(UserPathTest, RelativePathsStartWhereTheUserCalledFrom) {
  ASSERT_EQ(setenv("BUILD_WORKING_DIRECTORY", "/home/user/here", 1), 0);
  EXPECT_EQ(user_path("runs"), "/home/user/here/runs");
  EXPECT_EQ(user_path("../a/./b"), "/home/user/a/b");
  EXPECT_EQ(user_path("/elsewhere"), "/elsewhere");
  EXPECT_EQ(user_path(""), "");
  ASSERT_EQ(unsetenv("BUILD_WORKING_DIRECTORY"), 0);
  EXPECT_EQ(user_path("runs"), "runs");
}

}  // namespace
}  // namespace fullshard
